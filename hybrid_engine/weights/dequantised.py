"""Quantised safetensors read as what they stand for, one tensor at a time: MXFP4 with its scales, fp8 with its own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from hybrid_engine.errors import CheckpointError, ConfigError
from hybrid_engine.weights.checkpoint import Checkpoint

MXFP4, FP8 = "mxfp4", "fp8"
METHODS = (MXFP4, FP8)
"""Values of quant_method that are read."""
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of the lower three bits; the fourth is the sign. Source: OCP Microscaling Formats 1.0, table 5."""
SCALE_BIAS = 127
"""Of a block's scale, a power of two. Source: the same, section 5.4."""


def quant_method(config: Mapping[str, Any]) -> str | None:
    """How a config says that its weights are quantised; None: they aren't.

    Raises ConfigError for a way that isn't read here.
    """
    for values in (config, config.get("text_config") or {}):
        for key in ("quantization_config", "compression_config"):
            if (found := values.get(key)) is None:
                continue
            method = found.get("quant_method", "unknown") if isinstance(found, Mapping) else found
            if method not in METHODS:
                raise ConfigError(
                    f"the model's config has {key} ({method}): of quantised safetensors {', '.join(METHODS)} are read "
                    f"here, take the model in bfloat16, float16 or float32, or as a GGUF file"
                )
            return method
    return None


def dequantised(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint itself, or one in front of it where its config says that it is quantised."""
    method = quant_method(checkpoint.config)
    if method is None:
        return checkpoint
    return Mxfp4Checkpoint(checkpoint) if method == MXFP4 else Fp8Checkpoint(checkpoint)


class DequantisedCheckpoint(Checkpoint):
    """A checkpoint in front of another one, of which some tensors are made of several of the other's."""

    def __init__(self, stored: Checkpoint) -> None:
        self.stored = stored
        self.path, self.config = stored.path, stored.config
        self.stored_names = frozenset(stored.names())

    @abstractmethod
    def parts(self, name: str) -> tuple[str, ...]:
        """What a tensor is made of, if the stored ones are all there; itself where it is stored as it is."""

    def tensor(self, name: str, *, dtype: torch.dtype | None = None) -> Tensor:
        parts = self.parts(name)
        if len(parts) == 1:
            return self.stored.tensor(parts[0], dtype=dtype)
        for part in parts:
            if part not in self.stored_names:
                raise CheckpointError(f"{self.path} lacks {part!r}, without which {parts[0]!r} means nothing")
        return self.combine(*parts, dtype=dtype or torch.float32)

    @abstractmethod
    def combine(self, *parts: str, dtype: torch.dtype) -> Tensor:
        """Make a tensor of its parts."""


class Mxfp4Checkpoint(DequantisedCheckpoint):
    """Stacks of matrices whose rows are cut into blocks of 32 numbers of four bits, with a power of two for each block.

    `x_blocks` [X, N, blocks, 16 bytes] and `x_scales` [X, N, blocks] are x [X, K, N], K = 32 a block: turned, as
    GPT-OSS has it when it isn't quantised.
    """

    def names(self) -> Iterable[str]:
        return sorted({name.removesuffix("_blocks") for name in self.stored_names if not self._is_scale(name)})

    def _is_scale(self, name: str) -> bool:
        return name.endswith("_scales") and f"{name.removesuffix('_scales')}_blocks" in self.stored_names

    def parts(self, name: str) -> tuple[str, ...]:
        blocks = f"{name}_blocks"
        return (blocks, f"{name}_scales") if blocks in self.stored_names else (name,)

    def shape(self, name: str) -> tuple[int, ...]:
        parts = self.parts(name)
        shape = self.stored.shape(parts[0])
        if len(parts) == 1:
            return shape
        if len(shape) != 4:
            raise CheckpointError(f"{self.path}: {parts[0]} has shape {list(shape)}, must have four dimensions")
        num_matrices, num_rows, num_blocks, num_bytes = shape
        return (num_matrices, 2 * num_bytes * num_blocks, num_rows)

    def combine(self, *parts: str, dtype: torch.dtype) -> Tensor:
        blocks, scales = (self.stored.tensor(part) for part in parts)
        if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8 or blocks.shape[:-1] != scales.shape:
            raise CheckpointError(
                f"{self.path}: {parts[0]} is {blocks.dtype} {list(blocks.shape)} and {parts[1]} {scales.dtype} "
                f"{list(scales.shape)}: must be bytes, with one scale a block"
            )
        table = torch.tensor([*FP4_VALUES, *(-value for value in FP4_VALUES)], dtype=dtype)
        out_XNK = torch.empty(*blocks.shape[:2], 2 * blocks[0, 0].numel(), dtype=dtype)
        for out_NK, matrix, exponents in zip(out_XNK, blocks, scales, strict=True):  # one by one: indices are large
            halves = torch.stack([matrix & 0x0F, matrix >> 4], -1).flatten(-2)
            factors = torch.exp2(exponents.float() - SCALE_BIAS).to(dtype)
            out_NK[:] = (table[halves.int()] * factors[..., None]).flatten(1)
        return out_XNK.transpose(1, 2)


class Fp8Checkpoint(DequantisedCheckpoint):
    """Matrices of 8-bit floats, with a factor for each tile of rows and columns: `x_scale_inv` beside `x`."""

    SUFFIX = "_scale_inv"

    def names(self) -> Iterable[str]:
        return sorted(name for name in self.stored_names if not self._is_scale(name))

    def _is_scale(self, name: str) -> bool:
        return name.endswith(self.SUFFIX) and name.removesuffix(self.SUFFIX) in self.stored_names

    def parts(self, name: str) -> tuple[str, ...]:
        scale = f"{name}{self.SUFFIX}"
        return (name, scale) if scale in self.stored_names else (name,)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.stored.shape(name)

    def combine(self, *parts: str, dtype: torch.dtype) -> Tensor:
        matrix, scales = (self.stored.tensor(part, dtype=torch.float32) for part in parts)
        rows, columns = self._tile()
        wanted = (*matrix.shape[:-2], -(-matrix.shape[-2] // rows), -(-matrix.shape[-1] // columns))
        if scales.numel() == 1:
            return matrix.mul_(scales.flatten()).to(dtype)
        if scales.shape != wanted:
            raise CheckpointError(
                f"{self.path}: {parts[1]} has shape {list(scales.shape)}, {parts[0]} in tiles of {rows} x {columns} "
                f"implies {list(wanted)}"
            )
        wide = scales.repeat_interleave(rows, -2)[..., : matrix.shape[-2], :]
        return matrix.mul_(wide.repeat_interleave(columns, -1)[..., : matrix.shape[-1]]).to(dtype)

    def _tile(self) -> tuple[int, int]:
        tile = (self.config.get("quantization_config") or {}).get("weight_block_size") or (128, 128)
        if len(tile) != 2 or not all(isinstance(size, int) and size > 0 for size in tile):
            raise ConfigError(f"weight_block_size is {tile}, must be two whole numbers above 0")
        return tile[0], tile[1]
