"""Machine code of the kernels, compiled for absent GPUs in subprocesses without the interpreter."""

import importlib.util
import json
import os
import random
import subprocess
import sys

import pytest

from benchmarks import compiled_kernel, machine_code, static, static_hopper, tile_shapes
from sigattn.ops.triton import tuning

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

CODE = """
import dataclasses, json, sys
from benchmarks import static, static_hopper
from sigattn.ops.triton import tuning
cases, with_gluon = json.loads(sys.argv[1])
for case in cases:
    options = case.pop() if isinstance(case[-1], dict) else {}
    if "config" in options:
        options["config"] = tuning.Config(*options["config"])
    print(json.dumps(dataclasses.asdict(static.compile_kernel(*case, **options))))
for report in static_hopper.compile_all() if with_gluon else []:
    print(json.dumps(dataclasses.asdict(report)))
"""


def compiled(cases, with_gluon=False):
    """Return reports of the cases, and of the Gluon kernels, compiled in one subprocess."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", CODE, json.dumps([cases, with_gluon])]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def asynchronous(cases):
    """Compile, and assert that ptxas serialises no product."""
    reports = compiled(cases)
    for report in reports:
        assert not report["advisories"], what(report)
    return reports


def what(report):
    return {k: v for k, v in report.items() if k != "loops"}


def kernels(architecture, head_dim, dtype):
    return [k for k in static.kernels_of(architecture, head_dim, dtype) if k != tuning.DECODE]


KERNELS = (tuning.FWD, tuning.DKDV, tuning.DQ)
SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
EVERYTHING = "SIGATTN_FUZZ_EXAMPLES" in os.environ
DIMS = (16, 32, 64, 128, 256) if EVERYTHING else (64, 128)
OPTIONS = [
    {},
    {"BIAS": "tensor", "grad_bias": "*fp32"},
    {"BIAS": "length", "VARLEN": True},
    {"BIAS": "length", "LENGTHS": True},
    {"MASK": "bool"},
    {"MASK": "added", "NEED_MASK": "added"},
    {"MASK": "added", "NEED_MASK": "added", "SUM_ROWS": True},
    {"MASK": "added", "NEED_MASK": "stored"},
    {"SLOPES": True, "grad_slopes": "*fp32"},
    {"HAS_LEFT": True},
    {"DROPOUT": True},
    {"GROUP": 4},
    {"SIGMOID": "fast"},
    {"SIGMOID": "accurate"},
    {"SOFTCAP": True},
    {"BLOCK_Q": 128, "BLOCK_K": 128},
    {"TMA": True},
]
OWN_OPTIONS = {
    tuning.DKDV: [{"grad_key": None}, {"grad_value": None}],
    tuning.DQ: [{"grad_query": None, "grad_bias": "*fp32"}],
}


def check_default(report, architecture, causal):
    """No spills in loops, shared memory within the limit, tensor cores used, few special-function instructions."""
    said, d = what(report), report["head_dim"]
    assert report["spills"] <= (12 if architecture == 90 else 0), said  # a few addresses, on the way into a loop
    assert report["loops"][0]["spills"] == 0, said
    # the causal forward at D = 256 spills 5 in the loop over the edge of the mask
    assert max(loop["spills"] for loop in report["loops"]) <= (5 if d == 256 else 0), said
    assert report["shared"] <= SHARED[architecture], said
    if architecture == 90 and d <= 128:  # σ of one overlaps with products of another
        assert report["programs"] >= 2, said
    if d <= 128 or architecture == 90:
        assert report["tensor_instructions"].startswith({80: "HMMA", 90: "HGMMA", 100: "UTC"}[architecture]), said
    inner = report["loops"][0]
    if d == 64:
        assert inner["special"] <= 1.6, said  # one and a half for "paired-rcp"
    # at most the few comparisons of addresses: a mask would take two instructions for each score
    assert inner["selects"] < (0.75 if d <= 128 else 1.1), said
    if causal:
        assert max(loop["selects"] for loop in report["loops"]) > 0.9, said  # and the edges do have one


def check_decoding(report, architecture):
    """Tensor cores used, nothing spilled, two programs on each multiprocessor."""
    assert report["spills"] == 0, what(report)
    assert report["shared"] <= SHARED[architecture] // 2, what(report)
    assert report["tensor_instructions"] == ("HGMMA" if report["config"][0] == 64 else "HMMA"), what(report)


def check_gluon(report):
    assert report["spills"] <= 16, what(report)  # a few addresses, outside the loop
    assert report["shared"] <= SHARED[90], what(report)
    assert report["tensor_instructions"] == "HGMMA", what(report)
    assert report["loops"][0]["special"] <= 1.6, what(report)


def decoding():
    """Return cases contiguous and in pages, plain and with every option; on Hopper also as many rows as wgmma takes."""
    pages = {"block_table": "*i32", "left_padding": "*i32", "HAS_LEFT": True, "SLOPES": True, "BIAS": "tensor"}
    wide = [("decode", 90, "bfloat16", d, False, {"config": tuning.decode_config(d, 2, 64)}) for d in DIMS]
    if not EVERYTHING:
        return [("decode", 100, "float16", 128, False, pages), wide[0]]
    each = [(t, d, o) for t in ("bfloat16", "float16") for d in DIMS for o in ({}, pages)]
    return wide + [("decode", architecture, t, d, False, o) for architecture in SHARED for t, d, o in each]


def test_kernels_of_the_tables():
    """Every kernel of the tables, in one subprocess; without the volatile accumulator ptxas serialises products."""
    pairs = {80: [(128, True)], 90: [(64, True)], 100: [(64, False)]}
    if EVERYTHING:
        pairs = {a: [(d, causal) for causal in (False, True) for d in DIMS] for a in SHARED}
    each = [(architecture, *pair) for architecture in pairs for pair in pairs[architecture]]
    default = [(k, a, "bfloat16", d, causal) for a, d, causal in each for k in kernels(a, d, "bfloat16")]
    sample = [case for dtype, d in TENSOR_CORES if d != 64 for case in options_of_hopper(dtype, d)]
    serialised = (tuning.FWD, 90, "bfloat16", 64, False, {"WGMMA": False, "config": [128, 64, 8, 3, "paired"]})
    others = [*options_together(), *random.sample(sample, 1), serialised]
    cases = [*default, *decoding(), *others]
    reports = compiled(cases, with_gluon=True)
    for case, report in zip([*cases, *[None] * (len(reports) - len(cases))], reports, strict=True):
        assert bool(report["advisories"]) == (case is serialised), what(report)
        if case is None:
            check_gluon(report)
        elif case in default:
            check_default(report, case[1], case[4])
        elif case not in others:
            check_decoding(report, case[1])
    assert len(reports) > len(cases)


def options_of_hopper(dtype, head_dim):
    """Return every kernel with every option, and with heads of two sizes, full and causal."""
    widths = {"D": head_dim - 8, "DV": head_dim}
    shift = {"number": "number", "tensor": "tensor", "length": "length"} if dtype == "float16" else {}
    return [
        (kernel, 90, dtype, head_dim, causal, {"SHIFT": shift.get(option.get("BIAS", "number"), "none"), **option})
        for kernel in kernels(90, head_dim, dtype)
        for option in [*OPTIONS, widths, *OWN_OPTIONS.get(kernel, [])]
        for causal in (False, True)
    ]


TENSOR_CORES = [(dtype, d) for dtype in ("bfloat16", "float16") for d in (16, 32, 64, 128, 256)]


@pytest.mark.skipif(not EVERYTHING, reason="long; make test-kernels runs it")
@pytest.mark.parametrize(("dtype", "head_dim"), TENSOR_CORES)
def test_products_are_asynchronous_on_hopper(dtype, head_dim):
    asynchronous(options_of_hopper(dtype, head_dim))


@pytest.mark.skipif(not EVERYTHING, reason="long; make test-kernels runs it")
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kernel", KERNELS)
def test_candidates_of_tune(kernel, head_dim):
    """Asynchronous, within shared memory, and nearly nothing spilled."""
    cases = []
    for config in tile_shapes.candidates(kernel, head_dim):
        parts = [{"grad_value": None}, {"grad_key": None}] if config.split_dkdv else [{}]
        cases += [(kernel, 90, "bfloat16", head_dim, False, {"config": config, **part}) for part in parts]
    for report in asynchronous(cases):
        assert report["shared"] <= SHARED[90], what(report)
        assert report["spills"] <= 8, what(report)


@pytest.mark.skipif(not EVERYTHING, reason="long; make test-kernels runs it")
@pytest.mark.parametrize("architecture", SHARED)
def test_float32_configurations(architecture):
    cases = [
        (k, architecture, "float32", d, causal)
        for d in DIMS
        for k in kernels(architecture, d, "float32")
        for causal in (False, True)
    ]
    for report in asynchronous(cases):
        assert report["spills"] == 0, what(report)
        assert report["shared"] <= SHARED[architecture], what(report)


def options_together():
    """Return what the interpreter has run, for a Hopper GPU in float16: several options at once.

    ``test_products_are_asynchronous_on_hopper`` compiles each alone, and tests/ops/compiled draws among all others.
    """
    score = {"MASK": "added", "NEED_MASK": "stored", "BIAS": "tensor", "SHIFT": "tensor", "grad_bias": "*fp32"}
    more = {"SLOPES": True, "grad_slopes": "*fp32", "HAS_LEFT": True, "SOFTCAP": True, "DROPOUT": True, "GROUP": 4}
    options = [
        {**score, **more},
        {"BIAS": "length", "SHIFT": "length", "VARLEN": True, "MASK": "bool"},
        {"MASK": "bool", "LENGTHS": True, "SIGMOID": "fast"},
        {"MASK": "added", "NEED_MASK": "added", "D": 40, "DV": 72},
        {"BLOCK_Q": 128, "BLOCK_K": 128},
    ]
    small = {"config": tuning.Config(64, 32, 4, 1)}  # compiled three times as fast
    cases = [(k, 90, "float16", 64, True, {**small, **o}) for o in options for k in KERNELS]
    cases += [(k, 90, "float32", 64, True, {"PRECISION": "tf32"}) for k in KERNELS[::-1]]
    cases += [("decode", 90, "bfloat16", 64, False, {"SOFTCAP": True, "MASK": "added"})]
    return cases if EVERYTHING else [*cases[:3], cases[4], cases[-2]]


def test_programs_on_a_multiprocessor():
    """Limited by registers, shared memory or warps, as in NVIDIA's occupancy calculator."""
    registers = [(90, 128, 8, 80, 2), (90, 129, 8, 80, 1), (90, 159, 4, 73, 3)]
    memory_or_warps = [(90, 64, 4, 113, 2), (90, 64, 4, 114, 1), (86, 32, 4, 4, 12), (75, 32, 4, 4, None)]
    for *case, kib, expected in [*registers, *memory_or_warps]:
        assert compiled_kernel.programs(*case, kib * 1024) == expected


def test_which_advisories_say_that_products_are_serialised():
    injected = "ptxas info : (C7519) warpgroup.arrive is injected in around line 3187 by compiler"
    serialised = "ptxas info : (C7515) Potential Performance Loss: wgmma.mma_async instructions are serialized"
    assert machine_code.advisories(f"{injected}\n{serialised}\nptxas info : Used 128 registers") == [serialised]


def test_missing_fences_are_found():
    whole = ["stmatrix.sync", "fence.proxy.async.shared::cta;", "bar.sync 2, 128;", "mbarrier.arrive.shared::cta.b64"]
    assert static_hopper.missing_fence("\n".join(whole)) == ""
    for missing in (1, 2):
        assert "mbarrier" in static_hopper.missing_fence("\n".join(whole[:missing] + whole[missing + 1 :]))
    swapped = [whole[0], whole[2], whole[1], whole[3]]
    assert "mbarrier" in static_hopper.missing_fence("\n".join(swapped))
