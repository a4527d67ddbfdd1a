"""Sweep of small training runs in parallel, each in its own folder; finished runs are not repeated."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sigattn.data.dataset import Data
from sigattn.experiments import datasets, tones
from sigattn.experiments.experiment import ExperimentError, Setting
from sigattn.models.language import LanguageModelConfig
from sigattn.models.speech import SpeechModelConfig
from sigattn.recipes.recipe import Recipe
from sigattn.train import loop, metrics, workers
from sigattn.train.identity import identity
from sigattn.train.loop import NonFiniteLossError
from sigattn.train.run_cache import load_result, prepared_folder, store_result

DONE = "done.json"


@dataclass(frozen=True)
class Job:
    """Training run of a sweep.

    Attributes:
        name: name of the variant, and of its folder. recipe: the recipe. seed: seed of weights and data.
        data: data of a language model (``Setting.data``), or recordings of a speech model. tokenizer: for text.
    """

    name: str
    recipe: Recipe
    seed: int
    data: Path | None = None
    tokenizer: Path | None = None


@dataclass(frozen=True)
class Outcome:
    """Result of a run.

    Attributes:
        rows: measurements of each step. final: metrics at the end, without the prefix "validation_".
        diverged: True if training stopped at a loss that is not finite.
    """

    rows: list[dict[str, Any]]
    final: dict[str, float]
    diverged: bool

    def mean_of_last(self, key: str = "loss", share: float = 0.1) -> float:
        """Return the mean of a measurement over the last ``share`` of the steps."""
        values = [row[key] for row in self.rows if key in row]
        values = values[-max(1, round(share * len(values))) :]
        return float(sum(values) / len(values))


def make_jobs(recipes: dict[str, Recipe], setting: Setting) -> list[Job]:
    """Return a job for each recipe and seed.

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
    recordings = recordings_path(setting) if speech else None
    return [
        Job(name, recipe, seed, recordings)
        if isinstance(recipe.model, SpeechModelConfig)
        else Job(name, recipe, seed, setting.data, setting.tokenizer)
        for seed in range(setting.seeds)
        for name, recipe in recipes.items()
    ]


def recordings_path(setting: Setting) -> Path:
    """Return the path of the recordings; at scale "smoke" without ``setting.speech``, generated tones.

    Raises:
        ExperimentError: at other scales without ``setting.speech``.
    """
    if setting.speech is not None:
        return setting.speech
    if setting.scale == "smoke":
        return tones.write_tones(setting.folder / "tones")
    raise ExperimentError(
        "this experiment needs recordings: name the Free Spoken Digit Dataset (a folder, or its .tar.gz) with --speech"
    )


def train_all(setting: Setting, wanted: Sequence[Job]) -> dict[str, list[Outcome]]:
    """Run all jobs, and return the outcomes by name and seed. Runs with other settings or data are repeated."""
    prints: dict[str, str] = {}
    runs = [(job, run_folder(setting, job), run_identity(setting, job, prints)) for job in wanted]
    todo = [run for run in runs if load_result(run[1] / DONE, run[2]) is None]
    if todo:
        with workers.pool(min(setting.workers, len(todo))) as processes:
            start = partial(workers.train_in_worker, train_one)
            futures = {processes.submit(start, folder, job, own): job for job, folder, own in todo}
            for i, future in enumerate(as_completed(futures), 1):
                future.result()
                setting.log(f"{i} of {len(todo)} runs: {futures[future].name}, seed {futures[future].seed}")
    found: dict[str, list[Outcome]] = {}
    for job, folder, own in runs:
        about = load_result(folder / DONE, own)
        assert about is not None
        rows = metrics.read(folder / "metrics.jsonl")
        found.setdefault(job.name, []).append(Outcome(rows, about["final"], about["diverged"]))
    return found


def run_identity(setting: Setting, job: Job, prints: dict[str, str]) -> str:
    """Return the identity of a run, and record its data in ``setting.fingerprints``.

    Args:
        setting: setting of the experiment. job: the run.
        prints: fingerprints of data computed so far, to which new ones are added.
    """
    model, recipe = job.recipe.model, job.recipe
    # the data of a language model depends on these two settings only; that of other recipes on any
    own = (model.vocab_size, model.max_seq_len) if isinstance(model, LanguageModelConfig) else (model, recipe.task)
    key = repr((type(model), own, recipe.data, recipe.augmentation, job.data, job.tokenizer))
    if key not in prints:
        prints[key] = load_job_data(job).fingerprint
    used = recipe.data if job.data is None else str(job.data)
    setting.fingerprints[used if job.tokenizer is None else f"{used}, {job.tokenizer}"] = prints[key]
    return identity(recipe.task, model, replace(recipe.training, seed=job.seed), prints[key])


def train_one(folder: Path, job: Job, identity: str) -> None:
    """Train a job and record that it is finished. Files of a run of another identity are deleted first."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", ".*Ramapuram")
    training = replace(job.recipe.training, seed=job.seed)
    diverged = False
    with prepared_folder(folder, identity):
        try:
            loop.train(job.recipe.task, job.recipe.model, training, load_job_data(job), folder, resume=True)
        except NonFiniteLossError:
            diverged = True
        rows = metrics.read(folder / "metrics.jsonl")
        last = rows[-1] if rows else {}
        final = {k.removeprefix("validation_"): v for k, v in last.items() if k.startswith("validation_")}
        store_result(folder / DONE, identity, {"final": final, "diverged": diverged})


def load_job_data(job: Job) -> Data:
    """Return the data of a run: the named data, CPython's documentation, or generated data of synthetic problems."""
    if isinstance(job.recipe.model, SpeechModelConfig):
        return datasets.load_dataset(job.recipe, job.data)
    if not isinstance(job.recipe.model, LanguageModelConfig):
        return datasets.load_dataset(job.recipe, None)
    return datasets.load_dataset(job.recipe, job.data, tokenizer=job.tokenizer)


def run_folder(setting: Setting, job: Job) -> Path:
    """Return the folder of a run."""
    name = "".join(c if c.isalnum() or c in ".-" else "-" for c in job.name)
    return setting.folder / "runs" / name / str(job.seed)


def model_folder(setting: Setting, job: Job) -> Path:
    """Return the folder of the trained model."""
    return run_folder(setting, job) / "model"
