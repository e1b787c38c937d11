import dataclasses

import pytest
from bookkeeping import full, sliding, state
from hypothesis import assume, given
from hypothesis import strategies as st

from hybrid_engine.errors import CapacityError
from hybrid_engine.groups.layout import MAX_LEFT_OVER, MemoryLayout, share_memory, split_memory
from hybrid_engine.groups.spec import FullAttentionSpec, Group, MambaSpec

JAMBA_MINI = (
    # Jamba 1.5 Mini in bfloat16: 4 attention layers of 8 heads of 128, 28 Mamba-1 layers of 8,192 channels.
    Group(0, FullAttentionSpec(8, 128, 2), tuple(range(4, 32, 8))),
    Group(1, MambaSpec((8192, 3), (8192, 16), 2), tuple(i for i in range(32) if i % 8 != 4)),
)


def group(group_id: int, num_bytes: int) -> Group:
    """A group whose block takes so many bytes."""
    return Group(group_id, MambaSpec((1, 16), ((num_bytes - 64) // 4,), 4), (group_id,))


@given(sizes=st.lists(st.integers(64, 64_000), min_size=1, max_size=5), memory_bytes=st.integers(100_000_000, 10**10))
def test_no_two_tensors_share_a_byte_and_little_is_left_over_in_extents(sizes, memory_bytes):
    layout = share_memory([group(i, size // 4 * 4) for i, size in enumerate(sizes)], memory_bytes)
    layout.check()
    (region,) = layout.regions
    assert max(region.left_over(index) for index in range(len(sizes))) <= MAX_LEFT_OVER
    assert region.num_bytes <= memory_bytes


@pytest.mark.parametrize("ratios", [(2, 3), (2, 3, 4.6), (1, 1000), (2, 3, 4.6, 2000), (3, 3 * 97)])
def test_pages_of_any_ratio_leave_over_at_most_two_percent(ratios):
    layout = share_memory([group(i, int(ratio * 6400)) for i, ratio in enumerate(ratios)], 40 << 30)
    (region,) = layout.regions
    assert max(region.left_over(index) for index in range(len(ratios))) <= MAX_LEFT_OVER


def test_a_block_takes_exactly_what_its_layers_keep():
    layout = share_memory(JAMBA_MINI, 1 << 30)
    assert [pages.stride_bytes for pages in layout.pages] == [group.block_bytes for group in JAMBA_MINI]
    (region,) = layout.regions
    assert region.extent_bytes == JAMBA_MINI[1].block_bytes
    assert region.blocks_per_extent == (JAMBA_MINI[1].block_bytes // JAMBA_MINI[0].block_bytes, 1)


def test_a_single_group_has_extents_of_one_block():
    (region,) = share_memory(JAMBA_MINI[:1], 1 << 30).regions
    assert region.blocks_per_extent == (1,)


def test_small_memory_is_cut_so_that_every_group_can_have_a_block():
    groups = [group(0, 6400), group(1, 9984)]
    (region,) = share_memory(groups, 3 * 9984).regions
    assert (region.num_extents, region.blocks_per_extent) == (2, (1, 1))


def test_memory_for_fewer_blocks_than_groups_is_refused():
    with pytest.raises(CapacityError, match="one block in every group takes 29,952 with the null block"):
        share_memory([group(0, 6400), group(1, 9984)], 3 * 9984 - 1)


def test_split_memory_gives_each_group_its_blocks_one_behind_the_other():
    layout = split_memory(JAMBA_MINI, [10, 3])
    layout.check()
    assert layout.num_bytes == 11 * JAMBA_MINI[0].block_bytes + 4 * JAMBA_MINI[1].block_bytes
    assert [layout.num_ids(0), layout.num_ids(1)] == [11, 4]


@given(st.data())
def test_tensors_that_would_overlap_are_found(data):
    layout = share_memory([Group(0, full(), (0, 1)), Group(1, sliding(8), (2,)), Group(2, state(), (3,))], 100_000)
    i = data.draw(st.integers(0, 2))
    pages = layout.pages[i]
    flat = [offset for of_layer in pages.offsets for offset in of_layer]
    index = data.draw(st.integers(1, len(flat) - 1)) if len(flat) > 1 else 0
    assume(index)
    moved = flat[index] - data.draw(st.integers(1, flat[index]))
    num_tensors = len(pages.offsets[0])
    flat[index] = moved
    offsets = tuple(tuple(flat[k : k + num_tensors]) for k in range(0, len(flat), num_tensors))
    wrong = [pages._replace(offsets=offsets) if k == i else other for k, other in enumerate(layout.pages)]
    with pytest.raises(AssertionError, match=r"taken|aligned"):
        dataclasses.replace(layout, pages=tuple(wrong)).check()


def test_regions_that_would_overlap_are_found():
    layout = split_memory(JAMBA_MINI, [10, 3])
    first, second = layout.regions
    wrong = MemoryLayout(layout.groups, layout.pages, (first, dataclasses.replace(second, start_bytes=64)))
    with pytest.raises(AssertionError, match="a region starts at 64"):
        wrong.check()
