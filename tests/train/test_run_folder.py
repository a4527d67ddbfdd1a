"""Run folders: one run at a time, unchanged by a failed resume, checkpoints with finite weights only."""

import contextlib
import errno
import math
import os
import signal
import threading
from dataclasses import replace

import pytest
import torch

from sigattn.data.text import TextData, load_text
from sigattn.models.language import LanguageModelConfig
from sigattn.tasks.language import LanguageModelling
from sigattn.train import checkpoint, loop, metrics
from sigattn.train.config import TrainConfig
from sigattn.train.folder_lock import FolderInUseError, lock_folder
from sigattn.train.loop import NonFiniteLossError
from tests.test_cli import contents, failure

MODEL = LanguageModelConfig(max_seq_len=16, num_layers=1, embed_dim=16, num_heads=2)
TRAIN = TrainConfig(max_steps=6, batch_size=2, warmup_steps=0, validate_every=3, checkpoint_every=2)
QUICK = [
    "--training.max-steps",
    "2",
    "--training.batch-size",
    "4",
    "--model.max-seq-len",
    "16",
    "--model.embed-dim",
    "32",
]


@pytest.fixture(scope="module")
def text():
    return TextData.from_bytes(load_text()[:20_000], 16, held_out=4)


def train(data, folder, config=TRAIN, **options):
    return loop.train(LanguageModelling(), MODEL, config, data, folder, **options)


@contextlib.contextmanager
def other_process(folder):
    """A process that holds the lock of a folder until the context ends; its number."""
    ready, done = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        with lock_folder(folder):
            os.write(ready[1], b"x")
            os.read(done[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    try:
        yield child
    finally:
        os.write(done[1], b"x")
        os.waitpid(child, 0)


class TestLock:
    @pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
    def test_another_process(self, tmp_path, text):
        train(text, tmp_path)
        before = contents(tmp_path)
        with other_process(tmp_path):
            with pytest.raises(FolderInUseError, match="another process or thread is writing into the run folder"):
                train(text, tmp_path, resume=True)
            with pytest.raises(FolderInUseError):
                train(text, tmp_path, replace(TRAIN, seed=1))
        assert contents(tmp_path) == before
        train(text, tmp_path, resume=True)

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
    def test_lock_is_released_when_process_is_killed(self, tmp_path):
        with other_process(tmp_path) as child:
            os.kill(child, signal.SIGKILL)
            os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
            with lock_folder(tmp_path):
                pass

    def test_another_thread(self, tmp_path):
        found = []

        def attempt():
            try:
                with lock_folder(tmp_path / "." / ""):
                    found.append("entered")
            except FolderInUseError as error:
                found.append(str(error))

        with lock_folder(tmp_path), lock_folder(tmp_path):
            thread = threading.Thread(target=attempt)
            thread.start()
            thread.join()
        assert len(found) == 1
        assert "another process or thread is writing into the run folder" in found[0]
        attempt()
        assert found[1] == "entered"


class TestFailedResume:
    """A failed resume leaves every file unchanged."""

    def test_full_disk_keeps_the_metrics(self, tmp_path, monkeypatch):
        log = metrics.MetricsLog(tmp_path)
        log.write({"step": 0, "loss": 1.0})
        log.close()

        def half_written(path, text, **_more):
            path.open("w").close()
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr("pathlib.Path.write_text", half_written)
        with pytest.raises(OSError, match=r"No space left on device: .*metrics\.jsonl"):
            metrics.MetricsLog(tmp_path, 1)
        assert metrics.read_metrics(tmp_path / "metrics.jsonl") == [{"step": 0, "loss": 1.0}]


class TestFiniteCheckpoints:
    def ruin(self, monkeypatch, after, name="norm.weight"):
        """Make a weight NaN by an update whose loss and gradient are finite."""
        step, count = torch.optim.AdamW.step, []

        def ruined(optimizer, *args):
            step(optimizer, *args)
            count.append(1)
            if len(count) == after:
                optimizer.param_groups[-1]["params"][-1].data.fill_(math.nan)

        monkeypatch.setattr(torch.optim.AdamW, "step", ruined)

    @pytest.mark.parametrize("steps", [4, 6])
    def test_last_checkpoint_is_finite(self, tmp_path, text, monkeypatch, steps):
        """After 4 steps a checkpoint is due, after 6 the run is over."""
        self.ruin(monkeypatch, steps)
        with pytest.raises(
            NonFiniteLossError, match=f"step {steps - 1}: weights that are not finite; .*-0000000{steps - 2}$"
        ):
            train(text, tmp_path)
        last = checkpoint.list_checkpoints(tmp_path / "checkpoints")[-1]
        assert last.name == f"step-{steps - 2:08d}"
        assert not (tmp_path / "model").exists()
        monkeypatch.undo()
        train(text, tmp_path, resume=True)  # refuses weights that are not finite
        assert math.isfinite(metrics.read_metrics(tmp_path / "metrics.jsonl")[-1]["validation_loss"])

    def test_interrupt_writes_no_non_finite_checkpoint(self, tmp_path, text, monkeypatch):
        self.ruin(monkeypatch, 1)

        def stop(row):
            signal.raise_signal(signal.SIGTERM)

        with pytest.raises(NonFiniteLossError, match="step 0: weights that are not finite; there is no checkpoint"):
            train(text, tmp_path, on_row=stop)

    def test_non_finite_checkpoint_raises(self, tmp_path, text, monkeypatch):
        self.ruin(monkeypatch, 6)
        monkeypatch.setattr(loop.Trainer, "_check_weights", lambda *_: None)
        monkeypatch.setattr(LanguageModelling, "evaluate", lambda *_: {"loss": 1.0})
        train(text, tmp_path)
        monkeypatch.undo()
        with pytest.raises(checkpoint.CheckpointError, match="step-00000006 holds weights that are not finite"):
            train(text, tmp_path, resume=True)

    def test_non_finite_validation_loss(self, tmp_path, capsys, monkeypatch):
        monkeypatch.setattr(LanguageModelling, "evaluate", lambda *_: {"loss": math.nan})
        code, message = failure(["train", "lm-1b-2k", "--tiny", "--folder", str(tmp_path / "run"), *QUICK], capsys)
        assert code == 1
        assert "step 1: held-out loss nan; there is no checkpoint yet" in message
