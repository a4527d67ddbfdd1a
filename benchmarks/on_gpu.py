"""``python -m benchmarks.on_gpu check|time|options FILE …``, for gpu.sh: are the operators right on a GPU, and fast?

``check FILE PART PARTS`` compares one part of the calls, with gradients, with float64 and the plain formula. ``time
FILE SECONDS`` times plain calls and those that normalise next to softmax, with heads of 128 also by the portable
kernels; ``options FILE SECONDS`` masks and float32 next to SDPA with the same mask. Each row is written when it is
known. Times are of captured CUDA graphs, in turns. Without a GPU all run interpreted at tiny sizes, to rehearse.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import sigattn
from benchmarks import gpu
from benchmarks.baselines import naive_sigmoid
from benchmarks.inputs import DTYPES, Options
from benchmarks.timing import capture_graph, time_calls
from sigattn.ops.triton import tuning

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Case = tuple[dict[str, Attention], tuple[int, int, int, int], torch.dtype]

TINY = not torch.cuda.is_available()
OPTIONS = (
    "plain", "causal", "bool mask", "float mask", "padding", "lengths", "alibi causal", "window", "softcap",
    "bias of heads", "low bias of heads", "gqa causal", "cross", "packed causal", "fast",
)  # fmt: skip
TIMED_OPTIONS = (
    "bool mask", "float mask", "float32", "dropout", "softcap", "padding", "TF32", "alibi causal", "window", "lengths",
)  # fmt: skip
SIZES = (
    ("bfloat16", 64), ("bfloat16", 128), ("bfloat16", 80), ("float16", 64), ("float16", 128), ("float32", 64),
    ("TF32", 64),
)  # fmt: skip
CASES = [
    (option, dtype, d, normalize)
    for option in OPTIONS
    for dtype, d in SIZES
    for normalize in (False, True)
    if not (option == "fast" and (normalize or dtype in ("float32", "TF32")))
]


def random(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Return random numbers (B, H, N, D) with the memory order of projections."""
    b, h, n, d = shape
    return (
        torch.randn(b, n, h, d, generator=torch.Generator().manual_seed(seed)).to(gpu.device(), dtype).transpose(1, 2)
    )


@contextlib.contextmanager
def tf32(is_allowed: bool) -> Iterator[None]:
    """Let PyTorch compute products of float32 in TF32, or not."""
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "tf32" if is_allowed else "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def arguments_of(option: str, shape: tuple[int, int, int, int], dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments of the operator for queries and keys of a size (B, H, N, M)."""
    b, h, n, m = shape
    g, device = torch.Generator().manual_seed(3), gpu.device()
    made: dict[str, Callable[[], dict[str, Any]]] = {
        "causal": lambda: {"is_causal": True},
        "bool mask": lambda: {"attn_mask": (torch.rand(1, 1, n, m, generator=g) < 0.7).to(device)},
        "float mask": lambda: {"attn_mask": torch.randn(1, 1, n, m, generator=g).to(device, dtype)},
        "padding": lambda: {
            "attn_mask": (torch.arange(m) < torch.linspace(m // 2, m, b)[:, None])[:, None, None].to(device)
        },
        "lengths": lambda: {"key_lengths": torch.linspace(m // 2, m, b).int().to(device)},
        "alibi causal": lambda: {"alibi_slopes": (2.0 ** -torch.linspace(1, 8, h)).to(device), "is_causal": True},
        "window": lambda: {"window": (n // 4, 0)},
        "softcap": lambda: {"softcap": 20.0},
        "dropout": lambda: {"dropout_p": 0.1},
        "bias of heads": lambda: {"bias": torch.linspace(-7, -3, h).view(1, h, 1, 1).to(device)},
        "low bias of heads": lambda: {"bias": torch.linspace(-90, -5, h).view(1, h, 1, 1).to(device)},
        "gqa causal": lambda: {"is_causal": True, "enable_gqa": True},
        "packed causal": lambda: {"is_causal": True},
    }
    return made[option]() if option in made else {}


def results_of(tensors: list[Tensor], option: str, backend: str, **arguments: Any) -> list[Tensor]:
    """Return the output and the gradients of query, key and value; tensors: these, and the output's gradient."""
    *leaves, grad = [t.detach().requires_grad_() for t in tensors]
    if option == "packed causal":
        b, h, n, d = leaves[0].shape
        starts = torch.tensor([0, n // 3, n, b * n], dtype=torch.int32, device=leaves[0].device)
        packed = [t.transpose(1, 2).reshape(b * n, -1, d) for t in leaves]
        longest = (b - 1) * n
        sizes = (starts, starts, longest, longest)
        out = sigattn.sigmoid_varlen_attention(packed[0], packed[1], packed[2], *sizes, backend=backend, **arguments)
        grad = grad.transpose(1, 2).reshape(b * n, h, d)
    else:
        sigattn.set_sigmoid_precision("fast" if option == "fast" else "accurate")
        out = sigattn.sigmoid_attention(leaves[0], leaves[1], leaves[2], backend=backend, **arguments)
        sigattn.set_sigmoid_precision("accurate")
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def check(option: str, dtype_name: str, d: int, normalize: bool) -> dict[str, Any]:
    """Compare a call with float64: its error may be twice that of the formula in the same dtype, plus rounding.

    dtype_name: also "TF32", float32 where PyTorch may compute products in TF32.
    """
    dtype = torch.float32 if dtype_name == "TF32" else DTYPES[dtype_name]
    b, h, n = (2, 4, 1096) if not TINY else (2, 2, 40)
    m = 2 * n + 1 if option == "cross" else n
    kv_heads = h // 2 if option == "gqa causal" else h
    d = 16 if TINY else d
    heads_and_rows = ((h, n), (kv_heads, m), (kv_heads, m), (h, n))
    tensors = [random(b, heads, rows, d, dtype=dtype, seed=i) for i, (heads, rows) in enumerate(heads_and_rows)]
    arguments = arguments_of(option, (b, h, n, m), dtype) | {"normalize": normalize}
    before = tuning.TMA_MIN_WEIGHTS, tuning.HOPPER_CONFIGS
    always: dict[str, Any] = {"min_keys": 1, "min_causal_keys": 1, "min_fill": 0.0}
    tuning.TMA_MIN_WEIGHTS = 0
    tuning.HOPPER_CONFIGS = {name: config._replace(**always) for name, config in tuning.HOPPER_CONFIGS.items()}
    try:
        found = [
            results_of(tensors, option, "triton", **arguments) for _ in range(4)
        ]  # seen, recorded, twice from the cache
    finally:
        tuning.TMA_MIN_WEIGHTS, tuning.HOPPER_CONFIGS = before

    def wide(x: Any) -> Any:
        return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x

    exact_arguments = {name: wide(x) for name, x in arguments.items()}
    exact = results_of([wide(t) for t in tensors], option, "reference", **exact_arguments)
    rough = results_of(tensors, option, "reference", **arguments)
    eps = torch.finfo(dtype).eps
    errors, ok = [], True
    for i, truth in enumerate(exact):
        size = truth.abs().max().item()
        own = max((run[i].double() - truth).abs().max().item() for run in found) / size
        formula = (rough[i].double() - truth).abs().max().item() / size
        errors.append([own, formula])
        ok &= own <= (0.06 if option == "fast" else 2 * formula + 2 * max(eps, 2e-6))
    return {"ok": ok, "errors": errors}


def softmax(backend: SDPBackend | None, **arguments: Any) -> Attention:
    """Return PyTorch's attention by one of its backends, or by the one that it chooses."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with contextlib.nullcontext() if backend is None else sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, **arguments)

    return call


def ours(precision: str = "accurate", **arguments: Any) -> Attention:
    """Return the operator with arguments and a precision of σ."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        sigattn.set_sigmoid_precision(precision)
        try:
            return sigattn.sigmoid_attention(q, k, v, backend="triton", **arguments)
        finally:
            sigattn.set_sigmoid_precision("accurate")

    return call


def without_gluon(call: Attention) -> Attention:
    """Return a call that the portable kernels serve, in both passes if it is captured."""

    def portable(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        tuning.HOPPER_CONFIGS = {}
        return call(q, k, v)

    return portable


def timed(
    calls: dict[str, Attention], shape: tuple[int, int, int, int], dtype: torch.dtype
) -> Iterator[dict[str, Any]]:
    """Yield rows of the forward and the backward pass of each call, of tensors (B, H, N, D)."""
    q, k, v, grad = (random(*shape, dtype=dtype, seed=i) for i in range(4))
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    tables = tuning.HOPPER_CONFIGS

    def forward(call: Attention) -> Callable[[], object]:
        def run() -> Tensor:
            with torch.no_grad():
                return call(q, k, v)

        return run

    def backward(call: Attention) -> Callable[[], object]:
        out = call(leaves[0], leaves[1], leaves[2])
        return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)

    for direction, of in {"forward": forward, "backward": backward}.items():
        graphs: dict[str, Callable[[], object]] = {}
        for name, call in calls.items():
            try:
                run = of(call)
                run()
                graphs[name] = capture_graph(run) or run
            except Exception as error:  # go on with the next call
                yield {"direction": direction, "name": name, "failed": f"{type(error).__name__}: {error}"[:300]}
            finally:
                tuning.HOPPER_CONFIGS = tables
        for timing in sorted(time_calls(graphs, *((5, 0.006) if not TINY else (1, 0.0))), key=lambda t: t.seconds):
            ratios = {name: round(ratio, 3) for name, ratio in timing.ratios.items()}
            yield {"direction": direction, "name": timing.name, "ms": timing.seconds * 1e3, "time_of_others": ratios}


def plain_times() -> Iterator[tuple[dict[str, Any], Case]]:
    """Yield what is timed next to softmax, and its calls and sizes."""
    for n in (4096, 1024, 16384) if not TINY else (40,):
        for d in (64, 128) if not TINY else (16,):
            for causal in (False, True):
                shape = (max(1, 16384 // n), 2048 // d, n, d) if not TINY else (1, 1, n, d)
                calls = {
                    "sigmoid": ours(is_causal=causal),
                    "sigmoid, fast": ours("fast", is_causal=causal),
                    "sigmoid, normalize": ours(is_causal=causal, normalize=True),
                    "cuDNN": softmax(SDPBackend.CUDNN_ATTENTION, is_causal=causal),
                    "flash": softmax(SDPBackend.FLASH_ATTENTION, is_causal=causal),
                }
                gluon = ("sigmoid", "sigmoid, normalize") if d > 64 else ("sigmoid",)
                calls |= {f"{x}, portable": without_gluon(calls[x]) for x in gluon}
                about = {"n": n, "head_dim": d, "causal": causal, "batch_size": shape[0]}
                yield about, (calls, shape, torch.bfloat16)


def option_times() -> Iterator[tuple[dict[str, Any], Case]]:
    """Yield options, and their calls and sizes; SDPA has the same mask, dropout and precision."""
    n = 4096 if not TINY else 40
    for option in TIMED_OPTIONS:
        dtype = torch.float32 if option in ("float32", "TF32") else torch.bfloat16
        for d in (64, 128) if not TINY else (16,):
            shape = (2 if dtype is torch.float32 else 4, 2048 // d, n, d) if not TINY else (1, 1, n, d)
            arguments = arguments_of(option, (shape[0], shape[1], n, n), dtype)
            calls = {"sigmoid": ours(**arguments), "plain": ours()}
            if set(arguments) <= {"attn_mask", "dropout_p"}:
                calls["SDPA"] = softmax(None, **arguments)
            if dtype is torch.float32:
                calls["formula"] = lambda q, k, v: naive_sigmoid(q, k, v, Options(-math.log(k.shape[-2])))
            yield {"option": option, "head_dim": d}, (calls, shape, dtype)


def write(file: TextIO, row: dict[str, Any]) -> None:
    """Write a row, and print it."""
    line = json.dumps(row)
    print(line, file=file, flush=True)
    print(line, flush=True)


def main(mode: str, path: str, *numbers: str) -> None:
    """Write the rows of one mode into a file."""
    with open(path, "a") as file:
        if mode == "check":
            part, parts = map(int, numbers)
            for case in CASES[part::parts]:
                try:
                    with tf32(case[1] == "TF32"):
                        row = check(*case)
                except Exception as error:  # go on with the next case
                    row = {"ok": False, "failed": f"{type(error).__name__}: {error}"[:300]}
                write(file, {"case": case, **row})
            return
        end = time.monotonic() + float(numbers[0])
        for about, settings in {"time": plain_times, "options": option_times}[mode]():
            if time.monotonic() > end:
                write(file, {**about, "failed": "no time left"})
                continue
            with tf32(about.get("option") == "TF32"):
                for row in timed(*settings):
                    write(file, {**about, **row})


if __name__ == "__main__":
    main(*sys.argv[1:])
