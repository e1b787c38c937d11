"""The threads that share a call: every task once, whoever else calls, and asleep when there is nothing to do."""

import ctypes
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from hybrid_engine.kernels.native.builder import build, find_compiler
from tests.kernels.native.test_native import run_python

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler here")

SOURCE = """
#include "team.h"
extern "C" {
int self_test() { return 0; }
// counts[task] += 1, and who did it.
void count(int64_t num_tasks, int32_t num_threads, int32_t is_much, int64_t chunk, int32_t* counts, int64_t* who) {
    each_task(num_tasks, num_threads, is_much, [&](int64_t task) {
        counts[task]++;
        who[task] = syscall(SYS_gettid);
        if (num_tasks < 100) usleep(1000);  // so that the others get some
    }, chunk);
}
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("team") / "op"
    folder.mkdir()
    source = folder / "cpu.cpp"
    source.write_text(SOURCE)
    path = build(source)
    assert path is not None
    return ctypes.CDLL(str(path))


def count(library, num_tasks, num_threads, *, is_much=True, chunk=0):
    """How often each task was done, and by which threads."""
    counts, who = np.zeros(num_tasks, np.int32), np.zeros(num_tasks, np.int64)
    pointers = (ctypes.c_void_p(counts.ctypes.data), ctypes.c_void_p(who.ctypes.data))
    library.count(ctypes.c_int64(num_tasks), num_threads, int(is_much), ctypes.c_int64(chunk), *pointers)
    return counts, set(who.tolist())


@pytest.mark.parametrize("num_tasks", [0, 1, 2, 7, 64, 1000, 100_001])
@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("chunk", [0, 1, 3, 1000])
def test_each_task_is_done_once(library, num_tasks, num_threads, chunk):
    counts, who = count(library, num_tasks, num_threads, chunk=chunk)
    assert (counts == 1).all()
    assert len(who) <= num_threads


def test_many_calls_one_after_the_other(library):
    for number in range(3000):
        counts, _ = count(library, 200, 2 + number % 4)
        assert (counts == 1).all()


def test_work_is_shared(library):
    who = set()
    for _ in range(100):  # on a busy machine a thread may come when all is done
        who |= count(library, 32, 4, chunk=1)[1]
        if len(who) == 4:
            break
    assert len(who) == 4


def test_little_work_stays_on_the_thread_that_calls(library):
    _, who = count(library, 32, 4, is_much=False)
    assert who == {int(os.readlink("/proc/thread-self").rpartition("/")[2])}


def test_callers_on_several_threads_all_get_their_work_done(library):
    def call(number):
        return all((count(library, 1000 + number, 3)[0] == 1).all() for _ in range(300))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(call, range(4)))


def test_threads_sleep_when_nothing_comes(library):
    count(library, 32, 4, chunk=1)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        states = [(task / "stat").read_text().rpartition(")")[2].split()[0] for task in _team()]
        if len(states) >= 3 and set(states) == {"S"}:
            return
        time.sleep(0.01)
    pytest.fail(f"threads are {states}")


def test_signals_are_left_to_the_program_s_own_threads(library):
    count(library, 32, 4, chunk=1)
    assert len(_team()) >= 3


def _team():
    """Threads that take no SIGTERM."""
    return [task for task in Path("/proc/self/task").iterdir() if int(_blocked(task), 16) & 1 << signal.SIGTERM - 1]


def _blocked(task):
    return next(line.split()[1] for line in (task / "status").read_text().splitlines() if line.startswith("SigBlk"))


def test_a_forked_process_has_threads_of_its_own():
    code = """
import os, warnings
import torch
from hybrid_engine.kernels.linear import PackedLinear, linear
warnings.simplefilter("ignore")
torch.set_num_threads(4)
packed = PackedLinear.pack(torch.ones(1024, 1024))
x = torch.ones(4, 1024)
wanted = linear(x, packed)
pid = os.fork()
if pid == 0:
    os._exit(0 if torch.equal(linear(x, packed), wanted) and len(os.listdir("/proc/self/task")) == 4 else 1)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    assert run_python(code, OMP_NUM_THREADS="1") == "0"
