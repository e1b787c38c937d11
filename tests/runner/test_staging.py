"""Arrays on their way to a device."""

import numpy as np
import pytest
import torch

from hybrid_engine.runner.staging import Staging

ARRAYS = [
    np.arange(5, dtype=np.int64),
    np.array([[1, 2, 3]], np.int32),
    np.array([True, False, True]),
    np.zeros((0, 4), np.int32),
    np.arange(3000, dtype=np.int64)[::3],
]


def stage(staging: Staging, arrays: list[np.ndarray]) -> list[torch.Tensor]:
    staging.begin()
    tensors = [staging.put(array) for array in arrays]
    staging.send()
    return tensors


def test_tensors_hold_what_the_arrays_held(device):
    for array, tensor in zip(ARRAYS, stage(Staging(device, num_bytes=64), ARRAYS), strict=True):
        assert tensor.device.type == device
        assert np.array_equal(tensor.cpu().numpy(), array)


@pytest.mark.gpu
def test_equal_sizes_in_equal_order_get_equal_addresses():
    staging = Staging("cuda")
    first = [tensor.data_ptr() for tensor in stage(staging, ARRAYS)]
    again = stage(staging, [array + 1 if array.dtype != bool else ~array for array in ARRAYS])
    assert [tensor.data_ptr() for tensor in again] == first
    assert again[0].tolist() == [1, 2, 3, 4, 5]
