"""NumPy numbers, fractions and 0-d tensors are equivalent to Python numbers."""

import fractions

import numpy as np
import pytest
import torch

from sigattn import attention_statistics, flash, sigmoid_attention

Q, K, V = torch.randn(3, 2, 4, 7, 8).unbind()
ROWS, STARTS, CACHE = torch.randn(10, 4, 8), torch.tensor([0, 4, 10]), torch.randn(2, 9, 4, 8)
REAL = {
    "scale": lambda x: sigmoid_attention(Q, K, V, scale=x),
    "bias": lambda x: sigmoid_attention(Q, K, V, bias=x),
    "dropout_p": lambda x: sigmoid_attention(Q, K, V, dropout_p=x),
    "softmax_scale": lambda x: flash.flash_attn_varlen_func(ROWS, ROWS, ROWS, STARTS, STARTS, 6, 6, softmax_scale=x),
    "sigmoid_bias": lambda x: flash.flash_attn_varlen_func(ROWS, ROWS, ROWS, STARTS, STARTS, 6, 6, sigmoid_bias=x),
    "sigmoid_bias of a cache": lambda x: flash.flash_attn_with_kvcache(ROWS[:2, None], CACHE, CACHE, sigmoid_bias=x),
}
INTEGER = {
    "window": lambda x: sigmoid_attention(Q, K, V, window=(x, x)),
    "window_size": lambda x: flash.flash_attn_func(Q, K, V, window_size=(x, x)),
    "window of statistics": lambda x: attention_statistics(Q, K, V, window=(x, x)).row_mass_mean,
    "max_seqlen": lambda x: flash.flash_attn_varlen_func(ROWS, ROWS, ROWS, STARTS[:2], STARTS[:2], x, x),
    "cache_seqlens": lambda x: flash.flash_attn_with_kvcache(
        ROWS[:2, None], CACHE, CACHE, cache_seqlens=x, num_splits=x, sigmoid_bias=-2.0
    ),
}


@pytest.mark.parametrize(
    ("call", "number", "kind"),
    [(REAL[name], 0.25, kind) for name in REAL for kind in (np.float32, np.float64, torch.tensor, fractions.Fraction)]
    + [(INTEGER[name], 4, kind) for name in INTEGER for kind in (np.int32, np.int64, np.uint8, torch.tensor)],
)
def test_a_number_of_another_library(call, number, kind):
    results = []
    for given in (number, kind(number)):
        torch.manual_seed(1)
        results.append(call(given))
    assert torch.equal(*results)
