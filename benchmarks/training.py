"""``python -m benchmarks training``: language models with κ = 4 and 8 and a ViT-S, with sigmoid and with softmax.

Measured are tokens (images) per second, peak memory, loss and attention norm in the training loop. The defaults are for
a GPU, where they take about six minutes; a CPU needs smaller settings.
"""

from __future__ import annotations

import contextlib
import statistics
import sysconfig
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.results_file import ResultsFile
from sigattn.data.dataset import Data
from sigattn.data.images import Digits
from sigattn.data.text import TextData
from sigattn.models.vision import SIZES
from sigattn.recipes import find_recipe
from sigattn.recipes.recipe import Recipe
from sigattn.train import loop, metrics
from sigattn.validation import check_at_least, check_positive


@dataclass(frozen=True, kw_only=True)
class TrainingBenchmark:
    """Configuration of the training benchmark.

    Attributes:
        kappas: κ of the language models.
        seconds: duration of each run.
        max_steps: updates of each run at most.
        batch_size: sequences in a batch; ten times as many images.
        upscale: factor by which the digits are enlarged.
        num_layers: number of blocks; None for that of the recipes.
        vision: also train a ViT-S.
        resume: continue the results in the folder instead of replacing them.
        results: folder for the results (JSON).
    """

    kappas: tuple[int, ...] = (4, 8)
    seconds: float = 50.0
    max_steps: int = 4000
    batch_size: int = 24
    upscale: int = 8
    num_layers: int | None = None
    vision: bool = True
    resume: bool = False
    results: Path = Path("runs/benchmarks/training")

    def __post_init__(self) -> None:
        check_at_least(1, self, "kappas", "max_steps", "batch_size", "upscale", "num_layers")
        check_positive(self, "seconds")


class _TimeIsUpError(Exception):
    """Raised in the training loop to end a run."""


def benchmark_training(config: TrainingBenchmark) -> None:
    """Train language models and a ViT with sigmoid and softmax on a GPU, or a CPU: tokens per second, memory, loss."""
    jobs = {
        (name, activation): (recipe if activation == "sigmoid" else recipe.softmax(), data)
        for name, recipe, data in _jobs(config)
        for activation in ("sigmoid", "softmax")
    }
    with ResultsFile.of("training", config) as results:
        for name, activation in results.remaining(jobs):
            try:
                row = {"model": name, "activation": activation, **_measure(*jobs[name, activation], config)}
            except loop.Interrupted:
                raise KeyboardInterrupt from None
            results.add((name, activation), [row])
            print(", ".join(f"{k} {v:.5g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)


def _jobs(config: TrainingBenchmark) -> list[tuple[str, Recipe, Data]]:
    library = Path(sysconfig.get_paths()["stdlib"])
    text = TextData.from_bytes(b"\n".join(f.read_bytes() for f in sorted(library.glob("*.py"))), 512)
    layers = {} if config.num_layers is None else {"num_layers": config.num_layers}
    jobs: list[tuple[str, Recipe, Data]] = []
    for kappa in config.kappas:
        recipe = find_recipe(f"lm-kappa-{kappa}").with_transformer(vocab_size=256, **layers)
        jobs.append((f"language, kappa {kappa}, 512 bytes", recipe, text))
    if not config.vision:
        return jobs
    size = {
        **SIZES["S"],
        "image_size": 8 * config.upscale,
        "patch_size": 4,
        "channels": 1,
        "num_classes": 10,
        "drop_path": 0.0,
    }
    vision = find_recipe("vit-supervised").with_transformer(**{**size, **layers}).with_training(learning_rate=1e-3)
    jobs.append((f"ViT-S, digits of {8 * config.upscale} pixels", vision, Digits(upscale=config.upscale)))
    return jobs


def _measure(recipe: Recipe, data: Data, config: TrainingBenchmark) -> dict[str, Any]:
    training = replace(
        recipe.training,
        max_steps=config.max_steps,
        batch_size=config.batch_size * (10 if "vit" in recipe.name else 1),
        warmup_steps=config.max_steps // 20,
        log_attention_every=50,
        validate_every=config.max_steps,
        checkpoint_every=config.max_steps,
        learning_rate=min(recipe.training.learning_rate, 1e-3),
    )
    start = time.perf_counter()

    def stop_in_time(_: loop.Row) -> None:
        if time.perf_counter() - start > config.seconds:
            raise _TimeIsUpError

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*Ramapuram")
        with contextlib.suppress(_TimeIsUpError):
            loop.train(recipe.task, recipe.model, training, data, Path(folder), on_row=stop_in_time)
        rows = metrics.read_metrics(Path(folder) / "metrics.jsonl")
    tokens = getattr(recipe.model, "max_seq_len", 1)
    last = rows[len(rows) // 2 :]
    return {
        "steps": len(rows),
        "tokens_or_images_per_second": tokens * statistics.median(r["samples_per_second"] for r in last),
        "peak_memory_mib": torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else None,
        "loss": statistics.mean(r["loss"] for r in last[-20:]),
        "first_attention_norm": rows[0]["attention_norm"],
        "gradient_spikes": metrics.count_spikes([r["gradient_norm"] for r in rows], 3.0),
    }
