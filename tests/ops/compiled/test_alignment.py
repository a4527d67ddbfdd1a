"""Rows that are multiples of 16 bytes but not of 16 entries are copied 16 bytes at a time."""

import os
import random
import re

import pytest
import torch

from sigattn.ops.gradients import NeedsGrad
from sigattn.ops.problem import Problem
from sigattn.ops.triton import launch
from tests.ops import standin_driver

EVERYTHING = "SIGATTN_FUZZ_EXAMPLES" in os.environ
# Heads of 8 are left out: some of their tiles have only 4 entries (8 bytes) for each thread.
CASES = [
    (architecture, d, dtype, kernel)
    for kernel in ("fwd", "dkdv", "dq")
    for dtype, dims in ((torch.bfloat16, (24, 40, 56, 72, 88)), (torch.float32, (20, 36)))
    for d in dims
    for architecture in (80, 90)
]


def start(d, dtype, kernel, shift=0):
    """Launch a kernel on (B, H, N, D) from projections, which begin ``shift`` entries after a multiple of 16 bytes."""
    q, g = (
        torch.zeros(2 * 64 * 3 * d + shift, dtype=dtype)[shift:].view(2, 64, 3, d).transpose(1, 2) for _ in range(2)
    )
    if kernel == "fwd":
        launch.forward(Problem(q, q, q))
    else:
        needs = NeedsGrad(False, True, True) if kernel == "dkdv" else NeedsGrad(True, False, False)
        launch.backward(Problem(q, q, q), g, needs)


def copied(launched):
    """Return the bytes of the copies to and from global memory in the PTX code of a kernel, each once."""
    ptx = launched.compiled.asm["ptx"]
    sizes = {int(size, 0) for size in re.findall(r"cp\.async\.\w+\.shared\.global \[[^]]*\], \[[^]]*\], (\w+)", ptx)}
    for vector, bits in re.findall(r"(?:ld|st)\.global(?:\.v(\d))?\.[a-z](\d+)", ptx):
        sizes.add(int(vector or 1) * int(bits) // 8)
    return sizes


@pytest.mark.parametrize(("architecture", "d", "dtype", "kernel"), CASES if EVERYTHING else random.sample(CASES, 1))
def test_rows_of_a_multiple_of_16_bytes(architecture, d, dtype, kernel):
    with standin_driver.gpu(architecture) as launched:
        start(d, dtype, kernel)
        (found,) = launched
        assert copied(found) == {16}


def test_rows_that_begin_elsewhere():
    with standin_driver.gpu(90) as launched:
        start(24, torch.bfloat16, "fwd", shift=1)
        assert min(copied(launched[0])) == 2
