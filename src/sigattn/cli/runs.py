"""What a run folder of ``sigattn train`` says of itself."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from sigattn.data.dataset import DataError
from sigattn.files import TEXT_OR_NONE, FileFormatError, naming, read_object
from sigattn.models import saving
from sigattn.models.language import LanguageModel
from sigattn.recipes.recipe import Recipe
from sigattn.recipes.registry import RecipeError, find
from sigattn.train.config import TrainConfig
from sigattn.validation import SettingsError


def remember(folder: Path, recipe: Recipe, name: str, options: Any) -> None:
    """What was trained on what, for the commands below."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {n: None if getattr(options, n) is None else str(getattr(options, n)) for n in ("data", "tokenizer")}
    settings: Any = (recipe.model, recipe.task, recipe.training)
    model, task, training = (dataclasses.asdict(s) for s in settings)
    about = {"recipe": name, **paths, "model": model, "task": task, "training": training}
    with naming(folder / "run.json"):
        (folder / "run.json").write_text(json.dumps(about, indent=2) + "\n")


def recall(folder: Path) -> tuple[Recipe, Path | None, Path | None]:
    """The recipe, the data's and the tokenizer's place of a run.

    Raises:
        DataError: if the folder holds no run.
    """
    try:
        about = read_object(
            folder / "run.json",
            recipe=str,
            data=TEXT_OR_NONE,
            tokenizer=TEXT_OR_NONE,
            model=dict,
            task=dict,
            training=dict,
        )
        recipe = find(about["recipe"])
        training = TrainConfig(**{**about["training"], "betas": tuple(about["training"]["betas"])})
        model, task = saving.from_dict(type(recipe.model), about["model"]), type(recipe.task)(**about["task"])
    except (OSError, FileFormatError, RecipeError, SettingsError, KeyError, TypeError) as error:
        raise DataError(f"{folder} holds no run of sigattn train: {error}") from error
    paths = [None if about[n] is None else Path(about[n]) for n in ("data", "tokenizer")]
    return dataclasses.replace(recipe, model=model, task=task, training=training), paths[0], paths[1]


def language_model(folder: Path) -> tuple[LanguageModel, Path | None]:
    """The language model of a run, and the place of its tokenizer (None for bytes).

    Raises:
        DataError: if the folder holds none.
    """
    recipe, _, tokenizer = recall(folder)
    model = saving.load(folder / "model")
    if not isinstance(model, LanguageModel):
        raise DataError(f"{folder} holds a {type(model).__name__} ({recipe.name}), no language model")
    return model, tokenizer
