"""Direct launches from the cache pass exactly Triton's arguments."""

import os

import pytest
import torch
from triton.runtime.jit import JITFunction

from sigattn.ops.attention import DENSE
from sigattn.ops.gradients import NeedsGrad
from sigattn.ops.kvcache import KV_CACHE
from sigattn.ops.problem import KVCacheProblem, Problem, VarlenProblem
from sigattn.ops.triton import launch_cache, tuning
from tests.ops import standin_driver

EVERYTHING = "SIGATTN_FUZZ_EXAMPLES" in os.environ
# options of the problem, architecture, settings of the tables
KINDS = {
    "plain": ({}, 80, {}),
    "causal": ({"right": 0}, 90, {}),
    "window, softcap, scale": ({"left": 3, "right": 5, "softcap": 4.0, "scale": 0.3}, 86, {}),
    "bias": ({"bias": torch.tensor(-1.0, dtype=torch.float64)}, 120, {}),
    "AMD": ({"right": 0}, "gfx942", {}),
    "TMA": ({"right": 0}, 90, {"tma": True}),
    "head of 40": ({"d": 40}, 90, {}),
    "dK and dV apart": ({"d": 256}, 90, {}),
    "Gluon": ({"right": 0, "d": 128}, 90, {"TMA_MIN_WEIGHTS": 0}),
    "Gluon, head of 80": ({"d": 80}, 90, {"TMA_MIN_WEIGHTS": 0}),
    "Gluon, normalize": ({"d": 128, "bias": (1, 4, 1, 1), "normalize": True}, 90, {"TMA_MIN_WEIGHTS": 0}),
    "normalize": ({"right": 0, "normalize": True}, 90, {}),
    "mask, ALiBi": ({"attn_mask": (2, 1, 130, 130), "alibi_slopes": (1, 4, 2)}, 90, {}),
    "bias of heads, lengths": ({"bias": (1, 4, 1, 1), "key_lengths": (2,)}, 90, {}),
    "packed": ({"layout": "packed"}, 90, {}),
    "decoding": ({"layout": "cache"}, 90, {}),
    "decoding, normalize": ({"layout": "cache", "normalize": True}, 90, {}),
}


@pytest.fixture(params=KINDS)
def kind(request, monkeypatch):
    """Yield the options of a kind of call and its architecture, with its tables patched."""
    options, architecture, settings = KINDS[request.param]
    if "tma" in settings:
        in_force = tuning.kernel_config
        monkeypatch.setattr(tuning, "kernel_config", lambda *given: in_force(*given)._replace(tma=True))
    for name, value in settings.items():
        if name != "tma":
            monkeypatch.setattr(tuning, name, value)
    return dict(options), architecture


def call(options, dtype=torch.bfloat16):
    """Run both passes on new tensors, or decode; return the tensors by name."""
    of_type = {"attn_mask": torch.bool, "key_lengths": torch.int32}
    fields = {
        name: torch.zeros(x, dtype=of_type.get(name, torch.float32)) if isinstance(x, tuple) else x
        for name, x in options.items()
        if name not in ("d", "layout")
    }
    layout, d = options.get("layout"), options.get("d", 64)
    q, k, v, grad_out = (torch.zeros(2, 130, 4, d, dtype=dtype) for _ in range(4))
    if layout == "cache":
        fields |= {"seqlens": torch.tensor([7, 130], dtype=torch.int32), "bias": torch.tensor(-1.0)}
        problem = KVCacheProblem(q[:, :1], k, v, **fields)
        result = KV_CACHE.backends["triton"].forward(problem, None)
        return problem._asdict() | result._asdict()
    if layout == "packed":
        q, k, v, grad_out = (t.flatten(0, 1) for t in (q, k, v, grad_out))
        starts = torch.tensor([0, 100, 260], dtype=torch.int32)
        problem = VarlenProblem(q, k, v, None, None, None, starts, starts, None, 160, 160, **fields)
    else:
        q, k, v, grad_out = (t.transpose(1, 2) for t in (q, k, v, grad_out))
        problem = Problem(q, k, v, **fields)
    backend = DENSE.backends["triton"]  # also of packed problems
    result = backend.forward(problem, None)
    gradients = backend.backward(problem, grad_out, result, NeedsGrad())
    named = {f"grad_{name}": t for name, t in gradients._asdict().items()}
    return problem._asdict() | result._asdict() | named | {"grad_out": grad_out}


def described(launched, tensors):
    """Return a launch with tensors and descriptors replaced by their names, temporaries by their shapes."""

    def readable(x):
        if isinstance(x, torch.Tensor):
            known = ((name, t) for name, t in tensors.items() if isinstance(t, torch.Tensor) and t.numel())
            names = [name for name, t in known if t.data_ptr() == x.data_ptr()]
            return names[0] if names else (x.shape, x.stride(), x.dtype)
        if hasattr(x, "base"):
            return type(x), {name: readable(value) for name, value in vars(x).items()}
        if isinstance(x, tuple):
            return [readable(field) for field in x]
        return x

    return launched.name, launched.grid, {name: readable(x) for name, x in launched.arguments.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16] if EVERYTHING else [torch.bfloat16])
def test_a_direct_launch_passes_what_triton_passes(kind, monkeypatch, dtype):
    """The stand-in driver also checks each launch against the specialisation of its kernel."""
    options, architecture = kind
    with standin_driver.gpu(architecture, compiles=False) as launched:
        monkeypatch.setattr(tuning, "DIRECT_LAUNCH", False)
        tensors = call(options, dtype)
        expected = [described(x, tensors) for x in launched]
        assert expected
        monkeypatch.setattr(tuning, "DIRECT_LAUNCH", True)
        launch_cache.clear()
        for made_before in range(4):
            if made_before == 2:  # seen and kept: Triton no longer inspects the arguments
                monkeypatch.setattr(JITFunction, "run", lambda *_, **__: pytest.fail("launched through Triton"))
            launched.clear()
            tensors = call(options, dtype)
            assert [described(x, tensors) for x in launched] == expected


def test_short_calls_have_no_descriptors(monkeypatch):
    """They would take more of the host's time than they gain on the GPU."""
    with standin_driver.gpu(90, compiles=False) as launched:
        call({"d": 128})
        short = [x.name for x in launched], any(hasattr(x, "base") for y in launched for x in y.arguments.values())
        monkeypatch.setattr(tuning, "TMA_MIN_WEIGHTS", 2 * 4 * 130 * 130)
        launched.clear()
        call({"d": 128})
        assert short == (["fwd_kernel", "bwd_dq_kernel", "bwd_dkdv_kernel"], False)
        assert [x.name for x in launched] == ["hopper_fwd_kernel", "hopper_bwd_dq_kernel", "hopper_bwd_dkdv_kernel"]
