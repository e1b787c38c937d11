"""What tests of the bookkeeping share: specs, requests, and a device that remembers which token's entry lies where."""

import hashlib
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import fields

from device_slots import DeviceSlots

from hybrid_engine.config import CacheConfig, SchedulerConfig
from hybrid_engine.coordinator import Coordinator
from hybrid_engine.groups.base import GroupManager
from hybrid_engine.groups.eviction import EvictionPolicy
from hybrid_engine.groups.layout import share_memory
from hybrid_engine.groups.spec import (
    ChunkedLocalSpec,
    FullAttentionSpec,
    LayerSpec,
    MambaSpec,
    SlidingWindowSpec,
    group_layers,
)
from hybrid_engine.invariants import check_invariants
from hybrid_engine.request import Request
from hybrid_engine.sampling_params import SamplingParams
from hybrid_engine.scheduler import RequestUpdate, Scheduler
from hybrid_engine.step_plan import NULL_BLOCK_ID, WHOLE_BLOCK, StepPlan, StepResult


def full(block_size: int = 16) -> FullAttentionSpec:
    return FullAttentionSpec(1, 8, 2, block_size)


def sliding(window: int, block_size: int = 16) -> SlidingWindowSpec:
    return SlidingWindowSpec(1, 8, 2, block_size, window=window)


def chunked(chunk: int, block_size: int = 16) -> ChunkedLocalSpec:
    return ChunkedLocalSpec(1, 8, 2, block_size, chunk=chunk)


def state(size: int = 8) -> MambaSpec:
    return MambaSpec((size, 3), (size, 4), 2)


def make_coordinator(
    specs: Sequence[LayerSpec],
    num_blocks: int | Sequence[int] = 0,
    *,
    memory_bytes: int | None = None,
    eviction: EvictionPolicy | None = None,
    **config,
) -> Coordinator:
    """num_blocks: of each group, which keeps its own; memory_bytes: what all groups share instead.

    eviction: instead of the policy that the config names.
    """
    groups = group_layers(dict(enumerate(specs)))
    if memory_bytes is not None:
        return Coordinator(groups, share_memory(groups, memory_bytes), config=CacheConfig(**config), policy=eviction)
    counts = [num_blocks] * len(groups) if isinstance(num_blocks, int) else num_blocks
    return Coordinator(groups, counts, config=CacheConfig(**config), policy=eviction)


def make_request(
    coordinator: Coordinator,
    token_ids: Sequence[int],
    request_id: str = "r",
    *,
    max_tokens: int = 1,
    message_boundaries: Sequence[int] = (),
    priority: int = 0,
    **kwargs,
) -> Request:
    return Request(
        request_id,
        list(token_ids),
        SamplingParams(max_tokens=max_tokens, **kwargs),
        hasher=coordinator.hasher,
        max_model_len=1 << 20,
        message_boundaries=message_boundaries,
        priority=priority,
    )


def compute(coordinator: Coordinator, request: Request, num_tokens: int | None = None) -> Request:
    """Allocate and compute tokens of a request (all known ones by default) as a step without a scheduler would."""
    num_new = (num_tokens or request.num_tokens) - request.num_computed_tokens
    assert coordinator.allocate_slots(request, num_new)
    request.num_computed_tokens += num_new
    coordinator.cache_blocks(request, request.num_computed_tokens)
    return request


def cache_prompt(coordinator: Coordinator, token_ids: Sequence[int], request_id: str = "cached") -> Request:
    """Compute a prompt and free it: all that its groups keep can be found afterwards."""
    request = compute(coordinator, make_request(coordinator, token_ids, request_id))
    coordinator.recorder.record_checkpoint(request)
    coordinator.free(request)
    return request


def lose(coordinator: Coordinator, group_id: int, request: Request, block_index: int) -> None:
    """Make one block of a cached prompt unfindable, as no eviction of ours would."""
    manager: GroupManager = coordinator.managers[group_id]
    pool = manager.pool
    block = pool.cached[manager.key(request.block_hashes, block_index)]
    del pool.cached[block.block_hash]
    block.block_hash = None
    pool.settle(block)


def hit_tokens(coordinator: Coordinator, token_ids: Sequence[int]) -> int:
    hit, _ = coordinator.look_up(make_request(coordinator, token_ids))
    return hit.num_computed_tokens


class FakeDevice:
    """Executes plans on a cache whose entries name the prefix they were computed from.

    Each step checks that every entry a request may read is the one of its own prefix, and answers with a token that
    depends on the whole prefix: a wrong hit is an assertion error or a different stream.
    """

    def __init__(self, coordinator: Coordinator, *, vocab_size: int = 50) -> None:
        self.managers = coordinator.managers
        self.vocab_size = vocab_size
        self.slots = [DeviceSlots(manager) for manager in self.managers]
        for slots in self.slots:
            slots.share_with(self.slots)
        self.tokens: dict[str, NamedPrefixes] = {}
        self.tables: dict[str, list[list[int]]] = {}
        self.num_computed_tokens = 0

    def execute(self, plan: StepPlan) -> StepResult:
        for request_id in plan.ended_ids:
            del self.tokens[request_id], self.tables[request_id]
        self._move_bytes(plan)
        for tables in self.tables.values():
            for move in plan.block_moves:
                table = tables[move.group_id]
                table[:] = [move.target_id if block_id == move.source_id else block_id for block_id in table]
        for started in plan.started:
            assert started.request_id not in self.tokens, f"{started.request_id} was started twice"
            self.tokens[started.request_id] = NamedPrefixes(started.token_ids)
            self.tables[started.request_id] = [list(ids) for ids in started.block_ids]
        for new in plan.new_blocks:
            for table, ids in zip(self.tables[new.request_id], new.block_ids, strict=True):
                table.extend(ids)
        self.captures = plan.state_captures
        drafts = plan.draft_token_ids or ((),) * len(plan.request_ids)
        self.drafts = dict(zip(plan.request_ids, drafts, strict=True))
        return StepResult(plan.step_id, self._run(plan))

    def _move_bytes(self, plan: StepPlan) -> None:
        for copy in plan.block_copies:
            source = list(self.slots[copy.group_id][copy.source_id])
            target = self.slots[copy.group_id][copy.target_id]
            num_slots = len(target) if copy.num_slots == WHOLE_BLOCK else copy.num_slots
            target[:] = source[:num_slots] + [None] * (len(target) - num_slots)

    def _run(self, plan: StepPlan) -> dict[str, tuple[int, ...]]:
        sizes = zip(plan.request_ids, plan.num_computed_tokens, plan.num_scheduled_tokens, strict=True)
        chunks = [(request_id, start, start + count) for request_id, start, count in sizes]
        for request_id, start, end in chunks:
            self._write(request_id, start, end)
        for request_id, start, end in chunks:
            self._check_reads(request_id, start, end)
        for request_id, start, end in chunks:
            self._advance_states(request_id, start, end)
        self.num_computed_tokens += plan.num_tokens
        sampled = {}
        for (request_id, _, end), is_sampled in zip(chunks, plan.is_sampled, strict=True):
            tokens, drafts = self.tokens[request_id], self.drafts[request_id]
            assert is_sampled == (end - len(drafts) == len(tokens.prefixes))
            assert is_sampled or not drafts
            if is_sampled:
                sampled[request_id] = tokens.verify(drafts, self.vocab_size)
                for token_id in sampled[request_id]:
                    tokens.append(token_id)
        return sampled

    def _prefixes(self, request_id: str) -> list[bytes]:
        """Names of the prefixes that this step computes a request on, drafts included."""
        return self.tokens[request_id].followed_by(self.drafts[request_id])

    def _write(self, request_id: str, start: int, end: int) -> None:
        prefixes = self._prefixes(request_id)
        for manager, slots, table in self._token_groups(request_id):
            for position in range(start, end):
                block_id = table[position // manager.block_size]
                assert block_id != NULL_BLOCK_ID, f"{request_id} writes position {position} to the null block"
                slots[block_id][position % manager.block_size] = prefixes[position]

    def _check_reads(self, request_id: str, start: int, end: int) -> None:
        prefixes = self._prefixes(request_id)
        for manager, slots, table in self._token_groups(request_id):
            for position in range(manager.num_skipped_tokens(start), end):
                found = slots[table[position // manager.block_size]][position % manager.block_size]
                assert found == prefixes[position], f"{request_id} reads another prefix's entry at {position}"

    def _token_groups(self, request_id: str) -> list[tuple]:
        groups = zip(self.managers, self.slots, self.tables[request_id], strict=True)
        return [group for group in groups if not group[0].is_state]

    def _advance_states(self, request_id: str, start: int, end: int) -> None:
        prefixes, drafts = self._prefixes(request_id), self.drafts[request_id]
        num_kept = len(self.tokens[request_id].verify(drafts, self.vocab_size)) if drafts else end - start
        for i, manager in enumerate(self.managers):
            if not manager.is_state:
                continue
            slots, (working, *draft_slots) = self.slots[i], self.tables[request_id][i]
            assert start == 0 or slots[working] == [prefixes[start - 1]], (
                f"{request_id} goes on at {start} from another state"
            )
            for capture in self.captures:
                if capture.request_id == request_id and capture.group_id == i:
                    assert start < capture.position <= end
                    assert capture.target_id not in (working, *draft_slots)
                    slots[capture.target_id][0] = prefixes[capture.position - 1]
            assert len(draft_slots) >= len(drafts), f"{request_id}: {len(draft_slots)} slots for {len(drafts)} drafts"
            for slot, position in zip(draft_slots, range(start + 1, start + 1 + len(drafts)), strict=False):
                slots[slot][0] = prefixes[position - 1]
            slots[working][0] = prefixes[start + num_kept - 1]


class NamedPrefixes:
    """Tokens of a request and a name for each prefix of them, by the position of its last token."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.prefixes: list[bytes] = []
        self._digest = hashlib.blake2b(digest_size=8)
        for token_id in token_ids:
            self.append(token_id)

    def append(self, token_id: int) -> None:
        self._digest.update(token_id.to_bytes(8, "little"))
        self.prefixes.append(self._digest.digest())

    def next_token(self, vocab_size: int) -> int:
        """Return a token that depends on the whole prefix."""
        return _token_after(self.prefixes[-1], vocab_size)

    def followed_by(self, token_ids: Sequence[int]) -> list[bytes]:
        """Return the names of all prefixes when these tokens would come next."""
        digest, names = self._digest.copy(), []
        for token_id in token_ids:
            digest.update(token_id.to_bytes(8, "little"))
            names.append(digest.digest())
        return [*self.prefixes, *names] if names else self.prefixes

    def verify(self, drafts: Sequence[int], vocab_size: int) -> tuple[int, ...]:
        """Return the drafts that are right, up to the first that is not, and one token more."""
        prefixes = self.followed_by(drafts)
        answer = []
        for i in range(len(drafts) + 1):
            answer.append(_token_after(prefixes[len(self.prefixes) - 1 + i], vocab_size))
            if i < len(drafts) and drafts[i] != answer[-1]:
                break
        return tuple(answer)


def _token_after(prefix: bytes, vocab_size: int) -> int:
    return int.from_bytes(prefix, "little") % vocab_size


class Bench:
    """A scheduler with a fake device; every step checks the invariants.

    Asynchronous: a plan is executed as late as its result is wanted, unless rng says earlier.
    """

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        num_blocks: int | Sequence[int] = 0,
        *,
        memory_bytes: int | None = None,
        eviction: EvictionPolicy | None = None,
        connector=None,
        drafter=None,
        rng: random.Random | None = None,
        **config,
    ) -> None:
        cache_keys = {field.name for field in fields(CacheConfig)} & config.keys()
        cache = {key: config.pop(key) for key in cache_keys}
        self.coordinator = make_coordinator(specs, num_blocks, memory_bytes=memory_bytes, eviction=eviction, **cache)
        self.scheduler = Scheduler(SchedulerConfig(**config), self.coordinator, connector=connector, drafter=drafter)
        self.device = FakeDevice(self.coordinator)
        self.connector = connector
        if connector is not None:
            connector.device = self.device
        self.rng = rng
        self.plans: list[StepPlan] = []
        # A step takes a second: what goes when memory is short doesn't hang on how fast this machine is.
        self.coordinator.checkpoints.facts.clock = lambda: float(len(self.plans))
        self.streams: dict[str, list[int]] = {}
        self.strangers: list[Request] = []
        self._launched: deque[StepPlan] = deque()
        self._results: deque[StepResult] = deque()

    def add(
        self, token_ids: Sequence[int], request_id: str = "r", *, max_tokens: int = 1, **sampling_and_more
    ) -> Request:
        request = make_request(self.coordinator, token_ids, request_id, max_tokens=max_tokens, **sampling_and_more)
        self.scheduler.add_request(request)
        return request

    def step(self) -> list[RequestUpdate]:
        """Launch a step and take in the oldest result once as many steps are launched as may be."""
        is_launched = self.launch()
        if self._is_due(is_launched):
            return self.take_in()
        return []

    def launch(self) -> bool:
        """Launch a step, taking in the oldest result before where as many are launched as may be."""
        while len(self._launched) > self.scheduler.config.async_depth:
            self.take_in()
        if self.connector is not None:
            self.connector.advance()
        plan = self.scheduler.schedule()
        if plan.request_ids:
            self.plans.append(plan)
            self._launched.append(plan)
        elif plan.block_copies or plan.transfers:
            # What was launched before is executed before, as everywhere.
            while len(self._results) < len(self._launched):
                self._results.append(self.device.execute(self._launched[len(self._results)]))
            self.device.execute(plan)
        self._check()
        return bool(plan.request_ids)

    def _check(self) -> None:
        check_invariants(self.coordinator, [*self.scheduler.holders(), *self.strangers])

    def hold(self, num_tokens: int) -> Request:
        """Let somebody of whom the scheduler knows nothing hold blocks."""
        stranger = make_request(self.coordinator, range(1_000_000, 1_000_000 + num_tokens), "stranger")
        self.strangers.append(compute(self.coordinator, stranger))
        return stranger

    def free_strangers(self) -> None:
        while self.strangers:
            self.coordinator.free(self.strangers.pop())

    def _is_due(self, is_launched: bool) -> bool:
        if not self._launched:
            return False
        if self.rng is not None and self.rng.random() < 0.3:
            return True
        return not is_launched or len(self._launched) > self.scheduler.config.async_depth

    def take_in(self) -> list[RequestUpdate]:
        num_to_execute = self.rng.randint(1, len(self._launched)) if self.rng is not None else 1
        while len(self._results) < num_to_execute:
            self._results.append(self.device.execute(self._launched[len(self._results)]))
        updates = self.scheduler.update(self._launched.popleft(), self._results.popleft())
        for update in updates:
            self.streams.setdefault(update.request.request_id, []).extend(update.new_token_ids)
        self._check()
        return updates

    def drain(self) -> None:
        """Take in all results of launched steps."""
        while self._launched:
            self.take_in()

    def run(self, max_steps: int = 10_000) -> None:
        """Step until nothing is left; fails when that takes more than max_steps."""
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished_requests():
                self.drain()
                return
            self.step()
        raise AssertionError(f"{self.scheduler.requests} did not finish in {max_steps} steps")

    def run_one(self, token_ids: Sequence[int], request_id: str = "r", **sampling) -> Request:
        request = self.add(token_ids, request_id, **sampling)
        self.run()
        return request

    def scheduled(self) -> list[list[int]]:
        """Tokens of each request in each step so far."""
        return [list(plan.num_scheduled_tokens) for plan in self.plans]


def expected_stream(token_ids: Sequence[int], num_tokens: int, vocab_size: int = 50) -> list[int]:
    """The answer that FakeDevice gives to a prompt, computed without any cache."""
    tokens, answer = NamedPrefixes(token_ids), []
    for _ in range(num_tokens):
        answer.append(tokens.next_token(vocab_size))
        tokens.append(answer[-1])
    return answer
