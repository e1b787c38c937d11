"""What stored bytes were computed from: the weights that were really loaded, and how the cache is laid out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn

from hybrid_engine.groups.spec import Group

COMPUTED_VERSION = 2
"""To be raised whenever equal weights and tokens give other keys, values or states than before."""
_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def cache_facts(
    model: nn.Module, config: Mapping[str, Any], groups: Sequence[Group], *, match_unit_tokens: int
) -> dict[str, Any]:
    """Return all that decides what a cached byte means, as JSON would have it."""
    return {
        "computed": COMPUTED_VERSION,
        "config": blake2b(json.dumps(config, sort_keys=True, default=str).encode(), digest_size=16).hexdigest(),
        "weights": weights_digest(model),
        # Equal weights may multiply inputs that are rounded in different ways.
        "quantization": getattr(model, "quantization", None),
        # An exact engine must find no bytes that another one computed.
        "exact": getattr(model, "is_exact", False),
        "match_unit_tokens": match_unit_tokens,
        "groups": [
            {"kind": group.spec.kind, "layers": list(group.layer_indices), **_plain(asdict(group.spec))}
            for group in groups
        ],
    }


@torch.inference_mode()
def weights_digest(model: nn.Module) -> str:
    """Return a digest of all tensors that a model holds, read once: their names, shapes, dtypes and values.

    Of the values the sum of each row's bits goes in, not each value: as fast as the memory, and still different after
    any training, merging or quantising. It tells models apart; it does not withstand somebody who crafts weights.
    """
    digest = blake2b(digest_size=16)
    num_tensors = 0
    for name, tensor in _tensors_of(model, "", set()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(_row_sums(tensor).cpu().numpy().tobytes())
        num_tensors += 1
    assert num_tensors, f"{type(model).__name__} holds no tensor that its digest could see"
    return digest.hexdigest()


def _tensors_of(value: Any, name: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    """Walk through modules, packed weights and lists of them; what stands in several places comes once."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _tensors_of(each, f"{name}.{key}", seen)
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from _tensors_of(each, f"{name}.{index}", seen)
    elif isinstance(value, nn.Module) or type(value).__module__.startswith("hybrid_engine."):
        # A module's own attributes: ours keep their weights there, not as parameters.
        names = getattr(type(value), "__slots__", ()) or vars(value)
        for attribute in names:
            yield from _tensors_of(getattr(value, attribute), f"{name}.{attribute}", seen)


def _row_sums(tensor: Tensor) -> Tensor:
    num_rows = len(tensor) if tensor.dim() > 1 else 1
    flat_X = tensor.detach().contiguous().view(-1).view(torch.uint8)
    # As few and as wide numbers as the rows can be cut into: eight times as fast.
    places = (len(flat_X) // num_rows, flat_X.storage_offset())
    width = next(width for width in _INTEGERS if not any(place % width for place in places))
    return flat_X.view(_INTEGERS[width]).view(num_rows, -1).sum(dim=1, dtype=torch.int64)


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
