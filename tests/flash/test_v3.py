"""sigattn.flash.v3: order of arguments; each option against a float64 formula or an equivalent call."""

import doctest
import inspect

import pytest
import torch

from sigattn import flash
from sigattn.flash import v3

from ..ops.cases import COMPILER_NOISE, device_of
from ..test_flash import one_sequence

BACKENDS = ["blocked", "triton"]
NONE = (-1, -1)
SIGNATURES = {  # of hopper/flash_attn_interface.py
    "flash_attn_func": "q k v softmax_scale causal qv q_descale k_descale v_descale window_size attention_chunk "
    "softcap num_splits pack_gqa deterministic sm_margin return_attn_probs",
    "flash_attn_qkvpacked_func": "qkv softmax_scale causal q_descale k_descale v_descale window_size attention_chunk "
    "softcap deterministic num_heads_q sm_margin return_attn_probs",
    "flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q seqused_k "
    "softmax_scale causal qv q_descale k_descale v_descale window_size attention_chunk softcap num_splits pack_gqa "
    "deterministic sm_margin return_attn_probs",
    "flash_attn_with_kvcache": "q k_cache v_cache k v qv rotary_cos rotary_sin cache_seqlens cache_batch_idx "
    "cache_leftpad page_table cu_seqlens_q cu_seqlens_k_new max_seqlen_q rotary_seqlens q_descale k_descale v_descale "
    "softmax_scale causal window_size attention_chunk softcap rotary_interleaved scheduler_metadata num_splits "
    "pack_gqa sm_margin return_softmax_lse",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_order_of_arguments_is_that_of_flash_attn_3(name):
    parameters = inspect.signature(getattr(v3, name)).parameters
    assert list(parameters) == [*SIGNATURES[name].split(), "sigmoid_bias", "sigmoid_precision", "backend", "attn_mask"]


def close(ours, truth):
    torch.testing.assert_close(ours.double().cpu(), truth, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_positional_arguments(backend):
    """(q, k, v, softmax_scale, causal), with gradients."""
    device = device_of(backend)
    given = [torch.randn(2, n, h, 8).to(device).requires_grad_() for n, h in ((5, 4), (7, 2), (7, 2))]
    out = v3.flash_attn_func(*given, 0.25, True, sigmoid_bias=-1.0, backend=backend)
    wide = [t.detach().double().cpu().requires_grad_() for t in given]
    parts = [one_sequence(*sample, torch.float64, True, NONE, None, -1.0, 0.25) for sample in zip(*wide, strict=True)]
    truth = torch.stack(parts)
    grad = torch.randn_like(truth)
    close(out, truth)
    ours = torch.autograd.grad(out, given, grad.float().to(device))
    for a, b in zip(ours, torch.autograd.grad(truth, wide, grad), strict=True):
        close(a, b)


def by_mask(q, k, v, visible, bias=-1.0):
    """(N, Hq, D), (M, Hkv, D), (M, Hkv, Dv) and visible (N, M) in float64."""
    q, k, v = (t.double().cpu().transpose(0, 1) for t in (q, k, v))
    k, v = (t.repeat_interleave(len(q) // len(t), 0) for t in (k, v))
    weights = torch.sigmoid(q @ k.mT * q.shape[-1] ** -0.5 + bias) * visible
    return (weights @ v).transpose(0, 1)


def chunk_is_seen(n, m, chunk, causal):
    """Compute the mask of chunks entry by entry, as flash-attn 3 documents it."""
    visible = torch.zeros(n, m, dtype=torch.float64)
    for i in range(n):
        position = i + m - n
        for j in range(m):
            same = position // chunk == j // chunk
            visible[i, j] = same and (not causal or j <= position)
    return visible


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("n", "m"), [(7, 7), (3, 9), (6, 4)])
def test_chunks(backend, causal, n, m):
    device = device_of(backend)
    q, k, v = (torch.randn(1, length, h, 8).to(device) for length, h in ((n, 4), (m, 2), (m, 2)))
    out = v3.flash_attn_func(q, k, v, causal=causal, attention_chunk=3, sigmoid_bias=-1.0, backend=backend)
    close(out[0], by_mask(q[0], k[0], v[0], chunk_is_seen(n, m, 3, causal)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_chunks_of_packed_sequences(backend):
    """Chunks are counted from each sequence's first key; with used rows, a mask, and gradients."""
    device = device_of(backend)
    sizes_q, sizes_k, used = [4, 0, 7], [9, 2, 7], [8, 1, 7]
    given = [
        torch.randn(sum(n), h, 8).to(device).requires_grad_() for n, h in ((sizes_q, 4), (sizes_k, 2), (sizes_k, 2))
    ]
    cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0).to(device) for n in (sizes_q, sizes_k))
    mask = torch.rand(3, 1, 7, 9) > 0.3
    out = v3.flash_attn_varlen_func(
        *given, cu_q, cu_k, 7, 9, seqused_k=torch.tensor(used, device=device), attention_chunk=3,
        sigmoid_bias=-1.0, backend=backend, attn_mask=mask.to(device),
    )  # fmt: skip
    wide = [t.detach().double().cpu().requires_grad_() for t in given]
    parts = []
    for s, (n, m) in enumerate(zip(sizes_q, used, strict=True)):
        rows, keys = slice(cu_q[s], cu_q[s] + n), slice(cu_k[s], cu_k[s] + m)
        visible = chunk_is_seen(n, m, 3, False) * mask[s, 0, :n, :m]
        parts.append(by_mask(wide[0][rows], wide[1][keys], wide[2][keys], visible))
    truth = torch.cat(parts)
    close(out, truth)
    grad = torch.randn_like(truth)
    ours = torch.autograd.grad(out, given, grad.float().to(device))
    for a, b in zip(ours, torch.autograd.grad(truth, wide, grad), strict=True):
        close(a, b)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_chunks_and_a_mask(kind):
    q, k, v = torch.randn(3, 1, 6, 4, 8).unbind()
    mask = torch.randn(4, 6, 6, requires_grad=kind == "float")
    visible = chunk_is_seen(6, 6, 4, True)
    given = mask > 0 if kind == "bool" else mask
    out = v3.flash_attn_func(q, k, v, causal=True, attention_chunk=4, sigmoid_bias=-1.0, attn_mask=given)
    q, k, v = (t[0].double().transpose(0, 1) for t in (q, k, v))
    logits = q @ k.mT * 8**-0.5 - 1
    truth = logits.sigmoid() * given if kind == "bool" else (logits + mask.double()).sigmoid()
    truth = ((truth * visible) @ v).transpose(0, 1)[None]
    close(out, truth)
    if kind == "float":
        ours, want = (torch.autograd.grad(t.sum(), mask)[0] for t in (out, truth))
        torch.testing.assert_close(ours, want)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("n", [1, 3])
def test_chunks_of_a_cache(backend, n):
    """Chunks are counted from the sample's first key."""
    device = device_of(backend)
    q, k, v = (torch.randn(4, length, h, 8).to(device) for length, h in ((n, 4), (16, 2), (16, 2)))
    lengths, leftpad = [1, 6, 9, 16], [0, 2, 0, 5]
    out = v3.flash_attn_with_kvcache(
        q, k, v, cache_seqlens=torch.tensor(lengths, device=device), cache_leftpad=torch.tensor(leftpad, device=device),
        causal=True, attention_chunk=4, sigmoid_bias=-1.0, backend=backend,
    )  # fmt: skip
    for b, (length, first) in enumerate(zip(lengths, leftpad, strict=True)):
        visible = chunk_is_seen(n, length - first, 4, True)
        close(out[b], by_mask(q[b], k[b, first:length], v[b, first:length], visible))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("used_q", "used_k"), [([2, 0, 3], None), (None, [4, 1, 0]), ([1, 2, 3], [3, 1, 6])])
def test_used_rows(backend, used_q, used_k):
    device = device_of(backend)
    sizes_q, sizes_k = [3, 2, 4], [5, 1, 6]
    given = [
        torch.randn(sum(n), h, 8).to(device).requires_grad_() for n, h in ((sizes_q, 4), (sizes_k, 2), (sizes_k, 2))
    ]
    cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0).to(device) for n in (sizes_q, sizes_k))
    used = {
        name: None if n is None else torch.tensor(n, dtype=torch.int32, device=device)
        for name, n in (("seqused_q", used_q), ("seqused_k", used_k))
    }
    out = v3.flash_attn_varlen_func(*given, cu_q, cu_k, 4, 6, causal=True, **used, backend=backend)
    wide = [t.detach().double().cpu().requires_grad_() for t in given]
    truth = torch.zeros(sum(sizes_q), 4, 8, dtype=torch.float64)
    for s in range(3):
        n, m = (sizes_q if used_q is None else used_q)[s], (sizes_k if used_k is None else used_k)[s]
        rows, keys = slice(cu_q[s], cu_q[s] + n), slice(cu_k[s], cu_k[s] + m)
        bias = -torch.tensor(float(max(m, 1))).log().item()
        own = one_sequence(wide[0][rows], wide[1][keys], wide[2][keys], torch.float64, True, NONE, None, bias, None)
        truth = truth.index_copy(0, torch.arange(sum(sizes_q))[rows], own)
    close(out, truth)
    grad = torch.randn_like(truth)
    ours = torch.autograd.grad(out, given, grad.float().to(device))
    for a, b in zip(ours, torch.autograd.grad(truth, wide, grad), strict=True):
        close(a, b)


class TestCache:
    """Packed new queries and keys against a cache, with and without pages: each sample equals a call of its own."""

    new_q, new_k, held = [2, 0, 3], [1, 2, 3], [5, 0, 4]

    def given(self, device, paged):
        g = torch.Generator().manual_seed(0)

        def randn(*shape):
            return torch.randn(shape, generator=g).to(device)

        cache = (12, 4) if paged else (3, 16)
        table = torch.tensor([[3, 1, 0, 2], [7, 4, 5, 6], [8, 11, 10, 9]]) if paged else None
        tensors = {
            "q": randn(sum(self.new_q) + 1, 4, 8),  # and one row that belongs to no sample
            "k_cache": randn(*cache, 2, 8),
            "v_cache": randn(*cache, 2, 6),
            "k": randn(sum(self.new_k), 2, 8),
            "v": randn(sum(self.new_k), 2, 6),
            "cache_seqlens": torch.tensor(self.held, device=device),
            "page_table": None if table is None else table.to(device),
        }
        starts = {
            "cu_seqlens_q": torch.tensor([0, *self.new_q], device=device).cumsum(0),
            "cu_seqlens_k_new": torch.tensor([0, *self.new_k], device=device).cumsum(0),
        }
        return tensors, starts

    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize(
        ("paged", "rotary", "causal"),
        [
            *((False, None, True), (False, "own", False), (False, "given", True)),
            *((True, None, False), (True, "own", True), (True, "given", False)),
        ],
    )
    def test_each_sample_is_as_if_alone(self, backend, paged, rotary, causal):
        device = device_of(backend)
        given, starts = self.given(device, paged)
        options = {"causal": causal, "sigmoid_bias": -2.0, "backend": backend}
        if rotary is not None:
            angles = torch.randn(20, 3, generator=torch.Generator().manual_seed(1)).to(device)
            options |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
        own = torch.tensor([4, 1, 9], device=device) if rotary == "given" else None
        alone = {n: t.clone() if isinstance(t, torch.Tensor) else t for n, t in given.items()}
        out = v3.flash_attn_with_kvcache(**given, **starts, max_seqlen_q=4, rotary_seqlens=own, **options)
        assert out.shape == (6, 4, 6)
        assert (out[5] == 0).all()
        for b in range(3):
            rows, new = (slice(int(c[b]), int(c[b + 1])) for c in starts.values())
            page_table = given["page_table"][b : b + 1] if paged else None
            options["cache_batch_idx"] = None if paged else torch.tensor([b], device=device)
            k, v = (alone[n][None, new] for n in ("k", "v"))
            one = v3.flash_attn_with_kvcache(
                alone["q"][None, rows], alone["k_cache"], alone["v_cache"], k, v,
                cache_seqlens=given["cache_seqlens"][b : b + 1], page_table=page_table,
                rotary_seqlens=None if own is None else own[b : b + 1], **options,
            )  # fmt: skip
            torch.testing.assert_close(out[rows], one[0], atol=1e-5, rtol=1e-5)
        for name in ("k_cache", "v_cache"):
            torch.testing.assert_close(given[name], alone[name])

    def test_against_the_formula(self):
        given, starts = self.given("cpu", False)
        caches = [t.clone() for t in (given["k_cache"], given["v_cache"])]
        out = v3.flash_attn_with_kvcache(**given, **starts, max_seqlen_q=3, causal=True, sigmoid_bias=-2.0)
        for b in range(3):
            rows, new = (slice(int(c[b]), int(c[b + 1])) for c in starts.values())
            k, v = (torch.cat((c[b, : self.held[b]], given[n][new])) for c, n in zip(caches, ("k", "v"), strict=True))
            close(out[rows], one_sequence(given["q"][rows], k, v, torch.float64, True, NONE, None, -2.0, None))

    def test_chunks(self):
        """Test packed queries, the last of which is aligned with the sample's last key."""
        given, starts = self.given("cpu", True)
        twin = {n: t.clone() if isinstance(t, torch.Tensor) else t for n, t in given.items()}
        options = {"causal": True, "sigmoid_bias": -2.0, "attention_chunk": 3}
        out = v3.flash_attn_with_kvcache(**given, **starts, max_seqlen_q=4, **options)
        for b in range(3):
            rows, new = (slice(int(c[b]), int(c[b + 1])) for c in starts.values())
            one = v3.flash_attn_with_kvcache(
                twin["q"][None, rows], twin["k_cache"], twin["v_cache"], twin["k"][None, new], twin["v"][None, new],
                cache_seqlens=given["cache_seqlens"][b : b + 1], page_table=given["page_table"][b : b + 1], **options,
            )  # fmt: skip
            torch.testing.assert_close(out[rows], one[0])

    @pytest.mark.filterwarnings(*COMPILER_NOISE)
    def test_compiled(self, unchecked):
        given, starts = self.given("cpu", True)
        twin = {n: t.clone() if isinstance(t, torch.Tensor) else t for n, t in given.items()}

        def step(given, starts):
            return v3.flash_attn_with_kvcache(**given, **starts, max_seqlen_q=3, causal=True, sigmoid_bias=-2.0)

        torch.testing.assert_close(
            torch.compile(step, fullgraph=True, backend="aot_eager")(given, starts), step(twin, starts)
        )
        torch.testing.assert_close(given["k_cache"], twin["k_cache"])

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"max_seqlen_q": None}, "cu_seqlens_q needs max_seqlen_q"),
            ({"max_seqlen_q": 2}, "max_seqlen_q is 2, but cu_seqlens_q has a sequence of 3"),
            ({"cu_seqlens_q": torch.tensor([0, 9, 9, 9])}, r"cu_seqlens_q must begin at 0, .* end at most at 6"),
            ({"cu_seqlens_q": torch.tensor([0, 2, 5])}, "as many sequences in cu_seqlens_q|must have q's batch size"),
            (
                {"cu_seqlens_k_new": torch.tensor([0, 1, 3, 5])},
                r"cu_seqlens_k_new must .* end at 6; got \[0, 1, 3, 5\]",
            ),
            ({"cu_seqlens_k_new": torch.tensor([0, 1, 6])}, "as many sequences"),
            ({"v": None}, "pass both"),
            ({"k": torch.randn(6, 4, 8), "v": torch.randn(6, 4, 6)}, "must have the cache's heads and head_dim"),
            ({"cache_seqlens": torch.tensor([5, 15, 4])}, r"cannot hold lengths .* \[6, 17, 7\]"),
            ({"attention_chunk": 4, "attn_mask": torch.ones(4, 9) > 0}, "attention_chunk with attn_mask"),
            ({"rotary_cos": torch.ones(6, 4), "rotary_sin": torch.ones(6, 4)}, "rotary_cos does not contain"),
        ],
    )
    def test_error_messages(self, changes, message):
        given, starts = self.given("cpu", False)
        before = given["k_cache"].clone()
        call = {**given, **starts, "max_seqlen_q": 4, "causal": True, "sigmoid_bias": -2.0, **changes}
        with pytest.raises((ValueError, TypeError), match=message):
            v3.flash_attn_with_kvcache(**call)
        assert torch.equal(given["k_cache"], before)


def test_hints_and_packed_forms():
    qkv = torch.randn(2, 5, 3, 4, 8)
    q, k, v = qkv.unbind(2)
    want = flash.flash_attn_func(q, k, v, causal=True, sigmoid_bias=-1.0)
    options = {"causal": True, "sigmoid_bias": -1.0}
    assert torch.equal(v3.flash_attn_func(q, k, v, num_splits=3, pack_gqa=True, sm_margin=8, **options), want)
    assert torch.equal(v3.flash_attn_qkvpacked_func(qkv, **options), want)
    few = torch.cat((q, k[:, :, :2], v[:, :, :2]), 2)
    want = flash.flash_attn_func(q, k[:, :, :2], v[:, :, :2], **options)
    assert torch.equal(v3.flash_attn_qkvpacked_func(few, num_heads_q=4, **options), want)
    cache = {"cache_seqlens": 4, "causal": True, "sigmoid_bias": -1.0}
    want = flash.flash_attn_with_kvcache(q[:, :1], k, v, **cache)
    ours = v3.flash_attn_with_kvcache(q[:, :1], k, v, num_splits=2, pack_gqa=False, **cache)
    torch.testing.assert_close(ours, want)


def test_options_of_flash_attn_2_are_passed_on():
    q, k, v = torch.randn(3, 2, 5, 4, 8).unbind()
    options = {"softmax_scale": 2.0, "softcap": 1.5, "window_size": (2, 0), "sigmoid_bias": -1.0}
    want = flash.flash_attn_func(q, k, v, **options)
    assert not torch.allclose(flash.flash_attn_func(q, k, v, **{**options, "softcap": 0.0}), want)
    assert torch.equal(v3.flash_attn_func(q, k, v, **options), want)
    assert torch.equal(v3.flash_attn_qkvpacked_func(torch.stack((q, k, v), 2), **options), want)
    starts = torch.tensor([0, 5, 10])
    packed = [t.flatten(0, 1) for t in (q, k, v)]
    ours = v3.flash_attn_varlen_func(*packed, starts, starts, 5, 5, **options)
    assert torch.equal(ours, flash.flash_attn_varlen_func(*packed, starts, starts, 5, 5, **options))
    torch.testing.assert_close(ours.unflatten(0, (2, 5)), want)
    torch.testing.assert_close(v3.flash_attn_with_kvcache(q, k, v, **options), want)
    mask = torch.rand(2, 4, 5, 5) > 0.4
    want = flash.flash_attn_func(q, k, v, attn_mask=mask, **options)
    assert torch.equal(v3.flash_attn_func(q, k, v, attn_mask=mask, **options), want)
    stacked = torch.stack((q, k, v), 2)
    assert torch.equal(v3.flash_attn_qkvpacked_func(stacked, attn_mask=mask, **options), want)
    torch.testing.assert_close(v3.flash_attn_with_kvcache(q, k, v, attn_mask=mask, **options), want)
    ragged = {"cu_seqlens_q": starts, "max_seqlen_q": 5, "attn_mask": mask}
    ours = v3.flash_attn_with_kvcache(packed[0], k, v, **ragged, **options)
    torch.testing.assert_close(ours.unflatten(0, (2, 5)), want)


Q = torch.randn(2, 5, 4, 8)
P, S, U = torch.randn(10, 4, 8), torch.tensor([0, 5, 10]), torch.tensor([5, 5])
WRONG = {
    "flash-attn 2's order": (lambda: v3.flash_attn_func(Q, Q, Q, 0.0, 0.25), TypeError, "that of sigattn.flash"),
    "and causal": (lambda: v3.flash_attn_func(Q, Q, Q, 0.0, None, True), TypeError, "causal a bool, got 0.0 and None"),
    "qv": (lambda: v3.flash_attn_func(Q, Q, Q, qv=Q), ValueError, "qv must be None: concatenate it to q"),
    "descale": (lambda: v3.flash_attn_func(Q, Q, Q, k_descale=Q), ValueError, "k_descale must be None: float8"),
    "probs": (lambda: v3.flash_attn_func(Q, Q, Q, return_attn_probs=True), ValueError, "return_attn_probs"),
    "pack_gqa": (lambda: v3.flash_attn_func(Q, Q, Q, pack_gqa=1), TypeError, "pack_gqa must be True or False, got 1"),
    "splits": (lambda: v3.flash_attn_func(Q, Q, Q, num_splits=-1), ValueError, "num_splits must not be negative"),
    "margin": (lambda: v3.flash_attn_func(Q, Q, Q, sm_margin=0.5), TypeError, "sm_margin must be an integer"),
    "chunk": (lambda: v3.flash_attn_func(Q, Q, Q, attention_chunk=-2), ValueError, "must not be negative"),
    "used": (
        lambda: v3.flash_attn_varlen_func(P, P, P, S, S, 5, 5, U + 1),
        ValueError,
        r"seqused_q must lie in 0 … the sequences' lengths \[5, 5\], got \[6, 6\]",
    ),
    "used shape": (lambda: v3.flash_attn_varlen_func(P, P, P, S, S, 5, 5, None, S), ValueError, r"\(B,\) = \(2,\)"),
    "lse": (
        lambda: v3.flash_attn_with_kvcache(Q, Q, Q, return_softmax_lse=True, sigmoid_bias=0.0),
        ValueError,
        "no log-sum-exp",
    ),
    "no bias": (lambda: v3.flash_attn_with_kvcache(Q, Q, Q), TypeError, "sigmoid_bias must be"),
    "heads": (lambda: v3.flash_attn_qkvpacked_func(Q), ValueError, "needs num_heads_q"),
    "odd heads": (lambda: v3.flash_attn_qkvpacked_func(Q, num_heads_q=1), ValueError, "must have num_heads_q"),
}


@pytest.mark.parametrize("what", WRONG)
def test_error_messages(what):
    call, error, message = WRONG[what]
    with pytest.raises(error, match=message):
        call()


def test_docstring_example():
    finder = doctest.DocTestFinder()
    (test,) = finder.find(v3.flash_attn_func, "flash_attn_func", globs={"torch": torch, **vars(v3)})
    assert test.examples
    assert doctest.DocTestRunner().run(test).failed == 0
