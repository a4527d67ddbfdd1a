"""What every public call would launch, on every architecture: it compiles, fits, spills little in its loops,
and ptxas serialises none of its tensor core instructions.

Two calls in each run of the tests; with SIGATTN_FUZZ_EXAMPLES (``make test-kernels EXAMPLES=…``) so many of all, drawn
by SIGATTN_SEED. A call takes some five seconds, and there are thousands.
"""

import os
import random

import pytest

from sigattn.bench import machine_code
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


def sample():
    everything = [(architecture, call) for architecture in ARCHITECTURES for call in calls.all_calls()]
    if not EXAMPLES:
        return [ONCE_TOO_LARGE[0], ONCE_TOO_LARGE[-1]]
    chosen = random.Random(os.environ.get("SIGATTN_SEED", "0"))  # the same in each process that shares the work
    return ONCE_TOO_LARGE + chosen.sample(everything, min(EXAMPLES, len(everything)))


@pytest.mark.parametrize(("architecture", "call"), sample(), ids=str)
def test_what_is_launched_compiles_and_fits(architecture, call):
    """The stand-in driver refuses grids and arguments that do not match; a step down would be a warning, an error."""
    with standin_driver.gpu(architecture) as launched:
        call()
        assert launched
        for x in launched:
            assert x.shared <= standin_driver.SHARED[architecture]
            if isinstance(architecture, int):
                assert spilled(x) <= most_spilled(call), x.name
            if architecture == 90:
                assert not x.advisories(), x.name


def most_spilled(call):
    """Return how many spills loops may have: at the edges of heads of 256 a few addresses, and more with options."""
    wide = max(call.d, call.dv or 0) > 128
    if set(call.options) <= {"causal"}:
        return 5 if wide else 0
    return 80 if wide else 8


def spilled(launched):
    """Count the loads and stores of spilled registers in the innermost loops that compute weights."""
    _, code = machine_code.disassemble(launched.compiled.asm["cubin"])
    return sum(op.startswith(("STL", "LDL")) for body in machine_code.inner_loops(code) for op, _ in body)


def test_every_option_reaches_the_kernels():
    """Without compilation: each option alone, with the pointers, strides and specialisations that it has."""
    chosen = random.Random(0)
    for call in calls.all_calls() if EXAMPLES else chosen.sample(calls.all_calls(), 12):
        with standin_driver.gpu(90, compiles=False) as launched:
            call()
            assert {"dense": 3, "packed": 3, "cached": 1}[call.kind] <= len(launched) <= 4, call
