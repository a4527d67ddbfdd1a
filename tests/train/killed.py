"""Train in child processes that are killed while they write checkpoints, until one ends. Arguments: folders, seed."""

import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import torch

from sigattn.data.text import TextData, load_text
from sigattn.models.language import LanguageModelConfig
from sigattn.tasks.language import LanguageModelling
from sigattn.train import checkpoint, loop
from sigattn.train.config import TrainConfig

MODEL = LanguageModelConfig(max_seq_len=32, num_layers=2, embed_dim=32, num_heads=2)
TRAIN = TrainConfig(max_steps=14, batch_size=4, warmup_steps=3, validate_every=5, checkpoint_every=1, seed=3)


def train(folder):
    """The run, or the rest of it."""
    data = TextData.from_bytes(load_text()[:40_000], 32, held_out=8)
    loop.train(LanguageModelling(), MODEL, TRAIN, data, Path(folder), resume=True)


def die_within(save, after, delay):
    """The same, but killed a moment after the after-th write began."""
    writes = 0

    def saving(*args, **kwargs):
        nonlocal writes
        writes += 1
        if writes == after:
            killer = threading.Thread(target=lambda: (time.sleep(delay), os.kill(os.getpid(), signal.SIGKILL)))
            killer.start()
            path = save(*args, **kwargs)
            killer.join()
            return path
        return save(*args, **kwargs)

    return saving


def main(whole, folder, seed):
    """Train once without a kill; then with five, to the end. Prints what each found whole when it began."""
    torch.set_num_threads(1)
    train(whole)  # first, so that what it imports and compiles is there in each child
    chance = random.Random(seed)
    kills = 0
    while kills < 5:
        complete = [p.name for p in checkpoint.list_checkpoints(Path(folder) / "checkpoints")]
        print(complete[-1] if complete else "none", flush=True)
        pid = os.fork()
        if pid == 0:
            checkpoint.save = die_within(checkpoint.save, 1 + chance.randrange(2), chance.uniform(0, 0.03))
            train(folder)
            os._exit(0)
        chance.random()  # parent and child have drawn from the same state: let the next child draw otherwise
        _, status = os.waitpid(pid, 0)
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
            print("done early", flush=True)
            return
        assert os.WTERMSIG(status) == signal.SIGKILL, status
        kills += 1
    train(folder)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
