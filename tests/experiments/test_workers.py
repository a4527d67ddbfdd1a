"""Worker processes end with the process that started them, also when it is killed."""

import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from experiments import workers

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")

CODE = """
import os, sys, time
from experiments.workers import worker_pool

def work(_):
    os.write(1, f"{os.getpid()}\\n".encode())  # at once: two workers write to one pipe
    time.sleep(60)

if __name__ == "__main__":
    with worker_pool(2) as processes:
        list(processes.map(work, range(2)))
"""


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().split(")")[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def start(code, path):
    path.write_text(code)
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    out, err = subprocess.PIPE, subprocess.DEVNULL
    return subprocess.Popen([sys.executable, str(path)], stdout=out, stderr=err, env=environment, text=True)


def test_workers_end_when_the_parent_is_killed(tmp_path):
    parent = start(CODE, tmp_path / "parent.py")
    children = [int(parent.stdout.readline()) for _ in range(2)]
    assert all(alive(pid) for pid in children)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    deadline = time.time() + 20
    while any(alive(pid) for pid in children) and time.time() < deadline:
        time.sleep(0.1)
    assert not any(alive(pid) for pid in children)


INTERRUPTED = """
import signal, sys, time
from functools import partial
from experiments.workers import run_in_workers

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if the tests run in a shell's background
    print("started", flush=True)
    list(run_in_workers({i: partial(time.sleep, 60) for i in range(4)}, 2))
"""


@pytest.mark.parametrize("wait", [0.5, 4.0])
def test_one_interrupt_ends_the_workers(wait, tmp_path):
    """While they start, and while they work; the pool would wait for the end of their jobs."""
    parent = start(INTERRUPTED, tmp_path / "parent.py")
    parent.stdout.readline()
    time.sleep(wait)
    parent.send_signal(signal.SIGINT)
    assert parent.wait(timeout=20) != 0
    parent.stdout.close()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of fork in a process of several threads
def test_killed_worker_is_an_error_of_memory(monkeypatch):
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(workers, "worker_pool", lambda count: ProcessPoolExecutor(count, mp_context=fork))
    with pytest.raises(MemoryError, match="a worker process was interrupted, or killed for want of memory"):
        list(workers.run_in_workers({0: functools.partial(os._exit, 9)}, 1))
