"""Machine code of the kernels, compiled for absent GPUs in subprocesses without the interpreter."""

import importlib.util
import json
import os
import random
import subprocess
import sys

import pytest

from benchmarks import hopper_model, machine_code, static, static_hopper, tile_shapes
from sigattn.ops.triton import tuning

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

CODE = """
import dataclasses, json, sys
from benchmarks import static
from sigattn.ops.triton import tuning
for case in json.loads(sys.argv[1]):
    options = case.pop() if isinstance(case[-1], dict) else {}
    if "config" in options:
        options["config"] = tuning.Config(*options["config"])
    print(json.dumps(dataclasses.asdict(static.compile_kernel(*case, **options))))
"""


def compiled(cases, advised=0):
    """Compile in a subprocess; ``advised``: number of last cases whose products ptxas is expected to serialise."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps(cases)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    for i, report in enumerate(reports):
        serialised = i >= len(cases) - advised
        assert bool(report["advisories"]) == serialised, {k: v for k, v in report.items() if k != "loops"}
    return reports


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


def test_default_configurations():
    """No spills in loops, shared memory within the limit, tensor cores used, few special-function instructions."""
    pairs = {80: [(128, True)], 90: [(64, False), (128, True)], 100: [(64, False)]}
    if EVERYTHING:
        pairs = {a: [(d, causal) for causal in (False, True) for d in DIMS] for a in SHARED}
    each = [(architecture, *pair) for architecture in pairs for pair in pairs[architecture]]
    cases = [(k, a, "bfloat16", d, causal) for a, d, causal in each for k in kernels(a, d, "bfloat16")]
    for (_, architecture, *_, causal), report in zip(cases, compiled(cases), strict=True):
        what = {k: v for k, v in report.items() if k != "loops"}
        assert report["spills"] <= (12 if architecture == 90 else 0), what  # a few addresses, on the way into a loop
        assert report["loops"][0]["spills"] == 0, what
        # the causal forward at D = 256 spills 5 in the loop over the edge of the mask
        assert max(loop["spills"] for loop in report["loops"]) <= (5 if report["head_dim"] == 256 else 0), what
        assert report["shared"] <= SHARED[architecture], what
        if architecture == 90 and report["head_dim"] <= 128:  # σ of one overlaps with products of another
            assert report["programs"] >= 2, what
        expected = {80: "HMMA", 90: "HGMMA", 100: "UTC"}[architecture]
        if report["head_dim"] <= 128 or architecture == 90:
            assert report["tensor_instructions"].startswith(expected), what
        inner = report["loops"][0]
        if report["head_dim"] == 64:
            assert inner["special"] <= 1.15, what
        # at most the few comparisons of addresses: a mask would take two instructions for each score
        assert inner["selects"] < (0.75 if report["head_dim"] <= 128 else 1.1), what
        if causal:
            assert max(loop["selects"] for loop in report["loops"]) > 0.9, what  # and the edges do have one


def test_decoding():
    """Contiguous and in pages, plain and with every option: tensor cores used, nothing spilled."""
    pages = {"TABLE": True, "LEFT_PADDING": True, "HAS_LEFT": True, "SLOPES": True, "BIAS": "tensor"}
    each = [(t, d, o) for t in ("bfloat16", "float16") for d in DIMS for o in ({}, pages)]
    cases = [("decode", architecture, t, d, False, o) for architecture in SHARED for t, d, o in each]
    # as many rows as wgmma takes
    cases += [("decode", 90, "bfloat16", d, False, {"config": tuning.decode_config(d, 2, 64)}) for d in DIMS]
    if not EVERYTHING:  # both dtypes and sizes, one contiguous and one in pages, on each of the newer architectures
        cases = [c for c in cases if (c[1], c[2], c[3]) in {(90, "bfloat16", 64), (100, "float16", 128)}]
    for (_, architecture, *_), report in zip(cases, compiled(cases), strict=True):
        what = {k: v for k, v in report.items() if k != "loops"}
        assert report["spills"] == 0, what
        assert report["shared"] <= SHARED[architecture] // 2, what  # two programs on each multiprocessor
        assert report["tensor_instructions"] == ("HGMMA" if report["config"][0] == 64 else "HMMA"), what


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
    compiled(options_of_hopper(dtype, head_dim))


def test_some_products_are_asynchronous_on_hopper():
    """A sample of the above; without the volatile ``tile.zero_accumulator`` ptxas serialises, which the check finds."""
    cases = [case for dtype, d in TENSOR_CORES if d != 64 for case in options_of_hopper(dtype, d)]
    compiled([*random.sample(cases, 3), (tuning.FWD, 90, "bfloat16", 64, False, {"WGMMA": False})], advised=1)


@pytest.mark.skipif(not EVERYTHING, reason="long; make test-kernels runs it")
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kernel", KERNELS)
def test_candidates_of_tune(kernel, head_dim):
    """Asynchronous, within shared memory, and nearly nothing spilled."""
    cases = []
    for config in tile_shapes.candidates(kernel, head_dim):
        parts = [{"grad_value": None}, {"grad_key": None}] if config.split_dkdv else [{}]
        cases += [(kernel, 90, "bfloat16", head_dim, False, {"config": config, **part}) for part in parts]
    for report in compiled(cases):
        what = {k: v for k, v in report.items() if k != "loops"}
        assert report["shared"] <= SHARED[90], what
        assert report["spills"] <= 8, what


@pytest.mark.skipif(not EVERYTHING, reason="long; make test-kernels runs it")
@pytest.mark.parametrize("architecture", SHARED)
def test_float32_configurations(architecture):
    cases = [
        (k, architecture, "float32", d, causal)
        for d in DIMS
        for k in kernels(architecture, d, "float32")
        for causal in (False, True)
    ]
    for report in compiled(cases):
        what = {k: v for k, v in report.items() if k != "loops"}
        assert report["spills"] == 0, what
        assert report["shared"] <= SHARED[architecture], what


def test_every_option_compiles():
    """For a Hopper GPU, what the interpreter has run, in float16: several options at once, a compilation takes seconds.

    ``test_products_are_asynchronous_on_hopper`` compiles each alone.
    """
    score = {
        "MASK": "added",
        "NEED_MASK": "stored",
        "BIAS": "tensor",
        "SHIFT": "tensor",
        "grad_bias": "*fp32",
        "GROUP": 4,
    }
    options = [
        {
            **score,
            "SLOPES": True,
            "grad_slopes": "*fp32",
            "HAS_LEFT": True,
            "SOFTCAP": True,
            "DROPOUT": True,
            "GROUP": 4,
        },
        {"BIAS": "length", "SHIFT": "length", "VARLEN": True, "MASK": "bool"},
        {"MASK": "bool", "LENGTHS": True, "SIGMOID": "fast"},
        {"MASK": "added", "NEED_MASK": "added", "D": 40, "DV": 72},
        {"BLOCK_Q": 128, "BLOCK_K": 128},
    ]
    small = {"config": tuning.Config(64, 32, 4, 1)}  # compiled three times as fast
    cases = [(k, 90, "float16", 64, True, {**small, **o}) for o in options for k in KERNELS]
    if not EVERYTHING:  # tests/ops/compiled draws among all others
        cases = [*cases[:3], cases[4]]
    cases += [(k, 90, "float32", 64, True, {"PRECISION": "tf32"}) for k in (KERNELS if EVERYTHING else KERNELS[1:2])]
    cases += [("decode", 90, "bfloat16", 64, False, {"SOFTCAP": True, "MASK": "added"})]
    assert len(compiled(cases)) == len(cases)


@pytest.mark.parametrize(
    ("architecture", "registers", "warps", "shared", "expected"),
    [
        (90, 128, 8, 80, 2),
        (90, 129, 8, 80, 1),
        (90, 159, 4, 73, 3),
        (90, 255, 4, 64, 2),
        (90, 64, 4, 112, 2),
        (90, 64, 4, 113, 2),
        (90, 64, 4, 114, 1),
        (80, 32, 4, 0, 16),
        (86, 40, 4, 8, 11),
        (86, 32, 4, 4, 12),
        (75, 32, 4, 4, None),
    ],
)
def test_programs_on_a_multiprocessor(architecture, registers, warps, shared, expected):
    """Limited by registers, shared memory or warps, as in NVIDIA's occupancy calculator."""
    assert hopper_model.programs(architecture, registers, warps, shared * 1024) == expected


def test_time_of_a_score():
    """Two programs overlap, one does not, and copies are the limit where few rows share them."""
    body = [("HGMMA.64x64x16.F32.BF16", " R24, gdesc[UR4], R24")] * 4 + [("FFMA", " R1, R2, R3, R4")] * 320
    body += [("HGMMA.64x64x16.F32.BF16", " R88, R132, gdesc[UR16].tnspB, R88")] * 4
    loop = hopper_model.loop_of(body, 32.0)  # a tile of 64 × 64 in four warps, D = 64
    cycles = loop.cycles(2, 64)
    assert loop.tensor_cycles == cycles["tensor"] == 1 / 16
    assert loop.operand_bytes == 4 + 2
    assert cycles["issue"] == 328 / 32 / 128
    rows = {"rows": 128, "row_bytes": 256}
    assert loop.time(cycles, 1, **rows, overlapping=False) == 1 / 16 + 328 / 32 / 128
    assert (
        loop.time(cycles, 2, **rows, overlapping=False) == loop.time(cycles, 1, **rows, overlapping=True) == 328 / 4096
    )
    assert loop.time(cycles, 2, 64, 256, overlapping=False) == pytest.approx(4 * 132 / 5120)
    narrow = hopper_model.loop_of([("HGMMA.64x32x16.F32.BF16", " R24, gdesc[UR4], RZ, !UPT")], 16.0)
    assert narrow.tensor_cycles * 2048 == 3072 / 128  # its operands take longer than its product


HOPPER = """
import dataclasses, json, sys
from benchmarks import static_hopper
for report in static_hopper.compile_all(json.loads(sys.argv[1])):
    print(json.dumps(dataclasses.asdict(report)))
"""


def test_hopper_kernels():
    """Asynchronous products, few spills, masks only at the edges."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    head_dims = json.dumps([64, 128] if EVERYTHING else [64])
    done = subprocess.run([sys.executable, "-c", HOPPER, head_dims], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    for report in map(json.loads, done.stdout.splitlines()):
        what = {k: v for k, v in report.items() if k != "loops"}
        assert not report["advisories"], what
        assert report["spills"] <= 16, what  # a few addresses, outside the loop
        assert report["shared"] <= SHARED[90], what
        assert report["tensor_instructions"] == "HGMMA", what
        assert report["loops"][0]["special"] <= 1.15, what


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
