"""Description of a run (run.json) and its tokenizer, stored in a run folder of ``sigattn train``."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from sigattn.data.dataset import DataError
from sigattn.data.hashing import file_sha256
from sigattn.data.tokens import load_tokenizer, packed_tokenizer
from sigattn.files import TEXT_OR_NONE, FileFormatError, add_path_to_errors, read_object
from sigattn.models import saving
from sigattn.models.language import LanguageModel
from sigattn.recipes.recipe import Recipe
from sigattn.recipes.registry import RecipeError, find_recipe
from sigattn.train.config import TrainConfig
from sigattn.validation import SettingsError

TOKENIZER = "tokenizer.json"


def write_run(folder: Path, recipe: Recipe, name: str, options: Any) -> None:
    """Write run.json (recipe, settings and path of the data) and a copy of the tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    data, tokenizer = options.data, options.tokenizer
    if data is not None and data.suffix == ".bin":
        tokenizer = packed_tokenizer(data, tokenizer)
    settings: Any = (recipe.model, recipe.task, recipe.training)
    model, task, training = (dataclasses.asdict(s) for s in settings)
    about: dict[str, Any] = {"recipe": name, "data": None if data is None else str(data), "tokenizer": None}
    if tokenizer is not None:
        kept = folder / TOKENIZER
        kept.write_bytes(tokenizer.read_bytes())
        about |= {"tokenizer": TOKENIZER, "tokenizer_sha256": file_sha256(kept)}
    about |= {"model": model, "task": task, "training": training}
    with add_path_to_errors(folder / "run.json"):
        (folder / "run.json").write_text(json.dumps(about, indent=2) + "\n")


def read_run(folder: Path) -> tuple[Recipe, Path | None, Path | None]:
    """Return the recipe of a run, and the paths of its data and its tokenizer.

    Raises:
        DataError: if the folder holds no run, or its tokenizer is missing or has changed.
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
        recipe = find_recipe(about["recipe"])
        training = TrainConfig(**{**about["training"], "betas": tuple(about["training"]["betas"])})
        model, task = saving.from_dict(type(recipe.model), about["model"]), type(recipe.task)(**about["task"])
    except (OSError, FileFormatError, RecipeError, SettingsError, KeyError, TypeError) as error:
        raise DataError(f"{folder} holds no run of sigattn train: {error}") from error
    data = None if about["data"] is None else Path(about["data"])
    return dataclasses.replace(recipe, model=model, task=task, training=training), data, _tokenizer(folder, about)


def _tokenizer(folder: Path, about: dict[str, Any]) -> Path | None:
    if about["tokenizer"] is None:
        return None
    if "tokenizer_sha256" not in about:  # a run of an earlier version, which stored no copy
        return Path(about["tokenizer"])
    kept = folder / TOKENIZER
    if not kept.exists() or file_sha256(kept) != about["tokenizer_sha256"]:
        raise DataError(f"the tokenizer of the run, {kept}, is missing or has changed")
    return kept


def language_model(folder: Path, named: Path | None = None) -> tuple[LanguageModel, Any]:
    """Return the language model of a run and its tokenizer, of Hugging Face's ``tokenizers`` (None for bytes).

    Args:
        folder: folder of the run. named: tokenizer of a run that has stored none.

    Raises:
        DataError: if the folder holds no language model, or the tokenizer is unknown or does not fit.
    """
    model, path = language_model_files(folder, named)
    return model, None if path is None else load_tokenizer(path)


def language_model_files(folder: Path, named: Path | None = None) -> tuple[LanguageModel, Path | None]:
    """Return the language model of a run and the path of its tokenizer; see ``language_model``."""
    recipe, data, path = read_run(folder)
    model = saving.load(folder / "model")
    if not isinstance(model, LanguageModel):
        raise DataError(f"{folder} holds a {type(model).__name__} ({recipe.name}), no language model")
    if path is not None and named is not None:
        raise DataError(f"the run has a tokenizer of its own, {path}: leave out --tokenizer")
    path = path or named
    vocabulary = model.config.vocab_size
    if path is None:
        if vocabulary != 256 or (data is not None and data.suffix == ".bin"):
            raise DataError(
                f"{folder} was trained on the tokens of {data}, and has stored no tokenizer: name it with --tokenizer"
            )
    elif (size := load_tokenizer(path).get_vocab_size()) > vocabulary:
        raise DataError(f"the tokenizer {path} has {size} tokens, and the model {vocabulary}")
    return model, path
