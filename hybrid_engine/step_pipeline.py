"""Steps launched and not yet taken in: on a thread of their own, so that the next is planned while one runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Protocol, runtime_checkable

from hybrid_engine.step_plan import StepPlan, StepResult, TransferPlan


class Runner(Protocol):
    """What executes a step."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute all that the plan lists."""


@runtime_checkable
class AheadRunner(Runner, Protocol):
    """A runner whose device works on its own: steps begin without waiting for those before them."""

    @property
    def can_run_ahead(self) -> bool:
        """Whether they do."""

    def begin(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Begin a step; what is returned waits for it and says what it found, in the order of the steps."""

    def wait(self) -> None:
        """Return when all steps begun have run."""


class StepPipeline:
    """Runs plans one after the other in the order in which they were launched, and gives their results in that order.

    With a depth of 0 a plan runs where it is launched, and so does it, without being waited for, on a runner that runs
    ahead. Otherwise one thread runs all of them: it ends when the pipeline is dropped or closed, or with the process,
    once the step that it is in has ended.
    """

    def __init__(self, runner: Runner, *, depth: int) -> None:
        """depth: launched steps beyond the one whose result is waited for; 0: no thread."""
        self.runner = runner
        self.depth = depth
        self._executor: ThreadPoolExecutor | None = None
        self._has_failed = False
        self._launched: deque[tuple[StepPlan, StepResult | Future[StepResult] | Callable[[], StepResult]]] = deque()
        self._ahead = runner if depth and isinstance(runner, AheadRunner) and runner.can_run_ahead else None

    @property
    def num_launched(self) -> int:
        """Steps whose results were not taken."""
        return len(self._launched)

    @property
    def is_full(self) -> bool:
        """Whether a result is to be taken before the next step is launched."""
        return len(self._launched) > self.depth

    def launch(self, plan: StepPlan) -> None:
        """Have a plan executed after those launched before it."""
        assert not self.is_full, f"{self.num_launched} steps are launched, the depth is {self.depth}"
        if self._ahead is not None:
            self._launched.append((plan, self._ahead.begin(plan)))
            return
        if self.depth == 0:
            self._launched.append((plan, self.runner.execute(plan)))
            return
        self._launched.append((plan, self._thread().submit(self._execute, plan)))

    def transfer(self, transfers: TransferPlan) -> None:
        """Have bytes moved after the steps launched before, and wait for that."""
        self.carry_out(StepPlan(0, (), (), (), (), transfers=transfers))

    def carry_out(self, plan: StepPlan) -> None:
        """Have a plan executed that computes nothing, after the steps launched before, and wait for that."""
        if self.depth == 0 or self._ahead is not None:
            self.runner.execute(plan)
        else:
            self._thread().submit(self._execute, plan).result()

    def _thread(self) -> ThreadPoolExecutor:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="hybrid-engine-step")
        return self._executor

    def take(self) -> tuple[StepPlan, StepResult]:
        """Wait for the oldest launched step and return what it found, or raise what it raised."""
        plan, result = self._launched.popleft()
        if isinstance(result, StepResult):
            return plan, result
        return plan, result.result() if isinstance(result, Future) else result()

    def wait(self) -> None:
        """Return when all that was launched has run, however it ended; the results stay to be taken."""
        wait([result for _, result in self._launched if isinstance(result, Future)])
        if self._ahead is not None:
            self._ahead.wait()

    def _execute(self, plan: StepPlan) -> StepResult:
        # A step that was launched behind one that failed would read caches that nobody can trust.
        assert not self._has_failed, f"step {plan.step_id} follows one that failed"
        try:
            return self.runner.execute(plan)
        except BaseException:
            self._has_failed = True
            raise

    def close(self) -> None:
        """Forget what is launched: a step that has not begun never runs; the one that runs is not waited for."""
        self._launched.clear()
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._executor = None
