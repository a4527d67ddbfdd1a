"""Random calls of the operator, over all of its options."""

import contextlib
import os
import random
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from sigattn.ops import llvm
from sigattn.ops.attention import BACKENDS
from sigattn.ops.blocked import dense, tiles
from sigattn.ops.dropout import keep_mask
from sigattn.ops.problem import Problem
from sigattn.ops.triton import tuning
from tests.ops.truth import formula_options

# what PyTorch's own compiler and export say of themselves, and cannot be helped from here
COMPILER_NOISE = [
    "ignore:.*[Dd]eprecat",
    "ignore:.*should not be instantiated",
    "ignore::FutureWarning",
    "ignore:The given buffer is not writable",
    "ignore:.*(isinstance\\(treespec|LeafSpec|pytree).*",
]


# the backends that support all options; tests/ops/test_llvm.py has the tests of "llvm"
COMPLETE = tuple(b for b in BACKENDS if b != "llvm")
HAS_LLVM = llvm.unavailable(Problem(*torch.empty(3, 1, 1, 1, 1))) is None
SUPPORTING = (*COMPLETE, *(["llvm"] if HAS_LLVM else []))  # all that can run here
ON_CPU = tuple(b for b in BACKENDS if b != "triton" and (HAS_LLVM or b != "llvm"))


LAYOUTS = ("contiguous", "length first", "columns first", "strided", "odd addresses", "expanded", "negated")
LARGE_HEADS = (8, 16, 24, 32, 40, 64, 72, 80, 96, 128, 192, 256)  # which no interpreter computes in good time


def device_of(backend):
    """Return the device on which a backend is tested: the GPU for GPU backends, if there is one."""
    return "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"


def wide(backend):
    """Return the widest dtype that a backend supports."""
    return torch.float32 if backend in ("triton", "llvm") else torch.float64


def operands(n=5, m=7, batch=2, heads=4, key_heads=None, d=8, dv=None, dtype=torch.float32):
    """Return a random query (B, Hq, N, D), key (B, Hkv, M, D) and value (B, Hkv, M, Dv)."""
    keys = batch, heads if key_heads is None else key_heads, m
    shapes = (batch, heads, n, d), (*keys, d), (*keys, d if dv is None else dv)
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def negated(t):
    """Return a tensor whose memory holds the negative, as ``x.conj().imag`` does."""
    return torch._neg_view(-t)


def mask_of(kind, numbers):
    """Return numbers as a mask that hides some entries, "bool" or by "-inf", or none ("float")."""
    kinds = {"bool": numbers > -0.5, "-inf": numbers.masked_fill(numbers < -0.5, -torch.inf), "float": numbers}
    return kinds[kind]


def spread(integers):
    """Return integers of an even sum as they are, others in another order in memory, or with gaps."""
    if integers.sum() % 2 == 0:
        return integers
    return integers.mT.contiguous().mT if integers.dim() == 2 else torch.stack([integers, -integers], -1)[..., 0]


@dataclass
class Case:
    """One call: shapes, dtype and options; ``tensors()`` returns new inputs."""

    shape: tuple[int, int, int, int, int, int, int]  # batch, key heads, query heads per key head, N, M, D, Dv
    dtype: torch.dtype
    causal: bool
    scale: float | None
    window: tuple[int, int] | None
    bias: Any  # None, a float, or a shape over (B, Hq, N, 1)
    mask: tuple[str, tuple[int, ...]] | None
    slopes: str | None
    lengths: bool
    layout: str
    seed: int
    softcap: float = 0.0
    normalize: bool = False
    offset: int = 0
    dropout: float = 0.0
    frozen: tuple[str, ...] = ()  # inputs without a gradient

    def tensors(self, device="cpu"):
        """Return leaves by name, in the order query, key, value, bias, mask, slopes; and key_lengths.

        They are laid out on the device itself: a copy to another device is contiguous where there are gaps or overlaps.
        """
        batch, kv, rep, n, m, d, dv = self.shape
        g = torch.Generator().manual_seed(self.seed)

        def randn(*shape, dtype=self.dtype):
            return torch.randn(shape, generator=g, dtype=torch.float64).to(device, dtype)

        heads = kv * rep
        q, k, v = (self._lay_out(randn, s) for s in ((batch, heads, n, d), (batch, kv, m, d), (batch, kv, m, dv)))
        given = {"query": q, "key": k, "value": v}
        other = self.dtype if self.dtype in (torch.float32, torch.float64) else torch.float32
        if isinstance(self.bias, tuple):
            given["bias"] = randn(*self.bias, dtype=other) - 1
        if self.mask is not None:
            kind, shape = self.mask
            given["attn_mask"] = mask_of(kind, randn(*shape, dtype=other))
        if self.slopes:
            shapes = {"head": (heads,), "sample": (batch, heads), "sides": (1, heads, 2), "all": (batch, heads, 2)}
            given["alibi_slopes"] = randn(*shapes[self.slopes], dtype=other).abs() / 8
        if self.layout == "negated":  # some of them: each must make the dispatcher convert it
            for i, (name, t) in enumerate(given.items()):
                given[name] = negated(t) if t.is_floating_point() and self.seed >> i & 1 else t
        lengths = spread(torch.randint(0, m + 1, (batch,), generator=g).to(device)) if self.lengths else None
        return given, lengths

    def _lay_out(self, randn, shape):
        if self.layout in ("contiguous", "negated"):
            return randn(*shape)
        if self.layout == "length first":  # (B, N, H, D) as projections give it
            return randn(shape[0], shape[2], shape[1], shape[3]).transpose(1, 2)
        if self.layout == "columns first":
            return randn(*shape[:-2], shape[-1], shape[-2]).mT
        if self.layout == "strided":
            return randn(*shape[:-1], 2 * shape[-1])[..., ::2]
        if self.layout == "odd addresses":  # pairs of bfloat16 are read at even ones
            return randn(*shape[:-1], shape[-1] + 1)[..., 1:]
        return randn(1, 1, *shape[2:]).expand(shape)

    def options(self, given, lengths):
        bias = given.get("bias", self.bias if isinstance(self.bias, float) else None)
        return {
            **{name: getattr(self, name) for name in ("scale", "window", "softcap", "normalize")},
            **{name: given.get(name) for name in ("attn_mask", "alibi_slopes")},
            **{"is_causal": self.causal, "enable_gqa": self.shape[2] > 1, "query_offset": self.offset},
            **{"bias": bias, "key_lengths": lengths, "dropout_p": self.dropout},
        }

    @property
    def dropout_seed(self):
        return torch.tensor(self.seed << 31)  # of more than 32 bits

    def formula_options(self, given, lengths):
        """Return the options of the formula, with the factors of the weights that dropout keeps or drops."""
        batch, kv, rep, n, m, *_ = self.shape
        options = formula_options(self.options(given, lengths))
        if p := options.pop("dropout_p"):
            heads, rows, columns = map(torch.arange, (batch * kv * rep, n, m))
            kept = keep_mask(self.dropout_seed, heads, rows + self.offset, columns, p)
            options["kept"] = kept.double().view(batch, kv * rep, n, m) / (1 - p)
        return options


def numbers(examples):
    """Return the numbers of the random calls of a test; SIGATTN_FUZZ_EXAMPLES asks for more."""
    return range(int(os.environ.get("SIGATTN_FUZZ_EXAMPLES", examples)))


class Draws(random.Random):
    """Random options, each drawn independently of the others; few and small ones for interpreted kernels."""

    def __init__(self, number, backend=None):
        super().__init__(number)
        self.backend, self.on_gpu = backend, torch.cuda.is_available()
        self.interpreted = backend == "triton" and not self.on_gpu

    def some(self, *choices):
        return self.choice(choices)

    def either(self):
        return self.random() < 0.5

    def dtype(self):
        if self.backend == "llvm":
            return self.some(torch.float32, torch.bfloat16)
        return self.some(wide(self.backend), torch.float32, torch.bfloat16, torch.float16)

    def head_dim(self, *small):
        """Return a head dim, up to 256 on a GPU, where no interpreter is slow."""
        return self.choice(LARGE_HEADS if self.on_gpu and self.either() else small)

    def broadcastable(self, *shape):
        """Return a shape that broadcasts to this one with as many dimensions."""
        return tuple(size if self.either() else 1 for size in shape)

    def mask(self, shape, dtype):
        """Return no mask, a bool mask or one that is added, without or with -inf."""
        kind = self.some(None, None, "bool", "float", "-inf")
        return None if kind is None else mask_of(kind, torch.randn(shape, dtype=dtype))


def random_case(number, interpreted=False):
    """Draw a call; few heads for interpreted kernels, whose time is that of the heads. Few calls have nothing to do."""
    r = Draws(number)

    def broadcastable(*shape):  # possibly without leading dimensions
        shape = r.broadcastable(*shape)
        while len(shape) > 1 and shape[0] == 1 and r.either():
            shape = shape[1:]
        return shape

    def length():
        if r.on_gpu and r.either():
            return r.some(0, 1, 130, 257, 333)
        return 0 if r.random() < 0.03 else r.randint(1, 37)

    def side():  # short ones have borders inside of most tiles
        return r.some(-1, r.randint(0, 8), r.randint(0, 40))

    kv, rep = r.some((1, 1), (2, 1), (1, 3), (1, 2), (2, 2)) if interpreted else (r.randint(1, 3), r.randint(1, 3))
    batch = 0 if r.random() < 0.03 else r.some(1, 1, 2) if interpreted else r.randint(1, 3)
    n, m, normalize = length(), length(), r.either()
    d, other = (r.head_dim(4, 8, r.randint(1, 24)) for _ in range(2))
    bias = r.uniform(-300, 300) if normalize else r.uniform(-8, 2)  # where plain weights are not all 0 or 1
    mask = r.some("bool", "float", "-inf"), broadcastable(batch, kv * rep, n, m)
    return Case(
        shape=(batch, kv, rep, n, m, d, r.some(d, other)),
        dtype=r.dtype(),
        causal=r.some(True, False, False),
        scale=r.some(None, r.uniform(0.05, 1.5)),
        window=r.some(None, (side(), side())),
        bias=r.some(None, bias, broadcastable(batch, kv * rep, n, 1)),
        mask=r.some(None, mask),
        slopes=r.some(None, None, None, "head", "sample", "sides", "all"),
        lengths=r.some(True, False, False),
        layout=r.some(*LAYOUTS),
        seed=r.randrange(1 << 30),
        softcap=r.some(0.0, r.uniform(0.3, 50)),
        normalize=normalize,
        offset=r.some(0, r.randint(-40, 40)),
        dropout=r.some(0.0, 0.0, 0.3),
        frozen=tuple(r.sample(("query", "key", "value", "bias", "attn_mask", "alibi_slopes"), r.some(0, 0, 1, 2))),
    )


def _small_blocks(kernel, _, head_dim, *__):
    """Use another tile size in each kernel, so that their borders differ, the other forms of σ, one for even and one
    for odd head sizes, dK and dV one after the other and, where they serve, descriptors."""
    blocks = {tuning.FWD: (32, 16), tuning.DKDV: (16, 32), tuning.DQ: (16, 16)}
    sigmoid = "rcp" if head_dim % 2 else "paired"
    return tuning.Config(*blocks[kernel], 4, 1, sigmoid, tma=True, split_dkdv=True)


# The ways of the Triton backend: the tiles of an architecture (in the interpreter, of the smallest), small ones, and
# large ones, for which the interpreter takes less time
KERNEL_PATHS = {
    "tuned": {},
    "small tiles": {(tuning, "kernel_config"): _small_blocks},
    "large tiles": {(tuning, "kernel_config"): lambda *_: tuning.Config(128, 128, 4, 1)},
}

# Settings of the blocked backend that make small problems cross every border of its tiles
_SMALL_TILES = {
    (tiles, "TILE_BYTES"): 2048,
    (tiles, "LONG_SIDE"): 13,
    (tiles, "SHORT_SIDE"): 5,
    (tiles, "WINDOWED_SIDE"): 7,
    (tiles, "WHOLE_UP_TO"): 0,
}
# bfloat16 products for every size, also where they are slow because the processor has none
_NARROW = {(tiles, "NARROW_FROM"): (0, 0), (tiles, "has_bfloat16_products"): lambda: True}
PATHS = {
    "as users meet it": {},
    "bfloat16 products": _NARROW,
    "bfloat16 products, saved weights": {**_NARROW, (dense, "MOST_SAVED"): 10**6},
    "small tiles": {**_SMALL_TILES, (dense, "MOST_SAVED"): 0},
    "small tiles, bfloat16 products": {**_SMALL_TILES, **_NARROW},
}


def ways(backend):
    """Return the names of the code paths of a backend; None is the default backend."""
    paths = {"blocked": PATHS, "triton": ("tuned", "small tiles")}
    return list(paths.get(backend, ["as users meet it"]))


@contextlib.contextmanager
def nan_filled_memory(fill=True):
    """Fill new memory with NaN, so that a number that is not written shows."""
    memory, deterministic = torch.utils.deterministic, torch.are_deterministic_algorithms_enabled()
    before = memory.fill_uninitialized_memory
    try:
        torch.use_deterministic_algorithms(fill or deterministic)
        memory.fill_uninitialized_memory = fill
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        memory.fill_uninitialized_memory = before


@contextlib.contextmanager
def path(name):
    """Make a backend take one code path; that of "triton" may have the same name as that of "blocked"."""
    assert name in PATHS or name in KERNEL_PATHS, name
    with contextlib.ExitStack() as stack:
        for (module, key), value in {**PATHS.get(name, {}), **KERNEL_PATHS.get(name, {})}.items():
            stack.enter_context(mock.patch.object(module, key, value))
        yield
