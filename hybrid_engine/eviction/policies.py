"""The policies by their names."""

from __future__ import annotations

from hybrid_engine.eviction.flop_aware import FlopAwarePolicy
from hybrid_engine.eviction.lru import LruPolicy
from hybrid_engine.eviction.valued import ValuedPolicy
from hybrid_engine.groups.eviction import EvictionPolicy

POLICIES: dict[str, type[EvictionPolicy]] = {"valued": ValuedPolicy, "lru": LruPolicy, "flop_aware": FlopAwarePolicy}


def make_policy(name: str) -> EvictionPolicy:
    """Return a policy that knows no checkpoint yet."""
    return POLICIES[name]()
