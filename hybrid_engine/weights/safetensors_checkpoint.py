"""Safetensors: one file, or shards with an index."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from hybrid_engine.errors import CheckpointError
from hybrid_engine.weights.checkpoint import Checkpoint, read_json

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
"""Stored types that are cast to the wanted dtype; integers stay what they are."""


class SafetensorsCheckpoint(Checkpoint):
    """A folder with config.json and safetensors files, mapped into memory and read when asked."""

    def __init__(self, folder: Path) -> None:
        """Read config, index and headers; raises CheckpointError when they contradict each other."""
        self.path = folder
        self.config = read_json(folder / "config.json")
        self._headers = {file: read_header(file) for file in find_files(folder)}
        self._file_of = {name: file for file, header in self._headers.items() for name in header}
        check_index(folder, self._file_of)
        self._mapped: dict[Path, Any] = {}
        # What the model was released to stop at stands here more often than in config.json.
        generation = folder / "generation_config.json"
        if generation.exists() and (ends := read_json(generation).get("eos_token_id")) is not None:
            self.config["eos_token_id"] = ends

    def names(self) -> Iterable[str]:
        return self._file_of.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._entry(name)["shape"])

    def tensor(self, name: str, *, dtype: torch.dtype | None = None) -> Tensor:
        is_float = self._entry(name)["dtype"] in FLOATS
        file = self._file_of[name]
        if file not in self._mapped:  # a private mapping: only the pages of tensors asked for are read
            self._mapped[file] = safe_open(file, framework="pt")
        tensor = self._mapped[file].get_tensor(name)
        return tensor.to(dtype) if dtype is not None and is_float else tensor

    def _entry(self, name: str) -> dict[str, Any]:
        if name not in self._file_of:
            raise self.missing(name)
        return self._headers[self._file_of[name]][name]


def find_files(folder: Path) -> list[Path]:
    """The files that hold the tensors: the index's shards, or the single file.

    Raises CheckpointError when a shard of the index isn't there.
    """
    if (folder / INDEX_NAME).exists():
        shards = sorted(set(weight_map(folder).values()))
    elif (folder / SINGLE_NAME).exists():
        shards = [SINGLE_NAME]
    else:
        shards = sorted(file.name for file in folder.glob("*.safetensors"))
        if len(shards) > 1:
            raise CheckpointError(f"{folder} holds {len(shards)} safetensors files and no {INDEX_NAME}")
    absent = [shard for shard in shards if not (folder / shard).exists()]
    if absent:
        raise CheckpointError(f"{folder} lacks {len(absent)} of {len(shards)} shards: {', '.join(absent)}")
    return [folder / shard for shard in shards]


def weight_map(folder: Path) -> dict[str, str]:
    """The index: which shard holds each tensor."""
    index = read_json(folder / INDEX_NAME)
    if not isinstance(index.get("weight_map"), dict):
        raise CheckpointError(f"{folder / INDEX_NAME} has no weight_map")
    return index["weight_map"]


def check_index(folder: Path, file_of: dict[str, Path]) -> None:
    """Raise CheckpointError when the index names a tensor that its shard lacks."""
    if not (folder / INDEX_NAME).exists():
        return
    for name, shard in weight_map(folder).items():
        if file_of.get(name) != folder / shard:
            raise CheckpointError(f"{INDEX_NAME} says that {shard} holds {name!r}, but it doesn't")


def read_header(file: Path) -> dict[str, dict[str, Any]]:
    """The header of a safetensors file: dtype, shape and offsets of each tensor.

    Raises CheckpointError when the file isn't as long as its header says.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > size - 8:
            raise CheckpointError(f"{file} is cut short: {size} bytes, its header alone takes {8 + length}")
        try:
            header = json.loads(stream.read(length))
        except ValueError as error:
            raise CheckpointError(f"{file} is no safetensors file: its header is no JSON ({error})") from error
    header.pop("__metadata__", None)
    wanted = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if size != wanted:
        verb = "cut short" if size < wanted else "too long"
        raise CheckpointError(f"{file} is {verb}: {size} bytes, its header says {wanted}")
    return header
