"""Machine code of the kernels, compiled for absent GPUs; test_calls.py has their options."""

import os

import pytest

from benchmarks import static, static_hopper
from benchmarks.compiled_kernel import PARTS
from sigattn.ops.triton import tuning
from sigattn.ops.triton.args import Mask

KERNELS = (tuning.FWD, tuning.DKDV, tuning.DQ)
SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
EVERYTHING = "SIGATTN_FUZZ_EXAMPLES" in os.environ
DIMS = (16, 32, 64, 128, 256)
PAGES = {"block_table": "*i32", "left_padding": "*i32", "HAS_LEFT": True, "SLOPES": True, "BIAS": "tensor"}


def kernels(architecture, head_dim, dtype):
    return [k for k in static.kernels_of(architecture, head_dim, dtype) if k != tuning.DECODE]


def products_are_asynchronous(*case, **changes):
    """Compile a kernel, and assert that ptxas serialises no product; return the report."""
    report = static.compile_kernel(*case, **changes)
    assert not report.advisories, report
    return report


TABLES = [(90, 64, True, k) for k in KERNELS] + [(80, 128, True, tuning.FWD), (100, 64, False, tuning.FWD)]
if EVERYTHING:
    groups = [(a, d, causal) for a in SHARED for d in DIMS for causal in (False, True)]
    TABLES = [(*group, k) for group in groups for k in kernels(*group[:2], "bfloat16")]


@pytest.mark.parametrize(("architecture", "d", "causal", "kernel"), TABLES)
def test_kernels_of_the_tables(architecture, d, causal, kernel):
    """No spills in loops, shared memory within the limit, tensor cores used, few special-function instructions."""
    report = products_are_asynchronous(kernel, architecture, "bfloat16", d, causal)
    assert report.spills <= (12 if architecture == 90 else 0), report  # a few addresses, on the way into a loop
    inner = report.loops[0]
    assert inner.spills == 0, report
    # the causal forward at D = 256 spills 5 in the loop over the edge of the mask
    assert max(loop.spills for loop in report.loops) <= (5 if d == 256 else 0), report
    assert report.shared <= SHARED[architecture], report
    if architecture == 90 and d <= 128:  # σ of one overlaps with products of another
        assert report.programs >= 2, report
    if d <= 128 or architecture == 90:
        assert report.tensor_instructions.startswith({80: "HMMA", 90: "HGMMA", 100: "UTC"}[architecture]), report
    if d == 64:
        assert inner.special <= 1.6, report  # one and a half for "paired-rcp"
    # at most the few comparisons of addresses: a mask would take two instructions for each score
    assert inner.selects < (0.75 if d <= 128 else 1.1), report
    if causal:
        assert max(loop.selects for loop in report.loops) > 0.9, report  # and the edges do have one


MASKED = [("added", tuning.FWD, 64), ("bool", tuning.DQ, 64)]
if EVERYTHING:
    MASKED = [key for key in tuning.HOPPER_MASKED if key[0] != "keys"]


@pytest.mark.parametrize("dtype", ["bf16", "fp32"] if EVERYTHING else ["bf16"])
@pytest.mark.parametrize(("mask", "kernel", "d"), MASKED)
def test_masks_on_hopper(mask, kernel, d, dtype):
    """The loop over whole tiles spills hardly anything, and as many programs fit a multiprocessor as were measured."""
    config, number = tuning.HOPPER_MASKED[mask, kernel, d], "i32:16"
    strides = (1, number) if kernel == tuning.DKDV else (number, 1)
    argument = Mask(f"*{'u8' if mask == 'bool' else dtype}:16", number, number, *strides)
    options = {"MASK": mask, "mask": argument} | ({"MASK_ORDER": "keys, queries"} if kernel == tuning.DKDV else {})
    report = products_are_asynchronous(kernel, 90, "bfloat16", d, False, config, **options)
    assert report.loops[0].spills <= 2, report
    if dtype == "bf16":
        assert report.programs >= {0: 2, 128: 4, 168: 3}[config.registers], report


@pytest.mark.parametrize("kernel", [tuning.FWD, "dk", "dv", tuning.DQ] if EVERYTHING else [tuning.DQ])
def test_float32_by_products_of_bfloat16(kernel):
    """Asynchronous products; the loops of the forward kernel spill a little."""
    config = tuning.kernel_config(tuning.DKDV if kernel in PARTS else kernel, 90, 128, 4, precision="bf16x6")
    report = products_are_asynchronous(kernel, 90, "float32", 128, True, config, PRECISION="bf16x6")
    assert report.tensor_instructions == "HGMMA", report
    assert report.shared <= SHARED[90], report
    assert report.loops[0].spills <= (24 if kernel == tuning.FWD else 0), report


DECODING = [(100, "float16", 128, PAGES), (90, "bfloat16", 64, {"config": tuning.decode_config(64, 2, 64)})]
if EVERYTHING:
    DECODING = [(a, t, d, o) for a in SHARED for t in ("bfloat16", "float16") for d in DIMS for o in ({}, PAGES)]
    DECODING += [(90, "bfloat16", d, {"config": tuning.decode_config(d, 2, 64)}) for d in DIMS]


@pytest.mark.parametrize(("architecture", "dtype", "d", "options"), DECODING)
def test_decoding(architecture, dtype, d, options):
    """Tensor cores used, nothing spilled, two programs on each multiprocessor; on Hopper also as many rows as wgmma."""
    report = products_are_asynchronous("decode", architecture, dtype, d, False, **options)
    assert report.spills == 0, report
    assert report.shared <= SHARED[architecture] // 2, report
    assert report.tensor_instructions == ("HGMMA" if report.config.block_m == 64 else "HMMA"), report


GLUON = [
    (k, causal, causal and k in (tuning.FWD, tuning.DQ)) for k in tuning.HOPPER_CONFIGS for causal in (False, True)
]


@pytest.mark.parametrize(("kernel", "causal", "normalize"), GLUON if EVERYTHING else GLUON[1::2])
def test_gluon_kernels(kernel, causal, normalize):
    """Also fenced: ``compile_kernel`` raises if the tensor cores may read memory too early."""
    report = static_hopper.compile_kernel(kernel, causal, tuning.HOPPER_CONFIGS[kernel], normalize)
    assert not report.advisories, report
    assert report.spills <= 16, report  # a few addresses, outside the loop
    assert report.shared <= SHARED[90], report
    assert report.tensor_instructions == "HGMMA", report
    assert report.loops[0].special <= (2.1 if kernel == tuning.FUSED else 1.6), report


def test_without_the_volatile_accumulator_products_are_serialised():
    config = tuning.Config(128, 64, 8, 3, "paired")
    assert static.compile_kernel(tuning.FWD, 90, "bfloat16", 64, False, config, WGMMA=False).advisories
