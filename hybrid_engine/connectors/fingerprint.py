"""What stored bytes were computed from: the weights that were really loaded, and how the cache is laid out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn

from hybrid_engine.groups.spec import Group

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def cache_facts(
    model: nn.Module, config: Mapping[str, Any], groups: Sequence[Group], *, match_unit_tokens: int, version: str
) -> dict[str, Any]:
    """Return all that decides what a cached byte means, as JSON would have it.

    version: the engine's own; what one release computed another doesn't read.
    """
    return {
        "engine": version,
        "architectures": config.get("architectures"),
        "weights": weights_digest(model),
        "match_unit_tokens": match_unit_tokens,
        "groups": [
            {"kind": group.spec.kind, "layers": list(group.layer_indices), **_plain(asdict(group.spec))}
            for group in groups
        ],
    }


@torch.inference_mode()
def weights_digest(model: nn.Module) -> str:
    """Return a digest of all parameters and buffers, read once: their names, shapes, dtypes and values.

    Of the values the sum of each row's bits goes in, not each value: as fast as the memory, and still different after
    any training, merging or quantising. It tells models apart; it does not withstand somebody who crafts weights.
    """
    digest = blake2b(digest_size=16)
    for name, tensor in sorted({**dict(model.named_parameters()), **dict(model.named_buffers())}.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(_row_sums(tensor).cpu().numpy().tobytes())
    return digest.hexdigest()


def _row_sums(tensor: Tensor) -> Tensor:
    rows_X = tensor.detach().reshape(len(tensor) if tensor.dim() > 1 else 1, -1).contiguous()
    return rows_X.view(_INTEGERS[tensor.element_size()]).sum(dim=1, dtype=torch.int64)


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
