"""Sweep of small training runs in parallel, each in its own folder; finished runs are not repeated."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from experiments import cache, tones
from experiments.experiment import ExperimentError, Setting
from sigattn.data.dataset import Data
from sigattn.files import check_files, write_text
from sigattn.models import saving
from sigattn.models.language import LanguageModelConfig
from sigattn.models.speech import SpeechModelConfig
from sigattn.recipes import datasets
from sigattn.recipes.recipe import Recipe
from sigattn.train import loop, metrics
from sigattn.train.checkpoint import CheckpointError
from sigattn.train.folder_lock import LOCK_FILE, lock_folder
from sigattn.train.loop import NonFiniteLossError

RESULT_FILE, IDENTITY_FILE = "done.json", "settings.txt"
DEFAULT_TEXT = "CPython's documentation, as bytes"  # what load_dataset gives a language model without a path


@dataclass(frozen=True)
class TrainingRun:
    """Training run of a sweep.

    Attributes:
        name: name of the variant. recipe: its recipe, with the seed of this run. folder: folder of the run.
        data: data of a language model (``Setting.data``), or recordings of a speech model. tokenizer: for text.
    """

    name: str
    recipe: Recipe
    folder: Path
    data: Path | None
    tokenizer: Path | None

    @property
    def label(self) -> str:
        """Name and seed."""
        return f"{self.name}, seed {self.recipe.training.seed}"

    def load_data(self) -> Data:
        """Load the named data, CPython's documentation, or the generated data of a synthetic problem."""
        return datasets.load_dataset(self.recipe, self.data, tokenizer=self.tokenizer)


@dataclass(frozen=True)
class Outcome:
    """Result of a run.

    Attributes:
        seed: seed of the run. rows: measurements of each step. final: metrics at the end, without "validation_".
        diverged: True if training stopped at a loss that is not finite. folder: folder of the run.
    """

    seed: int
    rows: list[dict[str, Any]]
    final: dict[str, float]
    diverged: bool
    folder: Path

    def mean_of_last(self, key: str = "loss", fraction: float = 0.1) -> float:
        """Return the mean of a measurement over the last ``fraction`` of the steps."""
        values = [row[key] for row in self.rows if key in row]
        values = values[-max(1, round(fraction * len(values))) :]
        return float(sum(values) / len(values))

    def load_model(self, step: int | None = None) -> Any:
        """Return the trained model, or that of the checkpoint after ``step`` steps, in evaluation mode."""
        model = saving.load(self.folder / "model").eval()
        if step is not None:
            path = self.folder / "checkpoints" / f"step-{step:08d}"
            names = [file.name for file in path.glob("*.safetensors")]
            if len(names) != 1:
                raise CheckpointError(f"cannot read the checkpoint {path}: it has {len(names)} files of weights, not 1")
            check_files(path, names)
            tensors = load_file(path / names[0])
            weights = {n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")}
            model.load_state_dict(weights)
        return model


def shortened(recipe: Recipe, steps: int, batch_size: int, **training: Any) -> Recipe:
    """Return the recipe with ``steps`` steps, a warm-up over a tenth of them, and one evaluation, at the last.

    Args:
        training: further changed settings of training.
    """
    usual = {"warmup_steps": steps // 10, "validate_every": steps, "checkpoint_every": steps}
    return recipe.with_training(**{"max_steps": steps, "batch_size": batch_size, **usual, **training})


def train_variants(
    setting: Setting, recipes: dict[str, Recipe], *, may_diverge: bool = False
) -> dict[str, list[Outcome]]:
    """Train every recipe with each of its seeds, and return the outcomes by name and seed, without stored seeds.

    A run is repeated only if its settings or its data have changed.

    Args:
        setting: arguments of the experiment. recipes: the recipes, by name.
        may_diverge: True if the caller reads ``Outcome.diverged``. A run that diverged has no final metrics, no model
            and no losses of the end of training.

    Raises:
        ExperimentError: for a run that diverged, unless ``may_diverge``; at the paper's scale, without data for
            language models; without recordings for speech; for seeds of a variant that is not in ``recipes``; or if
            the stored results are of other settings or data, or of more seeds.
    """
    setting.check_variants(recipes)
    fingerprints: dict[str, str] = {}
    runs = [
        _run(setting, name, recipe, seed)
        for seed in range(max(map(setting.num_seeds, recipes)))  # outermost: an interrupted sweep has complete seeds
        for name, recipe in recipes.items()
        if setting.stored.seeds.get(name, 0) <= seed < setting.num_seeds(name)
    ]
    for name, recipe in recipes.items():
        setting.identities[name] = _identity(setting, _run(setting, name, recipe, 0), fingerprints)
    check_stored(setting, recipes)
    jobs = {}
    for run in runs:
        identity = _identity(setting, run, fingerprints)
        jobs[run.label] = cache.Job(run.folder / RESULT_FILE, {"identity": identity}, partial(_train, run, identity))
    results = cache.run_jobs(jobs, setting.workers, setting.log)
    outcomes: dict[str, list[Outcome]] = {name: [] for name in recipes}
    for run in runs:
        result = results[run.label]
        rows = metrics.read_metrics(run.folder / "metrics.jsonl")
        outcome = Outcome(run.recipe.training.seed, rows, result["final"], result["diverged"], run.folder)
        if outcome.diverged and not may_diverge:
            raise ExperimentError(
                f"{run.label}: the loss was not finite after {len(rows)} steps, so that there is "
                f"nothing to compare; the measurements of the other steps are in {run.folder}"
            )
        outcomes[run.name].append(outcome)
    return outcomes


def check_stored(setting: Setting, names: Iterable[str]) -> None:
    """Raise ``ExperimentError`` if runs of these names cannot be added to the stored results."""
    stored = setting.stored
    if not stored.seeds:
        return
    known = [name for name in names if name in stored.seeds]  # others are new: all their seeds are trained
    if changed := [name for name in known if stored.identities.get(name) != setting.identities[name]]:
        raise ExperimentError(
            f"the stored results are of other settings or data than those of {', '.join(map(repr, changed))} here: "
            "leave out --extend, which trains all runs"
        )
    if more := [name for name in known if stored.seeds[name] > setting.num_seeds(name)]:
        listed = ", ".join(f"{name!r} {stored.seeds[name]}" for name in more)
        raise ExperimentError(f"the stored results have more seeds: name at least {listed} with --more-seeds")


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


def _run(setting: Setting, name: str, recipe: Recipe, seed: int) -> TrainingRun:
    recipe = recipe.with_training(seed=seed)
    folder_name = "".join(c if c.isalnum() or c in ".-" else "-" for c in name)
    folder = setting.folder / "runs" / folder_name / str(seed)
    if isinstance(recipe.model, SpeechModelConfig):
        return TrainingRun(name, recipe, folder, recordings_path(setting), None)
    if not isinstance(recipe.model, LanguageModelConfig):
        return TrainingRun(name, recipe, folder, None, None)
    if setting.scale == "paper" and setting.data is None:
        raise ExperimentError(
            "the paper's scale trains language models on C4's realnews: sigattn tokenizer and sigattn pack --data "
            "hf:allenai/c4:realnewslike make a file of tokens; name it with --data"
        )
    return TrainingRun(name, recipe, folder, setting.data, setting.tokenizer)


def _identity(setting: Setting, run: TrainingRun, fingerprints: dict[str, str]) -> str:
    """Return the identity of a run, and record its data in ``setting.fingerprints``.

    Args:
        fingerprints: fingerprints of data computed so far, to which new ones are added.
    """
    model, recipe = run.recipe.model, run.recipe
    # the data of a language model depends on these two settings only; that of other recipes on any
    own = (model.vocab_size, model.max_seq_len) if isinstance(model, LanguageModelConfig) else (model, recipe.task)
    key = repr((type(model), own, recipe.data, run.data, run.tokenizer))
    if key not in fingerprints:
        fingerprints[key] = run.load_data().fingerprint
    if run.data is not None:
        name = str(run.data)
    else:  # a recipe of the paper's size names its own text
        name = DEFAULT_TEXT if isinstance(model, LanguageModelConfig) else recipe.data.name
    setting.fingerprints[name if run.tokenizer is None else f"{name}, {run.tokenizer}"] = fingerprints[key]
    return cache.identity_hash(recipe.task, model, recipe.training, fingerprints[key])


def _train(run: TrainingRun, identity: str) -> dict[str, Any]:
    """Train, and return the metrics at the end and whether training diverged."""
    diverged = False
    with _prepared_folder(run.folder, identity):
        try:
            recipe = run.recipe
            loop.train(recipe.task, recipe.model, recipe.training, run.load_data(), run.folder, resume=True)
        except NonFiniteLossError:
            diverged = True
        rows = metrics.read_metrics(run.folder / "metrics.jsonl")
    last = rows[-1] if rows else {}
    final = {k.removeprefix("validation_"): v for k, v in last.items() if k.startswith("validation_")}
    return {"final": final, "diverged": diverged}


@contextmanager
def _prepared_folder(folder: Path, identity: str) -> Iterator[None]:
    """Lock a run's folder; if it contains a run of another identity, empty it first.

    Raises:
        FolderInUseError: if another process is training in it.
    """
    with lock_folder(folder):
        mark = folder / IDENTITY_FILE
        if not mark.exists() or mark.read_text() != identity:
            for path in folder.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                elif path.name != LOCK_FILE:
                    path.unlink()
        write_text(mark, identity)
        yield
