"""The model that comes with the engine and is used where none is named: see README.md beside this file."""

from pathlib import Path

from hybrid_engine.config import require_path

NAME = "tiny-hybrid"
"""Stands for it wherever a model's path is expected; a folder of that name is meant by ./tiny-hybrid."""


def find_model(model: str | Path) -> str | Path:
    """Return the path that a model's name stands for: all but one name are paths themselves."""
    require_path("model", model)
    return Path(__file__).parent if model == NAME else model
