"""Large pages are asked for inside a tensor, never beyond it."""

import pytest
import torch

from hybrid_engine.kernels.native import pages

MIB = 1 << 20


@pytest.fixture
def asked(monkeypatch):
    """Ranges of memory that Linux was asked about."""
    ranges = []

    class Libc:
        @staticmethod
        def madvise(start, size, advice):
            ranges.append((start.value, size.value, advice))

    monkeypatch.setattr(pages, "_libc", lambda: Libc)
    return ranges


@pytest.mark.parametrize("offset", [0, 1, 4096])
def test_whole_pages_inside_the_tensor_are_asked_for(asked, offset):
    memory = torch.empty(9 * MIB, dtype=torch.uint8)
    tensor = memory[offset:]
    assert pages.use_large_pages(tensor) is tensor
    ((start, size, _),) = asked
    assert start % (2 * MIB) == size % (2 * MIB) == 0
    assert tensor.data_ptr() <= start
    assert start + size <= tensor.data_ptr() + tensor.nbytes
    assert size >= 4 * MIB


def test_a_small_tensor_is_left_alone(asked):
    pages.use_large_pages(torch.empty(MIB, dtype=torch.uint8))
    assert asked == []


def test_what_is_written_afterwards_is_read_again():
    tensor = pages.use_large_pages(torch.empty(5 * MIB, dtype=torch.uint8))
    tensor.fill_(7)
    assert int(tensor.sum()) == 35 * MIB
