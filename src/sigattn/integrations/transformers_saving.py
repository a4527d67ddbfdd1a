"""Sigmoid attention in saved models of transformers: classes that load as sigmoid attention again."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

NAME = "sigmoid"
LOG_VISIBLE = "log_visible"
Bias = float | str


def checked_bias(bias: Any) -> Bias:
    """Return ``sigmoid_bias`` if it is a number or "log_visible"; raise ValueError otherwise."""
    if isinstance(bias, bool) or not (isinstance(bias, (int, float)) or bias == LOG_VISIBLE):
        raise ValueError(
            f'sigmoid_bias must be a number or "{LOG_VISIBLE}", got {bias!r}. (-log of the current length would change '
            "as a cache grows: pass -log of the training length)"
        )
    return bias


_SURVIVORS: dict[type[PretrainedConfig], tuple[type[PretrainedConfig], type[PreTrainedModel]]] = {}


def _known_configurations() -> list[type[PretrainedConfig]]:
    """Of what can be loaded by name in a new process after ``register()``."""
    names = ("llama", "mistral", "qwen3", "gemma3_text", "olmo2")
    return [CONFIG_MAPPING[name] for name in names if name in CONFIG_MAPPING]


def survivor(config_class: type[PretrainedConfig]) -> tuple[type[PretrainedConfig], type[PreTrainedModel]]:
    """Subclasses of a causal language model's configuration and model that stay sigmoid when saved and loaded.

    Their ``model_type`` is the original's with "sigmoid_" before it, and both are known to transformers' Auto classes.

    Args:
        config_class: of the original, ``LlamaConfig``, say.

    Raises:
        ValueError: if transformers has no causal language model with that configuration.
    """
    if config_class in _SURVIVORS:
        return _SURVIVORS[config_class]
    mapping: Any = AutoModelForCausalLM._model_mapping
    if config_class not in mapping:
        raise ValueError(f"transformers has no causal language model with a {config_class.__name__}")
    original: type[PreTrainedModel] = mapping[config_class]

    class Config(config_class):
        model_type = f"sigmoid_{config_class.model_type}"
        sigmoid_bias: Bias = LOG_VISIBLE

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.setdefault("attn_implementation", NAME)
            super().__init__(*args, **kwargs)
            checked_bias(self.sigmoid_bias)

    class Model(original):
        config_class = Config

    for made, base in ((Config, config_class), (Model, original)):
        made.__name__ = made.__qualname__ = f"Sigmoid{base.__name__}"
        globals()[made.__name__] = made  # where pickle looks for it
    # without a module's source to read, transformers would not know that its layers can be switched
    Model._can_set_attn_implementation_cached_value = original._can_set_attn_implementation()
    AutoConfig.register(Config.model_type, Config, exist_ok=True)
    AutoModelForCausalLM.register(Config, Model, exist_ok=True)
    _SURVIVORS[config_class] = Config, Model
    return Config, Model


def register_saved() -> None:
    """Make the saved models known to transformers' Auto classes."""
    for config in _known_configurations():
        survivor(config)
