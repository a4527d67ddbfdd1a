"""Record sigmoid attention in the configurations that transformers saves, so that a loaded model computes it again.

transformers does not save ``attn_implementation``, but it uses that key if a ``config.json`` has it. ``to_dict`` is
therefore extended: a configuration whose implementation is "sigmoid" is saved with ``attn_implementation`` and
``sigmoid_bias``, which lists the learned biases of a converted model (``learned_bias.py``). Every architecture and
every Auto class can load it, and a process that did not import this package gets transformers' own error: 'Specified
`attn_implementation="sigmoid (import sigattn.integrations.transformers)"` is not supported'.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from transformers import PretrainedConfig

from sigattn.integrations.transformers.mask import ADDED

NAME = "sigmoid"
LOG_VISIBLE = "log_visible"
NORMALIZE = "sigmoid_normalize"  # attribute of configurations: True divides the weights of each row by their sum
Bias = float | str
_KEY = "attn_implementation"
_SAVED = f"{NAME} (import sigattn.integrations.transformers)"  # transformers' error without this package quotes it
_OTHER_KEY = "_attn_implementation"  # means the same; for configurations that have a field of their own called _KEY


def validate_bias(bias: Any) -> Bias:
    """Return ``sigmoid_bias`` if it is a finite number or "log_visible"; raise ValueError otherwise."""
    is_number = isinstance(bias, (int, float)) and not isinstance(bias, bool)
    if not (-math.inf < bias < math.inf if is_number else bias == LOG_VISIBLE):
        raise ValueError(
            f'sigmoid_bias must be a finite number or "{LOG_VISIBLE}", got {bias!r}. (-log of the current length would '
            "change as a cache grows: pass -log of the training length)"
        )
    return bias


@contextlib.contextmanager
def restored(configs: Iterable[PretrainedConfig], *, always: bool = False) -> Iterator[None]:
    """Restore the implementation and the settings of configurations after an exception, or ``always``."""
    names = ("_attn_implementation_internal", "sigmoid_bias", NORMALIZE)
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


def wrap(original: Any, wrapper: Callable[..., Any]) -> Any:
    """Return a method that calls ``wrapper`` with the original method and its arguments."""

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    return wrapped


@functools.cache  # once per process
def wrap_saving() -> None:
    """Wrap the methods with which configurations are saved and loaded."""
    PretrainedConfig.to_dict = wrap(PretrainedConfig.to_dict, _to_dict)
    store: Any = PretrainedConfig._attn_implementation

    def set_implementation(config: Any, value: Any) -> None:
        # None comes from a configuration that is made of parts of another one, whose choice they keep
        if value is not None or getattr(config, "_attn_implementation_internal", None) != NAME:
            store.fset(config, read_implementation(value))

    PretrainedConfig._attn_implementation = store.setter(set_implementation)


def _implementation(config: Any) -> str | None:
    """Return the implementation of a configuration: "sigmoid" if none was chosen and it has a ``sigmoid_bias``."""
    chosen: str | None = read_implementation(getattr(config, "_attn_implementation_internal", None))
    return NAME if chosen is None and getattr(config, "sigmoid_bias", None) is not None else chosen


def _to_dict(original: Callable[[Any], dict[str, Any]], config: Any) -> dict[str, Any]:
    """Include the implementation in the dictionary of a configuration with sigmoid attention."""
    output = original(config)
    output.pop(ADDED, None)
    implementation = _implementation(config)
    if implementation == NAME:
        _record_biases(config, output)
    if implementation is not None and output.get("sigmoid_bias") is not None:
        # a plain string would also apply to the parts of a composite configuration, which have their own entries
        output[_key(config)] = {"": _written(implementation)} if config.sub_configs else _written(implementation)
    return output


def _record_biases(config: Any, output: dict[str, Any]) -> None:
    """Write the bias into a configuration's dictionary; its parts have an entry only if they have another."""
    if output.get("sigmoid_bias") is None:
        output["sigmoid_bias"] = LOG_VISIBLE
    for key, part in vars(config).items():
        if isinstance(part, PretrainedConfig) and (other := _implementation(part)) is not None:
            output[key].setdefault(_key(part), _written(other))
            if getattr(part, "sigmoid_bias", None) is None:
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


def read_implementation(implementation: Any) -> Any:
    """Return an implementation, or those of the parts of a composite model, as it was before it was saved."""
    if isinstance(implementation, dict):
        return {part: read_implementation(value) for part, value in implementation.items()}
    return NAME if implementation == _SAVED else implementation
