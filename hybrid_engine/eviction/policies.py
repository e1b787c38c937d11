"""The policies by their names."""

from __future__ import annotations

from hybrid_engine.eviction.lru import LruPolicy
from hybrid_engine.groups.eviction import EvictionPolicy

POLICIES: dict[str, type[EvictionPolicy]] = {"lru": LruPolicy}


def make_policy(name: str) -> EvictionPolicy:
    """Return a policy that knows no checkpoint yet."""
    return POLICIES[name]()
