"""Hopper kernels in simulation, as they would be launched: correct for any order of events."""

import inspect
import math
import os
import types

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from benchmarks import tile_shapes
from sigattn.ops.gradients import NeedsGrad
from sigattn.ops.hopper import backward as hopper_backward
from sigattn.ops.hopper import forward as hopper
from sigattn.ops.hopper import launch as launch_hopper
from sigattn.ops.problem import UNLIMITED, Problem
from sigattn.ops.triton import kernel_args, launch, tuning
from sigattn.ops.triton.tuning import HopperConfig
from tests.ops import gluon_simulator, truth
from tests.ops.gluon_simulator import DeadlockError
from tests.ops.truth import assert_as_good_as_formula

ORDERS = [(0, True), (1, False)]  # seed, and whether copies arrive as late as they may
if "SIGATTN_FUZZ_EXAMPLES" in os.environ:
    ORDERS = [(seed, lazy) for seed in range(4) for lazy in (True, False)]
# queries, keys: tiles that are full and not, one and many, keys that no query sees, queries that see few
SIZES = [(130, 130), (200, 330), (64, 1), (1, 257), (300, 70)]


@pytest.fixture
def simulated(monkeypatch):
    """Run with every order of events; yield the list of configurations to use."""

    def run(prepared, kernel, programs, **arguments):
        module = next(m for m in simulated.modules if hasattr(m, kernel.fn.__name__))
        simulator = gluon_simulator.Simulator(simulated.order[0], lazy=simulated.order[1])
        simulator.run(module, kernel.fn.__name__, programs, **arguments)
        simulated.started.append(kernel.fn.__name__)

    simulated = types.SimpleNamespace(order=(0, True), modules=[hopper, hopper_backward], started=[])
    empty_like = torch.empty_like
    monkeypatch.setattr(launch_hopper, "multiprocessors", lambda device: 2)
    monkeypatch.setattr(kernel_args, "architecture", lambda device: 90)
    monkeypatch.setattr(tuning, "TMA_MIN_WEIGHTS", 0)
    monkeypatch.setattr(launch_hopper, "run", run)
    monkeypatch.setattr(torch, "empty_like", lambda t: empty_like(t).fill_(torch.nan))
    monkeypatch.setattr(
        launch_hopper, "descriptor", lambda t, rows: gluon_simulator.Descriptor(t, [1, 1, rows, launch_hopper.WIDTH])
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


def calls(*configs):
    """Return every size with the first configuration, and with the others a sample."""
    every = [(*config, size, causal) for config in configs for size in SIZES for causal in (True, False)]
    first = 2 * len(SIZES)
    return every if "SIGATTN_FUZZ_EXAMPLES" in os.environ else every[:first] + every[first::3]


@pytest.mark.parametrize(
    ("config", "dtype", "size", "causal"),
    calls(
        (HopperConfig(64, 2), torch.bfloat16),
        (HopperConfig(128, 3), torch.bfloat16),
        (HopperConfig(64, 2, persistent_keys=300), torch.bfloat16),
        (HopperConfig(64, 3), torch.float16),
        (HopperConfig(64, 3, sigmoid="paired-rcp"), torch.float16),
    ),
)
def test_forward(simulated, monkeypatch, causal, size, config, dtype):
    monkeypatch.setitem(tuning.HOPPER_CONFIGS, tuning.FWD, config)
    p, _ = problem_of(*size, causal, dtype)
    for simulated.order in ORDERS:
        check_forward(p)
    assert set(simulated.started) == {"hopper_fwd_kernel"}


@pytest.mark.parametrize(
    ("config", "dtype", "size", "causal"),
    calls(
        (HopperConfig(64, 2), torch.bfloat16),
        (HopperConfig(64, 2, sigmoid="paired-rcp"), torch.bfloat16),
        (HopperConfig(128, 3), torch.float16),
        (HopperConfig(64, 2, persistent_keys=300), torch.bfloat16),
    ),
)
def test_backward(simulated, monkeypatch, causal, size, config, dtype):
    for kernel in (tuning.DKDV, tuning.DQ):
        monkeypatch.setitem(tuning.HOPPER_CONFIGS, kernel, config)
    p, grad = problem_of(*size, causal, dtype)
    for simulated.order in ORDERS:
        check_backward(p, grad)
    assert set(simulated.started) == {"hopper_bwd_dkdv_kernel", "hopper_bwd_dq_kernel"}


@pytest.mark.parametrize("sigmoid", ["paired-rcp", "paired"])
def test_nan_is_not_lost(simulated, monkeypatch, sigmoid):
    monkeypatch.setitem(tuning.HOPPER_CONFIGS, tuning.FWD, HopperConfig(64, 2, sigmoid=sigmoid))
    p, _ = problem_of(130, 130, False, torch.bfloat16)
    p.query[0, 0, 7, 3] = torch.nan
    out = launch.forward(p).out
    assert out[0, 0, 7].isnan().all()
    assert out.isnan().sum() == 72


def test_the_tables(simulated):
    """Every configuration in the tables, with tiles of 128 features that heads fill or do not."""
    for d in (80, 128):
        p, grad = problem_of(150, 150, True, torch.bfloat16, d=d)
        check_forward(p)
        check_backward(p, grad)


@pytest.mark.parametrize("cache", [0, 300_000, 1 << 30])
def test_a_bias_for_each_head_and_sections_of_heads(simulated, monkeypatch, cache):
    """Sections of one head, of three key heads (the last has one), and of all."""
    monkeypatch.setattr(launch_hopper, "_CACHE", cache)
    p, grad = problem_of(200, 200, True, torch.bfloat16, heads=8, key_heads=4)
    p = p._replace(bias=torch.linspace(-7, -3, 8).view(1, 8, 1, 1))
    check_forward(p)
    check_backward(p, grad)
    assert set(simulated.started) == {"hopper_fwd_kernel", "hopper_bwd_dkdv_kernel", "hopper_bwd_dq_kernel"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("size", "causal"), [((200, 330), True), ((200, 330), False), ((130, 130), True), ((70, 5), False)]
)
def test_normalize(simulated, dtype, size, causal):
    """Also in rows whose sum underflows, in the head whose bias is -90 (or -90 in all of them, in float16)."""
    p, grad = problem_of(*size, causal, dtype)
    low = torch.tensor([-5.0, -90.0]).view(1, 2, 1, 1) if dtype is torch.bfloat16 else torch.tensor(-90.0)
    for bias in (p.bias, low):
        p = p._replace(normalize=True, bias=bias)
        for simulated.order in ORDERS:
            check_backward(p, grad, *check_forward(p))
    assert set(simulated.started) == {"hopper_fwd_kernel", "hopper_bwd_dq_kernel"}


GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
on_a_gpu = pytest.mark.skipif(not GPU, reason="it needs a GPU of compute capability 9.0")
each_kernel = pytest.mark.parametrize("kernel", list(tuning.HOPPER_CONFIGS), ids=list(tuning.HOPPER_CONFIGS))


@on_a_gpu
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("kernel", "config"), [(k, c) for k in tuning.HOPPER_CONFIGS for c in tile_shapes.hopper_candidates(k)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_candidates_on_a_gpu(monkeypatch, causal, kernel, config, dtype):
    """Every candidate configuration, on the GPU instead of in simulation."""
    monkeypatch.setitem(tuning.HOPPER_CONFIGS, kernel, config)
    for size in SIZES:
        check_on_a_gpu(monkeypatch, kernel, *problem_of(*size, causal, dtype, d=128))


@on_a_gpu
@each_kernel
@pytest.mark.parametrize("d", [72, 128])
def test_tables_on_a_gpu(monkeypatch, kernel, d):
    """The configurations in the tables, also at larger sizes."""
    for size in [*SIZES, (1024, 1024), (4096, 5000)]:
        for causal in (False, True):
            check_on_a_gpu(monkeypatch, kernel, *problem_of(*size, causal, torch.bfloat16, d=d, heads=8, key_heads=4))


def check_on_a_gpu(monkeypatch, kernel, p, grad):
    """Compare a kernel's results with the formula in float64 and in the same dtype."""
    p, grad = Problem(*(t.cuda() if isinstance(t, torch.Tensor) and t.dim() else t for t in p)), grad.cuda()
    what = f"{kernel} {tuning.HOPPER_CONFIGS[kernel]} {tuple(p.query.shape)} {tuple(p.key.shape)} {p.right}"
    monkeypatch.setattr(tuning, "HOPPER_CONFIGS", {kernel: tuning.HOPPER_CONFIGS[kernel]})
    monkeypatch.setattr(tuning, "TMA_MIN_WEIGHTS", 0)
    assert launch_hopper.supports(kernel_args.prepare(p), grad)
    if kernel == tuning.FWD:
        check_forward(p, what)
    else:
        check_backward(p, grad, needs=[kernel == k for k in (tuning.DQ, tuning.DKDV, tuning.DKDV)], what=what)


def test_unsupported_problems(simulated):
    p, _ = problem_of(130, 130, True, torch.bfloat16)
    assert launch_hopper.supports(kernel_args.prepare(p))
    others = [
        p._replace(query=p.query.float(), key=p.key.float(), value=p.value.float()),
        p._replace(left=5),
        p._replace(softcap=2.0),
        p._replace(bias=torch.zeros(1, 2, 130, 1)),
        p._replace(alibi_slopes=torch.ones(1, 2, 2)),
        p._replace(attn_mask=torch.ones(1, 1, 130, 130, dtype=torch.bool)),
        p._replace(key_lengths=torch.tensor([100])),
        p._replace(seed=torch.tensor(0), dropout_p=0.5),
        p._replace(value=p.value[..., :32]),
        p._replace(query=p.query.mT.contiguous().mT),
        p._replace(key=p.key[:, :, :1].expand(1, 1, 130, 72)),
        p._replace(**{name: getattr(p, name)[..., :64] for name in ("query", "key", "value")}),
    ]
    for other in others:
        assert not launch_hopper.supports(kernel_args.prepare(other))


# lines without which a kernel is wrong, with their indent and the error, or None if a number is wrong in some order of
# events
MISTAKES = {
    "unchanged": (hopper, 0, "", None),
    "unchanged backward": (hopper_backward, 0, "", None),
    "slot overwritten too early": (hopper, 12, "mbarrier.wait(memory.k_empty.index(slot), phase)", AssertionError),
    "slot never released": (hopper, 12, "mbarrier.arrive(memory.v_empty.index(v_slot))", DeadlockError),
    "baton not passed": (hopper, 12, "pass_baton(memory, WARP_GROUP, OPT)", DeadlockError),
    "value used before its wait": (hopper, 12, "logits = warpgroup_mma_wait(1, deps=[logits])", TypeError),
    "queries overwritten too early": (hopper, 12, "mbarrier.wait(memory.q_empty.index(g), turn & 1 ^ 1)", None),
    "output overwritten too early": (
        hopper, 8, "tma.store_wait(0)  # the store of the last turn has read its slot", None,
    ),
    "keys loaded too early": (hopper_backward, 8, "mbarrier.wait(memory.own_empty.index(g), turn & 1 ^ 1)", None),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_simulator_finds_mistakes(simulated, monkeypatch, mistake):
    module, indent, line, error = MISTAKES[mistake]
    source, line = inspect.getsource(module), f"{' ' * indent}{line}\n" if line else ""
    assert line in source
    source = source.replace(line, "").replace("@gluon.jit", "@plain").replace("from __future__ import annotations", "")
    changed = types.ModuleType("changed")
    vars(changed)["plain"] = lambda f=None, **_: types.SimpleNamespace(fn=f) if f else vars(changed)["plain"]
    exec(compile(source, "changed", "exec"), vars(changed))
    simulated.modules = [changed]
    kernels = [tuning.FWD] if module is hopper else [tuning.DKDV, tuning.DQ]
    config = HopperConfig(64, 3 if "queries" in mistake else 2)
    monkeypatch.setattr(tuning, "HOPPER_CONFIGS", dict.fromkeys(kernels, config))
    p, grad = problem_of(256, 256, False, torch.bfloat16, key_heads=2)
    exact = [formula(p, torch.float64)] if module is hopper else gradients(p, grad, torch.float64)

    def is_wrong(order):
        simulated.order = order
        needs = NeedsGrad(True, True, True)
        found = [launch.forward(p).out] if module is hopper else launch.backward(p, grad, needs)[:3]
        return not all(torch.allclose(f.double(), t, atol=0.05) for f, t in zip(found, exact, strict=True))

    if error is None:
        assert any(map(is_wrong, ORDERS)) == bool(line)
    else:
        with pytest.raises(error):
            any(map(is_wrong, ORDERS))
