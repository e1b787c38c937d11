"""What a block computed is computed again from new values, or the recording says why it can't be."""

import threading

import pytest
import torch

from hybrid_engine.kernels.native import recorded
from hybrid_engine.kernels.norm import rms_norm

WEIGHT_E = torch.linspace(0.5, 1.5, 32)


def block(x_TE: torch.Tensor) -> torch.Tensor:
    """Calls into C++, operations of torch's, a view, a change in place."""
    doubled_TE = rms_norm(x_TE, WEIGHT_E, eps=1e-6) * 2
    doubled_TE[0] += 1
    return rms_norm(doubled_TE.flatten().view(x_TE.shape), WEIGHT_E.float(), eps=1e-6)


@torch.inference_mode()
def test_a_recording_computes_the_same_of_new_values():
    first_TE, second_TE = torch.randn(3, 32), torch.randn(3, 32)
    x_TE = first_TE.clone()
    with recorded() as recording:
        out_TE = block(x_TE)
    assert torch.equal(out_TE, block(first_TE))
    x_TE.copy_(second_TE)
    recording.play()
    assert torch.equal(out_TE, block(second_TE))
    assert recording.obstacle is None


@torch.inference_mode()
def test_tensors_of_the_block_live_as_long_as_the_recording():
    with recorded() as recording:
        block(torch.ones(4, 32))
    assert recording.num_bytes >= 3 * 4 * 32 * 4


@pytest.mark.parametrize(
    "read", [torch.Tensor.tolist, torch.Tensor.numpy, lambda x: int(x[0, 0]), lambda x: bool(x.any()), lambda x: f"{x}"]
)
def test_a_block_that_looks_at_values_has_an_obstacle(read):
    x_TE = torch.ones(2, 32)
    with recorded() as recording:
        read(x_TE)
    assert recording.obstacle is not None
    with pytest.raises(AssertionError, match="values were asked for"):
        recording.play()


@torch.inference_mode()
def test_what_another_thread_computes_meanwhile_is_not_recorded():
    x_TE = torch.randn(3, 32)
    with recorded() as recording:
        out_TE = rms_norm(x_TE, WEIGHT_E, eps=1e-6)
        other = threading.Thread(target=rms_norm, args=(x_TE, WEIGHT_E), kwargs={"eps": 1.0})
        other.start()
        other.join()
    wanted_TE = out_TE.clone()
    recording.play()
    assert torch.equal(out_TE, wanted_TE)
    assert len(recording._calls) == 1


def test_behind_the_block_nothing_is_recorded_any_more():
    with pytest.raises(ZeroDivisionError), recorded() as recording:
        1 / 0  # noqa: B018
    rms_norm(torch.randn(3, 32), WEIGHT_E, eps=1e-6)
    assert recording._calls == []
