"""What an engine holds right now, as plain numbers: for metrics and for people."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid_engine.engine import Engine
from hybrid_engine.groups.arena import Arena
from hybrid_engine.groups.spec import ENDLESS, LayerSpec


@dataclass(frozen=True, slots=True)
class GroupUsage:
    """The blocks of one group; every usable one is held, or cached and free, or empty."""

    group_id: int
    kind: str
    """'full', 'window', 'chunk' or 'state'."""
    reach: int | None
    """Tokens of the window or chunk; None where there is none."""
    num_layers: int
    block_size: int | None
    """Tokens in a block; None for a state, which has no end."""
    block_bytes: int
    num_blocks: int
    num_held: int
    """Held by requests that run."""
    num_cached: int
    """Held by nobody, and found by the prompts that need them."""
    num_empty: int


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """An engine between two steps. Counters run since it was made."""

    num_running: int
    num_waiting: int
    num_steps: int
    num_computed_tokens: int
    num_preemptions: int
    num_recomputed_tokens: int
    num_checkpoints: int
    """Recorded positions that prompts can go on from."""
    memory_bytes: int
    """Of all groups' blocks together; it flows between groups that share it."""
    unowned_bytes: int
    """Of these, what no group has taken yet."""
    held_share: float
    """The part of the memory that running requests hold, 0 to 1; of the fullest region, where there are several."""
    groups: tuple[GroupUsage, ...]


def take_snapshot(engine: Engine) -> EngineSnapshot:
    """Look at an engine; to be called between two steps."""
    scheduler = engine.scheduler
    coordinator, stats = scheduler.coordinator, scheduler.stats
    arenas = coordinator.memory.arenas
    return EngineSnapshot(
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        num_steps=stats.num_steps,
        num_computed_tokens=stats.num_computed_tokens,
        num_preemptions=stats.num_preemptions,
        num_recomputed_tokens=stats.num_recomputed_tokens,
        num_checkpoints=sum(1 for _ in coordinator.checkpoints),
        memory_bytes=sum(arena.num_extents * arena.region.extent_bytes for arena in arenas),
        unowned_bytes=sum(arena.num_unowned * arena.region.extent_bytes for arena in arenas),
        held_share=max(map(_held_share, arenas)),
        groups=tuple(_usage(engine, index) for index in range(len(coordinator.groups))),
    )


def _held_share(arena: Arena) -> float:
    return sum(pool.num_extents_for(pool.num_held) for pool in arena.pools) / arena.num_extents


def _usage(engine: Engine, index: int) -> GroupUsage:
    coordinator = engine.scheduler.coordinator
    group, pool = coordinator.groups[index], coordinator.managers[index].pool
    kind, reach = _kind(group.spec)
    return GroupUsage(
        group_id=group.group_id,
        kind=kind,
        reach=reach,
        num_layers=len(group.layer_indices),
        block_size=None if group.block_size == ENDLESS else group.block_size,
        block_bytes=group.block_bytes,
        num_blocks=pool.num_owned,
        num_held=pool.num_held,
        num_cached=len(pool.free),
        num_empty=len(pool.empty),
    )


def _kind(spec: LayerSpec) -> tuple[str, int | None]:
    if spec.block_size == ENDLESS:
        return "state", None
    for name in ("window", "chunk"):
        reach = getattr(spec, name, None)
        if reach is not None:
            return name, reach
    return "full", None
