"""Which manager serves which kind of memory. A new kind is a file of its own and one line here."""

from __future__ import annotations

from hybrid_engine.errors import ConfigError
from hybrid_engine.groups.base import GroupManager
from hybrid_engine.groups.chunked_local import ChunkedLocalManager
from hybrid_engine.groups.full_attention import FullAttentionManager
from hybrid_engine.groups.mamba import MambaStateManager
from hybrid_engine.groups.pool import BlockPool
from hybrid_engine.groups.sliding_window import SlidingWindowManager
from hybrid_engine.groups.spec import (
    ChunkedLocalSpec,
    FullAttentionSpec,
    LayerSpec,
    MambaSpec,
    SlidingWindowSpec,
)

MANAGERS: dict[type[LayerSpec], type[GroupManager]] = {
    FullAttentionSpec: FullAttentionManager,
    SlidingWindowSpec: SlidingWindowManager,
    ChunkedLocalSpec: ChunkedLocalManager,
    MambaSpec: MambaStateManager,
}


def make_manager(spec: LayerSpec, pool: BlockPool, *, match_unit_tokens: int) -> GroupManager:
    """Make the manager of a group; raises ConfigError for a kind of memory that has none."""
    if type(spec) not in MANAGERS:
        known = ", ".join(cls.__name__ for cls in MANAGERS)
        raise ConfigError(f"no manager for {type(spec).__name__}; known: {known}")
    return MANAGERS[type(spec)](spec, pool, match_unit_tokens=match_unit_tokens)
