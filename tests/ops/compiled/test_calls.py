"""Launches of every public call, on every architecture: they compile, fit and spill little in their loops, and ptxas
serialises none of their tensor core instructions.

A run of the tests has one call, or SIGATTN_FUZZ_EXAMPLES (``make test-kernels EXAMPLES=…``), by SIGATTN_SEED. A
call takes about five seconds, and there are thousands.
"""

import os
import random

import pytest
import torch

from benchmarks import machine_code
from tests.ops import calls, standin_driver
from tests.ops.calls import Call

EXAMPLES = int(os.environ.get("SIGATTN_FUZZ_EXAMPLES", "0"))
ARCHITECTURES = tuple(standin_driver.SHARED)

# What did not fit: 360,448 bytes of an H200's 232,448; a gradient of the mask in the backward pass; small memories.
ONCE_TOO_LARGE = [
    (90, Call(("float32 mask with gradient",), d=128)),
    (90, Call(("float32 mask",), d=64)),
    (86, Call(("bool mask",), d=128)),
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


def test_a_mask_on_amd():
    """No kernel has PTX there: the compiler would end the process."""
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
