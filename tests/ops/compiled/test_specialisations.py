"""What kernels are compiled for: not for lengths, because a compilation takes one to two seconds, but for alignment."""

import os
import random
import re

import pytest
import torch

from sigattn.flash import flash_attn_with_kvcache
from sigattn.ops.gradients import NeedsGrad
from sigattn.ops.problem import Problem
from sigattn.ops.triton import launch, tuning
from tests.ops import standin_driver

EVERYTHING = "SIGATTN_FUZZ_EXAMPLES" in os.environ
HEADS, DTYPE = 12, torch.bfloat16
LENGTHS = [2, 4, 8, 15, 16, 48, 100, *random.Random(0).sample(range(18, 3000), 41 if EVERYTHING else 2)]
LAYOUTS = {
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


CASES = [(option, layout, tma) for option in OPTIONS for layout in LAYOUTS for tma in (False, True)]


@pytest.mark.parametrize(("option", "layout", "tma"), CASES if EVERYTHING else CASES[::5])  # each option once or twice
def test_lengths_are_not_compiled_for(monkeypatch, option, layout, tma):
    """Kernels that load by pointers, of short calls, and those that load by TMA, of long ones."""
    monkeypatch.setattr(tuning, "TMA_MIN_WEIGHTS", 0 if tma else 1 << 62)
    given, needed, expected = OPTIONS[option]
    needs = NeedsGrad(True, True, True, *(name in needed for name in NeedsGrad._fields[3:]))
    with standin_driver.gpu(90, compiles=False) as launched:
        for n in LENGTHS:
            t = LAYOUTS[layout](n, 64)
            problem = Problem(t, t, t, **given(n))
            launch.forward(problem)
            launch.backward(problem, t, needs)
        found = counts(launched)
        assert found.pop("hopper_bwd_fused_kernel", 1) == 1  # of long plain calls
        assert found == dict.fromkeys(("fwd_kernel", "bwd_dkdv_kernel", "bwd_dq_kernel"), expected)


def test_head_dims_that_are_no_multiples_of_16():
    """Their rows are aligned to 16 bytes only for some lengths."""
    with standin_driver.gpu(90, compiles=False) as launched:
        for n in LENGTHS:
            t = LAYOUTS["(B, N, H, D)"](n, 40)
            launch.forward(Problem(t, t, t))
            launch.backward(Problem(t, t, t), t, NeedsGrad())
        assert max(counts(launched).values()) <= 2


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
