"""Tile shapes that fit: the estimate for masks, and smaller tiles on devices with less memory than expected."""

import itertools
import warnings

import pytest
import torch

from benchmarks import gpu, tune
from benchmarks.inputs import random_inputs
from sigattn.ops import call_cache
from sigattn.ops.problem import Problem
from sigattn.ops.triton import launch, tuning
from sigattn.ops.triton.args import Options, padded_head_dim
from tests.ops import standin_driver
from tests.ops.calls import Call

KERNELS = (tuning.FWD, tuning.DKDV, tuning.DQ)


@pytest.fixture(autouse=True)
def short_calls_use_tma(monkeypatch):
    """As long ones do."""
    monkeypatch.setattr(tuning, "TMA_MIN_WEIGHTS", 0)


def problem(d=64, n=200, dtype=torch.bfloat16, **options):
    return Problem(*(torch.zeros(1, n, 2, d, dtype=dtype).transpose(1, 2) for _ in range(3)), **options)


def needed(kernel, options, settings):
    """Return the simulated shared memory of a kernel: its tiles in flight."""
    return settings["num_stages"] * (options.BLOCK_M + options.BLOCK_N) * padded_head_dim(options.D) * 2


def shape(launched):
    return launched.options.BLOCK_M, launched.options.BLOCK_N, launched.metadata.num_warps


def test_estimates_of_what_is_taken_fit():
    """On every NVIDIA architecture and head size; a mask never makes tiles larger."""
    for architecture, width, itemsize, mask in itertools.product(
        (80, 86, 90, 100, 120), (16, 64, 128, 256), (2, 4), (1, 4)
    ):
        limit = tuning.shared_memory_limit(architecture)
        for kernel, gradient in itertools.product(KERNELS, ("none", "added")):
            config = tuning.kernel_config(kernel, architecture, width, itemsize)
            case = Options(width, width, NEED_MASK=gradient), itemsize, mask, architecture
            taken = tuning.fit(kernel, config, *case)
            assert taken.stages == 1 or tuning.shared_memory(kernel, taken, *case) <= limit
            assert all(a <= b for a, b in zip(taken[:4], config[:4], strict=True))
            assert taken[4:] == config[4:]
        for rows in (1, 64):
            case = Options(width, width), itemsize, mask, architecture
            taken = tuning.fit(tuning.DECODE, tuning.decode_config(width, itemsize, rows), *case)
            assert tuning.shared_memory(tuning.DECODE, taken, *case) <= limit


def test_a_device_with_less_memory_takes_smaller_tiles_and_says_so_once():
    """The warning names the kernel and its requirement; later calls use these tiles at once."""
    limit = 30_000
    with standin_driver.gpu(90, compiles=False, needed=needed, shared=limit) as launched:
        with pytest.warns(RuntimeWarning) as said:
            launch.forward(problem())
        first = tuning.kernel_config(tuning.FWD, 90, 64, 2, True)
        (one,) = launched
        assert needed(one.name, one.options, {"num_stages": one.metadata.num_stages}) <= limit
        (message,) = (str(w.message) for w in said)
        wanted = needed("", Options(64, 64, first.block_m, first.block_n), {"num_stages": first.stages})
        tiles = f"tiles of {first.block_m} × {first.block_n}, {first.warps} warps and {first.stages} stages"
        for part in ("fwd_kernel", tiles, f"needs {wanted} of shared memory", f"has {limit}", "use smaller tiles"):
            assert part in message
        tried = len(launched[0].function.device_caches[one.device][0])
        assert tried > 1
        call_cache.clear()
        launch.forward(problem(n=300))  # a warning would be an error
        assert shape(launched[1]) == shape(one)
        assert len(launched[0].function.device_caches[one.device][0]) == tried
        assert launched[1].grid == (-(-300 // one.options.BLOCK_M) * 2, 1, 1)


def test_other_kinds_of_calls_keep_their_tiles():
    def much_for_masks(kernel, options, settings):
        return needed(kernel, options, settings) * (4 if options.MASK == "bool" else 1)

    mask = torch.ones(1, 1, 200, 200, dtype=torch.bool)
    with standin_driver.gpu(90, compiles=False, needed=much_for_masks, shared=120_000) as launched:
        with pytest.warns(RuntimeWarning, match="fwd_kernel"):
            launch.forward(problem(attn_mask=mask))
        launch.forward(problem())
        masked, plain = map(shape, launched)
        assert plain == tuning.kernel_config(tuning.FWD, 90, 64, 2, True)[:3]
        assert masked < plain


@pytest.mark.parametrize(
    ("call", "kernels"),
    [
        (Call(), {"fwd_kernel", "bwd_dkdv_kernel", "bwd_dq_kernel"}),
        (Call(d=256), {"fwd_kernel", "bwd_dkdv_kernel", "bwd_dq_kernel"}),
        (Call(("bool mask",), n=2, kind="cached"), {"decode_kernel"}),
    ],
    ids=str,
)
def test_repeated_calls_keep_the_smaller_tiles(call, kernels):
    with standin_driver.gpu(90, compiles=False, needed=needed, shared=20_000) as launched:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            call()
        assert {str(w.message).split()[1] for w in said} == kernels
        first = [shape(x) for x in launched]
        for _ in range(4):
            launched.clear()
            call()
            assert [shape(x) for x in launched] == first


def test_a_device_that_no_tile_fits_is_named():
    message = r"fwd_kernel with tiles of 16 × 16, 4 warps and 1 stages needs .* backend='blocked'"
    with (
        standin_driver.gpu(90, compiles=False, needed=needed, shared=1000),
        pytest.warns(RuntimeWarning),
        pytest.raises(RuntimeError, match=message),
    ):
        launch.forward(problem())


def test_a_candidate_that_is_measured_is_not_replaced():
    """``python -m benchmarks tune`` must not measure another tile shape than the candidate."""
    inputs = random_inputs(1, 1, 200, 64, torch.bfloat16, torch.device("cpu"))
    candidate = tuning.parse("64x64/4/2", "paired")
    call = tune._call(Problem(inputs.query, inputs.key, inputs.value), inputs, tuning.FWD, candidate)
    for _ in range(2):
        with (
            standin_driver.gpu(90, compiles=False, needed=needed, shared=1000),
            pytest.raises(RuntimeWarning, match="smaller tiles"),
        ):
            call()


def test_candidates_are_launched_as_they_are(monkeypatch):
    """One of four; those of Hopper's kernels by these kernels."""
    monkeypatch.setattr(gpu, "device", lambda: torch.device("cpu"))
    config = tune.TuneBenchmark(lengths=(256,), num_heads=1)
    seen, forms = set(), {tuning.FWD: "fwd", tuning.DKDV: "bwd_dkdv", tuning.DQ: "bwd_dq"}
    for case in (tune.Case(256, d, causal, k) for d, causal in ((64, True), (128, False)) for k in tune.PASSES):
        with standin_driver.gpu(90, compiles=False) as launched:
            for candidate in tune.candidates_of(config, case)[::4]:
                launched.clear()
                tune.try_once((config, case, candidate))
                prefix = "hopper_" if isinstance(candidate, tuning.HopperConfig) else ""
                assert {x.name for x in launched} == {f"{prefix}{forms[case.kernel]}_kernel"}, (case, candidate)
                seen.add((case.kernel, prefix))
    assert len(seen) == 6


WIDE = {"dtype": torch.float32, "d": 128}
CHOSEN = [  # by the options of a call, and the compile-time options of its kernels
    (90, Call(**WIDE), {"PRECISION": {"bf16x6"}}),
    (90, Call(dtype=torch.float32), {"PRECISION": {"tf32x3"}}),
    (90, Call(("bool mask",), **WIDE), {"PRECISION": {"tf32x3"}}),  # tiles with a mask would not fit
    (90, Call(("normalize",), **WIDE), {"PRECISION": {"tf32x3"}}),
    (80, Call(("TF32",), dtype=torch.float32), {"PRECISION": {"bf16x3"}}),
    (90, Call(("TF32", "bool mask"), **WIDE), {"PRECISION": {"bf16x3"}}),
    (90, Call(("dropout",)), {"SIGMOID": {"rcp"}}),
    (90, Call(("mask",)), {"SIGMOID": {"rcp"}, "TMA": {True}, "WGMMA": {True}}),
    (90, Call(("mask", "causal")), {"SIGMOID": {"paired"}, "TMA": {False}}),
    (90, Call(("softcap",)), {"SOFTCAP": {"absolute"}}),
    (90, Call(("softcap",), dtype=torch.float32), {"SOFTCAP": {"relative"}}),
    (90, Call(("fast",)), {"SIGMOID": {"fast"}}),
    (90, Call(("fast",), kind="packed"), {"SIGMOID": {"fast"}}),
    (90, Call(("fast",), kind="cached", n=4), {"SIGMOID": {"fast"}}),
    ("gfx942", Call(("fast",), dtype=torch.float16), {"SIGMOID": {"accurate"}}),
]


@pytest.mark.parametrize(("architecture", "call", "expected"), CHOSEN, ids=str)
def test_what_options_choose(architecture, call, expected):
    with standin_driver.gpu(architecture, compiles=False) as launched:
        call()
    for name, values in expected.items():
        assert {getattr(x.options, name) for x in launched} == values, name
