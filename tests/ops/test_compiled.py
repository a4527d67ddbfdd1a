"""Run the tests in ``compiled/``, which need a process without Triton's interpreter."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="this process collects them itself")
@pytest.mark.skipif("SIGATTN_FUZZ_EXAMPLES" in os.environ, reason="make test-kernels runs all of them, in parallel")
def test_compiled():
    folder = Path(__file__).parent / "compiled"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(folder)]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
