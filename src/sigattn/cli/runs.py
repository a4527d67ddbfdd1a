"""Run folders of ``sigattn train``: training in them and its progress, run.json, the tokenizer, and checksums."""

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column
from torch import Tensor

from sigattn import files
from sigattn.data.dataset import Data, DataError
from sigattn.data.tokens import END, find_packed_tokenizer, load_tokenizer
from sigattn.distributed.process_mesh import init_process_mesh
from sigattn.models import saving
from sigattn.models.language import LanguageModel
from sigattn.recipes import Recipe, find_recipe
from sigattn.train import loop, metrics
from sigattn.train.checkpoint import check_no_checkpoints, list_checkpoints
from sigattn.train.config import TrainConfig
from sigattn.validation import SettingsError, check_output_folder

RUN, TOKENIZER = "run.json", "tokenizer.json"
FORMAT = 2  # of run.json; increased when an older one can no longer be read


class TrainingProgress(Progress):
    """A bar for each model with its latest measurements; if the output is not a terminal, a line every 20 steps."""

    def __init__(self, steps: int, *, quiet: bool = False) -> None:
        console = Console()
        columns = (TextColumn("{task.fields[title]}"), BarColumn(12), MofNCompleteColumn(), TimeRemainingColumn())
        text = TextColumn("{task.description}", table_column=Column())  # wraps in a narrow terminal, unlike the others
        super().__init__(*columns, text, console=console, disable=quiet or not console.is_terminal)
        self.steps = steps
        self.validation: dict[str, str] = {}  # by title

    def show(self, title: str, row: dict[str, Any]) -> None:
        """Show the measurements of a step of the model ``title``."""
        if title not in self.validation:
            self.add_task("", total=self.steps, title=title)
        validation = [f"{k.removeprefix('validation_')} {v:.4g}" for k, v in row.items() if k.startswith("validation_")]
        self.validation[title] = " ".join(validation) or self.validation.get(title, "")
        attention = f" attention {row['attention_norm']:,.1f}" if "attention_norm" in row else ""
        text = f"loss {row['loss']:.4g} gradient {row['gradient_norm']:.3g}{attention}"
        text += f" samples/s {row['samples_per_second']:,.1f} | {self.validation[title]}"
        done = row["step"] + 1
        self.update(self.task_ids[-1], completed=done, description=text)
        if not self.console.is_terminal and (done % 20 == 0 or done in (1, self.steps)):
            self.console.print(f"{title}: step {done} {text}", soft_wrap=True, highlight=False)


def check_run_folder(folder: Path, resume: bool) -> None:
    """Check that a run can start or be resumed in a folder, before its data is read, which can take long."""
    check_output_folder(folder)
    if not resume:
        check_no_checkpoints(folder)
    elif init_process_mesh().is_main_process and not list_checkpoints(folder / "checkpoints"):
        print(f"nothing to resume in {folder}: starting")


def run_training(
    recipe: Recipe, data: Data, folder: Path, *, resume: bool, on_start: Callable[[], None],
    weights: Mapping[str, Tensor] | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Train a recipe in a folder (``train.loop.train``) and show the progress; return the measurements of each step."""
    with TrainingProgress(recipe.training.max_steps, quiet=not init_process_mesh().is_main_process) as progress:
        run = (recipe.task, recipe.model, recipe.training, data, folder)
        on_row = functools.partial(progress.show, recipe.name)
        loop.train(*run, weights=weights, resume=resume, on_row=on_row, on_start=lambda _: on_start())
    return metrics.read_metrics(folder / "metrics.jsonl")


def write_run(folder: Path, recipe: Recipe, name: str, data: Path | None, tokenizer: Path | None) -> None:
    """Write run.json (recipe, settings and path of the data), a copy of the tokenizer, and the checksums of both."""
    folder.mkdir(parents=True, exist_ok=True)
    if data is not None and data.suffix == ".bin":
        tokenizer = find_packed_tokenizer(data, tokenizer)
    settings: dict[str, Any] = {"model": recipe.model, "task": recipe.task, "training": recipe.training}
    about = {
        "format": FORMAT,
        "recipe": name,
        "data": None if data is None else str(data),
        "tokenizer": None if tokenizer is None else TOKENIZER,
        **{part: dataclasses.asdict(config) for part, config in settings.items()},
    }
    files.write_text(folder / RUN, json.dumps(about, indent=2) + "\n")
    if tokenizer is not None:
        with files.add_path_to_errors(folder / TOKENIZER):
            (folder / TOKENIZER).write_bytes(tokenizer.read_bytes())
    written = [RUN] if tokenizer is None else [RUN, TOKENIZER]
    files.write_checksums(folder, {name: files.file_sha256(folder / name) for name in written})


def read_run(folder: Path) -> tuple[Recipe, Path | None, Path | None]:
    """Return the recipe of a run, and the paths of its data and its tokenizer.

    Raises DataError if the folder holds no run or one of another version, or run.json or the tokenizer has changed.
    """
    if not (folder / RUN).exists():
        reason = "it holds no run.json" if folder.exists() else "there is no such folder"
        raise DataError(f"cannot read the run in {folder}: {reason}; name a folder of sigattn train or convert")
    try:
        keys: dict[str, Any] = dict.fromkeys(("data", "tokenizer"), (str, NoneType))
        keys |= dict.fromkeys(("model", "task", "training"), dict)
        about = files.read_json_object(folder / RUN, version=FORMAT, recipe=str, **keys)
        recipe = find_recipe(about["recipe"])
        parts = {"model": type(recipe.model), "task": type(recipe.task), "training": TrainConfig}
        settings: dict[str, Any] = {name: saving.from_dict(kind, about[name]) for name, kind in parts.items()}
        tokenizer = None if about["tokenizer"] is None else folder / TOKENIZER
        files.check_files(folder, [RUN] if tokenizer is None else [RUN, TOKENIZER])
    except (OSError, files.FileFormatError, SettingsError, KeyError, TypeError) as error:
        raise DataError(f"cannot read the run in {folder}: {error}") from error
    data = None if about["data"] is None else Path(about["data"])
    return dataclasses.replace(recipe, **settings), data, tokenizer


def load_language_model(folder: Path) -> tuple[LanguageModel, Any, int | None]:
    """Return the language model of a run, its tokenizer (None for bytes), and the tokenizer's end token or None."""
    recipe, _, tokenizer = read_run(folder)
    model = saving.load(folder / "model")
    if not isinstance(model, LanguageModel):
        raise DataError(f"{folder} holds a {type(model).__name__} ({recipe.name}), no language model")
    if tokenizer is None:
        return model, None, None
    loaded = load_tokenizer(tokenizer)
    return model, loaded, loaded.token_to_id(END)
