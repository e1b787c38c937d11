"""Keeps what happens in a run: sums, and a few hundred samples over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from hybrid_engine.bench.prefix_result import GroupSeries, Seconds, Series, Totals
from hybrid_engine.coordinator import Coordinator
from hybrid_engine.explanation import CacheExplanation
from hybrid_engine.groups.spec import Group

N = TypeVar("N", int, float)

MAX_SAMPLES = 400
"""When there are more, each two become one."""


class Recorder:
    """Counts requests as they end, and takes a sample every so many of them."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.totals = Totals()
        self.series = Series(groups=[GroupSeries(group_name(group)) for group in coordinator.groups])
        self._coordinator = coordinator
        self._ttft: list[float] = []
        self._every = 1
        self._sums = _Sums()

    def take(self, cache: CacheExplanation, num_answer_tokens: int, ttft_s: float) -> None:
        """Count a request that has ended."""
        totals = self.totals
        totals.num_requests += 1
        totals.num_prompt_tokens += cache.num_prompt_tokens
        totals.num_hit_tokens += cache.hit
        totals.num_last_tokens += cache.LAST
        totals.num_answer_tokens += num_answer_tokens
        for reason, count in cache.reasons().items():
            totals.missed_tokens[reason] = totals.missed_tokens.get(reason, 0) + count
        self._ttft.append(ttft_s)
        self._sums.take(cache)

    def sample(self, now: float, num_running: int, num_waiting: int) -> None:
        """Take a sample if it is time for one."""
        sums, series = self._sums, self.series
        if sums.num_requests < self._every:
            return
        series.time_s.append(now)
        series.num_requests.append(self.totals.num_requests)
        series.hit_tokens.append(sums.hit)
        series.last_tokens.append(sums.last)
        for reason, count in sums.missed.items():
            series.missed_tokens.setdefault(reason, []).append(count)
        series.num_running.append(num_running)
        series.num_waiting.append(num_waiting)
        series.unowned_bytes.append(unowned_bytes(self._coordinator))
        for kept, usage in zip(series.groups, self._coordinator.usage(), strict=True):
            size = usage.group.block_bytes
            kept.held_bytes.append(usage.num_held * size)
            kept.cached_bytes.append(usage.num_cached * size)
            kept.empty_bytes.append(usage.num_empty * size)
        self._sums = _Sums()
        if len(series.time_s) > MAX_SAMPLES:
            self._thin()

    def finish(self) -> None:
        """Work out what only a whole run has."""
        if self._ttft:
            quantiles = np.percentile(self._ttft, range(101)).tolist()
            self.totals.ttft_s = Seconds(quantiles[50], quantiles[90], quantiles[99])
            self.totals.ttft_quantiles_s = quantiles

    def _thin(self) -> None:
        series = self.series
        self._every *= 2
        for sums in (series.hit_tokens, series.last_tokens, *series.missed_tokens.values()):
            sums[:] = _in_twos(sums)
        series.time_s = _later_ones(series.time_s)
        for counts in (series.num_requests, series.num_running, series.num_waiting, series.unowned_bytes):
            counts[:] = _later_ones(counts)
        for group in series.groups:
            for sizes in (group.held_bytes, group.cached_bytes, group.empty_bytes):
                sizes[:] = _later_ones(sizes)


class _Sums:
    """Of the requests since the last sample."""

    def __init__(self) -> None:
        self.num_requests = self.hit = self.last = 0
        self.missed: dict[str, int] = {}

    def take(self, cache: CacheExplanation) -> None:
        self.num_requests += 1
        self.hit += cache.hit
        self.last += cache.LAST
        for reason, count in cache.reasons().items():
            self.missed[reason] = self.missed.get(reason, 0) + count


def _in_twos(values: Sequence[int]) -> list[int]:
    return [sum(values[index : index + 2]) for index in range(0, len(values), 2)]


def _later_ones(values: list[N]) -> list[N]:
    """Return the later one of each two, and the last where it stands alone."""
    return values[1::2] + values[len(values) // 2 * 2 :]


def group_name(group: Group) -> str:
    """Return a group's kind, with its window where it has one."""
    window = getattr(group.spec, "window", 0) or getattr(group.spec, "chunk", 0)
    return f"{group.spec.kind} {window}" if window else group.spec.kind


def unowned_bytes(coordinator: Coordinator) -> int:
    """Return the bytes that belong to no group now: they go to whichever needs them."""
    return sum(arena.num_unowned * arena.region.extent_bytes for arena in coordinator.memory.arenas)


def orphan_bytes(coordinator: Coordinator) -> int:
    """Return the bytes of cached blocks that no recorded checkpoint needs, where only those can be gone on from."""
    if not coordinator.has_states:
        return 0
    checkpoints = list(coordinator.checkpoints)
    total = 0
    for index, (group, manager) in enumerate(zip(coordinator.groups, coordinator.managers, strict=True)):
        needed = set().union(*(checkpoint.keys[index] for checkpoint in checkpoints))
        cached = manager.pool.cached.items()
        num_orphans = sum(block.ref_count == 0 and key not in needed for key, block in cached)
        total += num_orphans * group.block_bytes
    return total
