"""C++ beside the Python: built on first use, kept in the user's cache, torch where that can't be.

    _library = NativeLibrary(__package__, {"rms_norm_float": "pppiillf" ...})      # in an op's cpu.py
    if (native := _library.load()) is None: ...the same in torch...
    native.rms_norm_float(x.data_ptr(), ..., num_threads())

Each op's `cpu.cpp` becomes one shared object that knows nothing of torch. HYBRID_ENGINE_NATIVE=0 in the environment
turns all of them off; HYBRID_ENGINE_MARCH names another target than "native" to the compiler, and may bring flags
("native -mno-amx-bf16").
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import get_num_threads as num_threads

from hybrid_engine.kernels.native.builder import build
from hybrid_engine.kernels.native.recording import Recording, active_recording, recorded

__all__ = ["NativeLibrary", "Recording", "num_threads", "prepare", "recorded"]

_TYPES = {"p": ctypes.c_void_p, "l": ctypes.c_int64, "i": ctypes.c_int32, "f": ctypes.c_float}
_OPS = ("activation", "attention", "linear", "norm", "rope", "ssm")


class NativeLibrary:
    """The shared object of one op, loaded when it is first asked for."""

    def __init__(self, package: str | None, functions: Mapping[str, str]) -> None:
        """package: the op's package, which holds cpu.cpp (its `__package__`).

        functions: by name, a letter for each argument: p pointer, l int64, i int32, f float32; then "?" if the function
        returns whether its arguments made sense. Every function takes one int32 more, the number of threads it may
        use: pass num_threads(), torch's own setting.
        """
        assert package is not None
        self._package = package
        self._functions = dict(functions)
        self._is_tried = False
        self._library: Any = None

    def load(self) -> Any:
        """The library, with one attribute a function, or None: take the torch path. The answer never changes."""
        if not self._is_tried:
            self._library = self._open()
            self._is_tried = True
        recording = active_recording()
        return self._library if recording is None or self._library is None else recording.watch(self._library)

    def _open(self) -> Any:
        if os.environ.get("HYBRID_ENGINE_NATIVE", "1") == "0":
            return None
        source = Path(str(import_module(self._package).__file__)).with_name("cpu.cpp")
        path = build(source)
        if path is None:
            return None
        library = ctypes.CDLL(str(path))
        for name, letters in self._functions.items():
            function = getattr(library, name)
            function.argtypes = [_TYPES[letter] for letter in letters.rstrip("?") + "i"]
            function.restype = ctypes.c_bool if letters.endswith("?") else None
        return library


def prepare() -> dict[str, bool]:
    """Build and load every op's library now, side by side, instead of one by one on first use.

    Takes some seconds the first time on a machine. Returns, by op, whether its C++ will be used.
    """
    from concurrent.futures import ThreadPoolExecutor  # only start-up needs it

    libraries = [import_module(f"hybrid_engine.kernels.{op}.cpu").library for op in _OPS]
    with ThreadPoolExecutor(len(libraries)) as pool:
        loaded = pool.map(NativeLibrary.load, libraries)
        return {op: library is not None for op, library in zip(_OPS, loaded, strict=True)}
