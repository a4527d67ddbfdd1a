"""Small models trained as a list of jobs says, one after another, in one group of processes."""

import functools
import signal
from dataclasses import replace
from pathlib import Path

import torch

from sigattn.data.dataset import PlaceholderBatch
from sigattn.data.images import Digits
from sigattn.data.text import TextData, load_text
from sigattn.models.language import LanguageModelConfig
from sigattn.models.vision import ViTConfig
from sigattn.tasks import BYOL, Classification, LanguageModelling, SimCLR
from sigattn.train import loop
from sigattn.train.config import TrainConfig
from sigattn.train.folder_lock import FolderInUseError

STEPS = 3
TRAINING = TrainConfig(
    max_steps=STEPS, batch_size=8, warmup_steps=2, validate_every=STEPS, checkpoint_every=STEPS, learning_rate=1e-2
)
LANGUAGE = LanguageModelConfig(
    max_seq_len=32, num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=4, position="alibi", learn_bias="layer"
)
VISION = ViTConfig(
    num_layers=2, embed_dim=32, num_heads=4, image_size=8, patch_size=4, channels=1, num_classes=10, init_values=0.1
)


def setting(kind):
    if kind == "vision":
        return Classification(), VISION, Digits()
    if kind in ("contrast", "teacher"):
        task = SimCLR if kind == "contrast" else BYOL
        return task(projector_dim=16, output_dim=8), VISION, Digits(num_views=2)
    model = LANGUAGE
    if kind == "rope":
        model = replace(LANGUAGE, position="rope", norm_placement="hybrid", num_kv_heads=2, temperature=0.1)
    # lines of very different numbers of words, so of targets that are not ignored
    task = LanguageModelling(end_token=ord(" ") if kind == "documents" else None)
    data = FirstProcessOnly if kind == "placeholder" else TextData
    return task, model, data.from_bytes(load_text()[:40_000], 32, held_out=4)


class FirstProcessOnly(TextData):
    def batch(self, step, size, seed, shard=(0, 1)):
        batch = super().batch(step, size, seed)
        return batch if shard[0] == 0 else PlaceholderBatch(t[:1] for t in batch)


def interrupt(at, row):
    if row["step"] == at:
        signal.raise_signal(signal.SIGINT)


def terminated(data, at, rank):
    """The same data; SIGTERM comes to one process while it is read."""
    read = data.batch

    def batch(step, *arguments):
        if step == at and torch.distributed.get_rank() == rank:
            signal.raise_signal(signal.SIGTERM)
        return read(step, *arguments)

    data.batch = batch
    return data


def run(jobs):
    """Train as each job says: {"folder": …, "kind": "language", "training": {"parallel": "fsdp"}}."""
    torch.set_num_threads(1)
    for job in jobs:
        task, model, data = setting(job["kind"])
        stop = functools.partial(interrupt, job.get("stop_after"))
        model, config = replace(model, **job.get("model", {})), replace(TRAINING, **job.get("training", {}))
        if "terminate" in job:
            data = terminated(data, *job["terminate"])
        if job["kind"] in ("contrast", "teacher"):  # batch norm of 8 samples makes rounding errors grow fast
            config = replace(config, learning_rate=1e-4)
        try:
            loop.train(task, model, config, data, Path(job["folder"]), resume=job.get("resume", False), on_row=stop)
        except loop.Interrupted as stop:
            assert "stop_after" in job or "terminate" in job
            if "terminate" in job:
                (Path(job["folder"]) / f"stopped-{torch.distributed.get_rank()}").write_text(f"{stop.signal} {stop}")
        except (ValueError, FolderInUseError) as error:
            Path(job["folder"]).mkdir(parents=True, exist_ok=True)
            name = f"error-{torch.distributed.get_rank()}" if isinstance(error, FolderInUseError) else "error"
            (Path(job["folder"]) / name).write_text(str(error))
