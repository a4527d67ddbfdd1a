"""Launches of every public call, on every architecture, checked by the stand-in driver.

Compiled, they fit, spill little in their loops, and ptxas serialises none of their tensor core instructions. A run of
the tests has one, or SIGATTN_FUZZ_EXAMPLES (``make test-kernels EXAMPLES=…``), by SIGATTN_SEED: each takes about five
seconds, and there are thousands. Directly from the cache, not compiled, they have the arguments that Triton gets.
"""

import os
import random

import pytest
import torch
from triton.runtime.jit import JITFunction

from benchmarks import machine_code
from sigattn.ops import call_cache
from sigattn.ops.triton import tuning
from tests.ops import calls, standin_driver
from tests.ops.calls import Call

EXAMPLES = int(os.environ.get("SIGATTN_FUZZ_EXAMPLES", "0"))
ARCHITECTURES = tuple(standin_driver.SHARED)

# What did not fit: 360,448 bytes of an H200's 232,448; a gradient of the mask in the backward pass; small memories.
ONCE_TOO_LARGE = [
    (86, Call(("bool mask",), d=128)),
    (90, Call(("float32 mask with gradient",), d=128)),
    (90, Call(("float32 mask",), d=64)),
    (86, Call(("float32 mask with gradient",), d=64)),
    (100, Call(("bool mask",), d=128)),
    (86, Call(d=256, n=64, kind="cached")),
]
EXTRA = "slopes", "bias of rows", "window", "softcap", "dropout", "GQA"
TOGETHER = [
    (90, Call(("mask with gradient", *EXTRA), torch.float16)),
    (90, Call(("bool mask", "lengths", "fast"), torch.float16)),
    (90, Call(("mask with gradient",), torch.float16, d=40, dv=72)),
]


def sample():
    everything = [(architecture, call) for architecture in ARCHITECTURES for call in calls.all_calls()]
    if not EXAMPLES:
        return ONCE_TOO_LARGE[:1]
    chosen = random.Random(os.environ.get("SIGATTN_SEED", "0"))  # the same in each process that shares the work
    return ONCE_TOO_LARGE + TOGETHER + chosen.sample(everything, min(EXAMPLES, len(everything)))


@pytest.mark.parametrize(("architecture", "call"), sample(), ids=str)
def test_what_is_launched_compiles_and_fits(architecture, call):
    """The stand-in driver rejects mismatched grids and arguments; smaller tiles would be a warning, an error here."""
    with standin_driver.gpu(architecture) as launched:
        call()
        assert launched
        for x in launched:
            assert x.binary.shared <= standin_driver.SHARED[architecture]
            if isinstance(architecture, int):
                assert spilled(x) <= most_spilled(call), x.name
            if architecture == 90:  # ptxas serialises no asynchronous product
                assert not machine_code.advisories(machine_code.ptxas_log(x.compiled.asm["ptx"], 90)), x.name


def test_a_mask_on_amd(monkeypatch):
    """No kernel has PTX there: the compiler would end the process."""
    monkeypatch.setattr(tuning, "kernel_config", lambda *_: tuning.Config(16, 16, 4, 1))  # small ones compile fast
    with standin_driver.gpu("gfx942") as launched:
        Call(("mask",), d=16)()
    assert {x.name for x in launched} == {"fwd_kernel", "bwd_dq_kernel", "bwd_dkdv_kernel"}


def most_spilled(call):
    """Return the allowed spills of loops: a few addresses at the edges of heads of 256, more with options."""
    width = max(call.d, call.dv or 0)
    if call.dtype is torch.float32 and width > 64:  # numbers split in two: in the loop over the last tile, at most
        return 60
    wide = width > 128
    if set(call.options) <= {"causal"}:
        return 5 if wide else 0
    return 96 if wide or len(call.options) > 2 else 8


def spilled(launched):
    """Count the loads and stores of spilled registers in the innermost loops that compute weights."""
    _, code = machine_code.disassemble(launched.compiled.asm["cubin"])
    return sum(op.startswith(("STL", "LDL")) for body in machine_code.inner_loops(code) for op, _ in body)


SMALL_HEADS = {k: tuning.HOPPER_CONFIGS[k]._replace(min_keys=1, min_fill=0) for k in (tuning.FWD_64, tuning.FUSED)}
KINDS = [  # architecture, call, settings of the tables
    (80, Call(), {}),
    (86, Call(("window", "softcap", "scale")), {}),
    (90, Call(("causal",)), {}),
    (90, Call(("causal",)), {"tma": True}),
    (90, Call(d=40), {}),
    (90, Call(d=256), {}),  # dK and dV apart
    (90, Call(("causal",), d=128), {"TMA_MIN_WEIGHTS": 0}),  # Gluon
    (90, Call(d=80), {"TMA_MIN_WEIGHTS": 0}),
    (90, Call(), {"TMA_MIN_WEIGHTS": 0, "HOPPER_CONFIGS": SMALL_HEADS}),
    (90, Call(("bias tensor", "normalize"), d=128), {"TMA_MIN_WEIGHTS": 0}),
    (90, Call(("causal", "normalize")), {}),
    (90, Call(("bool mask", "slopes")), {}),
    (90, Call(("bias tensor", "lengths")), {}),
    (90, Call(kind="packed"), {}),
    (90, Call(kind="cached"), {}),
    (90, Call(("normalize",), n=1, kind="cached"), {}),
    (120, Call(("bias",)), {}),
    ("gfx942", Call(("causal",)), {}),
]
KINDS += [(90, c, {}) for c in (calls.all_calls() if EXAMPLES else random.Random(0).sample(calls.all_calls(), 6))]


def described(launched, tensors):
    """Return a launch with tensors and descriptors replaced by their indices, temporaries by their shapes."""

    def readable(x):
        if isinstance(x, torch.Tensor):
            known = [i for i, t in enumerate(tensors) if t.numel() and t.data_ptr() == x.data_ptr()]
            return known[0] if known else (x.shape, x.stride(), x.dtype)
        if hasattr(x, "base"):
            return type(x), {name: readable(value) for name, value in vars(x).items()}
        if isinstance(x, tuple):
            return [readable(field) for field in x]
        return x

    return launched.name, launched.grid, {name: readable(x) for name, x in launched.arguments.items()}


@pytest.mark.parametrize(("architecture", "call", "settings"), KINDS, ids=str)
def test_a_direct_launch_passes_what_triton_passes(architecture, call, settings, monkeypatch):
    in_force = tuning.kernel_config
    for name, value in settings.items():
        if name == "tma":
            monkeypatch.setattr(tuning, "kernel_config", lambda *given: in_force(*given)._replace(tma=True))
        else:
            monkeypatch.setattr(tuning, name, value)
    with standin_driver.gpu(architecture, compiles=False) as launched:
        monkeypatch.setattr(tuning, "DIRECT_LAUNCH", False)
        tensors = call()
        expected = [described(x, tensors) for x in launched]
        fewest = {"dense": 3, "packed": 3, "cached": 1}[call.kind]
        if any(name == "hopper_bwd_fused_kernel" for name, *_ in expected):
            fewest = 2
        assert fewest <= len(expected) <= 4
        monkeypatch.setattr(tuning, "DIRECT_LAUNCH", True)
        call_cache.clear()
        for made_before in range(3):
            if made_before == 2:  # seen and kept: Triton no longer inspects the arguments
                monkeypatch.setattr(JITFunction, "run", lambda *_, **__: pytest.fail("launched through Triton"))
            launched.clear()
            tensors = call()
            assert [described(x, tensors) for x in launched] == expected


def test_short_calls_have_no_descriptors(monkeypatch):
    """They would take more of the host's time than they gain on the GPU."""
    for most, prefix in ((tuning.TMA_MIN_WEIGHTS, ""), (2 * 4 * 256 * 256, "hopper_")):
        monkeypatch.setattr(tuning, "TMA_MIN_WEIGHTS", most)
        with standin_driver.gpu(90, compiles=False) as launched:
            Call(d=128)()
            assert [x.name for x in launched] == [f"{prefix}{x}_kernel" for x in ("fwd", "bwd_dq", "bwd_dkdv")]
            assert prefix or not any(hasattr(x, "base") for y in launched for x in y.arguments.values())
