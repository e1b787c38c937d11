"""Things to store, and how tests store them on a disk."""

from pathlib import Path

import numpy as np

from hybrid_engine.connectors.disk import DiskTier
from hybrid_engine.transfer_plan import BlockKey, CheckpointKey, StoreKey

SECRET = b"s" * 32


def block(number: int, group_id: int = 0) -> BlockKey:
    return BlockKey(group_id, number.to_bytes(16, "big"))


def checkpoint(number: int, tail: tuple[int, ...] = (7, 8)) -> CheckpointKey:
    return CheckpointKey(number.to_bytes(16, "big"), tail, 16 * number + len(tail))


def payload(number: int, num_bytes: int = 1000) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, num_bytes, dtype=np.uint8)


def store(tier: DiskTier, *keys: StoreKey) -> list[Path]:
    """Write things, each to a file of its own; return the files in that order."""
    files: list[Path] = []
    for number, key in enumerate(keys):
        tier.put(key, payload(number))
        tier.flush()
        files += [path for path in sorted(tier.folder.glob("*.safetensors")) if path not in files]
    return files
