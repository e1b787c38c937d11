"""Linear layers on a GPU: cuBLAS through torch, which accumulates in float32; where bits must stay, our own kernel."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from hybrid_engine.kernels.linear.triton_linear import rows_kernel
from hybrid_engine.kernels.triton_math import dot_precision

_ROWS, _COLUMNS = 64, 64
"""One tile whatever there is to do: another one might add in another order."""
_STEP = {torch.bfloat16: 64, torch.float32: 32}


def linear(
    x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, *, out_dtype: torch.dtype, is_exact: bool = False
) -> Tensor:
    """As reference.linear. is_exact: a row doesn't depend on those beside it."""
    if is_exact:
        return _linear_by_rows(x_TK, weight_NK, bias_N, out_dtype)
    if x_TK.dtype == out_dtype:
        return F.linear(x_TK, weight_NK, bias_N if bias_N is None else bias_N.to(out_dtype))
    # The product in float32 as it was summed up (logits): nothing is rounded on the way.
    out_TN = torch.mm(x_TK, weight_NK.T, out_dtype=out_dtype) if out_dtype == torch.float32 else x_TK @ weight_NK.T
    return (out_TN if bias_N is None else out_TN + bias_N).to(out_dtype)


def _linear_by_rows(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    x_TK = x_TK if x_TK.stride(1) == 1 else x_TK.contiguous()
    (num_rows, num_inputs), num_outputs = x_TK.shape, len(weight_NK)
    out_TN = torch.empty(num_rows, num_outputs, dtype=out_dtype, device=x_TK.device)
    if out_TN.numel():
        rows_kernel[(-(-num_outputs // _COLUMNS), -(-num_rows // _ROWS))](
            x_TK,
            weight_NK,
            weight_NK if bias_N is None else bias_N.contiguous(),
            out_TN,
            num_rows,
            x_TK.stride(0),
            INPUTS=num_inputs,
            OUTPUTS=num_outputs,
            HAS_BIAS=bias_N is not None,
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
            STEP=_STEP[x_TK.dtype],
            PRECISION=dot_precision(x_TK.dtype),
            num_warps=4,
            num_stages=1,
        )
    return out_TN
