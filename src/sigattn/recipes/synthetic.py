"""Recipes of the paper's two synthetic problems (App. "Simple Experiments")."""

from __future__ import annotations

from sigattn.models.sequence import SequenceModelConfig
from sigattn.recipes.recipe import DataConfig, Recipe
from sigattn.tasks.synthetic import KSummation, PairRepeat
from sigattn.train.config import TrainConfig


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
        data=DataConfig(name="generated"),
        paper="final loss grows with k as softmax's does",
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
        data=DataConfig(name="generated"),
        paper="sigmoid learns from fewer samples than softmax",
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
