"""Sigmoid self-attention: O = σ(scale · Q Kᵀ + b) V, a practical replacement for softmax attention."""

from sigattn.ops.attention import sigmoid_attention as sigmoid_attention
from sigattn.ops.problem import log_length_bias as log_length_bias
from sigattn.ops.statistics import AttentionStatistics as AttentionStatistics
from sigattn.ops.statistics import attention_statistics as attention_statistics

__version__ = "0.1.0"
