"""Public calls, launched without compilation: directly from the cache, with exactly the arguments that Triton gets.

The stand-in driver checks each launch against the specialisation of its kernel.
"""

import os
import random

import pytest
import torch
from triton.runtime.jit import JITFunction

from sigattn.ops.triton import launch_cache, tuning
from tests.ops import calls, standin_driver
from tests.ops.calls import Call

SMALL_HEADS = {k: tuning.HOPPER_CONFIGS[k]._replace(min_keys=1, min_fill=0) for k in (tuning.FWD_64, tuning.FUSED)}
EVERYTHING = "SIGATTN_FUZZ_EXAMPLES" in os.environ
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
KINDS += [(90, c, {}) for c in (calls.all_calls() if EVERYTHING else random.Random(0).sample(calls.all_calls(), 6))]


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
        launch_cache.clear()
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
