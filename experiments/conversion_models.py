"""Softmax models that the conversion experiment trains and converts, and the training of the Llama by Trainer."""

from __future__ import annotations

import copy
import operator
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from experiments import sweep
from experiments.experiment import Setting
from sigattn.models.language import LanguageModelConfig
from sigattn.nn.attention import Attention
from sigattn.nn.bias import BatchLengthBias
from sigattn.optional import explain_import_errors
from sigattn.recipes import find_recipe
from sigattn.recipes.recipe import Recipe
from sigattn.tasks.language import LanguageModelling

LLAMA = "Llama"
LANGUAGE = ("RoPE", LLAMA)  # models of bytes
FAMILIES = (*LANGUAGE, "ViT", "speech")


class TransformersModel(nn.Module):
    """Language model of transformers that returns logits, as those of this library do."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next bytes, (B, N) → (B, N, 256)."""
        logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits


def llama(sizes: LanguageModelConfig, **changes: Any) -> TransformersModel:
    """Return a Llama of bytes with the sizes of a configuration; ``changes`` are of transformers' configuration."""
    with explain_import_errors("transformers"):
        from transformers import LlamaConfig, LlamaForCausalLM
    config = {
        "vocab_size": 256,
        "hidden_size": sizes.embed_dim,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "max_position_embeddings": sizes.max_seq_len,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return TransformersModel(LlamaForCausalLM(LlamaConfig(**{**config, **changes})))


class _Batches(IterableDataset[dict[str, Any]]):
    """Batches in a given order."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return ({"batch": batch} for batch in self.batches)


def train_by_trainer(
    model: nn.Module,
    loss: Callable[[Any], Tensor],
    batches: Iterable[Any],
    optimizer: torch.optim.Optimizer,
    rates: list[float],
) -> None:
    """Train a model by the Trainer of transformers, with clipped gradients.

    Args:
        loss: returns the loss of a batch. batches: one for each step. rates: learning rates of the steps.
    """
    from transformers import PrinterCallback, Trainer, TrainingArguments

    class OfLoss(Trainer):
        """Trainer whose loss is given."""

        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Tensor:
            return loss(inputs["batch"])

    first = optimizer.param_groups[0]["lr"]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rates[min(step, len(rates) - 1)] / first)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=len(rates),
            per_device_train_batch_size=1,  # an item is a batch
            max_grad_norm=1.0,
            use_cpu=True,
            remove_unused_columns=False,
            logging_strategy="no",
            save_strategy="no",
            disable_tqdm=True,
            report_to=[],
        )
        trainer = OfLoss(
            model,
            arguments,
            data_collator=operator.itemgetter(0),
            train_dataset=_Batches(batches),
            optimizers=(optimizer, scheduler),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()


def recipe_of(family: str, setting: Setting) -> Recipe:
    """Return the recipe of a family's softmax model."""
    steps = setting.steps(4, 600, 6000)
    if family == "ViT":
        return sweep.shortened(find_recipe("vit-supervised-tiny").softmax(), steps, setting.scaled(8, 64, 128))
    if family == "speech":
        return sweep.shortened(find_recipe("asr-ls960-tiny").softmax(), 5 * steps, setting.scaled(2, 8, 20))
    model = LanguageModelConfig(
        activation="softmax",
        num_layers=setting.scaled(2, 3, 6),
        embed_dim=setting.scaled(32, 96, 384),
        max_seq_len=setting.scaled(32, 128, 512),
        position="rope",
    )
    recipe = replace(find_recipe("lm-85m-2k-tiny"), name=f"lm-{family}", model=model, task=LanguageModelling())
    return sweep.shortened(recipe, steps, 16, learning_rate=2e-3, weight_decay=0.1)


def build(recipe: Recipe) -> nn.Module:
    """Return the untrained softmax model of a recipe of ``recipe_of``.

    Raises:
        MissingPackageError: for "Llama", without transformers.
    """
    if recipe.name == f"lm-{LLAMA}" and isinstance(recipe.model, LanguageModelConfig):
        width = recipe.model.embed_dim
        return llama(recipe.model, num_attention_heads=4, num_key_value_heads=2, intermediate_size=3 * width)
    return recipe.task.build(recipe.model)


def with_log_n(model: nn.Module) -> nn.Module:
    """Return a copy whose attention is sigmoid with b = -log n (Llama: of the keys that a query sees)."""
    model = copy.deepcopy(model)
    if isinstance(model, TransformersModel):
        from sigattn.integrations.transformers import NAME, register

        register()
        model.model.set_attn_implementation(NAME)
    for layer in model.modules():
        if isinstance(layer, Attention):
            layer.activation, layer.attention_bias = "sigmoid", BatchLengthBias()
    return model
