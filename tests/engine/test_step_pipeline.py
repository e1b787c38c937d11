import gc
import threading

import pytest

from hybrid_engine.step_pipeline import StepPipeline
from hybrid_engine.step_plan import StepPlan, StepResult

DEADLINE_SECONDS = 30


class Gate:
    """A runner whose steps end when they are let through; it knows the order and the threads."""

    def __init__(self, *, is_open: bool = False) -> None:
        self.gate = threading.Semaphore(100 if is_open else 0)
        self.began = threading.Semaphore(0)
        self.ran: list[int] = []
        self.threads: set[threading.Thread] = set()

    def execute(self, plan: StepPlan) -> StepResult:
        self.threads.add(threading.current_thread())
        self.began.release()
        assert self.gate.acquire(timeout=DEADLINE_SECONDS)
        self.ran.append(plan.step_id)
        if plan.step_id == 13:
            raise ValueError("thirteen")
        return StepResult(plan.step_id, {})


def make_plan(step_id: int) -> StepPlan:
    return StepPlan(step_id, (), (), (), ())


def test_without_depth_a_step_runs_in_the_caller():
    runner = Gate(is_open=True)
    pipeline = StepPipeline(runner, depth=0)
    pipeline.launch(make_plan(1))
    assert (runner.ran, runner.threads) == ([1], {threading.current_thread()})
    assert pipeline.take()[1].step_id == 1


def test_steps_run_one_after_the_other_while_the_caller_goes_on():
    runner = Gate()
    pipeline = StepPipeline(runner, depth=2)
    for step_id in range(3):
        pipeline.launch(make_plan(step_id))
    assert runner.began.acquire(timeout=DEADLINE_SECONDS)
    assert (runner.ran, pipeline.is_full, pipeline.num_launched) == ([], True, 3)
    for step_id in range(3):
        runner.gate.release()
        assert pipeline.take()[1].step_id == step_id
    assert (runner.ran, len(runner.threads)) == ([0, 1, 2], 1)


def test_waiting_leaves_the_results_to_be_taken():
    runner = Gate(is_open=True)
    pipeline = StepPipeline(runner, depth=2)
    for step_id in (12, 13):
        pipeline.launch(make_plan(step_id))
    pipeline.wait()
    assert (runner.ran, pipeline.num_launched) == ([12, 13], 2)


def test_what_a_step_raises_comes_out_where_its_result_is_taken():
    pipeline = StepPipeline(Gate(is_open=True), depth=1)
    pipeline.launch(make_plan(13))
    with pytest.raises(ValueError, match="thirteen"):
        pipeline.take()


def test_nothing_runs_behind_a_step_that_failed():
    runner = Gate()
    pipeline = StepPipeline(runner, depth=1)
    for step_id in (13, 14):
        pipeline.launch(make_plan(step_id))
    runner.gate.release(2)
    for message in ("thirteen", "step 14 follows one that failed"):
        with pytest.raises((ValueError, AssertionError), match=message):
            pipeline.take()
    assert runner.ran == [13]


def test_after_closing_no_further_step_runs_and_the_thread_ends():
    runner = Gate()
    pipeline = StepPipeline(runner, depth=2)
    for step_id in range(3):
        pipeline.launch(make_plan(step_id))
    assert runner.began.acquire(timeout=DEADLINE_SECONDS)
    pipeline.close()
    runner.gate.release(3)
    (thread,) = runner.threads
    thread.join(DEADLINE_SECONDS)
    assert (thread.is_alive(), runner.ran, pipeline.num_launched) == (False, [0], 0)


def test_the_thread_ends_when_nobody_has_the_pipeline_any_more():
    runner = Gate(is_open=True)
    pipeline = StepPipeline(runner, depth=1)
    pipeline.launch(make_plan(0))
    pipeline.take()
    (thread,) = runner.threads
    del pipeline
    gc.collect()
    thread.join(DEADLINE_SECONDS)
    assert not thread.is_alive()


class Device(Gate):
    """A runner whose steps begin at once; their results come when they are asked for."""

    can_run_ahead = True

    def __init__(self) -> None:
        super().__init__(is_open=True)
        self.begun: list[int] = []
        self.num_waits = 0

    def begin(self, plan: StepPlan):
        self.begun.append(plan.step_id)
        return lambda: self.execute(plan)

    def wait(self) -> None:
        self.num_waits += 1


def test_a_runner_that_runs_ahead_begins_steps_in_the_caller_and_finishes_them_when_they_are_taken():
    runner = Device()
    pipeline = StepPipeline(runner, depth=2)
    for step_id in range(3):
        pipeline.launch(make_plan(step_id))
    pipeline.wait()
    assert (runner.begun, runner.ran, runner.num_waits) == ([0, 1, 2], [], 1)
    assert [pipeline.take()[1].step_id for _ in range(3)] == [0, 1, 2]
    assert (runner.ran, runner.threads) == ([0, 1, 2], {threading.current_thread()})


def test_without_depth_nothing_runs_ahead():
    runner = Device()
    StepPipeline(runner, depth=0).launch(make_plan(1))
    assert (runner.begun, runner.ran) == ([], [1])
