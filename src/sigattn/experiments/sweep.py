"""Many small training runs side by side, each in a folder of its own; those that are finished are not done again."""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from collections.abc import Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from sigattn.data.dataset import Data
from sigattn.experiments import tones
from sigattn.experiments.experiment import ExperimentError, Setting
from sigattn.models.language import LanguageModelConfig
from sigattn.models.speech import SpeechModelConfig
from sigattn.recipes import loading, workers
from sigattn.recipes.recipe import Recipe
from sigattn.train import loop, metrics
from sigattn.train.loop import NonFiniteLossError

DONE, BEGUN = "done.json", "settings.txt"


@dataclass(frozen=True)
class Job:
    """A run.

    Attributes:
        name: of its kind, also its folder's. recipe: what is trained. seed: of weights and data.
        data: of a language model, as ``Setting`` has it, or a speech model's recordings. tokenizer: for text.
    """

    name: str
    recipe: Recipe
    seed: int
    data: Path | None = None
    tokenizer: Path | None = None


@dataclass(frozen=True)
class Outcome:
    """What a run gave.

    Attributes:
        rows: a step each. final: metrics at the end, without "validation_". diverged: whether it ended in a loss that
            is not finite.
    """

    rows: list[dict[str, Any]]
    final: dict[str, float]
    diverged: bool

    def mean_of_last(self, key: str = "loss", share: float = 0.1) -> float:
        """Over the last part of the steps."""
        values = [row[key] for row in self.rows if key in row]
        values = values[-max(1, round(share * len(values))) :]
        return float(sum(values) / len(values))


def jobs(recipes: dict[str, Recipe], setting: Setting) -> list[Job]:
    """Each recipe with each seed.

    Raises:
        ExperimentError: at the paper's scale, without data for language models.
    """
    language = any(isinstance(r.model, LanguageModelConfig) for r in recipes.values())
    if setting.scale == "paper" and language and setting.data is None:
        raise ExperimentError(
            "the paper's scale trains language models on C4's realnews: sigattn tokenizer and sigattn pack --data "
            "hf:allenai/c4:realnewslike make a file of tokens; name it with --data"
        )
    speech = any(isinstance(r.model, SpeechModelConfig) for r in recipes.values())
    recordings = speech_of(setting) if speech else None
    return [
        Job(name, recipe, seed, recordings)
        if isinstance(recipe.model, SpeechModelConfig)
        else Job(name, recipe, seed, setting.data, setting.tokenizer)
        for seed in range(setting.seeds)
        for name, recipe in recipes.items()
    ]


def speech_of(setting: Setting) -> Path:
    """The recordings; at the smallest scale, where none are named, tones that stand for digits.

    Raises:
        ExperimentError: if they are needed.
    """
    if setting.speech is not None:
        return setting.speech
    if setting.scale == "smoke":
        return tones.write(setting.folder / "tones")
    raise ExperimentError(
        "this experiment needs recordings: name the Free Spoken Digit Dataset (a folder, or its .tar.gz) with --speech"
    )


def train_all(setting: Setting, wanted: Sequence[Job]) -> dict[str, list[Outcome]]:
    """The outcomes of each kind, by seed. What was done with other settings is done again."""
    todo = [job for job in wanted if not is_done(_folder(setting, job), job)]
    if todo:
        with workers.pool(min(setting.workers, len(todo))) as processes:
            futures = {processes.submit(train_one, _folder(setting, job), job): job for job in todo}
            for i, future in enumerate(as_completed(futures), 1):
                future.result()
                setting.show(f"{i} of {len(todo)} runs: {futures[future].name}, seed {futures[future].seed}")
    found: dict[str, list[Outcome]] = {}
    for job in wanted:
        about = json.loads((_folder(setting, job) / DONE).read_text())
        rows = metrics.read(_folder(setting, job) / "metrics.jsonl")
        found.setdefault(job.name, []).append(Outcome(rows, about["final"], about["diverged"]))
    return found


def is_done(folder: Path, job: Job) -> bool:
    """Whether a folder holds this run, finished."""
    try:
        found: str = json.loads((folder / DONE).read_text())["settings"]
    except (OSError, json.JSONDecodeError, KeyError):
        return False
    return found == settings_of(job)


def settings_of(job: Job) -> str:
    """Tells a run from one with other settings."""
    return hashlib.sha256(repr((job.recipe.model, job.recipe.task, job.recipe.training, job.seed)).encode()).hexdigest()


def train_one(folder: Path, job: Job) -> None:
    """A run, and a file that says it is done. What is left of a run with other settings makes way."""
    torch.set_num_threads(1)
    begun = folder / BEGUN
    if folder.exists() and (not begun.exists() or begun.read_text() != settings_of(job)):
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    begun.write_text(settings_of(job))
    warnings.filterwarnings("ignore", ".*Ramapuram")
    training = replace(job.recipe.training, seed=job.seed)
    diverged = False
    try:
        loop.train(job.recipe.task, job.recipe.model, training, data_of(job), folder, resume=True)
    except NonFiniteLossError:
        diverged = True
    rows = metrics.read(folder / "metrics.jsonl")
    last = rows[-1] if rows else {}
    final = {k.removeprefix("validation_"): v for k, v in last.items() if k.startswith("validation_")}
    about = {"final": final, "diverged": diverged, "settings": settings_of(job)}
    (folder / DONE).write_text(json.dumps(about) + "\n")


def data_of(job: Job) -> Data:
    """What a run trains on: what was named, CPython's documentation, or what is drawn for the synthetic problems."""
    if isinstance(job.recipe.model, SpeechModelConfig):
        return loading.load(job.recipe, job.data)
    if not isinstance(job.recipe.model, LanguageModelConfig):
        return loading.load(job.recipe, None)
    return loading.load(job.recipe, job.data, tokenizer=job.tokenizer)


def _folder(setting: Setting, job: Job) -> Path:
    name = "".join(c if c.isalnum() or c in ".-" else "-" for c in job.name)
    return setting.folder / "runs" / name / str(job.seed)


def model_of(setting: Setting, job: Job) -> Path:
    """Where the trained model is."""
    return _folder(setting, job) / "model"
