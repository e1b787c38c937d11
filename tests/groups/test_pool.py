import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hybrid_engine.groups.arena import Arena
from hybrid_engine.groups.layout import Region
from hybrid_engine.groups.pool import BlockPool


def make_pool(num_blocks: int, **settings) -> BlockPool:
    """A pool alone in its arena, whose extents are single blocks."""
    return BlockPool(Arena(Region((0,), (1,), 64, 0, 1, 1, num_blocks)), **settings)


def cached_block(pool: BlockPool, name: bytes):
    (block,) = pool.take(1)
    pool.register(block, name)
    return block


def test_empty_blocks_leave_first_then_those_marked_then_the_least_recently_used():
    pool = make_pool(4)
    old, marked, recent = (cached_block(pool, name) for name in (b"old", b"marked", b"recent"))
    pool.release([old])
    pool.release([marked], evict_first=True)
    pool.release([recent])
    taken = [pool.take(1)[0] for _ in range(4)]
    assert taken[1:] == [marked, old, recent]


def test_a_block_that_is_used_again_leaves_the_middle_of_the_queue():
    pool = make_pool(3)
    blocks = [cached_block(pool, bytes([i])) for i in range(3)]
    pool.release(blocks)
    pool.pin([blocks[1]])
    assert [*pool.take(1), *pool.take(1)] == [blocks[0], blocks[2]]
    assert pool.cached == {b"\x01": blocks[1]}


def test_a_block_stays_while_a_second_request_reads_it():
    pool = make_pool(1)
    block = cached_block(pool, b"a")
    pool.pin([block])
    pool.release([block])
    assert pool.num_free == 0
    pool.release([block])
    assert pool.num_free == 1


def test_one_copy_of_the_same_content_is_kept():
    pool = make_pool(3)
    first, second = cached_block(pool, b"a"), cached_block(pool, b"a")
    pool.release([first])
    assert (pool.cached[b"a"], len(pool.free)) == (second, 0)
    pool.release([second])
    assert (pool.cached[b"a"], len(pool.free)) == (second, 1)


def test_content_computed_again_replaces_the_older_free_copy():
    pool = make_pool(3)
    first = cached_block(pool, b"a")
    pool.release([first])
    (second,) = pool.take(1)
    pool.register(second, b"a")
    assert (pool.cached[b"a"], len(pool.free), first.block_hash) == (second, 0, None)


def test_evicted_keys_are_remembered_up_to_a_bound_and_until_they_return():
    pool = make_pool(1, max_evicted_keys=2)
    for name in (b"a", b"b", b"c", b"d"):
        pool.release([cached_block(pool, name)])
    assert list(pool.evicted) == [b"b", b"c"]
    pool.release([cached_block(pool, b"b")])
    assert list(pool.evicted) == [b"c", b"d"]


@pytest.mark.parametrize("needs_parents", [False, True], ids=["each on its own", "chains"])
def test_blocks_stay_while_a_checkpoint_needs_them_and_are_empty_afterwards(needs_parents):
    pool = make_pool(5)
    pool.needed, pool.needs_parents = {}, needs_parents
    chain = [bytes([i]) for i in range(4)]
    blocks = [cached_block(pool, name) for name in chain]
    for length in (2, 4, 3, 4):
        assert pool.can_need(chain[:length])
        pool.need(chain[:length])
    pool.release(blocks)
    kept = []
    for length in (4, 2, 4, 3):
        pool.release_need(chain[:length])
        assert set(pool.needed) == set(pool.cached)
        kept.append(len(pool.cached))
    assert kept == [4, 4, 3, 0]
    assert not pool.can_need(chain[:1])


def test_a_block_that_no_checkpoint_needs_is_empty_but_remembered_as_known():
    pool = make_pool(2, max_evicted_keys=4)
    pool.needed = {}
    pool.release([cached_block(pool, b"a")])
    assert (len(pool.free), list(pool.evicted)) == (0, [b"a"])


def test_a_checkpoint_behind_another_costs_only_what_it_adds():
    pool = make_pool(100)
    pool.needed, pool.needs_parents = {}, True
    chain = [bytes([i]) for i in range(100)]
    pool.need(chain[:99])
    counts_before = dict(pool.needed)
    pool.need(chain)
    changed = [key for key in pool.needed if pool.needed[key] != counts_before.get(key)]
    assert sorted(changed) == chain[98:]


class PoolMachine(RuleBasedStateMachine):
    """Random operations against a model: a map of what each held block holds, and of what must be found."""

    def __init__(self):
        super().__init__()
        self.pool = make_pool(6, max_evicted_keys=4)
        self.held = []

    @precondition(lambda self: self.pool.num_free)
    @rule(name=st.sampled_from([b"a", b"b", b"c", None]))
    def take(self, name):
        (block,) = self.pool.take(1)
        assert not block.is_known
        self.held.append(block)
        if name:
            self.pool.register(block, name)

    @precondition(lambda self: self.pool.cached)
    @rule(data=st.data())
    def hit(self, data):
        block = self.pool.cached[data.draw(st.sampled_from(sorted(self.pool.cached)))]
        self.pool.pin([block])
        self.held.append(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), evict_first=st.booleans())
    def release(self, data, evict_first):
        block = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        name, others = block.block_hash, [other for other in self.held if other.block_hash == block.block_hash]
        self.pool.release([block], evict_first=evict_first)
        if name:
            assert self.pool.cached[name] in (block, *others)

    @rule()
    def forget_all(self):
        self.pool.forget_all()
        assert len(self.pool.free) == 0

    @invariant()
    def every_block_is_held_or_free_once(self):
        held_ids = {block.block_id for block in self.held}
        free = [*self.pool.empty, *self.pool.free]
        known_ids = sorted(held_ids | {block.block_id for block in free})
        assert known_ids == list(range(1, 7 - self.pool.arena.num_unowned))
        assert len(free) + len(held_ids) == len(known_ids)
        assert all(self.held.count(block) == block.ref_count for block in self.pool.blocks())

    @invariant()
    def every_key_leads_to_a_block_that_has_it(self):
        for name, block in self.pool.cached.items():
            assert block.block_hash == name
        assert not self.pool.evicted.keys() & self.pool.cached.keys()


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
