"""Calls of the GPU's ops on random tensors: what runs, its reference, and what it costs at least.

On the device "meta" tensors take no memory, and running a work compiles its kernels and no more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from hybrid_engine.kernels import activation, attention, norm, rope, ssm
from hybrid_engine.kernels.activation import reference as activation_reference
from hybrid_engine.kernels.attention import AttentionMeta
from hybrid_engine.kernels.attention import reference as attention_reference
from hybrid_engine.kernels.linear import PackedLinear, linear
from hybrid_engine.kernels.linear import reference as linear_reference
from hybrid_engine.kernels.norm import reference as norm_reference
from hybrid_engine.kernels.rope import reference as rope_reference
from hybrid_engine.kernels.ssm import PIECE_TOKENS, StateMeta
from hybrid_engine.kernels.ssm import reference as ssm_reference

BLOCK_SIZE = 16
Run = Callable[[], object]


@dataclass
class Work:
    """One op on tensors that exist."""

    run: Run
    """The public op: tensors, or a tuple of them. What it changes in place is of no interest to a timing."""
    reference: Callable[[], object] | None = None
    """The same by the plain reference, on copies of what is changed in place."""
    num_bytes: float = 0.0
    """The fewest that must be moved."""
    num_flops: float = 0.0
    """Multiplications and additions of matrix products."""
    peers: dict[str, Run] = field(default_factory=dict)
    """The same work by others."""


@dataclass(frozen=True)
class Scan:
    """The recurrent layer of one model: inner width or heads, states."""

    name: str
    heads: int
    size: int
    states: int
    groups: int = 1


def random_tensor(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


# Attention


def make_meta(
    device: torch.device,
    num_queries: list[int],
    num_keys: list[int],
    block_size: int = BLOCK_SIZE,
    *,
    num_shared_blocks: int = 0,
) -> tuple[AttentionMeta, int]:
    """Requests whose blocks lie in random order, the first ones shared by all, and the number of blocks."""
    needs = [-(-n // block_size) - num_shared_blocks for n in num_keys]
    num_blocks = num_shared_blocks + sum(needs)
    order = (np.random.default_rng(0).permutation(num_blocks) + 1).tolist()
    shared, order = order[:num_shared_blocks], order[num_shared_blocks:]
    tables = []
    for need in needs:
        tables.append(shared + order[:need])
        order = order[need:]
    meta = AttentionMeta.build(
        num_queries=num_queries,
        num_keys=num_keys,
        block_tables=tables,
        block_size=block_size,
        device=device,
        is_shared=num_shared_blocks > 0,
    )
    return meta, num_blocks + 1


def make_qkv(
    device: torch.device, dtype: torch.dtype, heads: int, kv: int, sizes: tuple[int, int], rotary: int
) -> Work:
    """The packed projection of 70 tokens."""
    return make_qkv_of(device, dtype, heads, kv, sizes, rotary, 70)


def make_qkv_of(
    device: torch.device, dtype: torch.dtype, heads: int, kv: int, sizes: tuple[int, int], rotary: int, num_tokens: int
) -> Work:
    """A packed projection, split, normed, turned and written. sizes: of a key's heads and of a value's."""
    size, value_size = sizes
    meta, num_blocks = make_meta(device, [num_tokens], [num_tokens])
    caches = [random_tensor(device, dtype, num_blocks, kv, BLOCK_SIZE, each) for each in sizes * 2]
    qkv_TC = random_tensor(device, dtype, num_tokens, (heads + kv) * size + kv * value_size)
    angles = torch.randn(num_tokens, rotary // 2, device=device).repeat(1, 2)
    options = {
        "slots_T": meta.slots_T,
        "cos_TD": angles.cos(),
        "sin_TD": angles.sin(),
        "q_norm_D": torch.randn(size, device=device),
        "k_norm_D": torch.randn(size, device=device),
        "eps": 1e-6,
        "zero_centered": True,
    }

    def run(function: Callable[..., Tensor], k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return function(qkv_TC, k_cache_BKPD=k, v_cache_BKPD=v, **options), _in_slots(k, meta), _in_slots(v, meta)

    return Work(
        lambda: run(attention.qkv_norm_rope_write, *caches[:2]),
        lambda: run(attention_reference.qkv_norm_rope_write, *caches[2:]),
        num_bytes=2 * qkv_TC.numel() * dtype.itemsize,
    )


def _in_slots(cache_BKPD: Tensor, meta: AttentionMeta) -> Tensor:
    if cache_BKPD.device.type == "meta":
        return cache_BKPD
    return cache_BKPD.transpose(1, 2).flatten(0, 1)[meta.slots_T]


def make_write(device: torch.device, dtype: torch.dtype) -> Work:
    """Keys and values of 70 tokens into their slots."""
    meta, num_blocks = make_meta(device, [70], [70])
    caches = [random_tensor(device, dtype, num_blocks, 4, BLOCK_SIZE, 128) for _ in range(4)]
    k_TKD, v_TKD = random_tensor(device, dtype, 70, 4, 128), random_tensor(device, dtype, 70, 4, 128)

    def run(function: Callable[..., None], k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        function(k_TKD, v_TKD, k_cache_BKPD=k, v_cache_BKPD=v, slots_T=meta.slots_T)
        return _in_slots(k, meta), _in_slots(v, meta)

    return Work(lambda: run(attention.write_kv, *caches[:2]), lambda: run(attention_reference.write_kv, *caches[2:]))


def make_copies(device: torch.device, dtype: torch.dtype) -> Work:
    """Copies of blocks, one of a block that was just copied to."""
    k, v = random_tensor(device, dtype, 6, 4, BLOCK_SIZE, 128), random_tensor(device, dtype, 6, 4, BLOCK_SIZE, 128)
    others = (k.clone(), v.clone())
    copies = [(1, 3, 5), (2, 5, 16), (3, 4, 16)]

    def run(function: Callable[..., None], k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        function(k, v, copies=copies)
        return k, v

    return Work(lambda: run(attention.copy_blocks, k, v), lambda: run(attention_reference.copy_blocks, *others))


# What surrounds it


def make_norm(device: torch.device, dtype: torch.dtype, width: int, num_tokens: int = 70) -> Work:
    """Norm, add, norm."""
    x_TE, residual_TE = random_tensor(device, dtype, num_tokens, width), random_tensor(device, dtype, num_tokens, width)
    post_E, pre_E = torch.randn(width, device=device), torch.randn(width, device=device)
    options = {"post_weight_E": post_E, "pre_weight_E": pre_E, "eps": 1e-6, "zero_centered": True}

    def run(module: object) -> tuple[Tensor, ...]:
        plain = {"eps": 1e-6, "zero_centered": False}
        return (
            *module.norm_add_norm(x_TE, residual_TE, **options),  # type: ignore[attr-defined]
            *module.add_rms_norm(x_TE, residual_TE, pre_E, **plain),  # type: ignore[attr-defined]
            module.rms_norm(x_TE, pre_E, **plain),  # type: ignore[attr-defined]
        )

    return Work(lambda: run(norm), lambda: run(norm_reference))


def make_activation(device: torch.device, dtype: torch.dtype, width: int, kind: str, num_tokens: int = 70) -> Work:
    """act(gate) * up."""
    x_TC = random_tensor(device, dtype, num_tokens, 2 * width)
    return Work(
        lambda: activation.act_mul(x_TC, kind=kind),
        lambda: activation_reference.act_mul(x_TC, kind=kind),
        num_bytes=1.5 * x_TC.numel() * dtype.itemsize,
    )


def make_rope(device: torch.device, dtype: torch.dtype, heads: int, kv: int, size: int) -> Work:
    """Queries and keys of 70 tokens."""
    q_THD, k_TKD = random_tensor(device, dtype, 70, heads, size), random_tensor(device, dtype, 70, kv, size)
    tables = {"cos_TD": torch.randn(70, size, device=device), "sin_TD": torch.randn(70, size, device=device)}
    return Work(
        lambda: rope.apply_rope(q_THD, k_TKD, **tables), lambda: rope_reference.apply_rope(q_THD, k_TKD, **tables)
    )


# Recurrent layers


def make_state_meta(
    device: torch.device, num_queries: list[int], captures: list[tuple[int, int, int]], *, is_exact: bool = False
) -> tuple[StateMeta, int]:
    """Every second request goes on from a state; slots in no order; and the number of slots."""
    num_rows = len(num_queries)
    meta = StateMeta.build(
        num_queries=num_queries,
        slots=list(range(num_rows, 0, -1)),
        has_history=[row % 2 == 0 for row in range(num_rows)],
        captures=captures,
        put=lambda array: torch.as_tensor(array, device=device),
        piece_size=None if is_exact else PIECE_TOKENS,
        is_exact=is_exact,
    )
    return meta, max([num_rows, *(slot for _, _, slot in captures)]) + 1


STATE_NAMES = {
    "causal_conv1d": "conv_SIW",
    "mamba1_scan": "state_SIN",
    "mamba2_scan": "state_SHDN",
    "gated_delta_rule": "state_SHND",
}
"""What each recurrent op calls its states."""


def _stateful(name: str, states: Tensor, meta: StateMeta, **inputs: object) -> tuple[Run, Run]:
    """An op and its reference, each with states of its own; both return the output and the slots written."""
    copies = {ssm: states, ssm_reference: states.clone()}
    slots = torch.cat([meta.slots_R, meta.capture_slots_C])

    def run(module: object) -> tuple[Tensor, Tensor]:
        mine = copies[module]  # type: ignore[index]
        out = getattr(module, name)(**inputs, **{STATE_NAMES[name]: mine}, meta=meta)
        return (out, mine) if mine.device.type == "meta" else (out, mine[slots])

    return lambda: run(ssm), lambda: run(ssm_reference)


def make_conv(device: torch.device, dtype: torch.dtype, channels: int, num_queries: list[int], captures: list) -> Work:
    """A convolution of four taps."""
    meta, num_slots = make_state_meta(device, num_queries, captures)
    x_TI = random_tensor(device, dtype, sum(num_queries), channels)
    weight_IW, bias_I = torch.randn(channels, 4, device=device), torch.randn(channels, device=device)
    states = random_tensor(device, dtype, num_slots, channels, 3)
    inputs = {"x_TI": x_TI, "weight_IW": weight_IW, "bias_I": bias_I, "activation": "silu"}
    return Work(*_stateful("causal_conv1d", states, meta, **inputs), num_bytes=2 * x_TI.numel() * dtype.itemsize)


def make_mamba1(
    device: torch.device, dtype: torch.dtype, channels: int, states: int, num_queries: list[int], captures: list
) -> Work:
    """The selective scan, gated."""
    meta, num_slots = make_state_meta(device, num_queries, captures)
    num_tokens = sum(num_queries)
    wide = {name: random_tensor(device, dtype, num_tokens, channels) for name in ("x_TI", "dt_TI", "z_TI")}
    narrow = {name: random_tensor(device, dtype, num_tokens, states) for name in ("B_TN", "C_TN")}
    weights = {
        "A_IN": -torch.rand(channels, states, device=device),
        "D_I": torch.randn(channels, device=device),
        "dt_bias_I": torch.randn(channels, device=device) - 1,
    }
    cache = torch.randn(num_slots, channels, states, device=device)
    num_bytes = 4 * wide["x_TI"].numel() * dtype.itemsize + 8 * len(num_queries) * channels * states
    return Work(*_stateful("mamba1_scan", cache, meta, **wide, **narrow, **weights), num_bytes=num_bytes)


def make_mamba2(
    device: torch.device,
    dtype: torch.dtype,
    scan: Scan,
    num_queries: list[int],
    captures: list,
    chunk: int = PIECE_TOKENS,
    *,
    is_exact: bool = False,
) -> Work:
    """The scan by heads."""
    meta, num_slots = make_state_meta(device, num_queries, captures, is_exact=is_exact)
    num_tokens = sum(num_queries)
    inputs = {
        "x_THD": random_tensor(device, dtype, num_tokens, scan.heads, scan.size),
        "dt_TH": random_tensor(device, dtype, num_tokens, scan.heads),
        "B_TGN": random_tensor(device, dtype, num_tokens, scan.groups, scan.states),
        "C_TGN": random_tensor(device, dtype, num_tokens, scan.groups, scan.states),
        "A_H": -torch.rand(scan.heads, device=device),
        "D_H": torch.randn(scan.heads, device=device),
        "dt_bias_H": torch.randn(scan.heads, device=device) - 1,
        "dt_limit": (0.0, math.inf),
        "chunk": chunk,
    }
    cache = torch.randn(num_slots, scan.heads, scan.size, scan.states, device=device)
    state_elements = scan.heads * scan.size * scan.states
    x_THD = inputs["x_THD"]
    assert isinstance(x_THD, Tensor)
    return Work(
        *_stateful("mamba2_scan", cache, meta, **inputs),
        num_bytes=2 * x_THD.numel() * dtype.itemsize + 8 * len(num_queries) * state_elements,
        num_flops=4.0 * num_tokens * state_elements,
    )


def make_delta(
    device: torch.device,
    dtype: torch.dtype,
    scan: Scan,
    is_by_row: bool,
    num_queries: list[int],
    captures: list,
    *,
    is_exact: bool = False,
) -> Work:
    """The gated delta rule, with a decay for each head or for each row of its state."""
    meta, num_slots = make_state_meta(device, num_queries, captures, is_exact=is_exact)
    num_tokens, decays = sum(num_queries), scan.states if is_by_row else 1
    inputs = {
        "q_TGN": random_tensor(device, dtype, num_tokens, scan.groups, scan.states),
        "k_TGN": random_tensor(device, dtype, num_tokens, scan.groups, scan.states),
        "v_THD": random_tensor(device, dtype, num_tokens, scan.heads, scan.size),
        "dt_THN": random_tensor(device, dtype, num_tokens, scan.heads, decays),
        "b_TH": random_tensor(device, dtype, num_tokens, scan.heads),
        "A_H": -torch.rand(scan.heads, device=device),
        "dt_bias_HN": torch.randn(scan.heads, decays, device=device) - 1,
        "beta_scale": 1.0,
        "chunk": PIECE_TOKENS,
    }
    cache = torch.randn(num_slots, scan.heads, scan.states, scan.size, device=device)
    state_elements = scan.heads * scan.size * scan.states
    v_THD = inputs["v_THD"]
    assert isinstance(v_THD, Tensor)
    return Work(
        *_stateful("gated_delta_rule", cache, meta, **inputs),
        num_bytes=2 * v_THD.numel() * dtype.itemsize + 8 * len(num_queries) * state_elements,
        num_flops=6.0 * num_tokens * state_elements,
    )


def make_exact_linear(device: torch.device, dtype: torch.dtype, rows: int, outputs: int, inputs: int) -> Work:
    """A product whose rows don't depend on each other, to float32."""
    x_TK, weight_NK = random_tensor(device, dtype, rows, inputs), random_tensor(device, dtype, outputs, inputs)
    packed, bias_N = PackedLinear.pack(weight_NK, is_exact=True), torch.randn(outputs, device=device)
    return Work(
        lambda: linear(x_TK, packed, bias_N, out_dtype=torch.float32),
        lambda: linear_reference.linear(x_TK, weight_NK, bias_N, out_dtype=torch.float32),
        num_bytes=weight_NK.numel() * dtype.itemsize,
        num_flops=2.0 * rows * outputs * inputs,
    )


def make_gated_norm(device: torch.device, dtype: torch.dtype, width: int, group_size: int) -> Work:
    """The norm behind a scan."""
    x_TI, gate_TI = random_tensor(device, dtype, 70, width), random_tensor(device, dtype, 70, width)
    weight_I = torch.randn(width, device=device)
    return Work(
        lambda: ssm.gated_rms_norm(x_TI, gate_TI, weight_I, eps=1e-5, group_size=group_size),
        lambda: ssm_reference.gated_rms_norm(
            x_TI, gate_TI, weight_I, eps=1e-5, group_size=group_size, norm_before_gate=False, activation="silu"
        ),
    )
