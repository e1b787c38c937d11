"""A runner around the real one that poisons what nobody may read and counts what is computed for whom."""

from collections import defaultdict

import torch

from hybrid_engine.groups.block import Block
from hybrid_engine.runner.model_runner import ModelRunner
from hybrid_engine.scheduler import Scheduler
from hybrid_engine.step_plan import StepPlan, StepResult


class WatchedRunner:
    """Blocks that are empty, and those given out for new content, are NaN before each step."""

    def __init__(self, runner: ModelRunner, scheduler: Scheduler) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.pools = [manager.pool for manager in scheduler.coordinator.managers]
        self.hits: dict[str, int] = {}
        """By request: where its first computed token stood when it was first started."""
        self.num_computed: dict[str, int] = defaultdict(int)
        """By request: tokens computed for it, those computed again counted again."""
        self.num_starts: dict[str, int] = defaultdict(int)
        """By request: once, and once more after each preemption."""
        self.most_waiting = self.most_tokens = 0
        """Most requests that waited while a step ran, and most tokens of a step."""
        self.peaks = [0] * len(self.pools)
        """By group: most blocks that running requests had in their tables at once."""
        self.least_free = [pool.num_blocks for pool in self.pools]
        self._position: dict[str, int] = {}
        self._taken: list[list[Block]] = [[] for _ in self.pools]
        self._plan: StepPlan | None = None
        runner.cache.poison_all()
        self._watch_copies()
        for group_id in range(len(self.pools)):
            self._watch(group_id)

    @property
    def num_preemptions(self) -> int:
        """Requests that came back."""
        return sum(self.num_starts.values()) - len(self.num_starts)

    def _watch(self, group_id: int) -> None:
        pool, take = self.pools[group_id], self.pools[group_id].take

        def watched(num_blocks: int):
            blocks = take(num_blocks)
            self._taken[group_id] += blocks
            return blocks

        pool.take = watched  # type: ignore[method-assign]

    def _watch_copies(self) -> None:
        cache, copy_blocks = self.runner.cache, self.runner.cache.copy_blocks

        def watched(copies):
            copy_blocks(copies)
            plan, self._plan = self._plan, None
            if plan is not None:
                # What was copied or moved first thing may have come from where something new belongs.
                self._poison(plan)

        cache.copy_blocks = watched  # type: ignore[method-assign]

    def execute(self, plan: StepPlan) -> StepResult:
        self._plan = plan
        self._count(plan)
        before = self.runner.num_computed_tokens_total
        result = self.runner.execute(plan)
        assert self.runner.num_computed_tokens_total - before == plan.num_tokens
        return result

    def _poison(self, plan: StepPlan) -> None:
        for group_id, pool in enumerate(self.pools):
            written = {copy.target_id for copy in plan.block_copies if copy.group_id == group_id}
            stale = {block.block_id for block in (*pool.empty, *self._taken[group_id])} - written
            self.runner.cache.poison(group_id, sorted(stale), torch.nan)
            self._taken[group_id] = []

    def _count(self, plan: StepPlan) -> None:
        self.most_waiting = max(self.most_waiting, self.scheduler.num_waiting)
        self.most_tokens = max(self.most_tokens, plan.num_tokens)
        for group_id, pool in enumerate(self.pools):
            tables = [request.held.tables[group_id] for request in self.scheduler.running]
            num_held = sum(block is not pool.null_block for table in tables for block in table)
            self.peaks[group_id] = max(self.peaks[group_id], num_held)
            self.least_free[group_id] = min(self.least_free[group_id], pool.num_free)
        for started in plan.started:
            self.num_starts[started.request_id] += 1
            self.hits.setdefault(started.request_id, started.num_computed_tokens)
            self._position[started.request_id] = started.num_computed_tokens
        for index, request_id in enumerate(plan.request_ids):
            assert plan.num_computed_tokens[index] == self._position[request_id], f"{request_id} skips or repeats"
            self._position[request_id] += plan.num_scheduled_tokens[index]
            self.num_computed[request_id] += plan.num_scheduled_tokens[index]
