"""Linear layers on a GPU: cuBLAS through torch, which accumulates in float32."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def linear(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, *, out_dtype: torch.dtype) -> Tensor:
    """As reference.linear."""
    if x_TK.dtype == out_dtype:
        return F.linear(x_TK, weight_NK, bias_N if bias_N is None else bias_N.to(out_dtype))
    # The product in float32 as it was summed up (logits): nothing is rounded on the way.
    out_TN = torch.mm(x_TK, weight_NK.T, out_dtype=out_dtype) if out_dtype == torch.float32 else x_TK @ weight_NK.T
    return (out_TN if bias_N is None else out_TN + bias_N).to(out_dtype)
