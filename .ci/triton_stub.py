"""Stands in for a GPU: Triton compiles as it would for one, nothing is launched.

Kernels are specialised from the arguments of real launches, on tensors without memory; only the driver is replaced.
Works with Triton 3.6 to 3.9.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
MAX_SHARED_BYTES = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448}
"""By compute capability; what needs more raises OutOfResources, as on the GPU itself."""


@dataclass(frozen=True)
class Compiled:
    """What a kernel became."""

    name: str
    registers: int
    local_bytes: int
    """Stack and local memory of a thread: above 0 registers were spilled, or an array is indexed at run time."""
    shared_bytes: int
    wgmmas: int
    """Tensor-core instructions of Hopper."""
    mmas: int
    """Those of the generations before."""


def install(capability: int, record: Callable[[Compiled], None]) -> None:
    """Make Triton compile for a compute capability (90 is 9.0) and tell `record` of every kernel."""
    driver.set_active(_Driver(capability, record))


def _examine(name: str, cubin: bytes, shared_bytes: int) -> Compiled:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, code = (
            subprocess.run([CUOBJDUMP, option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("--dump-resource-usage", "--dump-sass")
        )
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    assert found, usage
    registers, stack, local = map(int, found.groups())
    counts = [len(re.findall(rf"\b{instruction}\b", code)) for instruction in ("HGMMA", "HMMA")]
    return Compiled(name, registers, stack + local, shared_bytes, *counts)


class _Utils:
    def __init__(self, capability: int, record: Callable[[Compiled], None]) -> None:
        self._capability = capability
        self._record = record

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": MAX_SHARED_BYTES[self._capability],
            "max_num_regs": 65_536,
            "multiprocessor_count": 132,
            "warpSize": 32,
            "sm_clock_rate": 1_980_000,
            "mem_clock_rate": 3_201_000,
            "mem_bus_width": 6144,
        }

    def load_binary(self, name: str, cubin: bytes, shared_bytes: int, device: int) -> tuple[int, ...]:
        compiled = _examine(name, cubin, shared_bytes)
        self._record(compiled)
        return 1, 1, compiled.registers, compiled.local_bytes // 4, 1024

    def unload_module(self, module: int) -> None:
        pass


class _Launcher:
    def __init__(self, source: Any, metadata: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        pass


class _Driver:
    launcher_cls = _Launcher

    def __init__(self, capability: int, record: Callable[[Compiled], None]) -> None:
        self._capability = capability
        self.utils = _Utils(capability, record)

    def get_current_device(self) -> int:
        # Triton keeps what it has compiled by device: each capability must be another one.
        return self._capability

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    @classmethod
    def is_active(cls) -> bool:
        return True
