"""Hopper kernels in simulation, as they would be launched: correct for any order of events."""

import math
import os
import sys
import types

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from benchmarks import tile_shapes
from sigattn.ops.gradients import NeedsGrad
from sigattn.ops.hopper import launch as launch_hopper
from sigattn.ops.problem import UNLIMITED, Problem
from sigattn.ops.triton import kernel_args, launch, launch_cache, tuning
from sigattn.ops.triton.tuning import Config, HopperConfig
from tests.ops import gluon_simulator, truth
from tests.ops.truth import assert_as_good_as_formula

ORDERS = [(0, True), (1, False)]  # seed, and whether copies arrive as late as they may
if "SIGATTN_FUZZ_EXAMPLES" in os.environ:
    ORDERS = [(seed, lazy) for seed in range(4) for lazy in (True, False)]
# queries, keys: tiles that are full and not, one and many, keys that no query sees, queries that see few
SIZES = [(130, 130), (200, 330), (64, 1), (1, 257), (300, 70)]


@pytest.fixture
def simulated(monkeypatch):
    """Run the Gluon kernels in simulation, in an order of events; ``started`` has their names."""
    simulated = types.SimpleNamespace(order=(0, True), started=set())
    launch_portable, empty_like = launch_cache.launch, torch.empty_like

    def start(kernel, grid, device, options, arguments):
        name = kernel.fn.__name__
        if not name.startswith("hopper"):
            launch_portable(kernel, grid, device, options, arguments)
            return
        simulator = gluon_simulator.Simulator(simulated.order[0], lazy=simulated.order[1])
        simulator.run(sys.modules[kernel.fn.__module__], name, *grid, **arguments)
        simulated.started.add(name)

    monkeypatch.setattr(launch_cache, "launch", start)
    monkeypatch.setattr(launch_hopper, "multiprocessors", lambda device: 2)
    monkeypatch.setattr(kernel_args, "architecture", lambda device: 90)
    monkeypatch.setattr(tuning, "TMA_MIN_WEIGHTS", 0)
    monkeypatch.setattr(torch, "empty_like", lambda t: empty_like(t).fill_(torch.nan))
    monkeypatch.setattr(
        launch_hopper, "descriptor", lambda t, rows, width: gluon_simulator.Descriptor(t, [1, 1, rows, width])
    )
    return simulated


def problem_of(n, keys, causal, dtype, d=72, heads=2, key_heads=1):
    g = torch.Generator().manual_seed(n + keys)
    q, grad = torch.randn(2, 1, heads, n, d, generator=g).to(dtype).unbind()
    # (B, M, H, D) in memory, as projections give them
    k, v = torch.randn(2, 1, keys, key_heads, d, generator=g).to(dtype).transpose(2, 3).unbind()
    query_offset = keys - n if causal and keys > n else 0
    bias = torch.tensor(-math.log(keys), dtype=torch.float64)
    return Problem(q, k, v, bias, right=0 if causal else UNLIMITED, query_offset=query_offset), grad


def formula(p, dtype):
    options = {"causal": p.right == 0, "bias": p.bias, "offset": p.query_offset, "normalize": p.normalize}
    return truth.formula(p.query, p.key, p.value, dtype=dtype, **options)


def gradients(p, grad, dtype):
    leaves = [t.detach().to(dtype, copy=True).requires_grad_() for t in (p.query, p.key, p.value)]
    out = formula(p._replace(query=leaves[0], key=leaves[1], value=leaves[2]), dtype)
    return torch.autograd.grad(out, leaves, grad.to(dtype))


def check_forward(p, what=""):
    """Compare the output with the formula in float64 and in the same dtype, and return the result."""
    result = launch.forward(p)
    assert_as_good_as_formula(result.out, formula(p, torch.float64), formula(p, p.query.dtype), 1.0, what)
    return result


def check_backward(p, grad, *result, needs=(True, True, True), what=""):
    """Compare gradients in the same way; their strides are those of the operands, as the fakes announce."""
    found = launch.backward(p, grad, NeedsGrad(*needs), *result)
    exact, rough = (gradients(p, grad, dtype) for dtype in (torch.float64, p.query.dtype))
    for mine, t, r, operand in zip(found[:3], exact, rough, (p.query, p.key, p.value), strict=True):
        if mine is not None:
            assert_as_good_as_formula(mine, t, r, max(1.0, t.abs().max().item()), what)
            assert mine.stride() == operand.stride()


BACKWARD = {"hopper_bwd_dkdv_kernel", "hopper_bwd_dq_kernel"}
LARGE_HEADS = (tuning.FWD, tuning.DKDV, tuning.DQ)
OF_64 = tuning.HOPPER_CONFIGS[tuning.FWD_64]._replace(min_keys=1, min_causal_keys=1, min_fill=0)
CONFIGS = [  # kernels, their configuration, dtype and head_dim
    (LARGE_HEADS, HopperConfig(64, 2), torch.bfloat16, 72),
    ((tuning.FUSED,), HopperConfig(64, 3, "rcp"), torch.bfloat16, 64),
    ((tuning.FUSED,), HopperConfig(64, 2, "paired-rcp", persistent_keys=300), torch.float16, 40),
    ((tuning.FWD_64,), OF_64, torch.bfloat16, 64),
    ((tuning.FWD_64,), OF_64, torch.bfloat16, 40),
    (LARGE_HEADS, HopperConfig(128, 3), torch.bfloat16, 72),
    (LARGE_HEADS, HopperConfig(64, 2, persistent_keys=300), torch.bfloat16, 72),
    (LARGE_HEADS, HopperConfig(64, 3), torch.float16, 72),
    (LARGE_HEADS, HopperConfig(64, 3, sigmoid="paired-rcp"), torch.float16, 72),
]
CALLS = [(*config, size, causal) for config in CONFIGS for size in SIZES for causal in (True, False)]
if "SIGATTN_FUZZ_EXAMPLES" in os.environ:
    CALLS = [(*call, order) for call in CALLS for order in ORDERS]
else:  # every size with the first configurations, a sample with the others; the orders in turn
    CALLS = CALLS[: 10 * len(SIZES)] + CALLS[10 * len(SIZES) :: 5]
    CALLS = [(*call, ORDERS[i // 2 % 2]) for i, call in enumerate(CALLS)]
# several turns of a program, whose third group reuses its memory for keys
CALLS += [((tuning.FUSED,), HopperConfig(64, 3), torch.bfloat16, 64, (60, 1700), False, order) for order in ORDERS]


@pytest.mark.parametrize(("kernels", "config", "dtype", "d", "size", "causal", "order"), CALLS)
def test_output_and_gradients(simulated, monkeypatch, kernels, config, dtype, d, size, causal, order):
    for kernel in kernels:
        monkeypatch.setitem(tuning.HOPPER_CONFIGS, kernel, config)
    monkeypatch.setattr(launch_hopper, "_MANY_TURNS", 1)
    simulated.order = order
    p, grad = problem_of(*size, causal, dtype, d)
    if kernels != (tuning.FUSED,):
        check_forward(p)
    if kernels != (tuning.FWD_64,):
        check_backward(p, grad)
    expected = {LARGE_HEADS: {"hopper_fwd_kernel", *BACKWARD}, (tuning.FWD_64,): {"hopper_fwd_kernel"}}
    assert simulated.started == expected.get(kernels, {"hopper_bwd_fused_kernel"})


@pytest.mark.parametrize("sigmoid", ["paired-rcp", "paired", "paired-half", "rcp"])
def test_nan_is_not_lost(simulated, monkeypatch, sigmoid):
    monkeypatch.setitem(tuning.HOPPER_CONFIGS, tuning.FWD, HopperConfig(64, 2, sigmoid=sigmoid))
    p, _ = problem_of(130, 130, False, torch.bfloat16)
    p.query[0, 0, 7, 3] = torch.nan
    out = launch.forward(p).out
    assert out[0, 0, 7].isnan().all()
    assert out.isnan().sum() == 72


def test_the_tables(simulated, monkeypatch):
    """Every configuration in the tables, with tiles of 64 and 128 features that heads fill or do not."""
    tables = {k: c._replace(min_keys=1, min_causal_keys=1, min_fill=0) for k, c in tuning.HOPPER_CONFIGS.items()}
    monkeypatch.setattr(tuning, "HOPPER_CONFIGS", tables)
    for d in (40, 64, 80, 128):
        p, grad = problem_of(150, 150, True, torch.bfloat16, d=d)
        check_forward(p)
        check_backward(p, grad)


@pytest.mark.parametrize("cache", [0, 300_000, 1 << 30])
def test_a_bias_for_each_head_and_sections_of_heads(simulated, monkeypatch, cache):
    """Sections of one head, of three key heads (the last has one), and of all."""
    monkeypatch.setattr(launch_hopper, "_CACHE", cache)
    p, grad = problem_of(130, 130, True, torch.bfloat16, heads=8, key_heads=4)
    p = p._replace(bias=torch.linspace(-7, -3, 8).view(1, 8, 1, 1))
    check_forward(p)
    check_backward(p, grad)
    assert simulated.started == {"hopper_fwd_kernel", *BACKWARD}


@pytest.mark.parametrize(
    ("size", "causal", "dtype"), [((200, 330), True, torch.bfloat16), ((130, 70), False, torch.float16)]
)
def test_normalize(simulated, monkeypatch, size, causal, dtype):
    """Also in rows whose sum underflows, in the head whose bias is -90 (or -90 in all of them, in float16)."""
    monkeypatch.setattr(tuning, "kernel_config", lambda *_: Config(256, 512, 8, 1))  # few tiles are interpreted fast
    p, grad = problem_of(*size, causal, dtype)
    low = torch.tensor([-5.0, -90.0]).view(1, 2, 1, 1) if dtype is torch.bfloat16 else torch.tensor(-90.0)
    for bias, simulated.order in zip((p.bias, low), ORDERS, strict=False):
        p = p._replace(normalize=True, bias=bias)
        check_backward(p, grad, *check_forward(p))
    assert simulated.started == {"hopper_fwd_kernel", "hopper_bwd_dq_kernel"}


GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
CANDIDATES = [(k, c) for k in tuning.HOPPER_CONFIGS for c in tile_shapes.hopper_candidates(k)]


@pytest.mark.skipif(not GPU, reason="it needs a GPU of compute capability 9.0")
@pytest.mark.parametrize(("kernel", "config"), [*CANDIDATES, *tuning.HOPPER_CONFIGS.items()])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("d", [72, 128])
def test_each_kernel_on_a_gpu(monkeypatch, kernel, config, dtype, d):
    """Every candidate, and at larger sizes the configurations in the tables, compared with the formula."""
    sizes = [*SIZES, (1024, 1024), (4096, 5000)] if config == tuning.HOPPER_CONFIGS[kernel] else SIZES
    if kernel == tuning.FWD_64 and dtype is torch.float16:
        pytest.skip("the portable kernel serves it")
    always = config._replace(min_keys=1, min_causal_keys=1, min_fill=0.0)
    monkeypatch.setattr(tuning, "HOPPER_CONFIGS", {kernel: always})
    monkeypatch.setattr(tuning, "TMA_MIN_WEIGHTS", 0)
    for size in sizes:
        for causal in (False, True):
            width = d if launch_hopper.WIDTHS[kernel] == 128 else {72: 40, 128: 64}[d]
            p, grad = problem_of(*size, causal, dtype, d=width, heads=8, key_heads=4)
            p, grad = Problem(*(t.cuda() if isinstance(t, torch.Tensor) and t.dim() else t for t in p)), grad.cuda()
            what = f"{kernel} {config} {tuple(p.query.shape)} {tuple(p.key.shape)} {p.right}"
            assert launch_hopper.supports(kernel_args.prepare(p), kernel, grad)
            if kernel in (tuning.FWD, tuning.FWD_64):
                check_forward(p, what)
            else:
                needs = [kernel in (k, tuning.FUSED) for k in (tuning.DQ, tuning.DKDV, tuning.DKDV)]
                check_backward(p, grad, needs=needs, what=what)


def plain(n=70, keys=70, causal=True, dtype=torch.bfloat16, d=64, **options):
    return problem_of(n, keys, causal, dtype, d)[0]._replace(**options)


LARGE = plain(130, 130, d=72)
SERVED = {  # by the forward kernel of heads of more than 64, and by one kernel for all gradients or the forward of 64
    "heads of 72": (LARGE, {"hopper_fwd_kernel", "hopper_bwd_dkdv_kernel", "hopper_bwd_dq_kernel"}),
    "heads of 64": (plain(), {"hopper_fwd_kernel", "hopper_bwd_fused_kernel"}),
    "float16": (plain(dtype=torch.float16), {"hopper_bwd_fused_kernel"}),
    "normalised": (plain(normalize=True), set()),
    "deterministic": (plain(deterministic=True), {"hopper_fwd_kernel"}),
    "few keys": (plain(keys=69), set()),
    "few keys, all visible": (plain(causal=False), set()),
    "heads of 32": (plain(d=32), set()),
    "float32": (plain(130, 130, dtype=torch.float32, d=72), set()),
    "window": (LARGE._replace(left=5), set()),
    "softcap": (LARGE._replace(softcap=2.0), set()),
    "bias of rows": (LARGE._replace(bias=torch.zeros(1, 2, 130, 1)), set()),
    "slopes": (LARGE._replace(alibi_slopes=torch.ones(1, 2, 2)), set()),
    "mask": (LARGE._replace(attn_mask=torch.ones(1, 1, 130, 130, dtype=torch.bool)), set()),
    "lengths": (LARGE._replace(key_lengths=torch.tensor([100])), set()),
    "dropout": (LARGE._replace(seed=torch.tensor(0), dropout_p=0.5), set()),
    "smaller values": (LARGE._replace(value=LARGE.value[..., :32]), set()),
    "columns first": (LARGE._replace(query=LARGE.query.mT.contiguous().mT), set()),
    "one key for all": (LARGE._replace(key=LARGE.key[:, :, :1].expand(1, 1, 130, 72)), set()),
}


@pytest.mark.parametrize("call", SERVED)
def test_which_calls_these_kernels_serve(simulated, monkeypatch, call):
    """No kernel runs: the names of those that are launched."""
    few = {"min_keys": 71, "min_causal_keys": 70, "min_fill": 0}
    for kernel in (tuning.FWD_64, tuning.FUSED):
        monkeypatch.setitem(tuning.HOPPER_CONFIGS, kernel, tuning.HOPPER_CONFIGS[kernel]._replace(**few))
    monkeypatch.setattr(launch_cache, "launch", lambda kernel, *_: simulated.started.add(kernel.fn.__name__))
    p, served = SERVED[call]
    result, grad = launch.forward(p), torch.ones(*p.query.shape[:3], p.value.shape[3], dtype=p.query.dtype)
    launch.backward(p, grad, NeedsGrad(), *result)
    assert {name for name in simulated.started if name.startswith("hopper")} == served


OPERANDS = (True, True, True)
# key heads: one tile for two multiprocessors, or two; is_causal: half of their keys are hidden; gradients needed
BACKWARD_PASSES = [
    *((key_heads, causal, OPERANDS) for key_heads in (1, 2) for causal in (False, True)),
    *((2, False, needs) for needs in ((True, True, False), (*OPERANDS, True))),
]


@pytest.mark.parametrize(("key_heads", "causal", "needs"), BACKWARD_PASSES)
def test_which_backward_passes_take_one_kernel(simulated, monkeypatch, key_heads, causal, needs):
    monkeypatch.setitem(tuning.HOPPER_CONFIGS, tuning.FUSED, HopperConfig(64, 3, "rcp", min_fill=0.85))
    check_backward(*problem_of(70, 70, causal, torch.bfloat16, d=64, key_heads=key_heads), needs=needs)
    assert bool(simulated.started) == ((key_heads, causal, needs) == (2, False, OPERANDS))
