"""Tensors in large pages: of mappings that Linux was asked to give them for, apart from each other, given back."""

import itertools
import mmap
import weakref

import pytest
import torch

from hybrid_engine.kernels.native import pages

MIB = 1 << 20

pytestmark = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="large pages are Linux's")


@pytest.fixture
def mappings(monkeypatch):
    """Weak references to all mappings made, each with whether large pages were asked for."""
    made = {}

    class Mapping(mmap.mmap):
        def madvise(self, advice):
            made[weakref.ref(self)] = advice == mmap.MADV_HUGEPAGE
            super().madvise(advice)

    monkeypatch.setattr(pages.mmap, "mmap", Mapping)
    return made


def test_tensors_that_share_a_mapping_lie_apart_and_at_lines_of_the_cache(mappings):
    memory = pages.LargePages()
    sizes = [70_001, 3 * MIB, MIB + 1, *[9 * MIB + 63] * 5]
    tensors = [memory.empty(size, torch.uint8) for size in sizes]
    assert [tensor.nbytes for tensor in tensors] == sizes
    assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors)
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    assert [set(tensor.tolist()) for tensor in tensors[:3]] == [{0}, {1}, {2}]
    assert list(mappings.values()) == [True, True]


def test_small_tensors_are_torchs_own_and_large_ones_have_a_mapping_that_begins_at_a_page(mappings):
    memory = pages.LargePages()
    assert memory.empty(100, torch.bfloat16).untyped_storage().nbytes() == 200
    assert not mappings
    large = [memory.empty(17 * MIB, torch.bfloat16) for _ in range(2)]
    assert [tensor.data_ptr() % (2 * MIB) for tensor in large] == [0, 0]
    assert list(mappings.values()) == [True, True]


def test_memory_is_given_back_with_the_last_tensor_in_it(mappings):
    memory = pages.LargePages()
    first, second = (memory.empty(MIB, torch.uint8) for _ in range(2))
    shared, *_ = mappings
    memory.empty(32 * MIB - 1, torch.uint8)  # in another one, which is the last from now on
    del first
    assert shared() is not None
    second.fill_(3)
    assert int(second.sum()) == 3 * MIB
    del second
    assert shared() is None


def test_more_than_there_is_is_refused():
    with pytest.raises(MemoryError, match="no memory for a tensor"):
        pages.LargePages().empty(1 << 55, torch.uint8)


def test_where_linux_has_no_large_pages_all_is_the_same(monkeypatch):
    class Mapping(mmap.mmap):
        def madvise(self, advice):
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(pages.mmap, "mmap", Mapping)
    assert pages.LargePages().empty(MIB, torch.uint8).fill_(1).sum() == MIB
