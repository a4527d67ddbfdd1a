"""kill -9 while a checkpoint is written: the resumed run equals one that was never killed."""

import subprocess
import sys
from pathlib import Path

import pytest

from sigattn.train import checkpoint
from tests.train import killed
from tests.train.test_loop import numbers


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="forks")
def test_resume_after_random_kills(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    command = [sys.executable, str(Path(killed.__file__)), str(whole), str(parts), "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    checkpoints = done.stdout.split()  # the last one that each attempt starts from
    assert len(checkpoints) == 5
    assert checkpoints == sorted(
        checkpoints, key=lambda name: "" if name == "none" else name
    )  # nothing once whole is lost
    assert len(set(checkpoints)) > 1
    assert numbers(parts) == numbers(whole)
    assert sorted(p.name for p in (parts / "checkpoints").iterdir()) == ["step-00000013", "step-00000014"]
    assert len(checkpoint.list_checkpoints(parts / "checkpoints")) == 2
