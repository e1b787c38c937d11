"""A block of code as the calls that compute: recorded once, made again without the Python between them.

A decode step of a small model is a few hundred short calls into C++, and the Python that prepares each of them (checks,
shapes, pointers) takes as long as a tenth of the step. The second time all arguments are known: the same tensors at the
same addresses. Whoever plays a recording first writes new values into the tensors that the recorded block took.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_ALLOCATIONS = {"aten::empty", "aten::new_empty", "aten::empty_like"}
_READS = {"tolist", "numpy", "item", "__array__", "__bool__", "__float__", "__format__", "__index__", "__int__"}
"""Methods that bring a tensor's values into Python, where they may decide what is computed."""

_recording: ContextVar[Recording | None] = ContextVar("recording", default=None)


class Recording:
    """The native calls and torch's operations of a block, in their order."""

    def __init__(self) -> None:
        self._calls: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        self._kept: list[Tensor] = []
        self.obstacle: str | None = None
        """Why it can't be played: the block looked at a tensor's values."""

    @property
    def num_bytes(self) -> int:
        """Memory that the block's own tensors take as long as this lives."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self._kept)

    def play(self) -> None:
        """Do again what was recorded, on the same tensors. Under torch.inference_mode() if it was recorded so."""
        assert self.obstacle is None, self.obstacle
        for function, arguments in self._calls:
            assert function(*arguments) is not False, f"{function} refused its arguments"

    def watch(self, library: Any) -> Any:
        """A native library whose calls are recorded as they are made."""
        return _Watched(library, self._calls)

    def note_operation(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Take in an operation of torch's."""
        outputs = [each for each in _flat(result) if isinstance(each, Tensor)]
        inputs = {_address(each) for each in _flat((args, kwargs)) if isinstance(each, Tensor)}
        if func._schema.name in _ALLOCATIONS:
            self._kept += outputs
        elif func._schema.is_mutable:
            self._calls.append((partial(func, *args, **kwargs), ()))
        elif not all(_address(each) in inputs for each in outputs):  # else a view
            self._kept += outputs
            self._calls.append((_redo, (func, args, kwargs, tuple(outputs))))


@contextmanager
def recorded() -> Iterator[Recording]:
    """Record what this thread computes in a block."""
    recording = Recording()
    token = _recording.set(recording)
    try:
        with _Functions(recording), _Operations(recording):
            yield recording
    finally:
        _recording.reset(token)


def active_recording() -> Recording | None:
    """The recording that this thread is in."""
    return _recording.get()


class _Watched:
    """Functions that note each call before they make it."""

    def __init__(self, library: Any, calls: list[tuple[Callable[..., object], tuple[Any, ...]]]) -> None:
        self._library = library
        self._calls = calls

    def __getattr__(self, name: str) -> Callable[..., object]:
        function = getattr(self._library, name)

        def call(*arguments: Any) -> object:
            self._calls.append((function, arguments))
            return function(*arguments)

        return call


class _Operations(TorchDispatchMode):
    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._recording.note_operation(func, args, kwargs or {}, result)
        return result


class _Functions(TorchFunctionMode):
    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _READS:
            self._recording.obstacle = f"a tensor's values were asked for by {name}"
        return func(*args, **(kwargs or {}))


def _redo(func: Any, args: Any, kwargs: Any, outputs: tuple[Tensor, ...]) -> None:
    """Run an operation again, and put what it gives where it was."""
    again = [each for each in _flat(func(*args, **kwargs)) if isinstance(each, Tensor)]
    for output, new in zip(outputs, again, strict=True):
        output.copy_(new)


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, list | tuple):
        for each in value:
            yield from _flat(each)
    else:
        yield value


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
