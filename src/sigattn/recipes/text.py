"""Recipe of text classification, which is not in the paper."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sigattn.data.labelled_text import LabelledText, load_labelled_text
from sigattn.models.text_classifier import TextClassifierConfig
from sigattn.recipes.datasets import check_classes
from sigattn.recipes.recipe import DataSource, Recipe
from sigattn.tasks.classification import Classification
from sigattn.train.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class LabelledTextSource(DataSource):
    """Folder with a subfolder of texts for each class, or packages of Python's standard library."""

    def load(self, recipe: Recipe, path: Path | None, tokenizer: Path | None, workers: int) -> LabelledText:
        model: Any = recipe.model
        data = LabelledText(load_labelled_text(path), model.max_seq_len)
        check_classes(str(path or self.name), data.classes, model)
        return data


def text_classifier() -> Recipe:
    """Four layers of width 128 that tell from which package of Python's standard library 256 bytes of source are.

    sigattn train text-classifier                       (--tiny: 128 bytes, minutes on 2 cores)

    ``--data FOLDER --model.num-classes N`` trains on the texts in N subfolders, one for each class.

    Hardware: 2 CPU cores, or a GPU. Time: see ``sigattn recipes text-classifier``, an estimate by FLOPs.
    """
    return Recipe(
        name="text-classifier",
        domain="Text",
        objective="Classification",
        model=TextClassifierConfig(num_classes=8, max_seq_len=256),
        task=Classification(),
        training=TrainConfig(max_steps=1000, batch_size=64, learning_rate=1e-3, validate_every=200),
        tiny_training={"max_steps": 600, "batch_size": 64, "learning_rate": 2e-3},
        data=LabelledTextSource(name="packages of Python's standard library, as bytes"),
    )


RECIPES = (text_classifier,)
