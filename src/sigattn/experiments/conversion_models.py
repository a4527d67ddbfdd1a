"""Softmax models that the conversion experiment trains and converts."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from sigattn.experiments import sweep
from sigattn.experiments.experiment import Setting
from sigattn.models.language import LanguageModelConfig
from sigattn.nn.attention import Attention
from sigattn.nn.bias import BatchLengthBias
from sigattn.optional import explain_import_errors
from sigattn.recipes.recipe import Recipe
from sigattn.recipes.registry import find_recipe
from sigattn.tasks.language import LanguageModelling

LLAMA, WEAK, PEAKY = "Llama", "RoPE, weak", "RoPE, peaky"
# changed settings of a language model of bytes, and the factor of its training steps
LANGUAGE: dict[str, tuple[dict[str, Any], float]] = {
    "RoPE": ({}, 1.0),
    "ALiBi": ({"position": "alibi"}, 1.0),
    WEAK: ({}, 0.25),
    PEAKY: ({"qk_norm": "none"}, 4.0),
    LLAMA: ({}, 1.0),
}
FAMILIES = (*LANGUAGE, "ViT", "speech")


class Llama(nn.Module):
    """Llama of transformers, a language model of bytes with the sizes of a ``LanguageModelConfig``."""

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__()
        with explain_import_errors("transformers"):
            from transformers import LlamaConfig, LlamaForCausalLM
        sizes = LlamaConfig(
            vocab_size=256,
            hidden_size=config.embed_dim,
            intermediate_size=3 * config.embed_dim,
            num_hidden_layers=config.num_layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=config.max_seq_len,
            bos_token_id=None,
            eos_token_id=None,
        )
        self.model: Any = LlamaForCausalLM(sizes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next bytes, (B, N) → (B, N, 256)."""
        logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits


def recipe_of(family: str, setting: Setting) -> Recipe:
    """Return the recipe of a family's softmax model."""
    steps = setting.steps(8, 600, 6000)
    if family == "ViT":
        return sweep.shortened(find_recipe("vit-supervised-tiny").softmax(), steps, setting.scaled(8, 64, 128))
    if family == "speech":
        return sweep.shortened(find_recipe("asr-ls960-tiny").softmax(), 5 * steps, setting.scaled(2, 8, 20))
    changes, factor = LANGUAGE[family]
    model = LanguageModelConfig(
        activation="softmax",
        num_layers=setting.scaled(2, 3, 6),
        embed_dim=setting.scaled(32, 96, 384),
        max_seq_len=setting.scaled(32, 128, 512),
        **{"position": "rope", **changes},
    )
    recipe = replace(find_recipe("lm-85m-2k-tiny"), name=f"lm-{family}", model=model, task=LanguageModelling())
    return sweep.shortened(recipe, round(factor * steps), 16, learning_rate=2e-3, weight_decay=0.1)


def build(recipe: Recipe) -> nn.Module:
    """Return the untrained softmax model of a recipe of ``recipe_of``.

    Raises:
        MissingPackageError: for "Llama", without transformers.
    """
    if recipe.name == f"lm-{LLAMA}" and isinstance(recipe.model, LanguageModelConfig):
        return Llama(recipe.model)
    return recipe.task.build(recipe.model)


def with_log_n(model: nn.Module) -> nn.Module:
    """Return a copy whose attention is sigmoid with b = -log n (Llama: of the keys that a query sees)."""
    model = copy.deepcopy(model)
    if isinstance(model, Llama):
        from sigattn.integrations.transformers import NAME, register

        register()
        model.model.set_attn_implementation(NAME)
    for layer in model.modules():
        if isinstance(layer, Attention):
            layer.activation, layer.attention_bias = "sigmoid", BatchLengthBias()
    return model
