"""Draws on a GPU: a program a row."""

from __future__ import annotations

from torch import Tensor
from triton import next_power_of_2

from hybrid_engine.kernels.sampling.triton_draw import draw_kernel

_BLOCK = 2048


def draw_in_place(logits_RV: Tensor, numbers_RC: Tensor, token_ids_R: Tensor) -> None:
    """As reference.draw_in_place."""
    num_rows, vocab_size = logits_RV.shape
    if logits_RV.stride(1) != 1:
        logits_RV = logits_RV.contiguous()
    if num_rows:
        draw_kernel[(num_rows,)](
            logits_RV,
            numbers_RC.contiguous(),
            token_ids_R,
            logits_RV.stride(0),
            VOCAB=vocab_size,
            BLOCK=min(_BLOCK, next_power_of_2(vocab_size)),
            num_warps=16,
        )
