"""Others that do what the GPU's ops do, on tensors of equal sizes laid out as they like them.

A peer is made when it is timed: what it needs may not be installed, and it may refuse a size. Both are told, not fatal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from hybrid_engine.bench.gpu_attention_work import Heads
    from hybrid_engine.bench.gpu_work import Scan

Run = Callable[[], object]
MakePeer = Callable[[], Run]
UNAVAILABLE = (ImportError, AttributeError, RuntimeError, NotImplementedError, TypeError, ValueError, AssertionError)
"""What a peer may raise that isn't there, or can't do this size here; torch's compiler raises RuntimeErrors."""


def attention_peers(
    device: torch.device, dtype: torch.dtype, heads: Heads, num_queries: list[int], num_keys: list[int]
) -> dict[str, MakePeer]:
    """Attention over keys in one piece: alike requests, without soft caps and sinks, cold or decoding."""
    is_alike = len(set(num_queries)) == len(set(num_keys)) == 1
    is_cold = num_queries == num_keys
    if (
        heads.softcap
        or heads.has_sinks
        or heads.chunk
        or heads.value_size
        or not is_alike
        or not (is_cold or num_queries[0] == 1)
    ):
        return {}
    num_requests, sizes = len(num_keys), (num_queries[0], num_keys[0])

    def tensors() -> tuple[Tensor, Tensor, Tensor]:
        q = torch.randn(num_requests, heads.query, sizes[0], heads.size, device=device).to(dtype)
        k, v = (torch.randn(num_requests, heads.kv, sizes[1], heads.size, device=device).to(dtype) for _ in range(2))
        return q, k, v

    def sdpa(backend: str) -> Run:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        q, k, v = tensors()

        def run() -> Tensor:
            with sdpa_kernel(getattr(SDPBackend, backend)):
                return F.scaled_dot_product_attention(q, k, v, is_causal=sizes[0] > 1, enable_gqa=True)

        return run

    def varlen() -> Run:
        from torch.nn.attention.varlen import varlen_attn

        q, k, v = (tensor.transpose(1, 2).flatten(0, 1).contiguous() for tensor in tensors())
        query_starts, key_starts = (
            torch.arange(0, num_requests * size + 1, size, dtype=torch.int32, device=device) for size in sizes
        )
        window = (-1 if heads.window is None else heads.window - 1, 0)
        options: dict[str, Any] = {"max_q": sizes[0], "max_k": sizes[1], "window_size": window, "enable_gqa": True}
        return lambda: varlen_attn(q, k, v, query_starts, key_starts, **options)

    def flex() -> Run:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        q, k, v = tensors()
        limit, first = heads.window or sizes[1], sizes[1] - sizes[0]

        def is_seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query + first) & (key > query + first - limit)

        mask = create_block_mask(is_seen, None, None, *sizes, device=device)
        compiled: Any = torch.compile(flex_attention, dynamic=False) if device.type == "cuda" else flex_attention
        return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=True)

    peers: dict[str, MakePeer] = {"varlen_attn": varlen, "flex_attention, blocks passed over": flex}
    if heads.window is None:
        named = {"torch SDPA, flash": "FLASH_ATTENTION", "torch SDPA, cuDNN": "CUDNN_ATTENTION"}
        peers |= {name: lambda backend=backend: sdpa(backend) for name, backend in named.items()}  # type: ignore[misc]
    return peers


def scan_peers(device: torch.device, dtype: torch.dtype, scan: Scan, num_queries: list[int]) -> dict[str, MakePeer]:
    """Mamba-2's scan of one request, or its update of many."""
    num_requests, length = len(num_queries), num_queries[0]
    A_H = -torch.rand(scan.heads, device=device)
    bias_H = torch.randn(scan.heads, device=device)

    def inputs(*leading: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        sizes = ((scan.heads, scan.size), (scan.heads,), (scan.groups, scan.states), (scan.groups, scan.states))
        x, dt, b, c = (torch.randn(*leading, *size, device=device).to(dtype) for size in sizes)
        return x, dt, b, c

    def mamba_scan() -> Run:
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

        x, dt, b, c = inputs(1, length)
        options = {"D": A_H, "dt_bias": bias_H, "dt_softplus": True, "return_final_states": True}
        return lambda: mamba_chunk_scan_combined(x, dt, A_H, b, c, chunk_size=256, **options)

    def mamba_update() -> Run:
        from mamba_ssm.ops.triton.selective_state_update import selective_state_update

        x, dt, b, c = inputs(num_requests)
        state = torch.randn(num_requests, scan.heads, scan.size, scan.states, device=device)
        dt = dt[..., None].expand(-1, -1, scan.size)
        A = A_H[:, None, None].expand(-1, scan.size, scan.states)
        D, bias = (each[:, None].expand(-1, scan.size) for each in (A_H, bias_H))
        return lambda: selective_state_update(state, x, dt, A, b, c, D, dt_bias=bias, dt_softplus=True)

    def fla_scan() -> Run:
        from fla.ops.simple_gla import chunk_simple_gla

        x, dt, b, c = inputs(1, length)
        b, c = (each.repeat_interleave(scan.heads // scan.groups, 2) for each in (b, c))
        steps = F.softplus(dt.float() + bias_H)
        return lambda: chunk_simple_gla(c, b, x * steps[..., None].to(dtype), g=steps * A_H, scale=1.0)

    if num_requests == 1 and length > 1:
        return {"mamba-ssm's scan": mamba_scan, "FLA's simple GLA": fla_scan}
    return {"mamba-ssm's update": mamba_update} if set(num_queries) == {1} else {}


def delta_peers(device: torch.device, dtype: torch.dtype, scan: Scan, num_queries: list[int]) -> dict[str, MakePeer]:
    """The gated delta rule of one request."""
    if len(num_queries) > 1:
        return {}

    def fla() -> Run:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        shape = (1, num_queries[0], scan.heads)
        q, k = (torch.randn(*shape, scan.states, device=device).to(dtype) for _ in range(2))
        v = torch.randn(*shape, scan.size, device=device).to(dtype)
        g, beta = F.logsigmoid(torch.randn(shape, device=device)), torch.rand(shape, device=device).to(dtype)
        options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
        return lambda: chunk_gated_delta_rule(q, k, v, g, beta, **options)

    return {"FLA's gated delta rule": fla}
