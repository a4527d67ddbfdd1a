"""Sigmoid self-attention: O = σ(scale · Q Kᵀ + b) V, a practical replacement for softmax attention."""

try:
    from sigattn import flash as flash
    from sigattn.ops.attention import sigmoid_attention as sigmoid_attention
    from sigattn.ops.kvcache import sigmoid_kvcache_attention as sigmoid_kvcache_attention
    from sigattn.ops.problem import log_length_bias as log_length_bias
    from sigattn.ops.settings import get_sigmoid_precision as get_sigmoid_precision
    from sigattn.ops.settings import set_sigmoid_precision as set_sigmoid_precision
    from sigattn.ops.statistics import AttentionStatistics as AttentionStatistics
    from sigattn.ops.statistics import attention_statistics as attention_statistics
    from sigattn.ops.varlen import sigmoid_varlen_attention as sigmoid_varlen_attention
except KeyboardInterrupt:  # importing PyTorch takes seconds; the command line then exits without a traceback
    import sys

    if sys.argv[0].endswith("sigattn") or sys.orig_argv[1:3] == ["-m", "sigattn"]:
        raise SystemExit(130) from None
    raise

__version__ = "0.1.0"

__all__ = [
    "AttentionStatistics",
    "attention_statistics",
    "flash",
    "get_sigmoid_precision",
    "log_length_bias",
    "set_sigmoid_precision",
    "sigmoid_attention",
    "sigmoid_kvcache_attention",
    "sigmoid_varlen_attention",
]
