"""Which folder a model's stored bytes lie in, and the secret that names and proves them.

    DIR/hash_key            the key of all block hashes, readable by its owner alone
    DIR/<digest>/           one folder for each combination of weights, dtype, groups, block sizes and hash key …
        manifest.json       … that stands here in full
        *.safetensors       what is stored

Two models never share a folder, so that a changed model finds nothing instead of something wrong.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from hybrid_engine.errors import ConfigError

logger = logging.getLogger(__name__)

KEY_NAME = "hash_key"
KEY_BYTES = 32
MANIFEST_NAME = "manifest.json"
FORMAT = 1
"""To be raised when files are laid out in another way than before."""


def read_or_make_key(directory: Path) -> bytes:
    """Return the directory's hash key, drawn when the directory is used for the first time.

    Raises ConfigError when the directory can't be made or its key can't be read.
    """
    path = directory / KEY_NAME
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            _make_key(directory, path)
        key = path.read_bytes()
        if path.stat().st_mode & 0o077:
            logger.warning("%s can be read by others, who could then forge cached content: chmod 600 it", path)
    except OSError as error:
        raise ConfigError(
            f"disk_cache is {directory}, which can't be used: {error}; give a folder of your own"
        ) from error
    if len(key) != KEY_BYTES:
        raise ConfigError(
            f"{path} has {len(key)} bytes, must have {KEY_BYTES}: it is no key of ours; remove it together with the "
            f"folders beside it, whose content can't be found any more, or give another disk_cache"
        )
    return key


def open_folder(directory: Path, facts: Mapping[str, Any], *, hash_key: bytes) -> Path:
    """Return the folder of what was computed under these facts, made when there is none.

    facts: all that decides what the bytes mean, as JSON would have it.
    Raises ConfigError when the folder's manifest says something else, or the folder can't be used.
    """
    key_id = blake2b(hash_key, digest_size=16, person=b"hash-key-id").hexdigest()
    manifest = json.dumps({"format": FORMAT, "hash_key_id": key_id, **facts}, indent=1, sort_keys=True) + "\n"
    path = directory / blake2b(manifest.encode(), digest_size=12).hexdigest()
    file = path / MANIFEST_NAME
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not file.exists():
            _write_at_once(file, manifest.encode())
        found = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"disk_cache: {path} can't be used: {error}") from error
    if found != manifest:
        raise ConfigError(f"disk_cache: {file} isn't what its folder's name stands for: remove {path}")
    return path


def _make_key(directory: Path, path: Path) -> None:
    temporary = directory / f".{KEY_NAME}.{secrets.token_hex(8)}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(secrets.token_bytes(KEY_BYTES))
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass  # another process was faster: its key is the one
    finally:
        temporary.unlink()


def _write_at_once(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    temporary.write_bytes(content)
    temporary.replace(path)
