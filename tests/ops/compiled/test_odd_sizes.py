"""Unusual sizes, layouts and alignments: their launches are valid (without compilation).

The stand-in driver checks the grid, the range and dtype of each argument, and TMA's requirements of a descriptor.
"""

import pytest
import torch

from sigattn import sigmoid_attention, sigmoid_kvcache_attention, sigmoid_varlen_attention
from sigattn.ops.triton import tuning
from tests.ops import standin_driver


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype)


def rows(b, n, h, d):
    """Return (B, H, N, D) with the memory order of projections, (B, N, H, D)."""
    return empty(b, n, h, d).transpose(1, 2)


def moved(*shape):
    """Return a tensor whose memory begins one element after a multiple of 16 bytes."""
    t = rows(*shape)
    return empty(t.numel() + 1)[1:].view(shape).transpose(1, 2)


SELF = {
    "one head": lambda: rows(2, 100, 1, 64),
    "one query": lambda: rows(2, 1, 4, 64),
    "one of everything": lambda: rows(1, 1, 1, 1),
    "no sample": lambda: rows(0, 7, 4, 64),
    "no head": lambda: rows(2, 7, 0, 64),
    "misaligned": lambda: moved(2, 100, 4, 64),
    "without the first token": lambda: rows(2, 101, 4, 64)[:, :, 1:],
    "a part of the features": lambda: rows(2, 101, 4, 72)[..., 3:67],
    "every second feature": lambda: rows(2, 101, 4, 128)[..., ::2],
    "(N, B, H, D)": lambda: empty(100, 2, 4, 64).permute(1, 2, 0, 3),
    "(B, H, D, N)": lambda: empty(2, 4, 64, 100).mT,
    "one token for all": lambda: rows(2, 1, 4, 64).expand(2, 4, 100, 64),
    "one feature for all": lambda: rows(2, 100, 4, 1).expand(2, 4, 100, 64),
    "one sample for all": lambda: rows(1, 100, 4, 64).expand(3, 4, 100, 64),
    "128 features": lambda: rows(2, 100, 4, 128),
    "misaligned, 128 features": lambda: moved(2, 100, 4, 128),
    "rows of 146 bytes": lambda: rows(2, 101, 4, 73)[..., :72],
    "a part of 128 features": lambda: rows(2, 101, 4, 128)[..., 8:88],
    "70,000 samples": lambda: rows(70_000, 2, 2, 16),
    "70,001 heads": lambda: rows(1, 2, 70_001, 16),
}


@pytest.fixture
def launched(monkeypatch):
    monkeypatch.setattr(tuning, "TMA_MIN_WEIGHTS", 0)
    monkeypatch.setattr(tuning, "DIRECT_LAUNCH", True)
    with standin_driver.gpu(90, compiles=False) as launched:
        yield launched


def both_passes(q, k, v, grad=torch.empty_like, **options):
    """Run both passes three times: prepared, recorded, launched directly."""
    for _ in range(3):
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        out = sigmoid_attention(*leaves, backend="triton", **options)
        torch.autograd.grad(out, leaves, grad(out))


def test_self_attention(launched):
    for name, make in SELF.items():
        launched.clear()
        t = make()
        both_passes(t, t, t)
        assert bool(launched) == bool(t.numel()), name


def test_other_keys_and_gradients_of_any_layout(launched):
    """``sum().backward()`` passes an expanded gradient."""
    for n, m in ((0, 100), (7, 0), (1, 100), (100, 1), (1, 40_000_000)):
        both_passes(rows(1, n, 2, 64), *[rows(1, m, 2, 64)] * 2)
    both_passes(moved(2, 100, 4, 64), *[rows(2, 100, 4, 64)] * 2)  # one of them misaligned
    both_passes(rows(2, 100, 4, 64), *[rows(2, 100, 1, 64).expand(2, 4, 100, 64)] * 2)
    q = rows(2, 100, 4, 64)
    for grad in (
        lambda out: torch.zeros((), dtype=out.dtype).expand_as(out),
        lambda out: torch.zeros(64, dtype=out.dtype).expand_as(out),
        lambda out: torch.zeros_like(out[:1]).expand_as(out),
        lambda out: empty(2, 4, 64, 100).mT,
        lambda out: moved(2, 100, 4, 64),
    ):
        both_passes(q, q, q, grad)


def test_masks_and_numbers_of_any_kind(launched):
    q = rows(2, 100, 4, 64)
    ones = torch.ones(100, 100, dtype=torch.bool)
    for options in (
        {"attn_mask": ones[:1, :1].expand(100, 100)},
        {"attn_mask": ones.T},
        {"attn_mask": torch.ones(101, 101)[1:, 1:]},
        {"attn_mask": torch.ones(100, 100, dtype=torch.float16)},
        {"attn_mask": torch.ones(100, 100, dtype=torch.float64)},
        {"bias": torch.zeros(4, 1, 1, dtype=torch.float64)},
        {"alibi_slopes": torch.zeros(4, dtype=torch.float64)},
        *({"key_lengths": torch.tensor([0, 100], dtype=dtype)} for dtype in (torch.int64, torch.int16)),
        *({"bias": bias} for bias in (float("nan"), float("-inf"))),
        *({"window": window} for window in ((2**31 - 1, 2**31 - 1), (2**40, 5))),
        *({"dropout_p": p} for p in (0.999999, 1e-12)),
    ):
        for t in (q, rows(2, 100, 4, 128)):
            both_passes(t, t, t, **options)


def test_more_elements_than_32_bits_count(launched, monkeypatch):
    """Strides beyond 2^31 are passed in 64 bits (the memory is never accessed)."""
    monkeypatch.setattr(tuning, "HOPPER_CONFIGS", {})  # which load by descriptors
    q = rows(5, 70_000, 100, 64)
    sigmoid_attention(q, q, q, backend="triton")
    (one,) = launched
    assert one.arguments["query_strides"].b == 70_000 * 6400
    assert q.numel() > 2**31
    assert one.grid == (-(-70_000 // one.options.BLOCK_M) * 500, 1, 1)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packed_sequences(launched, dtype):
    for starts in ([0, 0], [0, 0, 10], [0, 10, 10], range(3001)):
        starts = torch.tensor(starts, dtype=dtype)
        q, longest = empty(int(starts[-1]), 2, 64).requires_grad_(), int(starts.diff().max())
        out = sigmoid_varlen_attention(q, q, q, starts, starts, longest, longest, backend="triton")
        torch.autograd.grad(out, q, torch.empty_like(out))
    assert launched


@pytest.mark.parametrize(
    ("batch", "capacity", "queries", "heads", "splits"),
    [(70_000, 16, 1, 2, 0), (1, 1_000_000, 1, 2, 0), (1, 2_000_000, 1, 2, 100_000), (1, 100, 1, 2, 100_000),
     (1, 0, 1, 2, 0), (2, 100, 500, 16, 0)],
)  # fmt: skip
def test_caches(launched, batch, capacity, queries, heads, splits):
    """No more parts than the grid permits or than there are tiles of keys."""
    q, k = empty(batch, queries, heads, 64), empty(batch, capacity, 1, 64)
    options = {"cache_seqlens": min(capacity, 9), "num_splits": splits, "bias": -1.0, "enable_gqa": True}
    sigmoid_kvcache_attention(q, k, k, backend="triton", **options)
    assert launched[-1].grid[1] <= max(1, -(-capacity // launched[-1].options.BLOCK_N))
