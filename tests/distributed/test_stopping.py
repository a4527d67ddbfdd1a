"""SIGTERM to one of several processes, and a folder that is in use: all processes stop together."""

import signal

import pytest
import torch

from sigattn.train import checkpoint
from sigattn.train.folder_lock import lock_folder
from tests.distributed import worker
from tests.distributed.test_training import launch, rows

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")


def test_all_processes_stop_together(tmp_path):
    jobs = [
        {"folder": str(tmp_path / "in-use"), "kind": "language"},
        {"folder": str(tmp_path / "run"), "kind": "language", "terminate": [1, 1], "training": {"parallel": "fsdp"}},
    ]
    with lock_folder(tmp_path / "in-use"):
        launch(2, jobs)
    assert "another process or thread is writing into" in (tmp_path / "in-use" / "error-0").read_text()
    assert "the main process cannot write into" in (tmp_path / "in-use" / "error-1").read_text()
    assert not (tmp_path / "in-use" / "checkpoints").exists()
    for rank in range(2):
        text = (tmp_path / "run" / f"stopped-{rank}").read_text()
        assert text.startswith(f"{int(signal.SIGTERM)} stopped after 2 of 5 steps")
    assert [p.name for p in checkpoint.list_checkpoints(tmp_path / "run" / "checkpoints")] == ["step-00000002"]
    worker.run([{"folder": str(tmp_path / "run"), "kind": "language", "resume": True}])
    worker.run([{"folder": str(tmp_path / "whole"), "kind": "language"}])
    for ours, theirs in zip(rows(tmp_path / "run"), rows(tmp_path / "whole"), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=2e-4)
