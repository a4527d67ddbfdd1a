"""Public calls over all options, forward and backward, for tests of what is compiled and launched."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask

import sigattn
from sigattn import flash

HEADS, KEYS, PAGE = 4, 256, 16
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_DIMS = (8, 16, 24, 32, 40, 48, 64, 72, 80, 88, 96, 112, 128, 160, 192, 256)


@dataclass(frozen=True)
class Call:
    """A public call: dtype, head dims, sizes and options by name."""

    options: tuple[str, ...] = ()
    dtype: torch.dtype = torch.bfloat16
    d: int = 64
    dv: int | None = None
    n: int = KEYS
    kind: str = "dense"  # "packed", "cached"

    def __str__(self) -> str:
        dims = self.d if self.dv is None else f"{self.d}, {self.dv}"
        return f"{self.kind} {', '.join(self.options) or 'plain'}; {str(self.dtype)[6:]} D={dims} N={self.n}"

    def __call__(self) -> list[torch.Tensor]:
        """Make the call, and its backward pass if there is one; return inputs, outputs and gradients."""
        with contextlib.ExitStack() as stack:
            if "deterministic" in self.options:
                torch.use_deterministic_algorithms(True)
                stack.callback(torch.use_deterministic_algorithms, False)
            if "fast" in self.options and self.kind == "dense":  # the others have an argument
                stack.callback(sigattn.set_sigmoid_precision, sigattn.get_sigmoid_precision())
                sigattn.set_sigmoid_precision("fast")
            if "TF32" in self.options:
                setting = torch.backends.cuda.matmul
                stack.callback(setattr, setting, "fp32_precision", setting.fp32_precision)
                setting.fp32_precision = "tf32"
            given: dict[str, Any] = {}
            for name in self.options:
                given |= ARGUMENTS[name](self)
            return {"dense": _dense, "packed": _packed, "cached": _cached}[self.kind](self, given)

    def rows(self, n: int, heads: int, width: int) -> torch.Tensor:
        return torch.zeros(2, n, heads, width, dtype=self.dtype)


def _of_flash(**arguments: Any) -> Callable[[Call], dict[str, Any]]:
    """Return arguments that sigmoid_attention lacks: ``Call.__call__`` sets them for the process."""
    return lambda c: {} if c.kind == "dense" else arguments


# Arguments of sigmoid_attention by the name of an option; its floating-point tensors among them require a gradient.
ARGUMENTS: dict[str, Callable[[Call], dict[str, Any]]] = {
    "causal": lambda c: {"is_causal": True},
    "window": lambda c: {"window": (7, 5)},
    "bool mask": lambda c: {"attn_mask": torch.ones(c.n, KEYS, dtype=torch.bool)},
    "bool mask of keys": lambda c: {"attn_mask": torch.ones(2, 1, 1, KEYS, dtype=torch.bool)},
    "mask": lambda c: {"attn_mask": torch.zeros(c.n, KEYS, dtype=c.dtype), "constant": True},
    "mask with gradient": lambda c: {"attn_mask": torch.zeros(2, HEADS, c.n, KEYS, dtype=c.dtype)},
    "broadcast mask with gradient": lambda c: {"attn_mask": torch.zeros(c.n, KEYS, dtype=c.dtype)},
    "mask of keys with gradient": lambda c: {"attn_mask": torch.zeros(2, 1, 1, KEYS, dtype=c.dtype)},
    "mask of queries with gradient": lambda c: {"attn_mask": torch.zeros(c.n, 1, dtype=c.dtype)},
    "float32 mask": lambda c: {"attn_mask": torch.zeros(c.n, KEYS), "constant": True},
    "float32 mask with gradient": lambda c: {"attn_mask": torch.zeros(HEADS, c.n, KEYS)},
    "float32 broadcast mask with gradient": lambda c: {"attn_mask": torch.zeros(c.n, KEYS)},
    "BlockMask": lambda c: {"attn_mask": _blocks(c.n)},
    "dropout": lambda c: {"dropout_p": 0.25},
    "slopes": lambda c: {"alibi_slopes": torch.zeros(HEADS)},
    "bias": lambda c: {"bias": -1.5},
    "bias tensor": lambda c: {"bias": torch.zeros((2, HEADS) if c.kind == "cached" else (HEADS, 1, 1))},
    "bias of rows": lambda c: {"bias": torch.zeros(2, HEADS, c.n, 1)},
    "lengths": lambda c: {"key_lengths": torch.tensor([3, KEYS])},
    "softcap": lambda c: {"softcap": 20.0},
    "normalize": lambda c: {"normalize": True},
    "GQA": lambda c: {"enable_gqa": True},
    "scale": lambda c: {"scale": 0.3},
    "fast": _of_flash(sigmoid_precision="fast"),
    "TF32": lambda c: {},
    "deterministic": _of_flash(deterministic=True),
    "splits": lambda c: {"num_splits": 3},
    "left padding": lambda c: {"cache_leftpad": torch.tensor([0, 3], dtype=torch.int32)},
    "pages": lambda c: {"block_table": torch.zeros(2, KEYS // PAGE, dtype=torch.int32)},
}
OF_CACHES = ("bias tensor", "GQA", "splits", "left padding", "pages")
COMMON = ("causal", "window", "slopes", "softcap", "normalize", "bias", "fast", "bool mask", "float32 mask")
OPTIONS = {
    "dense": tuple(name for name in ARGUMENTS if name not in OF_CACHES[2:]),
    "packed": (*COMMON, "dropout", "deterministic"),
    "cached": (*COMMON, *OF_CACHES),
}


def _blocks(n: int) -> Any:
    return create_block_mask(lambda b, h, i, j: i >= j, None, None, n, KEYS, device="cpu")


def _tensors(*given: Any) -> list[torch.Tensor]:
    return [x for x in given if isinstance(x, torch.Tensor)]


def _in_flash(given: dict[str, Any]) -> dict[str, Any]:
    """Return arguments under flash-attn's names, and the backend."""
    names = {"is_causal": "causal", "window": "window_size", "bias": "sigmoid_bias"}
    ignored = ("constant", "enable_gqa")
    return {"backend": "triton"} | {names.get(name, name): x for name, x in given.items() if name not in ignored}


def _dense(call: Call, given: dict[str, Any]) -> list[torch.Tensor]:
    constant = given.pop("constant", False)
    kv_heads = HEADS // 2 if "enable_gqa" in given else HEADS
    dv = call.dv or call.d
    q, k, v = call.rows(call.n, HEADS, call.d), call.rows(KEYS, kv_heads, call.d), call.rows(KEYS, kv_heads, dv)
    leaves = [x for x in _tensors(q, k, v, *([] if constant else given.values())) if x.is_floating_point()]
    for leaf in leaves:
        leaf.requires_grad_()
    out = sigattn.sigmoid_attention(*(t.transpose(1, 2) for t in (q, k, v)), backend="triton", **given)
    grad = torch.ones_like(out)
    return _tensors(q, k, v, *given.values(), out, grad, *torch.autograd.grad(out, leaves, grad))


def _packed(call: Call, given: dict[str, Any]) -> list[torch.Tensor]:
    starts = torch.tensor([0, 10, 10, 10 + KEYS], dtype=torch.int32)
    dims = (call.d, call.d, call.dv or call.d)
    q, k, v = (torch.zeros(10 + KEYS, HEADS, e, dtype=call.dtype).requires_grad_() for e in dims)
    out = flash.flash_attn_varlen_func(q, k, v, starts, starts, KEYS, KEYS, **_in_flash(given))
    grad = torch.ones_like(out)
    return _tensors(q, k, v, starts, *given.values(), out, grad, *torch.autograd.grad(out, (q, k, v), grad))


def _cached(call: Call, given: dict[str, Any]) -> list[torch.Tensor]:
    kv_heads = 1 if "GQA" in call.options else HEADS
    size = (KEYS, PAGE) if "pages" in call.options else (2, KEYS)
    k, v = (torch.zeros(*size, kv_heads, e, dtype=call.dtype) for e in (call.d, call.dv or call.d))
    lengths = torch.tensor([KEYS, 100], dtype=torch.int32)
    q = call.rows(call.n, HEADS, call.d)
    out = flash.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, **{"sigmoid_bias": -1.5, **_in_flash(given)})
    return _tensors(q, k, v, lengths, *given.values(), out)


def all_calls() -> list[Call]:
    """Every option alone at the common sizes, and every size and dtype without options."""
    calls = [
        Call((option,), dtype, d, None, 4 if kind == "cached" else KEYS, kind)
        for kind, options in OPTIONS.items()
        for option in options
        for dtype in DTYPES
        for d in (64, 128, 256)
    ]
    calls += [
        Call(options, dtype, d, None, 64, "cached")
        for options in ((), ("float32 mask",), ("bool mask", "slopes", "bias tensor"))
        for dtype in DTYPES
        for d in (64, 128, 256)
    ]
    calls += [
        Call(options, dtype, d, dv, 1 if kind == "cached" else KEYS, kind)
        for kind in OPTIONS
        for options in ((), ("causal",))
        for dtype in DTYPES
        for d, dv in [*((d, None) for d in HEAD_DIMS), (64, 128), (128, 64), (40, 72), (192, 128)]
    ]
    return calls
