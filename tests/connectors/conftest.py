"""Folders to store things in."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from stored_things import SECRET

from hybrid_engine.connectors.disk import DiskTier


@pytest.fixture
def open_disk(tmp_path: Path) -> Iterator[Callable[..., DiskTier]]:
    """Open the same folder as often as asked, as restarts or other processes would."""
    opened: list[DiskTier] = []

    def open_tier(*, secret: bytes = SECRET, capacity_bytes: int = 1 << 20) -> DiskTier:
        opened.append(DiskTier(tmp_path, secret=secret, capacity_bytes=capacity_bytes))
        return opened[-1]

    yield open_tier
    for tier in opened:
        tier.close()
