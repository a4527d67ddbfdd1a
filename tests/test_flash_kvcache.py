"""flash_attn_with_kvcache: every option against the formula in float64, and the cache afterwards."""

import math

import pytest
import torch

from sigattn.flash import flash_attn_with_kvcache
from sigattn.ops.problem import KVCacheProblem
from tests.ops.cases import COMPILER_NOISE, ON_CPU, Draws, device_of, numbers, spread
from tests.ops.truth import assert_as_good_as_formula, one_sequence

pytestmark = [pytest.mark.filterwarnings(w) for w in COMPILER_NOISE]
CAPACITY = 63


class Call:
    """A random call, each option drawn independently, and its expected result."""

    def __init__(self, number, backend):
        r = Draws(number, backend)
        torch.manual_seed(number)
        self.backend, self.device, self.dtype = backend, device_of(backend), r.dtype()
        self.batch, self.n, self.added = r.randint(1, 3), r.some(1, 1, 1, 2, 5), r.some(0, 0, 1, 1, 2, 5)
        held = [r.some(0, 1, 3, 16, 33, 50) for _ in range(self.batch)]
        self.held = r.some(held, [held[0]] * self.batch)  # samples of one length are computed together
        self.padding = [r.randint(0, held) for held in self.held] if r.either() else None
        (self.hq, hkv), d, dv = r.some((1, 1), (2, 2), (4, 2), (6, 1)), r.head_dim(2, 8, 20), r.head_dim(8, 13)
        self.q = torch.randn(self.batch, self.n, self.hq, d, dtype=self.dtype)
        self.rows = [torch.randn(self.batch, CAPACITY, hkv, e, dtype=self.dtype) for e in (d, dv)]  # keys, values
        # the cache: of the samples in their order, of others, or of pages
        self.kind, self.page, pages_of_each = r.some("samples", "picked", "pages"), CAPACITY, 1
        if self.kind == "pages":
            self.page = r.some(1, 7, 16)
            pages_of_each = -(-CAPACITY // self.page)
        self.heads_first, self.pages = r.either(), self.batch * pages_of_each + 2 * (self.kind != "samples")
        self.table = torch.arange(self.batch)[:, None]
        if self.kind != "samples":
            self.table = torch.randperm(self.pages)[: self.batch * pages_of_each].view(self.batch, -1)
        self.bias, self.slopes = r.some(-3.0, 0.0, -150.0), None
        if r.either():
            shapes = (), (self.batch,), (1, self.hq), (self.batch, self.hq), (self.batch, 1, self.n)
            self.bias = torch.randn(r.choice(shapes)) - 1
        if r.either():
            self.slopes = torch.rand(r.some((self.hq,), (self.batch, self.hq))) / 8
        # of the last keys, fewer or more than a sample has
        shape = *r.broadcastable(self.batch, self.hq, self.n), r.some(1, 5, 40, 70)
        self.mask = r.mask(shape, torch.float32)
        self.rotary = r.some(None, "interleaved", "halves") if self.added else None
        angles = torch.rand(CAPACITY + 8, max(1, d // 4)) * 6
        self.tables = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
        self.options = {"causal": r.either(), "normalize": r.either()}
        self.options["softcap"] = 0.0 if backend == "llvm" else r.some(0.0, 0.0, 0.7, 15.0)
        self.window, self.scale = r.some((-1, -1), (r.randint(-1, 40), r.randint(-1, 40))), r.some(None, 0.3)
        self.splits = r.some(0, 1, 3, 100)  # more than there are keys

    def cache_of(self, rows, lengths, dtype):
        """Return a cache with the first rows of each sample, and NaN in all other slots."""
        cache = torch.full((self.pages, self.page, *rows.shape[2:]), torch.nan, dtype=dtype)
        if self.heads_first:
            cache = cache.transpose(1, 2).contiguous().transpose(1, 2)
        for b, length in enumerate(lengths):
            j = torch.arange(length)
            cache[self.table[b, j // self.page], j % self.page] = rows[b, :length].to(dtype)
        return cache

    def run(self):
        def there(t, dtype=None):
            return t if t is None or not isinstance(t, torch.Tensor) else t.to(self.device, dtype)

        caches = [there(self.cache_of(t, self.held, self.dtype)) for t in self.rows]
        index = torch.tensor(self.held)[:, None] + torch.arange(self.added)
        new = [there(t[torch.arange(self.batch)[:, None], index]) for t in self.rows] if self.added else [None, None]
        options = dict(self.options)
        if self.kind == "pages":
            options["block_table"] = spread(there(self.table, torch.int32))
        elif self.kind == "picked":
            options["cache_batch_idx"] = spread(there(self.table[:, 0], torch.int32))
        if self.padding:
            options["cache_leftpad"] = spread(there(torch.tensor(self.padding), torch.int32))
        if self.rotary:
            options |= dict(zip(("rotary_cos", "rotary_sin"), map(there, self.tables), strict=True))
            options["rotary_interleaved"] = self.rotary == "interleaved"
        out = flash_attn_with_kvcache(
            there(self.q), *caches, *new, cache_seqlens=spread(there(torch.tensor(self.held), torch.int32)),
            softmax_scale=self.scale, window_size=self.window, alibi_slopes=there(self.slopes),
            num_splits=self.splits, sigmoid_bias=there(self.bias), attn_mask=there(self.mask), backend=self.backend,
            **options,
        )  # fmt: skip
        return out.cpu(), [cache.cpu() for cache in caches]

    def turn(self, x, positions, dtype):
        """Rotate (n, H, D) one feature at a time, and round to the dtype of the call."""
        x, out = x.to(dtype), x.to(dtype).clone()
        cos, sin = (t.to(dtype)[positions, None] for t in self.tables)  # (n, 1, pairs)
        half = cos.shape[2]
        for i in range(half):
            a, b = (2 * i, 2 * i + 1) if self.rotary == "interleaved" else (i, i + half)
            out[..., a] = x[..., a] * cos[..., i] - x[..., b] * sin[..., i]
            out[..., b] = x[..., a] * sin[..., i] + x[..., b] * cos[..., i]
        return out.to(self.dtype).to(dtype)

    def expected(self, dtype):
        """Return the output by the formula, and the caches afterwards, in a dtype."""
        outs, rows = [], [t.to(dtype) for t in self.rows]
        biases = slopes = [None] * self.batch
        if isinstance(self.bias, torch.Tensor):
            biases = self.bias.reshape(*self.bias.shape, *[1] * (3 - self.bias.dim()))
            biases = biases.expand(self.batch, self.hq, self.n)
        if self.slopes is not None:
            slopes = self.slopes.expand(self.batch, self.hq)
        for b, held in enumerate(self.held):
            total, first = held + self.added, self.padding[b] if self.padding else 0
            q, steps = self.q[b].to(dtype), torch.arange(self.n)
            if self.rotary:
                rows[0][b, held:total] = self.turn(rows[0][b, held:total], torch.arange(held, total), dtype)
                q = self.turn(q, held + steps * (self.options["causal"] or self.window != (-1, -1)), dtype)
            options = {"slopes": slopes[b], "mask": self.mask_of(b, total - first), "window": self.window}
            bias = self.bias if biases[b] is None else biases[b]
            keys, values = (t[b, first:total] for t in rows)
            outs.append(one_sequence(q, keys, values, dtype, bias, scale=self.scale, **options, **self.options))
        lengths = [held + self.added for held in self.held]
        return torch.stack(outs), [self.cache_of(t, lengths, dtype) for t in rows]

    def mask_of(self, b, keys):
        """Return the mask of all keys of a sample; earlier keys than those of the mask are visible."""
        if self.mask is None:
            return None
        mask = self.mask[b if len(self.mask) > 1 else 0]  # (Hq or 1, N or 1, K)
        return torch.nn.functional.pad(mask, (keys - mask.shape[2], 0), value=mask.dtype is torch.bool)


@pytest.mark.parametrize(
    ("backend", "number"), [(b, n) for b in (*ON_CPU, "triton") for n in numbers(25 if b == "triton" else 50)]
)
def test_every_option(backend, number):
    call = Call(number, backend)
    out, ours = call.run()
    assert call.device == "cpu" or torch.equal(call.run()[0], out)
    (truth, caches), (rough, _) = call.expected(torch.float64), call.expected(call.dtype)
    magnitude = (max(call.held) + call.added + 1) * 8 * (1 + max(1.0, truth.abs().max().item()))
    if call.dtype in (torch.bfloat16, torch.float16):
        magnitude /= 8
    assert_as_good_as_formula(out, truth, rough.to(call.dtype), magnitude)
    rtol = torch.finfo(call.dtype).eps * 2
    for mine, theirs in zip(ours, caches, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=rtol, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize(
    ("backend", "dtype", "layout", "heads", "keys"),
    # "blocked" takes 4,096 or 8,192 keys of 64 features at a time; interpreted kernels split at any length
    [
        ("blocked", torch.float32, "length first", (2, 2), 4500),
        ("blocked", torch.bfloat16, "heads first", (4, 1), 9000),
        ("triton", torch.bfloat16, "heads first", (4, 1), 1500),
    ],
)
def test_long_caches(backend, dtype, layout, heads, keys):
    hq, hkv = heads
    g = torch.Generator().manual_seed(0)
    device = device_of(backend)
    d = 16 if backend == "triton" else 64
    for slopes, normalize in ((None, False), (torch.tensor([0.01, 0.02, 0.03, 0.04][:hq]), False), (None, True)):
        q = torch.randn(2, 1, hq, d, generator=g).to(dtype)
        k, v = (torch.randn(2, keys, hkv, d, generator=g).to(dtype) for _ in range(2))
        if layout == "heads first":
            k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (k, v))
        bias = -math.log(keys) - 200 * normalize  # far below what float32 holds
        options = {"causal": True, "sigmoid_bias": bias, "normalize": normalize}
        lengths = torch.tensor([keys, keys * 4 // 5], dtype=torch.int32)
        options |= {"alibi_slopes": None if slopes is None else slopes.to(device), "cache_seqlens": lengths.to(device)}
        out = flash_attn_with_kvcache(*(t.to(device) for t in (q, k, v)), backend=backend, **options).cpu()
        for b, n in enumerate(lengths.tolist()):
            parts = (q[b], k[b, :n], v[b, :n])
            truth, rough = (
                one_sequence(*parts, t, bias, slopes, causal=True, normalize=normalize) for t in (torch.float64, dtype)
            )
            assert_as_good_as_formula(out[b], truth, rough, 1.0)


def test_rotary_tables_need_only_the_positions_used():
    """Without causal, all queries are rotated by the angle of the first position; with it, by consecutive ones."""
    q, cache, new = torch.randn(2, 3, 4, 8), torch.randn(2, 16, 4, 8), torch.randn(2, 1, 4, 8)
    angles = torch.randn(9, 4)
    lengths = torch.tensor([3, 5])

    def call(places, causal):
        tables = {"rotary_cos": angles[:places].cos(), "rotary_sin": angles[:places].sin()}
        caches = cache.clone(), cache.clone()
        options = {"cache_seqlens": lengths, "causal": causal, "sigmoid_bias": -2.0, **tables}
        return flash_attn_with_kvcache(q, *caches, new, new, **options)

    assert torch.equal(call(6, False), call(9, False))
    with pytest.raises(ValueError, match=r"does not contain the positions \d … 5;"):
        call(5, False)
    assert torch.equal(call(8, True), call(9, True))
    with pytest.raises(ValueError, match=r"does not contain the positions \d … 7;"):
        call(7, True)


@pytest.mark.usefixtures("unchecked")
def test_compiled():
    """Compile in one graph, with the cache changed in place, without recompiling for other lengths."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 1, 2, 8).unbind()
    caches = [torch.randn(2, 32, 2, 8) for _ in range(2)]
    twins = [c.clone() for c in caches]

    def step(lengths, *caches):
        return flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=lengths, causal=True, sigmoid_bias=-2.0)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    with torch.no_grad(), torch.compiler.set_stance("default"):
        for i in range(3):
            lengths = torch.tensor([i, 9 + i])
            torch.testing.assert_close(compiled(lengths, *caches), step(lengths, *twins))
        for a, b in zip(caches, twins, strict=True):
            assert torch.equal(a, b)


def test_opcheck():
    q, cache = torch.randn(2, 1, 4, 8), torch.randn(2, 2, 16, 2, 8)
    lengths, bias = torch.tensor([3, 16]), torch.tensor(-2.0, dtype=torch.float64)
    args = (*KVCacheProblem(q, cache[0], cache[1], lengths, bias, right=0, softcap=2.5), "blocked", False)
    torch.library.opcheck(torch.ops.sigattn.kvcache_forward.default, args)
    new = torch.randn(2, 2, 1, 2, 8)
    args = (cache[0], cache[1], new[0], new[1], torch.tensor([3, 15]), None)
    torch.library.opcheck(torch.ops.sigattn.append_to_cache.default, args)
