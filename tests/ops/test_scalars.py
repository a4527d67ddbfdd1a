"""NumPy numbers and 0-d tensors are equivalent to Python numbers."""

import fractions

import numpy as np
import pytest
import torch

from sigattn import attention_statistics, flash, sigmoid_attention

Q, K, V = torch.randn(3, 2, 4, 7, 8).unbind()
REALS = [np.float32, np.float64, np.float16, torch.tensor, fractions.Fraction]
INTEGERS = [np.int32, np.int64, np.uint8, torch.tensor]


@pytest.mark.parametrize("real", REALS)
@pytest.mark.parametrize("name", ["scale", "bias", "dropout_p"])
def test_real_numbers_of_the_operator(name, real):
    torch.manual_seed(1)
    want = sigmoid_attention(Q, K, V, **{name: 0.25})
    torch.manual_seed(1)
    assert torch.equal(sigmoid_attention(Q, K, V, **{name: real(0.25)}), want)
    assert not torch.equal(sigmoid_attention(Q, K, V), want)


@pytest.mark.parametrize("integer", INTEGERS)
def test_windows(integer):
    window = integer(2), integer(1)
    want = sigmoid_attention(Q, K, V, window=(2, 1))
    assert torch.equal(sigmoid_attention(Q, K, V, window=window), want)
    ours = flash.flash_attn_func(*(t.transpose(1, 2) for t in (Q, K, V)), window_size=window)
    torch.testing.assert_close(ours.transpose(1, 2), want)
    torch.testing.assert_close(*(attention_statistics(Q, K, V, window=w) for w in (window, (2, 1))))


@pytest.mark.parametrize("integer", INTEGERS)
def test_packed_sequences_and_caches(integer):
    q, starts = torch.randn(10, 4, 8), torch.tensor([0, 4, 10])
    want = flash.flash_attn_varlen_func(q, q, q, starts, starts, 6, 6, softmax_scale=0.25, sigmoid_bias=-1.0)
    most = integer(6)
    options = {"softmax_scale": np.float32(0.25), "sigmoid_bias": np.float64(-1.0)}
    assert torch.equal(flash.flash_attn_varlen_func(q, q, q, starts, starts, most, most, **options), want)
    with pytest.raises(ValueError, match=r"max_seqlen_q \(max_q\) is 5, but"):
        flash.flash_attn_varlen_func(q, q, q, starts, starts, integer(5), most, **options)
    cache, q = torch.randn(2, 9, 4, 8), torch.randn(2, 2, 4, 8)
    want = flash.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=6, causal=True, sigmoid_bias=-2.0)
    ours = flash.flash_attn_with_kvcache(
        q, cache, cache, cache_seqlens=most, causal=True, sigmoid_bias=np.float32(-2.0), num_splits=integer(0)
    )
    assert torch.equal(ours, want)
