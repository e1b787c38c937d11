"""Which file of an op runs where: cpu.py on a CPU, gpu.py (Triton) on an NVIDIA GPU, elsewhere the reference."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

_FILES = {"cpu": "cpu", "cuda": "gpu"}


def has_triton() -> bool:
    """Whether Triton is installed. Nothing imports it before a tensor on a GPU asks for it."""
    return find_spec("triton") is not None


def file_of(device_type: str) -> str:
    """Name of the file that runs tensors on a kind of device."""
    return _FILES.get(device_type, "reference")


@cache
def implementation(package: str, device_type: str) -> ModuleType:
    """The module of an op's package (its `__name__`) for tensors on a kind of device."""
    return import_module(f"{package}.{file_of(device_type)}")
