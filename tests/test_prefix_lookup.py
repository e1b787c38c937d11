"""The longest hit, against an exhaustive search, on pools with any content."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from bookkeeping import Bench, cache_prompt, chunked, full, hit_tokens, lose, make_coordinator, make_request, sliding
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_engine.coordinator import Coordinator
from hybrid_engine.groups.checkpoint_tree import Path
from hybrid_engine.groups.checkpoints import Checkpoint
from hybrid_engine.request import Request

SPECS = st.one_of(
    st.sampled_from([4, 8, 12]).map(full),
    st.tuples(st.integers(1, 40), st.sampled_from([4, 8, 12])).map(lambda pair: sliding(*pair)),
    st.tuples(st.integers(1, 40), st.sampled_from([4, 8, 12])).map(lambda pair: chunked(*pair)),
)


@dataclass
class Content:
    """A pool content, and what it says about a prompt."""

    coordinator: Coordinator
    request: Request

    def can_resume(self, position: int, checkpoint: Checkpoint | None) -> bool:
        for i, manager in enumerate(self.coordinator.managers):
            start = manager.num_skipped_tokens(position) // manager.block_size
            keys = [manager.key(self.request.block_hashes, k) for k in range(start, position // manager.block_size)]
            if any(key not in manager.pool.cached for key in keys):
                return False
            if position % manager.block_size and (checkpoint is None or checkpoint.blocks[i] is None):
                return False
        return True

    def candidates(self) -> Iterator[tuple[int, Checkpoint | None]]:
        for position in range(self.request.num_tokens):
            yield position, None
        unit = self.coordinator.match_unit_tokens
        for checkpoint in self.coordinator.checkpoints:
            start = checkpoint.position // unit * unit
            tail = tuple(self.request.token_ids[start : checkpoint.position])
            if checkpoint.position < self.request.num_tokens and tail == checkpoint.tail:
                yield checkpoint.position, checkpoint

    def longest(self) -> int:
        return max(position for position, checkpoint in self.candidates() if self.can_resume(position, checkpoint))


@st.composite
def contents(draw, *, with_holes: bool = False) -> Content:
    specs = draw(st.lists(SPECS, min_size=1, max_size=4))
    coordinator = make_coordinator(specs, 60)
    request = make_request(coordinator, range(draw(st.integers(1, 120))))
    for manager in coordinator.managers:
        num_keyed = manager.num_keyed_blocks(request.block_hashes)
        if manager.keeps_everything and not with_holes:
            present = set(range(draw(st.integers(0, num_keyed))))
        else:
            # Mostly there: a content that is mostly missing has no hit to find.
            present = set(range(num_keyed)) - draw(st.sets(st.integers(0, max(num_keyed - 1, 0)), max_size=4))
        for block_index in present:
            (block,) = manager.pool.take(1)
            manager.pool.register(block, manager.key(request.block_hashes, block_index))
    unit = coordinator.match_unit_tokens
    for position in draw(st.sets(st.integers(1, request.num_tokens), max_size=4)):
        start = position // unit * unit
        # Some belong to another prompt that parts from this one after the parent.
        shift = draw(st.sampled_from([0, 0, 0, 1000]))
        tail = tuple(token + shift for token in request.token_ids[start:position])
        coordinator.checkpoints.record(
            Checkpoint(
                position=position,
                parent=request.hash_at(position // unit),
                tail=tail,
                blocks=tuple(
                    manager.pool.take(1)[0] if position % manager.block_size else None
                    for manager in coordinator.managers
                ),
            ),
            Path(request.root_hash, request.block_hashes[: position // unit], [*request.token_ids[:start], *tail]),
        )
    return Content(coordinator, request)


@settings(max_examples=400, deadline=None)
@given(contents())
def test_the_hit_is_the_longest_that_an_exhaustive_search_finds(content):
    hit = content.coordinator.lookup.find_longest_cache_hit(content.request)
    assert hit.num_computed_tokens == content.longest()


@settings(max_examples=400, deadline=None)
@given(contents(with_holes=True))
def test_listing_the_blocks_finds_the_longest_hit_even_where_parents_are_missing(content):
    hit, tables = content.coordinator.look_up(content.request)
    assert hit.num_computed_tokens == content.longest()
    for manager, table in zip(content.coordinator.managers, tables, strict=True):
        keys = [block.block_hash for block in table[manager.first_needed_block(hit.num_computed_tokens) :]]
        first = manager.first_needed_block(hit.num_computed_tokens)
        assert keys == [manager.key(content.request.block_hashes, first + k) for k in range(len(keys))]


@settings(max_examples=200, deadline=None)
@given(contents())
def test_the_boundary_lies_beyond_the_hit_where_the_groups_that_keep_everything_still_match(content):
    coordinator, request = content.coordinator, content.request
    hit = coordinator.lookup.find_longest_cache_hit(request)
    unit = coordinator.match_unit_tokens
    reaches = [
        manager.longest_hit(request.block_hashes, request.num_tokens)
        for manager in coordinator.managers
        if manager.keeps_everything
    ]
    expected = min([*reaches, request.num_tokens - 1]) // unit * unit if reaches else 0
    assert hit.shared_prefix_boundary == (expected if expected > hit.num_computed_tokens else None)


def tokens(count: int, start: int = 0) -> list[int]:
    return list(range(start, start + count))


def test_a_prompt_that_goes_on_after_an_answer_hits_the_exact_end_of_what_was_computed():
    bench = Bench([full(), sliding(32)], 40)
    first = bench.run_one(tokens(80), max_tokens=19)
    second = bench.run_one([*first.token_ids, *tokens(10, 5000)], max_tokens=4)
    assert second.cache.hit == 98
    assert bench.plans[-4].num_tokens == len(first.token_ids) + 10 - 98


def test_a_prompt_shorter_than_a_block_is_known_but_not_hit():
    bench = Bench([full()], 10)
    bench.run_one(tokens(10))
    again = bench.run_one(tokens(10))
    assert (again.cache.hit, again.cache.alignment) == (0, 9)


def test_a_checkpoint_is_not_used_by_a_prompt_that_parts_before_it():
    coordinator = make_coordinator([full()], 10)
    cache_prompt(coordinator, tokens(41))
    assert hit_tokens(coordinator, [*tokens(41), 7, 8]) == 41
    assert hit_tokens(coordinator, [*tokens(40), 999, 7, 8]) == 32


def test_an_earlier_shorter_conversation_does_not_get_a_later_checkpoint():
    coordinator = make_coordinator([full(), sliding(24)], 20)
    cache_prompt(coordinator, tokens(100))
    cache_prompt(coordinator, tokens(60))
    assert hit_tokens(coordinator, [*tokens(60), 777, 778]) == 60


def test_a_checkpoint_goes_with_its_block():
    coordinator = make_coordinator([full()], 4)
    cache_prompt(coordinator, tokens(20))
    blocker = make_request(coordinator, tokens(64, 1000), "blocker")
    assert coordinator.allocate_slots(blocker, 64)
    coordinator.free(blocker)
    assert hit_tokens(coordinator, tokens(30)) == 0
    assert list(coordinator.checkpoints) == []


def test_a_reader_of_a_checkpoint_does_not_write_its_block():
    bench = Bench([full()], 20)
    owner = bench.add(tokens(40), "owner", max_tokens=30)
    bench.step()
    reader = bench.add([*tokens(40), 7], "reader", max_tokens=30)
    bench.step()
    (copy,) = bench.plans[-1].block_copies
    assert (reader.cache.hit, copy.num_slots) == (40, 8)
    assert copy.source_id == owner.held.tables[0][2].block_id
    bench.run()  # FakeDevice fails when either reads the other's entries


def test_a_hit_that_needs_a_copy_too_many_is_shortened_before_the_request_waits():
    bench = Bench([full()], 4)
    bench.run_one(tokens(60))
    # 60 cached tokens lie in 4 blocks; going on at 60 would take a fifth for the copy.
    request = bench.run_one([*tokens(60), 1, 2])
    assert (request.cache.hit, request.cache.alignment) == (48, 12)
    assert bench.plans[-1].started[0].num_computed_tokens == 48


@pytest.mark.parametrize("lost", [0, 3, 5])
def test_windows_below_the_last_one_are_not_needed(lost):
    coordinator = make_coordinator([full(), sliding(16)], 20)
    cached = cache_prompt(coordinator, tokens(161))
    lose(coordinator, 1, cached, lost)
    assert hit_tokens(coordinator, tokens(161)) == 160
