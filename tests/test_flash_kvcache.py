"""flash_attn_with_kvcache: every option against the formula in float64, the cache afterwards, and invalid input."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from sigattn.flash import flash_attn_with_kvcache
from sigattn.ops.problem import KVCacheProblem
from tests.ops.cases import COMPILER_NOISE, ON_CPU, device_of, fuzz, head_dims
from tests.ops.truth import assert_as_good_as_formula, one_sequence

pytestmark = [pytest.mark.filterwarnings(w) for w in COMPILER_NOISE]


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@st.composite
def cases(draw):
    """Draw lengths, layout and options of a call."""
    batch = draw(st.integers(1, 3))
    new = draw(st.sampled_from([0, 0, 1, 1, 2, 5]))
    page = draw(st.sampled_from([None, None, 1, 7, 16]))
    held = draw(st.lists(st.sampled_from([0, 1, 3, 16, 33, 50]), min_size=batch, max_size=batch))
    side = st.integers(-1, 40)
    return {
        "held": held,
        "new": new,
        "n": draw(st.sampled_from([1, 1, 1, 2, 5])),
        "page": page,
        "picked": page is None and draw(st.booleans()),
        "leftpad": [draw(st.integers(0, h)) for h in held] if draw(st.booleans()) else None,
        "heads": draw(st.sampled_from([(1, 1), (2, 2), (4, 2), (6, 1)])),
        "d": draw(head_dims(2, 8, 20)),
        "dv": draw(head_dims(8, 13)),
        "dtype": draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16])),
        "causal": draw(st.booleans()),
        "window": draw(st.one_of(st.just((-1, -1)), st.tuples(side, side))),
        "slopes": draw(st.sampled_from([None, "head", "sample"])),
        "bias": draw(st.sampled_from([-3.0, 0.0, -150.0, "number", "sample", "head", "both", "query"])),
        "scale": draw(st.sampled_from([None, 0.3])),
        "softcap": draw(st.sampled_from([0.0, 0.0, 0.7, 15.0])),
        "normalize": draw(st.booleans()),
        "rotary": draw(st.sampled_from([None, "interleaved", "halves"])) if new else None,
        "layout": draw(st.sampled_from(["length first", "heads first"])),
        "splits": draw(st.sampled_from([0, 1, 3])),
        "mask": draw(st.sampled_from([None, None, "bool", "float", "-inf"])),
        "mask of": (*draw(st.tuples(*[st.booleans()] * 3)), draw(st.sampled_from([1, 5, 40, 70]))),
        "seed": draw(st.integers(0, 1 << 30)),
    }


CAPACITY = 63


class Call:
    """Tensors of a case, and the expected result."""

    def __init__(self, case, device):
        self.case, self.device = case, device
        self.generator = torch.Generator().manual_seed(case["seed"])
        (self.hq, hkv), batch, new = case["heads"], len(case["held"]), case["new"]
        self.q = self.randn(batch, case["n"], self.hq, case["d"])
        self.rows = [self.randn(batch, CAPACITY, hkv, e) for e in (case["d"], case["dv"])]  # all keys, all values
        index = torch.tensor(case["held"])[:, None] + torch.arange(new)
        self.new = [t[torch.arange(batch)[:, None], index] for t in self.rows] if new else [None, None]
        self.page = case["page"] or CAPACITY
        pages_of_each = -(-CAPACITY // self.page)
        self.pages = batch * pages_of_each + 2 * bool(case["page"] or case["picked"])
        self.table = torch.arange(batch)[:, None]
        if case["page"] or case["picked"]:
            self.table = torch.randperm(self.pages, generator=self.generator)[: batch * pages_of_each].view(batch, -1)
        self.caches = [self.cache_of(t, case["held"], case["dtype"]) for t in self.rows]
        shapes = {"number": (), "sample": (batch,), "head": (1, self.hq), "both": (batch, self.hq)}
        shapes["query"] = (batch, 1, case["n"])
        self.bias = self.biases = case["bias"]
        if isinstance(self.bias, str):
            self.bias = self.randn(*shapes[case["bias"]], dtype=torch.float32) - 1
            of_all = self.bias.reshape(*self.bias.shape, *[1] * (3 - self.bias.dim()))
            self.biases = of_all.expand(batch, self.hq, case["n"])
        shape = {"head": (self.hq,), "sample": (batch, self.hq)}.get(case["slopes"])
        self.slopes = self.randn(*shape, dtype=torch.float32).abs() / 8 if shape else None
        angles = torch.rand(CAPACITY + 8, case["d"] // 2, generator=self.generator, dtype=torch.float64) * 6
        self.tables = [t[:, : max(1, case["d"] // 4)].to(device, case["dtype"]) for t in (angles.cos(), angles.sin())]
        self.mask = None
        if case["mask"]:  # of the last keys, fewer or more than a sample has
            *kept, keys = case["mask of"]
            full = zip((batch, self.hq, case["n"]), kept, strict=True)
            self.mask = self.randn(*(size if keep else 1 for size, keep in full), keys, dtype=torch.float32)
            if case["mask"] == "-inf":
                self.mask = self.mask.masked_fill(self.mask < -0.5, -torch.inf)
            self.mask = self.mask > -0.5 if case["mask"] == "bool" else self.mask

    def randn(self, *shape, dtype=None):
        t = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return t.to(dtype or self.case["dtype"]).to(self.device)

    def cache_of(self, rows, lengths, dtype):
        """Return a cache with the first rows of each sample, and NaN in all other slots."""
        cache = torch.full((self.pages, self.page, *rows.shape[2:]), torch.nan, dtype=dtype, device=self.device)
        if self.case["layout"] == "heads first":
            cache = cache.transpose(1, 2).contiguous().transpose(1, 2)
        for b, length in enumerate(lengths):
            j = torch.arange(length)
            cache[self.table[b, j // self.page], j % self.page] = rows[b, :length].to(dtype)
        return cache

    def run(self, backend):
        case, integers, where = self.case, {"dtype": torch.int32, "device": self.device}, {}
        if case["page"]:
            where["block_table"] = self.table.to(**integers)
        elif case["picked"]:
            where["cache_batch_idx"] = self.table[:, 0].to(**integers)
        if case["leftpad"]:
            where["cache_leftpad"] = torch.tensor(case["leftpad"], **integers)
        if case["rotary"]:
            where["rotary_cos"], where["rotary_sin"] = self.tables
            where["rotary_interleaved"] = case["rotary"] == "interleaved"
        where |= {name: case[name] for name in ("softcap", "causal", "normalize")}
        return flash_attn_with_kvcache(
            self.q, *self.caches, *self.new, cache_seqlens=torch.tensor(case["held"], **integers),
            softmax_scale=case["scale"], window_size=case["window"], alibi_slopes=self.slopes,
            num_splits=case["splits"], sigmoid_bias=self.bias, attn_mask=self.mask, backend=backend, **where,
        )  # fmt: skip

    def turn(self, x, positions, dtype):
        """Rotate (n, H, D) one feature at a time, and round to the dtype of the case."""
        x, out = x.to(dtype), x.to(dtype).clone()
        cos, sin = (t.to(dtype)[positions, None] for t in self.tables)  # (n, 1, pairs)
        half = cos.shape[2]
        for i in range(half):
            a, b = (2 * i, 2 * i + 1) if self.case["rotary"] == "interleaved" else (i, i + half)
            out[..., a] = x[..., a] * cos[..., i] - x[..., b] * sin[..., i]
            out[..., b] = x[..., a] * sin[..., i] + x[..., b] * cos[..., i]
        return out.to(self.case["dtype"]).to(dtype)

    def expected(self, dtype):
        """Return the output by the formula, and the caches afterwards, in a dtype."""
        case, outs, rows = self.case, [], [t.to(dtype) for t in self.rows]
        for b, held in enumerate(case["held"]):
            total, first = held + case["new"], (case["leftpad"] or [0] * len(self.q))[b]
            q, steps = self.q[b].to(dtype), torch.arange(case["n"])
            if case["rotary"]:
                rows[0][b, held:total] = self.turn(rows[0][b, held:total], torch.arange(held, total), dtype)
                q = self.turn(q, held + steps * (case["causal"] or case["window"] != (-1, -1)), dtype)
            slopes = None if self.slopes is None else self.slopes.expand(len(self.q), self.hq)[b]
            options = {name: case[name] for name in ("causal", "window", "scale", "softcap", "normalize")}
            options |= {"slopes": slopes, "mask": self.mask_of(b, total - first)}
            bias = self.biases[b] if isinstance(self.biases, torch.Tensor) else self.biases
            outs.append(one_sequence(q, *(t[b, first:total] for t in rows), dtype, bias, **options))
        lengths = [held + case["new"] for held in case["held"]]
        return torch.stack(outs), [self.cache_of(t, lengths, dtype) for t in rows]

    def mask_of(self, b, keys):
        """Return the mask of all keys of a sample; earlier keys than those of the mask are visible."""
        if self.mask is None:
            return None
        mask = self.mask[b if len(self.mask) > 1 else 0]  # (Hq or 1, N or 1, K)
        visible = mask.dtype is torch.bool
        return torch.nn.functional.pad(mask, (keys - mask.shape[2], 0), value=visible)


EVERY_SHAPE = {  # options of each sample, which few random cases have
    "held": [3, 33, 0], "new": 2, "n": 2, "page": 7, "picked": False, "leftpad": [1, 5, 0], "heads": (4, 2), "d": 8,
    "dv": 13, "dtype": torch.float64, "causal": True, "window": (-1, -1), "slopes": "sample", "bias": "sample",
    "scale": None, "softcap": 0.0, "normalize": False, "rotary": "halves", "layout": "length first", "splits": 0,
    "mask": "float", "mask of": (True, True, True, 5), "seed": 0,
}  # fmt: skip


@pytest.mark.parametrize("backend", ON_CPU)
@fuzz(50)
@given(case=cases())
@example(case=EVERY_SHAPE)
@example(case={**EVERY_SHAPE, "bias": "both", "leftpad": None, "page": None, "picked": True, "mask": None})
@example(case={**EVERY_SHAPE, "bias": "query", "rotary": "interleaved", "normalize": True, "slopes": "head"})
def test_every_option(backend, case):
    if backend == "llvm":
        case |= {"dtype": torch.float32, "softcap": 0.0}
    check(backend, case)


@fuzz(25)
@given(case=cases())
def test_every_option_of_triton(case):
    case["dtype"] = torch.float32 if case["dtype"] is torch.float64 else case["dtype"]
    check("triton", case)


def check(backend, case):
    """Compare the output and the caches afterwards with the formula."""
    call = Call(case, device_of(backend))
    out = call.run(backend)
    truth, caches = Call(case, "cpu").expected(torch.float64)
    rough, _ = Call(case, "cpu").expected(case["dtype"])
    keys = max(case["held"]) + case["new"] + 1
    magnitude = keys * 8 * (1 + max(1.0, truth.abs().max().item()))
    if case["dtype"] in (torch.bfloat16, torch.float16):
        magnitude /= 8
    assert_as_good_as_formula(out.cpu(), truth, rough.to(case["dtype"]), magnitude)
    for ours, theirs in zip(call.caches, caches, strict=True):
        torch.testing.assert_close(
            ours.cpu().double(), theirs.double(), rtol=torch.finfo(case["dtype"]).eps * 2, atol=1e-6, equal_nan=True
        )


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
    """Test several pieces and many splits, with and without ALiBi."""
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


def test_results_repeat_bitwise_for_any_number_of_splits():
    q, (k, v) = torch.randn(1, 1, 2, 16), torch.randn(2, 1, 500, 2, 16).unbind()
    device = device_of("triton")
    q, k, v = (t.to(device) for t in (q, k, v))

    def run(splits):
        return flash_attn_with_kvcache(q, k, v, sigmoid_bias=-6.0, num_splits=splits, backend="triton")

    assert torch.equal(run(0), run(0))
    for splits in (1, 5, 100):
        torch.testing.assert_close(run(splits), run(0))


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


class TestBadInput:
    def call(self, **changes):
        """Make a valid call with some arguments changed, and assert that an invalid one leaves the cache unchanged."""
        torch.manual_seed(0)
        shapes = {"q": (2, 1, 4, 8), "k": (2, 1, 2, 8), "v": (2, 1, 2, 8)}
        shapes |= {"k_cache": (2, 16, 2, 8), "v_cache": (2, 16, 2, 8)}
        made = {name: torch.randn(shape) for name, shape in shapes.items()}
        made |= {"cache_seqlens": torch.tensor([3, 5]), "causal": True, "sigmoid_bias": -2.0, **changes}
        before = [made[n].clone() for n in ("k_cache", "v_cache")]
        try:
            return flash_attn_with_kvcache(**made)
        finally:
            changed = any(not torch.equal(made[n], b) for n, b in zip(("k_cache", "v_cache"), before, strict=True))
            assert changed == (changes == {})

    def test_valid_call(self):
        assert self.call().shape == (2, 1, 4, 8)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"cache_seqlens": torch.tensor([3, 16])}, r"a cache of 16 keys for each sample cannot hold .* \[4, 17\]"),
            ({"cache_seqlens": None}, "new keys and values need cache_seqlens"),
            ({"cache_seqlens": torch.tensor([3.0, 5.0])}, "flash_attn_with_kvcache: "),
            ({"cache_leftpad": torch.tensor([0, 9])}, r"cache_leftpad must lie in 0 … length; got \[0, 9\]"),
            ({"cache_batch_idx": torch.tensor([0, 2])}, r"names pages \[2\], but the cache has pages 0 … 1"),
            ({"block_table": torch.tensor([[0], [-1]])}, r"names pages \[-1\]"),
            ({"block_table": torch.tensor([0, 1])}, r"block_table must be \(B, pages of each sample\)"),
            ({"block_table": torch.tensor([[0], [1]]), "cache_batch_idx": torch.tensor([0, 1])}, "exclude each other"),
            ({"q": torch.zeros(3, 1, 4, 8), "k": None, "v": None}, "the cache must have q's batch size"),
            ({"k": None}, "k and v must both be given"),
            ({"k": torch.zeros(2, 1, 4, 8), "v": torch.zeros(2, 1, 4, 8)}, "must have the cache's heads and head_dim"),
            ({"v_cache": torch.zeros(2, 2, 16, 8)}, "k_cache and v_cache must have the same length"),
            ({"return_softmax_lse": True}, "no log-sum-exp"),
            ({"rotary_cos": torch.ones(20, 4)}, "rotary_cos and rotary_sin must be floating-point tensors"),
            ({"rotary_cos": torch.ones(5, 4), "rotary_sin": torch.ones(5, 4)}, r"does not contain .* \d … 5;"),
            ({"rotary_cos": torch.ones(9, 5), "rotary_sin": torch.ones(9, 5)}, "rotary_dim at most head_dim"),
            ({"sigmoid_bias": torch.ones(2, 4, 3)}, r"\(B or 1, Hq or 1, N or 1\) = \(2 or 1, 4 or 1, 1 or 1\)"),
            ({"sigmoid_bias": None}, "-log of the current length would change as the cache grows"),
            ({"attn_mask": torch.ones(3, 5) > 0}, "attn_mask does not broadcast"),
            ({"q": torch.zeros(2, 1, 4, 8, requires_grad=True)}, "has no gradient"),
            ({"attn_mask": torch.ones(1, 5, requires_grad=True)}, "has no gradient"),
        ],
    )
    def test_invalid_calls_are_explained(self, changes, message):
        with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
            self.call(**changes)

    def test_unsupported_backend(self, monkeypatch):
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        if not torch.cuda.is_available():
            with pytest.raises(ValueError, match="backend 'triton' does not support"):
                self.call(backend="triton", k=None, v=None)
