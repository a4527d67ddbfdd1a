"""Record sigmoid attention in the configurations that transformers saves, so that a loaded model computes it again.

transformers does not save ``attn_implementation``, but it uses that key if a ``config.json`` has it. ``to_dict`` is
therefore extended: a configuration whose implementation is "sigmoid" is saved with ``attn_implementation`` and
``sigmoid_bias``, which lists the learned biases of a converted model (``learned_bias.py``). Every architecture and
every Auto class can load it, and a process that did not call ``register`` gets transformers' own error: 'Specified
`attn_implementation="sigmoid"` is not supported'.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

NAME = "sigmoid"
LOG_VISIBLE = "log_visible"
Bias = float | str
_KEY = "attn_implementation"
_default_bias: Bias = LOG_VISIBLE


def validate_bias(bias: Any) -> Bias:
    """Return ``sigmoid_bias`` if it is a number or "log_visible"; raise ValueError otherwise."""
    if isinstance(bias, bool) or not (isinstance(bias, (int, float)) or bias == LOG_VISIBLE):
        raise ValueError(
            f'sigmoid_bias must be a number or "{LOG_VISIBLE}", got {bias!r}. (-log of the current length would change '
            "as a cache grows: pass -log of the training length)"
        )
    return bias


def register_saved(bias: Bias) -> None:
    """Extend transformers' configurations and models so that sigmoid attention is saved and loaded again.

    Args:
        bias: saved for a sigmoid configuration that has no ``sigmoid_bias``.
    """
    global _default_bias
    _default_bias = bias
    if getattr(PretrainedConfig.to_dict, "sigattn", False):
        return
    PretrainedConfig.to_dict = _recording(PretrainedConfig.to_dict)
    PreTrainedModel._check_and_adjust_attn_implementation = _selecting(
        PreTrainedModel._check_and_adjust_attn_implementation
    )


def _implementation(config: Any) -> str | None:
    """Return the implementation of a configuration: "sigmoid" if none was chosen and it has a ``sigmoid_bias``."""
    chosen: str | None = getattr(config, "_attn_implementation_internal", None)
    return NAME if chosen is None and getattr(config, "sigmoid_bias", None) is not None else chosen


def _recording(own: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    """Wrap ``to_dict`` so that it includes the implementation of configurations with sigmoid attention."""

    @functools.wraps(own)
    def to_dict(self: Any) -> dict[str, Any]:
        output = own(self)
        output.pop(_KEY, None)
        implementation = _implementation(self)
        if implementation == NAME:
            if output.get("sigmoid_bias") is None:
                output["sigmoid_bias"] = _default_bias
            for key, part in vars(self).items():
                if isinstance(part, PretrainedConfig) and (other := _implementation(part)) is not None:
                    output[key].setdefault(_KEY, other)
                    if getattr(part, "sigmoid_bias", None) is None:  # the value of the whole holds for the part
                        output[key].pop("sigmoid_bias", None)
        if implementation is not None and output.get("sigmoid_bias") is not None:
            # a plain string would also apply to the parts of a composite configuration, which have their own entries
            output[_KEY] = {"": implementation} if self.sub_configs else implementation
        return output

    to_dict.sigattn = True  # type: ignore[attr-defined]
    return to_dict


def _selecting(own: Callable[..., str]) -> Callable[..., str]:
    """Wrap the check of an implementation so that ``sigmoid_bias`` selects sigmoid attention, or gives a warning."""

    @functools.wraps(own)
    def _check_and_adjust_attn_implementation(
        self: Any, attn_implementation: str | None, *args: Any, **kwargs: Any
    ) -> str:
        bias = getattr(self.config, "sigmoid_bias", None)
        if bias is not None and attn_implementation is None:
            attn_implementation = NAME
            _select_in_parts(self.config)
        elif bias is not None and attn_implementation != NAME:
            warnings.warn(  # names the configuration, which a model and its base share, so that Python shows it once
                f'attn_implementation="{attn_implementation}" ignores sigmoid_bias = {_shown(bias)} of '
                f'{type(self.config).__name__}: this is not sigmoid attention. Choose "{NAME}", or remove sigmoid_bias',
                stacklevel=2,
            )
        return own(self, attn_implementation, *args, **kwargs)

    return _check_and_adjust_attn_implementation


def _shown(bias: Any) -> str:
    return f"{{learned biases of {len(bias)} layers}}" if isinstance(bias, dict) else repr(bias)


def _select_in_parts(config: PretrainedConfig) -> None:
    """Select "sigmoid" in the sub-configurations for which no implementation was chosen."""
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None and part._attn_implementation_internal is None:
            part._attn_implementation_internal = NAME
            _select_in_parts(part)
