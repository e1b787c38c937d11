"""What every kind of checkpoint offers, and how one is found on disk."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybrid_engine.errors import CheckpointError


class Checkpoint(ABC):
    """The weights and the config of one model. Tensors are read when asked for, one at a time."""

    path: Path
    """The folder or file that was opened."""
    config: dict[str, Any]
    """What config.json says, or what a GGUF file's metadata says in the words of config.json."""

    @abstractmethod
    def names(self) -> Iterable[str]:
        """The names of all tensors, as Hugging Face's model classes call them."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, without reading it."""

    @abstractmethod
    def tensor(self, name: str, *, dtype: torch.dtype | None = None) -> Tensor:
        """Read a tensor; the caller owns it.

        dtype: None gives the stored one (float32 for quantised blocks).
        Raises CheckpointError when there is no such tensor.
        """

    def missing(self, name: str) -> CheckpointError:
        """The error for a tensor that isn't there."""
        return CheckpointError(f"{self.path} has no tensor {name!r}; it has {listed(self.names())}")


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a folder with safetensors, a .gguf file, or a folder that holds one .gguf file.

    Checks that every file is there and as long as its header says, and reads no tensor.
    Raises CheckpointError when a file is missing, cut short or contradicts another.
    """
    from hybrid_engine.weights.gguf_checkpoint import GgufCheckpoint
    from hybrid_engine.weights.safetensors_checkpoint import SafetensorsCheckpoint

    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path} doesn't exist: give a folder with safetensors or a .gguf file")
    if path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(f"{path} is no .gguf file; for safetensors give the folder that holds config.json")
        return GgufCheckpoint(path)
    if any(path.glob("*.safetensors")) or (path / "model.safetensors.index.json").exists():
        return SafetensorsCheckpoint(path)
    return GgufCheckpoint(find_gguf(path))


def find_gguf(folder: Path) -> Path:
    """The only .gguf file of a folder.

    Raises CheckpointError when there is none or more than one.
    """
    files = sorted(folder.glob("*.gguf"))
    if not files:
        raise CheckpointError(f"{folder} holds neither *.safetensors nor a *.gguf file")
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise CheckpointError(f"{folder} holds {len(files)} .gguf files ({names}): give the path of one of them")
    return files[0]


def listed(names: Iterable[str]) -> str:
    """A few names and how many more there are."""
    names = sorted(names)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object. Raises CheckpointError when the file is missing, can't be read or holds something else."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is missing") from error
    except OSError as error:
        raise CheckpointError(f"{file} can't be read: {error}") from error
    except ValueError as error:
        raise CheckpointError(f"{file} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} holds a {type(value).__name__}, must be an object")
    return value
