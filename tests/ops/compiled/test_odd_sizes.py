"""Unusual sizes, layouts and alignments: their launches are valid, and few of them have kernels of their own.

The stand-in driver checks the grid, the range and dtype of each argument, and TMA's requirements of a descriptor.
Kernels are compiled for alignments but not for lengths, because a compilation takes one to two seconds.
"""

import os
import random
import re

import pytest
import torch

from sigattn import sigmoid_attention, sigmoid_kvcache_attention, sigmoid_varlen_attention
from sigattn.flash import flash_attn_with_kvcache
from sigattn.ops.gradients import NeedsGrad
from sigattn.ops.problem import Problem
from sigattn.ops.triton import launch, tuning
from tests.ops import standin_driver
from tests.ops.cases import numbers, random_case


@pytest.fixture
def launched(monkeypatch):
    monkeypatch.setattr(tuning, "TMA_MIN_WEIGHTS", 0)
    monkeypatch.setattr(tuning, "DIRECT_LAUNCH", True)
    with standin_driver.gpu(90, compiles=False) as launched:
        yield launched


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype)


def rows(b, n, h, d):
    return empty(b, n, h, d).transpose(1, 2)


def moved(*shape):
    """Return a tensor whose memory begins one element after a multiple of 16 bytes."""
    t = rows(*shape)
    return empty(t.numel() + 1)[1:].view(shape).transpose(1, 2)


def both_passes(q, k, v, grad=torch.empty_like, **options):
    """Run both passes three times: prepared, recorded, launched directly."""
    for _ in range(3):
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        out = sigmoid_attention(*leaves, backend="triton", **options)
        torch.autograd.grad(out, leaves, grad(out))


@pytest.mark.parametrize("part", range(4))
def test_random_calls(launched, part):
    for number in numbers(24)[part::4]:
        case = random_case(number)
        case.dtype = torch.bfloat16 if case.dtype is torch.float64 else case.dtype
        given, lengths = case.tensors()
        options = case.options(given, lengths)
        launched.clear()
        both_passes(given["query"], given["key"], given["value"], **options)
        assert launched or 0 in case.shape, number


LAYOUTS = {
    "one of everything": lambda: rows(1, 1, 1, 1),
    "no head": lambda: rows(2, 7, 0, 64),
    "misaligned": lambda: moved(2, 100, 4, 64),
    "a part of the features": lambda: rows(2, 101, 4, 72)[..., 3:67],
    "(B, H, D, N)": lambda: empty(2, 4, 64, 100).mT,
    "one token for all": lambda: rows(2, 1, 4, 64).expand(2, 4, 100, 64),
    "one feature for all": lambda: rows(2, 100, 4, 1).expand(2, 4, 100, 64),
    "128 features": lambda: rows(2, 100, 4, 128),
    "misaligned, 128 features": lambda: moved(2, 100, 4, 128),
    "rows of 146 bytes": lambda: rows(2, 101, 4, 73)[..., :72],
    "a part of 128 features": lambda: rows(2, 101, 4, 128)[..., 8:88],
    "70,000 samples": lambda: rows(70_000, 2, 2, 16),
    "70,001 heads": lambda: rows(1, 2, 70_001, 16),
}


def test_layouts(launched):
    for name, make in LAYOUTS.items():
        launched.clear()
        t = make()
        both_passes(t, t, t)
        assert bool(launched) == bool(t.numel()), name
    both_passes(rows(1, 1, 2, 64), *[rows(1, 40_000_000, 2, 64)] * 2)
    both_passes(moved(2, 100, 4, 64), *[rows(2, 100, 4, 64)] * 2)  # one of them misaligned
    q = rows(2, 100, 4, 64)
    for grad in (
        lambda out: torch.zeros((), dtype=out.dtype).expand_as(out),  # as of ``sum().backward()``
        lambda out: torch.zeros_like(out[:1]).expand_as(out),
        lambda out: empty(2, 4, 64, 100).mT,
        lambda out: moved(2, 100, 4, 64),
    ):
        both_passes(q, q, q, grad)


def test_masks_and_numbers_of_any_kind(launched):
    ones = torch.ones(100, 100, dtype=torch.bool)
    for options in (
        {"attn_mask": ones[:1, :1].expand(100, 100)},
        {"attn_mask": ones.T},
        {"attn_mask": torch.ones(101, 101)[1:, 1:]},
        {"attn_mask": torch.ones(100, 100, dtype=torch.float64)},
        {"bias": torch.zeros(4, 1, 1, dtype=torch.float64)},
        {"alibi_slopes": torch.zeros(4, dtype=torch.float64)},
        {"key_lengths": torch.tensor([0, 100], dtype=torch.int16)},
        *({"bias": bias} for bias in (float("nan"), float("-inf"))),
        *({"window": window} for window in ((2**31 - 1, 2**31 - 1), (2**40, 5))),
        *({"dropout_p": p} for p in (0.999999, 1e-12)),
    ):
        for d in (64, 128):
            both_passes(*[rows(2, 100, 4, d)] * 3, **options)


def test_more_elements_than_32_bits_count(launched, monkeypatch):
    """Strides beyond 2^31 are passed in 64 bits (the memory is never accessed)."""
    monkeypatch.setattr(tuning, "HOPPER_CONFIGS", {})  # which load by descriptors
    q = rows(5, 70_000, 100, 64)
    sigmoid_attention(q, q, q, backend="triton")
    (one,) = launched
    assert one.arguments["query_strides"].b == 70_000 * 6400
    assert q.numel() > 2**31
    assert one.grid == (-(-70_000 // one.options.BLOCK_M) * 500, 1, 1)


def test_packed_sequences(launched):
    for starts in ([0, 0], [0, 0, 10], [0, 10, 10], range(3001)):
        for dtype in (torch.int32, torch.int64):
            cu = torch.tensor(starts, dtype=dtype)
            q, longest = empty(int(cu[-1]), 2, 64).requires_grad_(), int(cu.diff().max())
            out = sigmoid_varlen_attention(q, q, q, cu, cu, longest, longest, backend="triton")
            torch.autograd.grad(out, q, torch.empty_like(out))
    assert launched


def test_caches(launched):
    """No more parts than the grid permits or than there are tiles of keys."""
    for batch, capacity, queries, heads, splits in (
        (70_000, 16, 1, 2, 0), (1, 1_000_000, 1, 2, 0), (1, 2_000_000, 1, 2, 100_000), (1, 100, 1, 2, 100_000),
        (1, 0, 1, 2, 0), (2, 100, 500, 16, 0),
    ):  # fmt: skip
        q, k = empty(batch, queries, heads, 64), empty(batch, capacity, 1, 64)
        options = {"cache_seqlens": min(capacity, 9), "num_splits": splits, "bias": -1.0, "enable_gqa": True}
        sigmoid_kvcache_attention(q, k, k, backend="triton", **options)
        assert launched[-1].grid[1] <= max(1, -(-capacity // launched[-1].options.BLOCK_N))


EVERYTHING = "SIGATTN_FUZZ_EXAMPLES" in os.environ
HEADS, DTYPE = 12, torch.bfloat16
LENGTHS = [2, 4, 8, 15, 16, 48, 100, *random.Random(0).sample(range(18, 3000), 41 if EVERYTHING else 2)]
ORDERS = {
    "(B, N, H, D)": lambda n, d: torch.empty(2, n, HEADS, d, dtype=DTYPE).transpose(1, 2),
    "(B, H, N, D)": lambda n, d: torch.empty(2, HEADS, n, d, dtype=DTYPE),
    "(B, N, 3, H, D)": lambda n, d: torch.empty(2, n, 3, HEADS, d, dtype=DTYPE)[:, :, 0].transpose(1, 2),
}
# Options given a length, the additional gradients asked for, and the compilations of forward, keys, queries. A mask's
# rows and a bias's heads begin at multiples of 16 bytes or do not; more does not matter.
OPTIONS = {
    "plain": (lambda n: {}, (), 1),
    "causal": (lambda n: {"right": 0}, (), 1),
    "window": (lambda n: {"left": 3, "right": n // 2}, (), 1),
    "bias": (lambda n: {"bias": torch.empty(1, HEADS, 1, 1)}, ("bias",), 1),
    "bias of rows": (lambda n: {"bias": torch.empty(2, HEADS, n, 1)}, ("bias",), 1),
    "slopes": (lambda n: {"alibi_slopes": torch.empty(1, HEADS, 2)}, ("alibi_slopes",), 1),
    "lengths": (lambda n: {"key_lengths": torch.tensor([1, 1])}, (), 1),
    "dropout": (lambda n: {"seed": torch.tensor(1), "dropout_p": 0.5}, (), 1),
    "mask of keys": (lambda n: {"attn_mask": torch.empty(2, 1, 1, n, dtype=torch.bool)}, (), 2),
    "mask": (lambda n: {"attn_mask": torch.empty(1, 1, n, n, dtype=DTYPE)}, ("attn_mask",), 2),
}


def counts(launched):
    binaries = {x.name: set() for x in launched}
    for x in launched:
        binaries[x.name].add(x.binary)
    return {name: len(found) for name, found in binaries.items()}


CASES = [(option, layout, tma, 64) for option in OPTIONS for layout in ORDERS for tma in (False, True)]
CASES = CASES if EVERYTHING else CASES[::5]  # each option once or twice
# rows of 40 features are aligned to 16 bytes only for some lengths
CASES += [("plain", "(B, N, H, D)", False, 40)]


@pytest.mark.parametrize(("option", "layout", "tma", "d"), CASES)
def test_lengths_are_not_compiled_for(monkeypatch, option, layout, tma, d):
    """Kernels that load by pointers, of short calls, and those that load by TMA, of long ones."""
    monkeypatch.setattr(tuning, "TMA_MIN_WEIGHTS", 0 if tma else 1 << 62)
    given, needed, expected = OPTIONS[option]
    needs = NeedsGrad(True, True, True, *(name in needed for name in NeedsGrad._fields[3:]))
    with standin_driver.gpu(90, compiles=False) as launched:
        for n in LENGTHS:
            t = ORDERS[layout](n, d)
            problem = Problem(t, t, t, **given(n))
            launch.forward(problem)
            launch.backward(problem, t, needs)
        found = counts(launched)
        assert found.pop("hopper_bwd_fused_kernel", 1) == 1  # of long plain calls
        assert found == dict.fromkeys(("fwd_kernel", "bwd_dkdv_kernel", "bwd_dq_kernel"), expected)


@pytest.mark.parametrize("pages", [False, True])
def test_caches_of_any_capacity(pages):
    """One query per sample, then a few; one part of the keys, then several that are summed."""
    with standin_driver.gpu(90, compiles=False) as launched:
        for capacity in LENGTHS:
            k = torch.empty(capacity if pages else 2, 16 if pages else capacity, 2, 64, dtype=DTYPE)
            table = torch.zeros(2, capacity, dtype=torch.int32) if pages else None
            lengths = torch.tensor([capacity, 1], dtype=torch.int32)
            for splits in (1, 3):
                q = torch.empty(2, 1, 4, 64, dtype=DTYPE)
                flash_attn_with_kvcache(
                    q, k, k, cache_seqlens=lengths, block_table=table, num_splits=splits, sigmoid_bias=-1.0,
                    backend="triton",
                )  # fmt: skip
        assert counts(launched) == {"decode_kernel": 2}


def test_rows_of_multiples_of_16_bytes_are_copied_16_bytes_at_a_time():
    """Also those of 24 entries, which are no multiple of 16 entries; but not those that begin elsewhere."""
    vector, copy = (
        r"(?:ld|st)\.global(?:\.v(\d))?\.[a-z](\d+)",
        r"cp\.async\.\w+\.shared\.global \[[^]]*\], \[[^]]*\], (\w+)",
    )
    for start, smallest in ((0, 16), (1, 2)):
        with standin_driver.gpu(90) as launched:
            q = torch.zeros(2 * 64 * 3 * 24 + start, dtype=DTYPE)[start:].view(2, 64, 3, 24).transpose(1, 2)
            launch.forward(Problem(q, q, q))
            ptx = launched[0].compiled.asm["ptx"]
            sizes = {int(size, 0) for size in re.findall(copy, ptx)}
            assert min(sizes | {int(n or 1) * int(bits) // 8 for n, bits in re.findall(vector, ptx)}) == smallest
