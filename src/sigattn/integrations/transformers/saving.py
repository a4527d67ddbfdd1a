"""Record sigmoid attention in the configurations that transformers saves, so that a loaded model computes it again.

transformers does not save ``attn_implementation``, but it uses that key if a ``config.json`` has it. ``to_dict`` is
therefore extended: a configuration whose implementation is "sigmoid" is saved with ``attn_implementation`` and
``sigmoid_bias``, which lists the learned biases of a converted model (``learned_bias.py``). Every architecture and
every Auto class can load it, and a process that did not import this package gets transformers' own error: 'Specified
`attn_implementation="sigmoid (import sigattn.integrations.transformers)"` is not supported'. The configuration of a
model also keeps the default bias with which the model was built, because ``register`` may set another one later.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from sigattn.integrations.transformers.mask import ADDED

NAME = "sigmoid"
LOG_VISIBLE = "log_visible"
NORMALIZE = "sigmoid_normalize"  # attribute of configurations: True divides the weights of each row by their sum
Bias = float | str
_KEY = "attn_implementation"
_SAVED = f"{NAME} (import sigattn.integrations.transformers)"  # transformers' error without this package quotes it
_OTHER_KEY = "_attn_implementation"  # means the same; for configurations that have a field of their own called _KEY
_DEFAULT = "_sigmoid_bias_default"  # attribute of a configuration: the default when its model was built
_default_bias: Bias = LOG_VISIBLE  # of models that are built from now on


def validate_bias(bias: Any) -> Bias:
    """Return ``sigmoid_bias`` if it is a number or "log_visible"; raise ValueError otherwise."""
    if isinstance(bias, bool) or not (isinstance(bias, (int, float)) or bias == LOG_VISIBLE):
        raise ValueError(
            f'sigmoid_bias must be a number or "{LOG_VISIBLE}", got {bias!r}. (-log of the current length would change '
            "as a cache grows: pass -log of the training length)"
        )
    return bias


def set_default_bias(bias: Bias) -> None:
    """Set the bias of models that are built from now on, where no configuration has a ``sigmoid_bias``."""
    global _default_bias
    _default_bias = bias


def keep_default_bias(config: PretrainedConfig) -> None:
    """Give the configuration of a model the present default, unless it has one: later defaults are for other models."""
    vars(config).setdefault(_DEFAULT, _default_bias)


def default_bias(configs: Iterable[Any]) -> Bias:
    """Return the default of the first configuration that belongs to a model, or the present one."""
    defaults = (getattr(config, _DEFAULT, None) for config in configs)
    return next((bias for bias in defaults if bias is not None), _default_bias)


@contextlib.contextmanager
def restored(configs: Iterable[PretrainedConfig], *, always: bool = False) -> Iterator[None]:
    """Restore the implementation and the settings of configurations after an exception, or ``always``."""
    names = ("_attn_implementation_internal", "sigmoid_bias", NORMALIZE, _DEFAULT)
    before = [(vars(c), {name: vars(c)[name] for name in names if name in vars(c)}) for c in configs]
    keep = False
    try:
        yield
        keep = not always
    finally:
        for attributes, values in () if keep else before:
            for name in names:
                attributes.pop(name, None)
            attributes.update(values)


def wrap_saving() -> None:
    """Wrap transformers' methods so that sigmoid attention is saved and loaded again, once per process."""
    if getattr(PretrainedConfig.to_dict, "sigattn", False):
        return
    PretrainedConfig.to_dict = _recording(PretrainedConfig.to_dict)
    PretrainedConfig._attn_implementation = _reading(PretrainedConfig._attn_implementation)
    PreTrainedModel._check_and_adjust_attn_implementation = _selecting(
        PreTrainedModel._check_and_adjust_attn_implementation
    )


def _implementation(config: Any) -> str | None:
    """Return the implementation of a configuration: "sigmoid" if none was chosen and it has a ``sigmoid_bias``."""
    chosen: str | None = _read(getattr(config, "_attn_implementation_internal", None))
    return NAME if chosen is None and getattr(config, "sigmoid_bias", None) is not None else chosen


def _recording(original: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    """Wrap ``to_dict`` so that it includes the implementation of configurations with sigmoid attention."""

    @functools.wraps(original)
    def to_dict(self: Any) -> dict[str, Any]:
        output = original(self)
        output.pop(_DEFAULT, None)
        output.pop(ADDED, None)
        implementation = _implementation(self)
        if implementation == NAME:
            _record_biases(self, output)
        if implementation is not None and output.get("sigmoid_bias") is not None:
            # a plain string would also apply to the parts of a composite configuration, which have their own entries
            output[_key(self)] = {"": _written(implementation)} if self.sub_configs else _written(implementation)
        return output

    to_dict.sigattn = True  # type: ignore[attr-defined]
    return to_dict


def _record_biases(config: Any, output: dict[str, Any]) -> None:
    """Write the bias into a configuration's dictionary, and into those of its parts that have another."""
    chosen, default = output.get("sigmoid_bias") is not None, default_bias([config])
    if not chosen:
        output["sigmoid_bias"] = default
    for key, part in vars(config).items():
        if isinstance(part, PretrainedConfig) and (other := _implementation(part)) is not None:
            output[key].setdefault(_key(part), _written(other))
            if getattr(part, "sigmoid_bias", None) is None and (chosen or getattr(part, _DEFAULT, default) == default):
                _inherit(part, output[key])


def _inherit(config: Any, output: dict[str, Any]) -> None:
    """Remove the bias from the dictionary of a part, and of its parts, for which the value of the whole holds."""
    output.pop("sigmoid_bias", None)
    for key, part in vars(config).items():
        if isinstance(part, PretrainedConfig) and getattr(part, "sigmoid_bias", None) is None:
            _inherit(part, output[key])


def _key(config: PretrainedConfig) -> str:
    return _OTHER_KEY if _KEY in vars(config) else _KEY


def _written(implementation: str) -> str:
    return _SAVED if implementation == NAME else implementation


def _read(implementation: Any) -> Any:
    """Return an implementation, or those of the parts of a composite model, as it was before it was saved."""
    if isinstance(implementation, dict):
        return {part: _read(value) for part, value in implementation.items()}
    return NAME if implementation == _SAVED else implementation


def _reading(original: property) -> property:
    """Wrap the attribute that a configuration sets when it is loaded."""
    assert original.fset is not None
    store = original.fset
    return property(original.fget, lambda self, value: store(self, _read(value)))


def _selecting(original: Callable[..., str]) -> Callable[..., str]:
    """Wrap the check of an implementation so that ``sigmoid_bias`` selects sigmoid attention, or gives a warning."""

    @functools.wraps(original)
    def _check_and_adjust_attn_implementation(
        self: Any, attn_implementation: str | None, *args: Any, **kwargs: Any
    ) -> str:
        attn_implementation = _read(attn_implementation)  # of a configuration from before this package was imported
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
        return original(self, attn_implementation, *args, **kwargs)

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
