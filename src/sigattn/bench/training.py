"""``sigattn bench training``: κ = 4 and 8 language models and a ViT-S, sigmoid beside softmax, for a time each.

Tokens (images) a second, peak memory, loss and attention norm, by the training loop itself. Made for a GPU, where it
takes about six minutes; on a CPU it needs smaller settings.
"""

from __future__ import annotations

import contextlib
import statistics
import sysconfig
import time
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from sigattn.bench import provenance
from sigattn.bench.results_file import Report
from sigattn.data.dataset import Data
from sigattn.data.images import Digits
from sigattn.data.text import TextData, TokenText
from sigattn.models.vision import SIZES
from sigattn.recipes.recipe import Recipe
from sigattn.recipes.registry import find_recipe
from sigattn.train import loop, metrics
from sigattn.validation import check_at_least, check_positive


@dataclass(frozen=True, kw_only=True)
class TrainingBenchmark:
    """What is trained, and for how long.

    Attributes:
        results: folder that gets training.json.
        kappas: of the language models.
        seconds: of each run.
        steps: at most so many in each run.
        batch: sequences; images are ten times as many.
        upscale: digits are made so many times as large.
        layers: number of blocks; None for the recipes' own.
        vision: also train a ViT-S.
        resume: continue the results in the folder instead of replacing them.
    """

    results: Path = Path("runs/bench/training")
    kappas: tuple[int, ...] = (4, 8)
    seconds: float = 50.0
    steps: int = 4000
    batch: int = 24
    upscale: int = 8
    layers: int | None = None
    vision: bool = True
    resume: bool = False

    def __post_init__(self) -> None:
        check_at_least(1, self, "kappas", "steps", "batch", "upscale", "layers")
        check_positive(self, "seconds")


class _EnoughError(Exception):
    """The time is over."""


def run(options: TrainingBenchmark) -> None:
    """Train each pair; print a line and write the results after each run."""
    described = provenance.describe("training", {**asdict(options), "results": ""})
    if torch.cuda.is_available():
        described["device"] = torch.cuda.get_device_name()
    jobs = {
        (name, mechanism): (recipe if mechanism == "sigmoid" else recipe.softmax(), data)
        for name, recipe, data in _jobs(options)
        for mechanism in ("sigmoid", "softmax")
    }
    with Report(options.results / "training.json", described, resume=options.resume) as report:
        for name, mechanism in report.remaining(jobs):
            try:
                found = {"model": name, "mechanism": mechanism, **_measure(*jobs[name, mechanism], options)}
            except loop.Interrupted:
                raise KeyboardInterrupt from None
            report.add((name, mechanism), [found])
            values = (f"{k} {v:.5g}" if isinstance(v, float) else f"{k} {v}" for k, v in found.items())
            print(", ".join(values), flush=True)


def _jobs(options: TrainingBenchmark) -> list[tuple[str, Recipe, Data]]:
    library = Path(sysconfig.get_paths()["stdlib"])
    text = TokenText.split(b"\n".join(f.read_bytes() for f in sorted(library.glob("*.py"))), 512)
    layers = {} if options.layers is None else {"num_layers": options.layers}
    jobs: list[tuple[str, Recipe, Data]] = []
    for kappa in options.kappas:
        recipe = find_recipe(f"lm-kappa-{kappa}").with_transformer(vocab_size=256, **layers)
        jobs.append((f"language, kappa {kappa}, 512 bytes", recipe, TextData(text, 512)))
    if not options.vision:
        return jobs
    size = {
        **SIZES["S"],
        "image_size": 8 * options.upscale,
        "patch_size": 4,
        "channels": 1,
        "num_classes": 10,
        "drop_path": 0.0,
    }
    vision = find_recipe("vit-supervised").with_transformer(**{**size, **layers})
    vision = replace(vision, training=replace(vision.training, learning_rate=1e-3))
    jobs.append((f"ViT-S, digits of {8 * options.upscale} pixels", vision, Digits(upscale=options.upscale)))
    return jobs


def _measure(recipe: Recipe, data: Data, options: TrainingBenchmark) -> dict[str, Any]:
    batch = options.batch * (10 if "vit" in recipe.name else 1)
    training = replace(
        recipe.training, max_steps=options.steps, batch_size=batch, warmup_steps=options.steps // 20,
        log_attention_every=50, validate_every=options.steps, checkpoint_every=options.steps,
        learning_rate=min(recipe.training.learning_rate, 1e-3),
    )  # fmt: skip
    start = time.perf_counter()

    def enough(_: loop.Row) -> None:
        if time.perf_counter() - start > options.seconds:
            raise _EnoughError

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*Ramapuram")
        with contextlib.suppress(_EnoughError):
            loop.train(recipe.task, recipe.model, training, data, Path(folder), on_row=enough)
        rows = metrics.read(Path(folder) / "metrics.jsonl")
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
