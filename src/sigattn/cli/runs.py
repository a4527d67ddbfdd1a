"""Description of a run (run.json), its tokenizer and the checksums of both, in a run folder of ``sigattn train``."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from sigattn.data.dataset import DataError
from sigattn.data.tokens import END, find_packed_tokenizer, load_tokenizer
from sigattn.files import (
    TEXT_OR_NONE,
    FileFormatError,
    add_path_to_errors,
    check_files,
    file_sha256,
    read_json_object,
    write_checksums,
    write_text,
)
from sigattn.models import saving
from sigattn.models.language import LanguageModel
from sigattn.recipes.recipe import Recipe
from sigattn.recipes.registry import RecipeError, find_recipe
from sigattn.train.config import TrainConfig
from sigattn.validation import SettingsError

RUN, TOKENIZER = "run.json", "tokenizer.json"
FORMAT = 2  # of run.json; increased when an older one can no longer be read


def write_run(folder: Path, recipe: Recipe, name: str, options: Any) -> None:
    """Write run.json (recipe, settings and path of the data), a copy of the tokenizer, and the checksums of both."""
    folder.mkdir(parents=True, exist_ok=True)
    data, tokenizer = options.data, options.tokenizer
    if data is not None and data.suffix == ".bin":
        tokenizer = find_packed_tokenizer(data, tokenizer)
    settings: Any = (recipe.model, recipe.task, recipe.training)
    model, task, training = (dataclasses.asdict(s) for s in settings)
    about = {
        "format": FORMAT,
        "recipe": name,
        "data": None if data is None else str(data),
        "tokenizer": None if tokenizer is None else TOKENIZER,
        "model": model,
        "task": task,
        "training": training,
    }
    written = [RUN]
    write_text(folder / RUN, json.dumps(about, indent=2) + "\n")
    if tokenizer is not None:
        with add_path_to_errors(folder / TOKENIZER):
            (folder / TOKENIZER).write_bytes(tokenizer.read_bytes())
        written.append(TOKENIZER)
    write_checksums(folder, {name: file_sha256(folder / name) for name in written})


def read_run(folder: Path) -> tuple[Recipe, Path | None, Path | None]:
    """Return the recipe of a run, and the paths of its data and its tokenizer.

    Raises:
        DataError: if the folder holds no run or one of another version, or run.json or the tokenizer has changed.
    """
    if not (folder / RUN).exists():
        raise DataError(
            f"cannot read the run in {folder}: it holds no run.json; name a folder of sigattn train or convert"
        )
    try:
        version = read_json_object(folder / RUN).get("format")
        if version != FORMAT:
            raise FileFormatError(
                f"run.json was written by another version of sigattn (format {version}; this version reads {FORMAT})"
            )
        about = read_json_object(
            folder / RUN,
            recipe=str,
            data=TEXT_OR_NONE,
            tokenizer=TEXT_OR_NONE,
            model=dict,
            task=dict,
            training=dict,
        )
        recipe = find_recipe(about["recipe"])
        parts = {"model": type(recipe.model), "task": type(recipe.task), "training": TrainConfig}
        settings: dict[str, Any] = {name: saving.from_dict(kind, about[name]) for name, kind in parts.items()}
        tokenizer = None if about["tokenizer"] is None else folder / TOKENIZER
        check_files(folder, [RUN] if tokenizer is None else [RUN, TOKENIZER])
    except (OSError, FileFormatError, RecipeError, SettingsError, KeyError, TypeError) as error:
        raise DataError(f"cannot read the run in {folder}: {error}") from error
    data = None if about["data"] is None else Path(about["data"])
    return dataclasses.replace(recipe, **settings), data, tokenizer


def load_language_model(folder: Path) -> tuple[LanguageModel, Any, int | None]:
    """Return the language model of a run, its tokenizer (None for bytes), and the tokenizer's end token or None.

    Raises:
        DataError: if the folder holds no language model, or its tokenizer is missing or has changed.
    """
    recipe, _, tokenizer = read_run(folder)
    model = saving.load(folder / "model")
    if not isinstance(model, LanguageModel):
        raise DataError(f"{folder} holds a {type(model).__name__} ({recipe.name}), no language model")
    if tokenizer is None:
        return model, None, None
    loaded = load_tokenizer(tokenizer)
    return model, loaded, loaded.token_to_id(END)
