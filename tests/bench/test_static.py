"""What the compiler makes of the kernels, for GPUs that are not there: in a process without the interpreter."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from sigattn.bench import static, static_hopper
from sigattn.ops.triton import tuning

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

CODE = """
import dataclasses, json, sys
from sigattn.bench import static
for case in json.loads(sys.argv[1]):
    options = case.pop() if isinstance(case[-1], dict) else {}
    print(json.dumps(dataclasses.asdict(static.compile_kernel(*case, **options))))
"""


def compiled(cases):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps(cases)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def kernels(architecture, head_dim, dtype):
    return [k for k in static.kernels_of(architecture, head_dim, dtype) if k != tuning.DECODE]


KERNELS = (tuning.FORWARD, tuning.KEYS, tuning.QUERIES)
SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
DIMS = (16, 32, 64, 128, 256) if "SIGATTN_FUZZ_EXAMPLES" in os.environ else (64, 128)


@pytest.mark.parametrize("architecture", SHARED)
@pytest.mark.parametrize("causal", [False, True])
def test_default_configurations(architecture, causal):
    """No spills, shared memory that is there, tensor cores used, hardly more than one special-function instruction."""
    cases = [(k, architecture, "bfloat16", d, causal) for d in DIMS for k in kernels(architecture, d, "bfloat16")]
    for report in compiled(cases):
        what = {k: v for k, v in report.items() if k != "loops"}
        assert report["spills"] == 0, what
        assert report["shared"] <= SHARED[architecture], what
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


@pytest.mark.parametrize("architecture", SHARED)
def test_decoding(architecture):
    """Contiguous and in pages, plain and with every option: tensor cores used, nothing spilled."""
    pages = {"TABLE": True, "FIRST": True, "HAS_LEFT": True, "SLOPES": True, "BIAS": "tensor"}
    cases = [
        ("decode", architecture, t, d, False, o) for t in ("bfloat16", "float16") for d in DIMS for o in ({}, pages)
    ]
    for report in compiled(cases):
        what = {k: v for k, v in report.items() if k != "loops"}
        assert report["spills"] == 0, what
        assert report["shared"] <= SHARED[architecture] // 2, what  # two programs on each multiprocessor
        assert "HMMA" in report["tensor_instructions"], what


@pytest.mark.skipif("SIGATTN_FUZZ_EXAMPLES" not in os.environ, reason="long; make test-kernels runs it")
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
    """For a Hopper GPU, what the interpreter has run: each option on, in float16."""
    options = [
        {"BIAS": "tensor", "SHIFT": "tensor"},
        {"BIAS": "length", "SHIFT": "length", "VARLEN": True, "BOTTOM_RIGHT": True},
        {"MASK": "bool", "LENGTHS": True},
        {"MASK": "added", "NEED_MASK": "added"},
        {"MASK": "added", "NEED_MASK": "stored", "NEED_BIAS": True, "BIAS": "tensor", "SHIFT": "tensor"},
        {"SLOPES": True, "NEED_SLOPES": True, "HAS_LEFT": True},
        {"DROPOUT": True, "GROUP": 4},
        {"SIGMOID": "fast"},
        {"ADD_QUERY": True},
        {"SOFTCAP": True},
        {"BLOCKS": True},
        {"D": 40, "DV": 72, "BLOCK_DV": 128},
    ]
    cases = [(k, 90, "float16", 64, True, o) for o in options for k in KERNELS]
    cases += [(k, 90, "float32", 64, True, {"PRECISION": "tf32"}) for k in KERNELS]
    cases += [
        ("decode", 90, "bfloat16", 64, False, o) for o in ({"SOFTCAP": True}, {"MASK": "bool"}, {"MASK": "added"})
    ]
    cases += [(k, 90, "float16", 64, True, {"MASK": "bool", "VARLEN": True, "BOTTOM_RIGHT": True}) for k in KERNELS]
    assert len(compiled(cases)) == len(cases)


FUSED = f"{tuning.FUSED}, Gluon"
HOPPER = """
import dataclasses, json
from sigattn.bench import static_hopper
for report in static_hopper.compile_all((64, 128)):
    print(json.dumps(dataclasses.asdict(report)))
"""


def test_hopper_kernels():
    """Tensor cores asynchronous (it raises if not), nothing spilled to speak of, masks at the edges alone."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", HOPPER], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    for report in map(json.loads, done.stdout.splitlines()):
        what = {k: v for k, v in report.items() if k != "loops"}
        # a few addresses, outside the loop; with everything in one kernel and heads of 128, some numbers inside it too
        assert report["spills"] <= (90 if (report["kernel"], report["head_dim"]) == (FUSED, 128) else 16), what
        assert report["shared"] <= SHARED[90], what
        assert report["tensor_instructions"] == "HGMMA", what
        assert report["loops"][0]["special"] <= 1.15, what


def test_what_is_handed_over_early():
    whole = ["stmatrix.sync", "fence.proxy.async.shared::cta;", "bar.sync 2, 128;", "mbarrier.arrive.shared::cta.b64"]
    assert static_hopper.handed_over_early("\n".join(whole)) == ""
    for missing in (1, 2):
        assert "mbarrier" in static_hopper.handed_over_early("\n".join(whole[:missing] + whole[missing + 1 :]))
    swapped = [whole[0], whole[2], whole[1], whole[3]]
    assert "mbarrier" in static_hopper.handed_over_early("\n".join(swapped))


def test_an_unknown_architecture_is_named():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "sigattn", "bench", "static", "--architectures", "71", "--head-dims", "64"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "sigattn: this Triton's ptxas knows no architecture sm_71"
    assert "Traceback" not in done.stderr
