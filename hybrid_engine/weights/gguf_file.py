"""The GGUF container: metadata, and tensors that are dequantised when asked for.

The gguf package reads a header of 262,144 tokens in 13 s; this reader takes a tenth of a second. Its dequantisers
are used. Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from hybrid_engine.errors import CheckpointError

SLICE_ELEMENTS = 1 << 22
"""Elements dequantised at once: float32 intermediates of a big embedding stay small."""

SCALAR_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""GGUF value type -> struct format."""
STRING, ARRAY = 8, 9


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies and how it is stored."""

    shape: tuple[int, ...]
    """Outermost dimension first, as torch has it."""
    kind: GGMLQuantizationType
    offset: int
    """Byte offset from the start of the file."""
    num_bytes: int


class Cursor:
    """Reads values from the front of a file that is mapped into memory."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.offset = 0

    def scalar(self, code: str) -> Any:
        """One value of a struct format."""
        (value,) = struct.unpack_from("<" + code, self.data, self.offset)
        self.offset += struct.calcsize("<" + code)
        return value

    def text(self) -> str:
        """A string: its length in 8 bytes, then UTF-8."""
        length = self.scalar("Q")
        if self.offset + length > len(self.data):
            raise struct.error("string beyond the end")
        raw = self.data[self.offset : self.offset + length]
        self.offset += length
        return raw.decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        """A value of a GGUF type."""
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            return self.scalar(SCALAR_FORMATS[kind])
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind in SCALAR_FORMATS:
            values = np.frombuffer(self.data, "<" + SCALAR_FORMATS[kind], count, self.offset)
            self.offset += values.nbytes
            return values.tolist()
        return [self.value(kind) for _ in range(count)]


class GgufFile:
    """A GGUF file, mapped into memory: metadata by key, tensors by their GGUF names."""

    def __init__(self, path: Path) -> None:
        """Read the header. Raises CheckpointError when it is no GGUF file or is cut short."""
        self.path = path
        self.size = path.stat().st_size
        if self.size < 24:
            raise CheckpointError(f"{path} is no GGUF file: {self.size} bytes")
        with path.open("rb") as stream:
            self._data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            self._read_header(Cursor(self._data))
        except (struct.error, ValueError) as error:
            raise CheckpointError(f"{path} is cut short: {self.size} bytes end inside its header ({error})") from error
        except KeyError as error:
            raise CheckpointError(f"{path} holds a value of type {error}, which GGUF doesn't define") from error
        self._check_size()

    def _read_header(self, cursor: Cursor) -> None:
        magic, version = bytes(self._data[:4]), struct.unpack_from("<I", self._data, 4)[0]
        if magic != b"GGUF" or version not in (2, 3):
            raise CheckpointError(f"{self.path} is no GGUF file of version 2 or 3: it starts with {magic!r} {version}")
        cursor.offset = 8
        num_tensors, num_values = cursor.scalar("Q"), cursor.scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = cursor.text()
            self.metadata[key] = cursor.value(cursor.scalar("I"))
        entries = [self._read_entry(cursor) for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        start = math.ceil(cursor.offset / alignment) * alignment
        self._header_bytes = cursor.offset
        self.tensors = {
            name: GgufTensor(shape, kind, start + offset, stored_bytes(shape, kind))
            for name, shape, kind, offset in entries
        }

    def _read_entry(self, cursor: Cursor) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = cursor.text()
        sizes = [cursor.scalar("Q") for _ in range(cursor.scalar("I"))]
        number = cursor.scalar("I")
        try:
            kind = GGMLQuantizationType(number)
        except ValueError as error:
            raise CheckpointError(f"{self.path}: {name} has type {number}, unknown to the gguf package") from error
        return name, tuple(reversed(sizes)), kind, cursor.scalar("Q")

    def _check_size(self) -> None:
        num_parts = self.metadata.get("split.count", 1)
        if num_parts > 1:
            raise CheckpointError(f"{self.path} is one of {num_parts} parts: merge them with llama-gguf-split --merge")
        wanted = max((tensor.offset + tensor.num_bytes for tensor in self.tensors.values()), default=0)
        if self.size < wanted:
            raise CheckpointError(f"{self.path} is cut short: {self.size} bytes, its header says {wanted}")

    def header(self) -> bytes:
        """The bytes before the tensors: all metadata."""
        return self._data[: self._header_bytes]

    def tensor(self, name: str, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """Dequantise a tensor, a slice of rows at a time.

        Raises CheckpointError when the gguf package can't dequantise its type.
        """
        stored = self.tensors[name]
        num_columns = stored.shape[-1] if stored.shape else 1
        num_rows = math.prod(stored.shape[:-1])
        raw = np.frombuffer(self._data, np.uint8, stored.num_bytes, stored.offset).reshape(num_rows, -1)
        out_NK = torch.empty(num_rows, num_columns, dtype=dtype)
        step = max(1, SLICE_ELEMENTS // num_columns)
        for start in range(0, num_rows, step):
            try:
                values = dequantize(raw[start : start + step], stored.kind)
            except NotImplementedError as error:
                raise CheckpointError(f"{self.path}: {name} is {stored.kind.name}, which gguf can't read") from error
            # From a view of the read-only file torch must copy, which copy_ does.
            out_NK[start : start + step].copy_(torch.from_numpy(np.require(values, np.float32, ["C", "W"])))
        return out_NK.reshape(stored.shape)


def stored_bytes(shape: tuple[int, ...], kind: GGMLQuantizationType) -> int:
    """Bytes that a tensor takes in the file."""
    block_elements, block_bytes = GGML_QUANT_SIZES[kind]
    return math.prod(shape) // block_elements * block_bytes
