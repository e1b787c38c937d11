"""Calls of what multiplies weights on a GPU, experts and linear layers in fp8, and of draws; on random tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hybrid_engine.bench.gpu_peers import MakePeer
from hybrid_engine.bench.gpu_work import Work, random_tensor
from hybrid_engine.kernels import linear, moe, sampling
from hybrid_engine.kernels.linear import reference as linear_reference
from hybrid_engine.kernels.linear.fp8 import Fp8Form, round_to_fp8
from hybrid_engine.kernels.moe import reference as moe_reference
from hybrid_engine.kernels.sampling import reference as sampling_reference

SILU = moe.Activation("silu")


@dataclass(frozen=True)
class ExpertShape:
    """The experts of one model's layer."""

    name: str
    num_experts: int
    num_chosen: int
    width: int
    inner: int
    activation: moe.Activation = SILU
    has_biases: bool = False


def make_moe(
    device: torch.device, dtype: torch.dtype, shape: ExpertShape, num_tokens: int, quantization: str | None = None
) -> Work:
    """Tokens of which each has chosen its experts at random. quantization: None or fp8."""
    first_columns = shape.inner * (2 if shape.activation.is_gated else 1)
    sizes = ((shape.num_experts, first_columns, shape.width), (shape.num_experts, shape.width, shape.inner))
    gate_up, down = (random_tensor(device, dtype, *size).mul_(size[2] ** -0.5) for size in sizes)
    x_TE = random_tensor(device, dtype, num_tokens, shape.width)
    scores_TX = torch.rand(num_tokens, shape.num_experts, device=device)
    weights_TC, experts_TC = scores_TX.topk(shape.num_chosen, dim=1)
    biases = [torch.randn(size[:2], device=device) if shape.has_biases else None for size in sizes]
    options: dict[str, Any] = {
        "activation": shape.activation,
        "gate_up_bias_XN": biases[0],
        "down_bias_XE": biases[1],
        "weighs_inputs": False,
    }
    packed: dict[str, Any] = {
        "gate_up": moe.PackedExperts.pack(gate_up, quantization),
        "down": moe.PackedExperts.pack(down, quantization),
    }
    num_read = 0 if device.type == "meta" else len(experts_TC.unique())
    each = gate_up[0].numel() + down[0].numel()
    weight_bytes = dtype.itemsize
    if quantization == "fp8":
        weight_bytes = 1
        gate_up, down = (fp8_as_it_is(stack) for stack in (gate_up, down))
    return Work(
        lambda: moe.moe(x_TE, weights_TC, experts_TC, **packed, **options),
        lambda: moe_reference.moe(x_TE, weights_TC, experts_TC, gate_up=gate_up, down=down, **options),
        num_bytes=num_read * each * weight_bytes + 2 * x_TE.numel() * dtype.itemsize,
        num_flops=2.0 * experts_TC.numel() * each,
        peers=_moe_peers(x_TE, weights_TC, experts_TC, gate_up, down, shape) if quantization is None else {},
    )


def fp8_as_it_is(weights: Tensor) -> Tensor:
    """What weights become in fp8, written out in float32: [..., N, K]."""
    rounded, scales = round_to_fp8(weights)
    return rounded.float() * scales[..., None]


def make_fp8_linear(
    device: torch.device,
    dtype: torch.dtype,
    num_outputs: int,
    num_inputs: int,
    num_tokens: int,
    out_dtype: torch.dtype | None = None,
) -> Work:
    """A linear layer whose weight is in fp8; the peer is the same one in the inputs' dtype."""
    weight_NK = random_tensor(device, dtype, num_outputs, num_inputs).mul_(num_inputs**-0.5)
    x_TK = random_tensor(device, dtype, num_tokens, num_inputs)
    packed, out_dtype = linear.PackedLinear.pack(weight_NK, "fp8"), out_dtype or dtype
    form = packed.form
    assert isinstance(form, Fp8Form), type(form)
    return Work(
        lambda: linear.linear(x_TK, packed, out_dtype=out_dtype),
        lambda: linear_reference.fp8_linear(x_TK, form.data, form.scales_N, None, out_dtype=out_dtype),
        num_bytes=weight_NK.numel() + num_tokens * (num_inputs + num_outputs) * dtype.itemsize,
        num_flops=2.0 * num_tokens * weight_NK.numel(),
        peers={f"cuBLAS in {str(dtype).removeprefix('torch.')}": lambda: lambda: F.linear(x_TK, weight_NK)},
    )


def make_draw(device: torch.device, dtype: torch.dtype, num_rows: int, vocab_size: int) -> Work:
    """Tokens drawn with min_p, top_k and top_p; logits are float32 whatever the dtype."""
    logits_RV = torch.randn(num_rows, vocab_size, device=device) * 3
    likeliest_R = logits_RV.argmax(1)
    draws_R1 = torch.rand(num_rows, 1, dtype=torch.float64, device=device)
    fixed = torch.tensor([[1.25, math.log(1e-4), 100.0, 0.95]], dtype=torch.float64, device=device)
    numbers_RC = torch.cat([fixed.expand(num_rows, 4), draws_R1], 1)

    def run(draw: Callable[..., None]) -> Tensor:
        token_ids_R = likeliest_R.clone()
        draw(logits_RV, numbers_RC, token_ids_R=token_ids_R)
        return token_ids_R

    return Work(
        lambda: run(sampling.draw_in_place),
        lambda: run(sampling_reference.draw_in_place),
        num_bytes=4 * logits_RV.numel(),
    )


def _moe_peers(
    x_TE: Tensor, weights_TC: Tensor, experts_TC: Tensor, gate_up: Tensor, down: Tensor, shape: ExpertShape
) -> dict[str, MakePeer]:
    """One expert after the other, as it is done where nothing is fused; torch's grouped product on sorted rows."""
    if shape.has_biases or shape.activation.kind != "silu":
        return {}

    def summed(by_row_XE: Tensor, order_X: Tensor) -> Tensor:
        by_pair_XE = torch.empty_like(by_row_XE)
        by_pair_XE[order_X] = by_row_XE
        return (by_pair_XE.unflatten(0, experts_TC.shape) * weights_TC[:, :, None]).sum(1).to(x_TE.dtype)

    def one_by_one() -> Tensor:
        order_X = experts_TC.flatten().argsort(stable=True)
        counts = experts_TC.flatten().bincount(minlength=shape.num_experts).tolist()
        parts = []
        for expert, rows in enumerate(x_TE[order_X // shape.num_chosen].split(counts)):
            if len(rows):
                gate, up = F.linear(rows, gate_up[expert]).chunk(2, 1)
                parts.append(F.linear(F.silu(gate) * up, down[expert]))
        return summed(torch.cat(parts), order_X)

    def grouped() -> Tensor:
        order_X = experts_TC.flatten().argsort(stable=True)
        ends_X = experts_TC.flatten().bincount(minlength=shape.num_experts).cumsum(0).int()
        rows = x_TE[order_X // shape.num_chosen]
        gate, up = F.grouped_mm(rows, gate_up.transpose(1, 2), offs=ends_X).chunk(2, 1)
        return summed(F.grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=ends_X), order_X)

    return {"one expert after the other": lambda: one_by_one, "torch's grouped product": lambda: grouped}
