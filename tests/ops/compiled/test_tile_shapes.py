"""Tile shapes that are launched on Hopper."""

import torch

from sigattn.ops.gradients import NeedsGrad
from sigattn.ops.problem import Problem
from sigattn.ops.triton import launch
from tests.ops import standin_driver


def launched_with(d, dtype=torch.bfloat16, needs=None, **options):
    """Launch a backward pass without compiling; return its kernels by name."""
    q, g = (torch.zeros(1, 2, 64, d, dtype=dtype) for _ in range(2))
    with standin_driver.gpu(90, compiles=False) as launched:
        launch.backward(Problem(q, q, q, **options), g, needs or NeedsGrad())
    return {x.name: x.options for x in launched}


def test_options_that_need_registers_have_lighter_tiles():
    mask = torch.zeros(1, 1, 64, 64)
    plain, masked = launched_with(128), launched_with(128, attn_mask=mask)
    gradient = launched_with(128, attn_mask=mask, needs=NeedsGrad(True, True, True, False, True, False))
    slopes = launched_with(128, alibi_slopes=torch.ones(1, 2, 2))
    assert [x["bwd_dq_kernel"].BLOCK_N for x in (plain, masked, slopes, gradient)] == [64, 32, 32, 16]
    assert [x["bwd_dkdv_kernel"].BLOCK_N for x in (plain, slopes)] == [64, 128]
    assert launched_with(64, alibi_slopes=torch.ones(1, 2, 2))["bwd_dq_kernel"].BLOCK_N == 64
