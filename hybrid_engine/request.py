"""A request as the bookkeeping sees it: its tokens, their hashes, what it holds and how far it is."""

from __future__ import annotations

import enum
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hybrid_engine.explanation import CacheExplanation
from hybrid_engine.groups.arena import Arena
from hybrid_engine.groups.base import NEVER
from hybrid_engine.groups.block import Block
from hybrid_engine.groups.checkpoints import Checkpoint
from hybrid_engine.groups.hashing import BlockHash, BlockHasher
from hybrid_engine.groups.pool import BlockPool
from hybrid_engine.sampling_params import SamplingParams
from hybrid_engine.step_plan import RequestId


class RequestStatus(enum.Enum):
    """Where a request is in its life."""

    WAITING = enum.auto()
    WAITING_FOR_KV = enum.auto()
    """It holds blocks which a connector is filling."""
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    """Waiting again, after it had to give its blocks back; while launched steps still compute it, it holds them."""
    FINISHED = enum.auto()


class Shortage(NamedTuple):
    """Why a request found no place; while nothing of this changes, it need not be tried again."""

    arena: Arena
    """The memory that had too little room."""
    num_freed: int
    """Blocks that must have been let go there in all before there can be place."""
    num_recorded: int
    """Checkpoints recorded until then. A new one may make the hit longer where states are needed, so that blocks which
    others hold can be shared. Without states whoever computes more of the prompt takes as many blocks as it offers."""


class HeldBlocks:
    """The block tables of a running request, by group, and the positions at which something is to be done."""

    __slots__ = (
        "captures",
        "first_needed",
        "num_registered",
        "num_slots",
        "pinned",
        "register_position",
        "release_position",
        "state_position",
        "tables",
    )

    def __init__(self, num_groups: int) -> None:
        self.tables: list[list[Block]] = [[] for _ in range(num_groups)]
        # By group: blocks of the table that were made findable, and the first block still needed.
        self.num_registered = [0] * num_groups
        self.first_needed = [0] * num_groups
        self.num_slots = 0
        """Tokens that the tables have place for."""
        self.release_position = NEVER
        """Computed tokens at which some group has passed another block."""
        self.register_position = 0
        """Computed tokens at which another block may be full."""
        self.state_position = -1
        """Tokens that the working states had consumed when the last step finished; -1: none was written yet."""
        self.captures: list[tuple[int, dict[int, Block]]] = []
        """Position, and by group the block, of each state that launched steps write, ascending."""
        self.pinned: list[tuple[Checkpoint, list[tuple[BlockPool, Block]]]] = []
        """The checkpoints that the request laid, and what it holds of each so that nobody takes it meanwhile."""


class Request:
    """One prompt and the answer that grows behind it. Its block hashes exist from the start and grow with it."""

    # Slots, since dictionaries of so many entries share no keys and are slow.
    __slots__ = (
        "__weakref__",
        "_hasher",
        "_next_hash_at",
        "arrival_time",
        "block_hashes",
        "cache",
        "checkpoint_positions",
        "draft_after",
        "eos_token_ids",
        "finish_reason",
        "held",
        "junction",
        "max_total_tokens",
        "message_boundaries",
        "min_total_tokens",
        "num_accepted_drafts",
        "num_computed_tokens",
        "num_drafts",
        "num_in_flight_tokens",
        "num_overtaken",
        "num_placeholders",
        "num_preemptions",
        "num_prompt_tokens",
        "num_tokens_lost",
        "priority",
        "rank",
        "request_id",
        "root_hash",
        "sampling",
        "seed",
        "shared_prefix_boundary",
        "shortage",
        "skips_connector",
        "status",
        "stop_reason",
        "stop_token_ids",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        hasher: BlockHasher,
        max_model_len: int,
        eos_token_ids: Iterable[int] = (),
        cache_salt: str = "",
        seed: int = 0,
        arrival_time: float | None = None,
        message_boundaries: Sequence[int] = (),
        priority: int = 0,
    ) -> None:
        """message_boundaries: positions in the prompt at which a message ends; a later prompt may part there.

        priority: the lower, the sooner, where the scheduler goes by it.
        seed: decides this request's draws together with the position; cache_salt: never hits under another salt."""
        assert prompt_token_ids, f"request {request_id} has an empty prompt"
        self.request_id = RequestId(request_id)
        self.sampling = sampling
        self.seed = seed
        self.arrival_time = time.monotonic() if arrival_time is None else arrival_time
        self.num_prompt_tokens = len(prompt_token_ids)
        self.token_ids = self._own_tokens(prompt_token_ids)
        max_tokens = max_model_len if sampling.max_tokens is None else sampling.max_tokens
        # A prompt as long as the model reaches yields one token all the same: it is sampled, never computed.
        self.max_total_tokens = max(self.num_prompt_tokens + 1, min(self.num_prompt_tokens + max_tokens, max_model_len))
        self.min_total_tokens = self.num_prompt_tokens + sampling.min_tokens
        self.eos_token_ids = frozenset() if sampling.ignore_eos else frozenset(eos_token_ids)
        self.stop_token_ids = self.eos_token_ids | frozenset(sampling.stop_token_ids)

        self.status = RequestStatus.WAITING
        self.priority = priority
        self.rank: tuple[float, float, int] = (0, 0, 0)
        """Its place in every order that the scheduler keeps, the smallest first; given when it is accepted."""
        self.num_computed_tokens = 0
        """Tokens whose cache entries exist: computed by steps that have finished, or found."""
        self.num_in_flight_tokens = 0
        """Tokens, drafts counted, that launched steps compute after those."""
        self.num_placeholders = 0
        """Tokens that launched steps will add, drafts not counted."""
        self.draft_after = NEVER
        """Tokens, placeholders counted, at which it waits until all are known, to draft again."""
        self.finish_reason: str | None = None
        """'stop', 'length', 'abort' or 'error'."""
        self.stop_reason: int | str | None = None
        """The stop token or stop string; None for an end-of-text token."""
        self.num_preemptions = 0
        self.num_tokens_lost = 0
        """Tokens computed when it was last preempted."""
        self.num_drafts = 0
        """Tokens guessed ahead and verified."""
        self.num_accepted_drafts = 0
        """Those of them that were right."""
        self.num_overtaken = 0
        """Steps in which others were admitted before it since it had no place."""
        self.shortage: Shortage | None = None
        """While it waits: why it found no place when last tried."""
        self.skips_connector = False
        """Whether a load for it has failed, so that its tokens are computed."""
        self.held: HeldBlocks | None = None
        self.shared_prefix_boundary: int | None = None
        self.message_boundaries = tuple(message_boundaries)
        self.junction: tuple[Request, int] | None = None
        """While it waits: the request that is computing its prefix, and up to where."""
        self.checkpoint_positions: list[int] = []
        """Where recurrent states are to be kept while it computes, ascending; known from its admission on."""
        self.cache: CacheExplanation | None = None
        """Why the first admission found what it found; None before."""

        self._hasher = hasher
        self.root_hash = hasher.root(cache_salt=cache_salt)
        self.block_hashes: list[BlockHash] = []
        hasher.extend(self.block_hashes, self.root_hash, self.token_ids)
        self._next_hash_at = self._hash_position()

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id}, {self.status.name}, {self.num_computed_tokens} of {self.num_tokens} computed)"
        )

    @property
    def num_tokens(self) -> int:
        """Tokens known: the prompt and what was generated."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens generated."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_cached_tokens(self) -> int:
        """The hit at first admission, in tokens, and what a connector brought."""
        return self.cache.hit + self.cache.external if self.cache else 0

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether a hit may be used: log-probabilities of the whole prompt need every token of it computed."""
        is_whole_wanted = self.sampling.prompt_logprobs is not None and self.sampling.prompt_logprob_start is None
        return not self.sampling.skip_reading_prefix_cache and not is_whole_wanted

    @property
    def max_hit_tokens(self) -> int:
        """Most tokens that a hit may have: the one before each token to be sampled or scored is computed."""
        start = self.sampling.prompt_logprob_start
        return self.num_tokens - 1 if start is None else min(start, self.num_tokens) - 1

    def hash_at(self, num_units: int) -> BlockHash:
        """Return the hash of the prefix of num_units match units; the root for none."""
        return self.block_hashes[num_units - 1] if num_units else self.root_hash

    def all_token_ids(self) -> tuple[int, ...]:
        """Return all tokens known, for a runner that has not seen the request."""
        return tuple(self.token_ids)

    def append_token(self, token_id: int) -> None:
        """Add a token to the answer and, where it ends a match unit, a block hash."""
        self.token_ids.append(token_id)
        if len(self.token_ids) >= self._next_hash_at:
            self._hasher.extend(self.block_hashes, self.root_hash, self.token_ids)
            self._next_hash_at = self._hash_position()

    def finish(self, reason: str, stop_reason: int | str | None = None) -> None:
        """Mark the request as ended; its blocks are the coordinator's to free."""
        self.status = RequestStatus.FINISHED
        self.finish_reason = reason
        self.stop_reason = stop_reason

    def _own_tokens(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """Return what the answer's tokens will be appended to."""
        return list(prompt_token_ids)

    def _hash_position(self) -> int:
        return (len(self.block_hashes) + 1) * self._hasher.match_unit_tokens
