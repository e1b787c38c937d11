"""Whether a model can be run exactly here: so that what it says has the same bits in whatever steps it is computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybrid_engine.errors import ConfigError
from hybrid_engine.kernels import native
from hybrid_engine.models.config import text_config
from hybrid_engine.models.registry import is_generic


def check_exact(exact: bool, model_config: Mapping[str, Any], *, device_type: str) -> None:
    """Raise ConfigError where exact is asked for and bits would depend on a token's company."""
    if not isinstance(exact, bool):
        raise ConfigError(f"exact is {exact!r}, must be True or False")
    if not exact:
        return
    values = text_config(model_config)
    if is_generic(values):
        raise ConfigError(
            f"exact is set, and model_type {values['model_type']!r} runs on transformers' code, whose products depend "
            f"on the batch: leave exact out, or take a model that this engine has code of its own for"
        )
    if device_type != "cpu":
        return
    missing = [op for op, is_native in native.prepare().items() if not is_native]
    if missing:
        raise ConfigError(
            f"exact is set, and {', '.join(missing)} would run on torch alone, whose products depend on the batch: "
            f"install a C++ compiler (the log says why the last one failed), or leave exact out"
        )
