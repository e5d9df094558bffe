"""The pool of threads of the C++ kernels: every task once, and what becomes of exceptions."""

import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

cpp = pytest.importorskip("_slipstream_cpu", reason="the C++ kernels are not built")
from slipstream.kernels.cpu import matmul  # noqa: E402
from slipstream.kernels.formats.int8 import ToInt8  # noqa: E402

TASKS = 200


@pytest.fixture(params=[1, 4], autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = cpp.num_threads()
    cpp.set_num_threads(request.param)
    yield request.param
    cpp.set_num_threads(before)


def done(tasks: int = TASKS) -> Counter[int]:
    """How many times each task was run."""
    found: list[int] = []
    cpp.run_tasks(tasks, found.append)
    return Counter(found)


@pytest.mark.parametrize("tasks", [0, 1, 3, TASKS])
def test_every_task_is_done_once(tasks: int) -> None:
    assert done(tasks) == Counter(range(tasks))


def in_thread(call: Callable[[], Counter[int]]) -> Counter[int]:
    """The result, or exception, of a call in another thread."""
    with ThreadPoolExecutor(1) as other:
        return other.submit(call).result(timeout=60)


def test_a_call_during_another_does_its_tasks_alone() -> None:
    found: list[Counter[int]] = []
    cpp.run_tasks(5, lambda _: found.append(in_thread(done)))
    assert found == [Counter(range(TASKS))] * 5


@pytest.mark.parametrize("failing", [0, 60, TASKS - 1])
def test_an_exception_comes_to_the_caller_and_leaves_the_pool_usable(failing: int) -> None:
    def fail(task: int) -> None:
        if task == failing:
            raise KeyError(f"task {task}")

    for _ in range(20):
        with pytest.raises(KeyError, match=f"task {failing}"):
            cpp.run_tasks(TASKS, fail)
    assert done() == Counter(range(TASKS))


def test_one_of_many_exceptions_comes_and_the_rest_is_left_out(threads: int) -> None:
    begun: list[int] = []
    together = threading.Barrier(threads)

    def fail(task: int) -> None:
        begun.append(task)
        together.wait(timeout=60)  # all threads are at a task of theirs, and all will fail
        raise KeyError(f"task {task}")

    with pytest.raises(KeyError, match="task"):
        cpp.run_tasks(TASKS, fail)
    assert len(begun) == threads
    assert done() == Counter(range(TASKS))


def test_an_exception_of_a_call_that_is_alone_is_its_own() -> None:
    def fail(task: int) -> None:
        raise KeyError(f"task {task}")

    def failing(_: int) -> None:
        with pytest.raises(KeyError, match="task 0"):
            in_thread(lambda: cpp.run_tasks(2, fail))

    cpp.run_tasks(5, failing)
    assert done() == Counter(range(TASKS))


def test_a_lack_of_memory_says_what_was_asked_for() -> None:
    weight = matmul.rounded(torch.randn(32, 64), ToInt8())
    assert isinstance(weight, matmul.CpuMatrix)
    x, out = torch.randn(1, 64), torch.empty(1, 32)
    rows = 1 << 45  # all of them the same, but each is rounded to a place of its own
    with pytest.raises(MemoryError, match=r"no room for \d+ MB that the CPU kernels asked for"):
        cpp.matmul(weight.handle, x.expand(rows, -1), None, out.expand(rows, -1))
    assert torch.isfinite(weight.logits(x)).all()


WITHOUT_ROOM = """
import resource
import _slipstream_cpu as cpp

cpp.set_num_threads(4)
counted = []
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 20), resource.RLIM_INFINITY))
try:
    cpp.run_tasks(9, counted.append)
except RuntimeError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert not counted
cpp.run_tasks(9, counted.append)
assert sorted(counted) == list(range(9))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and limits the address space")
def test_threads_that_cannot_start_are_an_error_of_the_call() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_ROOM], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "use fewer (--threads)" in done.stdout


FORKED = """
import os, signal, time
import _slipstream_cpu as cpp

def work():
    for _ in range(8):
        counted = []
        cpp.run_tasks(9, counted.append)
        assert sorted(counted) == list(range(9))
        time.sleep(0.02)  # until the threads sleep

cpp.set_num_threads(4)
work()
child = os.fork()
if child == 0:
    signal.alarm(60)  # ends it where it waits for threads that are its parent's
    assert cpp.num_threads() == 4
    work()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
work()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_forked_process_has_threads_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
