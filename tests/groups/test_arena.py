"""Random operations on pools that share an arena, against a model of the memory: who wrote what where."""

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hybrid_engine.groups.arena import Arena
from hybrid_engine.groups.layout import Region
from hybrid_engine.groups.pool import BlockPool

# Units of a block by group, and of an extent: the ratios of the blocks are 1 : 1.5 : 2.3 : 1,000, and smaller ones.
SHAPES = [((2, 3), 6, 7), ((20, 30, 46), 460, 5), ((1, 4), 8, 6), ((2, 3, 4, 2000), 2000, 5), ((5,), 5, 9)]


def make_pools(block_units: tuple[int, ...], extent_units: int, num_extents: int) -> tuple[Arena, list[BlockPool]]:
    region = Region(tuple(range(len(block_units))), block_units, 64, 0, max(block_units), extent_units, num_extents)
    arena = Arena(region)
    return arena, [BlockPool(arena, max_evicted_keys=4) for _ in block_units]


def keep(pool: BlockPool, *names: bytes) -> list:
    """Let blocks be cached under these names."""
    blocks = pool.take(len(names))
    for block, name in zip(blocks, names, strict=True):
        pool.register(block, name)
    pool.release(blocks)
    return blocks


def test_a_group_can_have_all_that_no_other_holds():
    _, (small, large) = make_pools((2, 3), 6, 4)
    (held,) = large.take(1)
    assert (small.num_free, large.num_free) == (9, 7)
    assert len({block.block_id for block in small.take(9)}) == 9
    assert small.num_free == large.num_free - 1 == 0
    large.release([held])
    assert small.num_free == 3


def test_blocks_in_use_are_moved_out_of_the_way():
    arena, (small, large) = make_pools((2, 3), 6, 2)
    moves = []
    arena.on_move = lambda pool, source_id, target_id: moves.append((pool, source_id, target_id))
    blocks = small.take(6)
    small.release(blocks[1:3] + blocks[4:5])
    kept = {block: block.block_id for block in (blocks[0], blocks[3], blocks[5])}
    (taken,) = large.take(1)
    moved = [block for block, block_id in kept.items() if block.block_id != block_id]
    assert moves == [(small, kept[block], block.block_id) for block in moved]
    extents = [range(3, 9), range(9, 15)]
    assert [[block.block_id in extent for block in kept] for extent in extents].count([True] * 3) == 1
    assert not any(taken.block_id in extent and block.block_id in extent for extent in extents for block in kept)


def test_what_is_cached_moves_with_its_key_and_what_is_worth_least_goes():
    arena, (small, large) = make_pools((2, 3), 6, 2)
    arena.on_move = lambda *move: None
    keep(small, b"a", b"b", b"c", b"d", b"e", b"f")
    small.pin([small.cached[b"a"]])
    large.take(2)
    assert sorted(small.cached) == [b"a", b"e", b"f"]
    assert list(small.evicted) == [b"b", b"c", b"d"]


def test_a_fixed_block_stays_where_it_is_and_others_are_moved():
    arena, (small, large) = make_pools((2, 3), 6, 2)
    arena.on_move = lambda *move: None
    blocks = small.take(6)
    fixed = blocks[0]
    small.fix([fixed])
    small.release(blocks[1:3] + blocks[4:5])
    before = fixed.block_id
    assert large.num_free == 2
    large.take(2)
    assert fixed.block_id == before


def test_extents_with_fixed_blocks_are_not_promised_to_others():
    _, (small, large) = make_pools((2, 3), 6, 2)
    blocks = small.take(6)
    for block in (blocks[0], blocks[5]):
        small.fix([block])
    small.release(blocks[1:5])
    assert large.num_free == 0
    small.unfix([blocks[5]])
    assert large.num_free == 2


def test_an_extent_that_no_group_has_is_taken_before_anything_is_given_up():
    _, (small, large) = make_pools((2, 3), 6, 3)
    keep(small, b"a", b"b", b"c")
    large.take(4)
    assert len(small.cached) == 3


@pytest.mark.parametrize(("block_units", "extent_units", "num_extents"), SHAPES)
def test_the_capacity_that_is_reported_can_be_filled_to_the_last_block(block_units, extent_units, num_extents):
    _, pools = make_pools(block_units, extent_units, num_extents)
    for pool in pools:
        blocks = pool.take(pool.num_free)
        num_blocks = num_extents * (extent_units // block_units[pools.index(pool)])
        assert len({block.block_id for block in blocks}) == num_blocks
        assert all(other.num_free == 0 for other in pools)
        pool.release(blocks)


class ArenaMachine(RuleBasedStateMachine):
    """Whoever takes a block writes its own name into every unit of it; a move carries what is there along."""

    @initialize(shape=st.sampled_from(SHAPES))
    def set_up(self, shape):
        self.block_units, self.extent_units, self.num_extents = shape
        self.arena, self.pools = make_pools(*shape)
        self.arena.on_move = self.move
        self.memory = {}
        self.names = itertools.count()
        self.name_of = {}
        self.held = [[] for _ in self.pools]
        self.fixed = [[] for _ in self.pools]

    def units(self, pool, block_id):
        return range(block_id, block_id + self.block_units[self.pools.index(pool)])

    def move(self, pool, source_id, target_id):
        content = [self.memory.get(unit) for unit in self.units(pool, source_id)]
        self.memory.update(zip(self.units(pool, target_id), content, strict=True))

    def pick(self, data):
        return data.draw(st.sampled_from(self.pools))

    @rule(data=st.data())
    def take(self, data):
        pool = self.pick(data)
        if not pool.num_free:
            return
        blocks = pool.take(data.draw(st.integers(1, min(4, pool.num_free))))
        for block in blocks:
            assert (block.ref_count, block.is_known) == (1, False)
            self.name_of[block] = name = next(self.names)
            self.memory.update(dict.fromkeys(self.units(pool, block.block_id), name))
            if data.draw(st.booleans()):
                pool.register(block, b"%d" % name)
        self.held[self.pools.index(pool)] += blocks

    @rule(data=st.data(), evict_first=st.booleans())
    def release(self, data, evict_first):
        pool = self.pick(data)
        held = self.held[self.pools.index(pool)]
        if held:
            block = held.pop(data.draw(st.integers(0, len(held) - 1)))
            if block in self.fixed[self.pools.index(pool)]:
                self.fixed[self.pools.index(pool)].remove(block)
                pool.unfix([block])
            pool.release([block], evict_first=evict_first)

    @rule(data=st.data())
    def hit(self, data):
        pool = self.pick(data)
        if pool.cached:
            block = pool.cached[data.draw(st.sampled_from(sorted(pool.cached)))]
            if block.ref_count == 0:
                pool.pin([block])
                self.held[self.pools.index(pool)].append(block)

    @rule(data=st.data())
    def evict(self, data):
        pool = self.pick(data)
        if len(pool.free):
            pool.evict(pool.free.first())

    @rule(data=st.data())
    def fix(self, data):
        pool = self.pick(data)
        held, fixed = self.held[self.pools.index(pool)], self.fixed[self.pools.index(pool)]
        if held and held[-1] not in fixed:
            pool.fix([held[-1]])
            fixed.append(held[-1])

    @precondition(lambda self: hasattr(self, "arena"))
    @rule(data=st.data())
    def fill(self, data):
        """What is said to be free can be had, all of it at once."""
        pool = self.pick(data)
        blocks = pool.take(pool.num_free)
        assert pool.num_free == 0
        for block in blocks:
            self.memory.update(dict.fromkeys(self.units(pool, block.block_id), None))
        pool.release(blocks)

    @invariant()
    def whoever_wrote_a_block_finds_it_whole(self):
        for pool, held in zip(getattr(self, "pools", ()), getattr(self, "held", ()), strict=True):
            for block in (*held, *pool.cached.values()):
                content = {self.memory.get(unit) for unit in self.units(pool, block.block_id)}
                assert content == {self.name_of[block]}

    @invariant()
    def no_extent_is_lost_and_none_belongs_to_two(self):
        if hasattr(self, "arena"):
            owned = [extent.number for pool in self.pools for extent in pool.empty.extents()]
            assert sorted([*owned, *self.arena._unowned]) == list(range(self.num_extents))
            for pool, held in zip(self.pools, self.held, strict=True):
                assert pool.num_held == len(held)
                assert pool.num_owned == sum(1 for _ in pool.blocks())
                for extent in pool.empty.extents():
                    ids = range(extent.first_id, extent.first_id + self.extent_units, extent.block_units)
                    assert [(block.block_id, block.extent) for block in extent.blocks] == [
                        (block_id, extent) for block_id in ids[: len(extent.blocks)]
                    ]

    @invariant()
    def nothing_is_kept_that_nobody_can_find(self):
        for pool in getattr(self, "pools", ()):
            assert all(block.is_known for block in pool.free)
            assert not any(block.is_known for block in pool.empty)


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
