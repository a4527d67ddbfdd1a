"""Recipes of the paper's two synthetic problems (App. "Simple Experiments")."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sigattn.data.synthetic import KSummationData, PairRepeatData
from sigattn.models.sequence import SequenceModelConfig
from sigattn.recipes.recipe import DataSource, Recipe
from sigattn.tasks.synthetic import KSummation, PairRepeat
from sigattn.train.config import TrainConfig
from sigattn.validation import SettingsError

TINY = {"max_steps": 500, "batch_size": 128, "learning_rate": 2e-3, "optimizer": "adam"}


@dataclass(frozen=True, kw_only=True)
class KSummationSource(DataSource):
    """Sequences of numbers, generated."""

    name: str = "generated"

    def load(self, recipe: Recipe, path: Path | None, tokenizer: Path | None, workers: int) -> KSummationData:
        model, task = _generated(recipe, path)
        return KSummationData(model.seq_len, task.k)


@dataclass(frozen=True, kw_only=True)
class PairRepeatSource(DataSource):
    """Sequences of symbols, generated."""

    name: str = "generated"

    def load(self, recipe: Recipe, path: Path | None, tokenizer: Path | None, workers: int) -> PairRepeatData:
        model, task = _generated(recipe, path)
        return PairRepeatData(model.num_symbols, model.seq_len, task.lengths)


def _generated(recipe: Recipe, path: Path | None) -> tuple[Any, Any]:
    """Return model and task of a recipe that generates its data.

    Raises:
        SettingsError: for a path.
    """
    if path is not None:
        raise SettingsError(f"{recipe.name} generates its data: name none", "data")
    return recipe.model, recipe.task


def k_summation() -> Recipe:
    """One layer of width 120 that adds the k marked ones of 20 numbers.

    sigattn train k-summation                           (generates its data: no --data)

    Hardware: 2 CPU cores. Time: minutes. Paper: loss grows with k as softmax's
    does (Fig. "final_loss_k_summation"); ``--task.k`` sets k, ``--model.kind mlp`` trains the MLP of 307k parameters.
    """
    return Recipe(
        name="k-summation",
        domain="Synthetic",
        objective="k-summation",
        model=SequenceModelConfig(),
        task=KSummation(),
        training=_training(max_steps=20_000, batch_size=256, schedule="constant"),
        tiny_training=TINY,
        data=KSummationSource(),
    )


def pair_repeat() -> Recipe:
    """Two layers of width 160 that decide if the first pair of a sequence of 14 or 15 symbols occurs again.

    sigattn train pair-repeat                           (generates its data: no --data)

    Hardware: 2 CPU cores. Time: an hour. Paper: sigmoid learns it from fewer
    samples than softmax, and both lose accuracy alike at other lengths (Fig. "repeat_seq_results").
    ``--model.kind mlp`` trains an MLP with as many parameters, 638k.
    """
    model = SequenceModelConfig(num_layers=2, embed_dim=160, seq_len=22, num_symbols=9, mlp_dims=(695, 695))
    return Recipe(
        name="pair-repeat",
        domain="Synthetic",
        objective="pair repeat",
        model=model,
        task=PairRepeat(),
        training=_training(max_steps=19_531, batch_size=256, schedule="cosine"),
        tiny_training=TINY,
        data=PairRepeatSource(),
    )


def _training(*, max_steps: int, batch_size: int, schedule: str) -> TrainConfig:
    return TrainConfig(
        max_steps=max_steps,
        batch_size=batch_size,
        optimizer="adam",
        learning_rate=1e-3,
        betas=(0.9, 0.999),
        weight_decay=0.0,
        max_grad_norm=None,
        schedule="cosine" if schedule == "cosine" else "constant",
        warmup_steps=max_steps // 20 if schedule == "cosine" else 0,
        final_learning_rate=0.0,
        validate_every=1000,
        checkpoint_every=1000,
        log_attention_every=10,
    )


RECIPES = (k_summation, pair_repeat)
