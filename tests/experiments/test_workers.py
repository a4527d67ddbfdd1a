"""Worker processes end with the process that started them, also when it is killed."""

import functools
import multiprocessing
import os
import signal
import time

import pytest

from experiments import workers

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of fork in a process of several threads
]


@pytest.fixture
def _forked(monkeypatch):
    """Workers that need not import PyTorch. (Spawned ones: test_run_with_changed_settings_is_repeated.)"""
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: fork)


def has_ended(pid, seconds=20):
    deadline = time.time() + seconds
    while time.time() < deadline:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().split(")")[1].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


def report_and_sleep(pipe):
    os.write(pipe, str(os.getpid()).encode())
    time.sleep(60)


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="looks for processes in /proc")
@pytest.mark.usefixtures("_forked")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_the_parent(number):
    """At SIGINT the pool would wait for the end of their jobs."""
    read, write = os.pipe()
    if (parent := os.fork()) == 0:
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if tests run in a shell's background
            list(workers.run_in_workers({i: functools.partial(report_and_sleep, write) for i in range(4)}, 1))
        finally:
            os._exit(1)
    worker = int(os.read(read, 20))
    os.kill(parent, number)
    assert has_ended(parent)
    os.waitpid(parent, 0)
    assert has_ended(worker)


@pytest.mark.usefixtures("_forked")
def test_killed_worker_is_an_error_of_memory():
    with pytest.raises(MemoryError, match="a worker process was interrupted, or killed for want of memory"):
        list(workers.run_in_workers({0: functools.partial(os._exit, 9)}, 1))
