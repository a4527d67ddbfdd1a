"""Sigmoid self-attention: O = σ(scale · Q Kᵀ + b) V, a practical replacement for softmax attention.

Functions::

    sigmoid_attention         dense attention, with F.scaled_dot_product_attention's arguments
    sigmoid_varlen_attention  packed sequences
    sigmoid_kvcache_attention queries over a key/value cache, contiguous or paged
    attention_statistics      row mass, output norm, largest logit and sparsity of a call
    FLOP_FORMULAS             for PyTorch's FlopCounterMode(custom_mapping=…)
    log_length_bias           -log n, the paper's rule for b
    convert, restore          softmax models converted to sigmoid attention, and loaded
    backend                   context that chooses the backend of the calls within it
    set_sigmoid_precision     exact or fast σ; get_sigmoid_precision returns the setting

Packages, imported at first use (``import sigattn; sigattn.nn.Attention``)::

    sigattn.flash             the functions of flash-attn with sigmoid attention
    sigattn.nn                layers
    sigattn.models            language, vision and speech models
    sigattn.conversion        implementation of convert and restore
    sigattn.integrations      Hugging Face transformers, timm, lm-evaluation-harness
    sigattn.distributed       data, tensor and context parallelism
    sigattn.theory            the paper's theorems as code
    sigattn.data, sigattn.tasks, sigattn.train, sigattn.recipes    training
    sigattn.ops               implementation of the operators

``sigattn --help`` lists the commands.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

try:
    from sigattn import flash
    from sigattn.ops.attention import sigmoid_attention
    from sigattn.ops.custom_ops import FLOP_FORMULAS
    from sigattn.ops.kvcache import sigmoid_kvcache_attention
    from sigattn.ops.problem import log_length_bias
    from sigattn.ops.settings import backend, get_sigmoid_precision, set_sigmoid_precision
    from sigattn.ops.statistics import AttentionStatistics, attention_statistics
    from sigattn.ops.varlen import sigmoid_varlen_attention
except KeyboardInterrupt:  # importing PyTorch takes seconds; the command line then exits without a traceback
    import sys

    if sys.argv[0].endswith("sigattn") or sys.orig_argv[1:3] == ["-m", "sigattn"]:
        raise SystemExit(130) from None
    raise

if TYPE_CHECKING:
    from sigattn import conversion, data, distributed, integrations, models, nn, ops, recipes, tasks, theory, train
    from sigattn.conversion import convert, restore

__all__ = [
    "FLOP_FORMULAS", "AttentionStatistics", "attention_statistics", "backend", "conversion", "convert", "data",
    "distributed", "flash", "get_sigmoid_precision", "integrations", "log_length_bias", "models", "nn", "ops",
    "recipes", "restore", "set_sigmoid_precision", "sigmoid_attention", "sigmoid_kvcache_attention",
    "sigmoid_varlen_attention", "tasks", "theory", "train",
]  # fmt: skip
__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    """Import a package, or the package of a function, of ``__all__`` at its first use."""
    if name in ("convert", "restore"):
        return getattr(import_module(f"{__name__}.conversion"), name)
    if name in __all__:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names."""
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
