"""Worker processes end with the process that started them, also when it is killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")

CODE = """
import os, sys, time
from sigattn.train.workers import worker_pool

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


def test_workers_end_when_the_parent_is_killed(tmp_path):
    (tmp_path / "parent.py").write_text(CODE)
    parent = subprocess.Popen([sys.executable, str(tmp_path / "parent.py")], stdout=subprocess.PIPE, text=True)
    workers = [int(parent.stdout.readline()) for _ in range(2)]
    assert all(alive(pid) for pid in workers)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    deadline = time.time() + 20
    while any(alive(pid) for pid in workers) and time.time() < deadline:
        time.sleep(0.1)
    assert not any(alive(pid) for pid in workers)
