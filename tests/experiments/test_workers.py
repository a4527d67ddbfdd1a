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
import os, signal, time
from functools import partial
from experiments.workers import run_in_workers

def work():
    print(os.getpid(), flush=True)
    time.sleep(60)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if the tests run in a shell's background
    print("started", flush=True)
    list(run_in_workers({i: work for i in range(4)}, 1))
"""


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().split(")")[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_the_parent(number, tmp_path):
    """At SIGINT the pool would wait for the end of their jobs."""
    (tmp_path / "parent.py").write_text(CODE)
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(tmp_path / "parent.py")]
    parent = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": path}, text=True
    )
    parent.stdout.readline()
    worker = int(parent.stdout.readline())
    parent.send_signal(number)
    assert parent.wait(timeout=20) != 0
    parent.stdout.close()
    deadline = time.time() + 20
    while alive(worker) and time.time() < deadline:
        time.sleep(0.1)
    assert not alive(worker)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of fork in a process of several threads
def test_killed_worker_is_an_error_of_memory(monkeypatch):
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(workers, "worker_pool", lambda count: ProcessPoolExecutor(count, mp_context=fork))
    with pytest.raises(MemoryError, match="a worker process was interrupted, or killed for want of memory"):
        list(workers.run_in_workers({0: functools.partial(os._exit, 9)}, 1))
