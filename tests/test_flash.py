"""sigattn.flash: flash-attn's layouts, alignment and packed sequences, against the formula in float64."""

import inspect

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from sigattn import flash, set_sigmoid_precision
from tests.ops.cases import COMPILER_NOISE, ON_CPU, SUPPORTING, device_of, fuzz, head_dims, path, ways, wide
from tests.ops.truth import assert_as_good_as_formula, one_sequence

pytestmark = [pytest.mark.filterwarnings(w) for w in COMPILER_NOISE]


@st.composite
def packed_cases(draw, interpreted=False):
    """Draw lengths and options of a packed call; few sequences and heads for interpreted kernels, which are slow."""
    count = draw(st.integers(0, 2 if interpreted else 4))
    length = st.sampled_from([0, 1, 2, 7, 16, 31, 32, 33, 50])
    lengths_q = draw(st.lists(length, min_size=count, max_size=count))
    same = draw(st.booleans())
    lengths_k = lengths_q if same else draw(st.lists(length, min_size=count, max_size=count))
    side = st.integers(-1, 40)
    return {
        "lengths": (lengths_q, lengths_k),
        "heads": draw(st.sampled_from([(1, 1), (2, 2), (2, 1)] if interpreted else [(1, 1), (2, 2), (4, 2), (3, 1)])),
        "d": draw(head_dims(1, 8, 16, 20)),
        "dv": draw(head_dims(8, 13)),
        "dtype": draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16])),
        "causal": draw(st.booleans()),
        "window": draw(st.one_of(st.just((-1, -1)), st.tuples(side, side))),
        "slopes": draw(st.sampled_from([None, "head", "sample"])),
        "bias": draw(st.sampled_from([None, -2.0, -150.0, "number", "sequence", "head", "both"])),
        "scale": draw(st.sampled_from([None, 0.3])),
        "softcap": draw(st.sampled_from([0.0, 0.7, 15.0])),
        "mask": draw(st.sampled_from([None, None, "bool", "float", "-inf"])),
        "mask of": draw(st.tuples(*[st.booleans()] * 4)),
        "normalize": draw(st.booleans()),
        "beyond": draw(st.sampled_from([0, 3])),
        "seed": draw(st.integers(0, 1 << 30)),
    }


def leaves_of(case):
    """Return the leaves of a call, and the cu_seqlens."""
    g = torch.Generator().manual_seed(case["seed"])
    (hq, hkv), dtype = case["heads"], case["dtype"]
    count = len(case["lengths"][0])

    def randn(*shape, dtype=dtype):
        return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_()

    total_q, total_k = (sum(n) + case["beyond"] for n in case["lengths"])
    leaves = {
        "q": randn(total_q, hq, case["d"]),
        "k": randn(total_k, hkv, case["d"]),
        "v": randn(total_k, hkv, case["dv"]),
    }
    other = dtype if dtype is torch.float64 else torch.float32
    shapes = {"number": (), "sequence": (count,), "head": (1, hq), "both": (count, hq)}
    if case["bias"] in shapes:
        leaves["bias"] = randn(*shapes[case["bias"]], dtype=other)
    if case["slopes"]:
        shape = (hq,) if case["slopes"] == "head" else (count, hq)
        leaves["slopes"] = (randn(*shape, dtype=other).detach().abs() / 8).requires_grad_()
    if case["mask"]:
        full = (count, hq, *(max(n, default=0) for n in case["lengths"]))
        mask = randn(
            *(size if own else 1 for size, own in zip(full, case["mask of"], strict=True)), dtype=other
        ).detach()
        if case["mask"] == "-inf":
            mask = mask.masked_fill(mask < -0.5, -torch.inf)
        leaves["mask"] = mask > -0.5 if case["mask"] == "bool" else mask.requires_grad_()
    starts = [torch.tensor([0, *n]).cumsum(0).to(torch.int32) for n in case["lengths"]]
    return leaves, starts


def by_formula(case, leaves, starts, dtype):
    """Compute each sequence separately."""
    (hq, _), lengths, out = case["heads"], case["lengths"], []
    count = len(lengths[0])
    bias, slopes, mask = (leaves.get(name) for name in ("bias", "slopes", "mask"))
    if bias is not None:
        bias = (bias.to(dtype)[:, None] if case["bias"] == "sequence" else bias.to(dtype)).expand(count, hq)
    slopes = None if slopes is None else slopes.expand(count, hq)
    mask = None if mask is None else mask.expand(count, hq, *(max(n, default=0) for n in lengths))
    options = {name: case[name] for name in ("causal", "window", "scale", "softcap", "normalize")}
    for s, (n, m) in enumerate(zip(*lengths, strict=True)):
        rows, keys = (slice(int(t[s]), int(t[s + 1])) for t in starts)
        options["mask"] = None if mask is None else mask[s, :, :n, :m]
        b = case["bias"] if bias is None else bias[s]
        qkv = leaves["q"][rows], leaves["k"][keys], leaves["v"][keys]
        out.append(one_sequence(*qkv, dtype, b, None if slopes is None else slopes[s], **options))
    out.append(leaves["q"].new_zeros(case["beyond"], hq, case["dv"], dtype=dtype))
    return torch.cat(out)


def gradients(out, leaves):
    leaves = {name: t for name, t in leaves.items() if t.is_floating_point()}
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(leaves["q"].dtype).to(out.dtype)
    found = torch.autograd.grad(out, list(leaves.values()), grad.to(out.device), allow_unused=True)
    return {name: torch.zeros_like(t) if g is None else g for (name, t), g in zip(leaves.items(), found, strict=True)}


EVERY_SHAPE = {  # options of each sequence, which few random cases have
    "lengths": ([7, 2, 16], [9, 2, 31]), "heads": (4, 2), "d": 8, "dv": 13, "dtype": torch.float64, "causal": True,
    "window": (-1, -1), "slopes": "sample", "bias": "sequence", "scale": None, "softcap": 0.0, "mask": "float",
    "mask of": (True, True, True, True), "normalize": False, "beyond": 3, "seed": 0,
}  # fmt: skip


@pytest.mark.parametrize("backend", ON_CPU)
@fuzz(40)
@given(case=packed_cases())
@example(case=EVERY_SHAPE)
@example(case={**EVERY_SHAPE, "bias": "both", "slopes": "head", "mask": None, "normalize": True, "softcap": 15.0})
def test_packed_sequences_match_the_formula(backend, case):
    if backend == "llvm":
        case |= {"dtype": torch.float32, "softcap": 0.0, "mask": "bool" if case["mask"] else None}
    check_packed(backend, "as users meet it", case)


@pytest.mark.parametrize("way", ways("triton"))
@fuzz(10)
@given(case=packed_cases(interpreted=not torch.cuda.is_available()))
def test_packed_sequences_of_triton_match_the_formula(way, case):
    check_packed("triton", way, case)


def check_packed(backend, way, case):
    """Compare output and gradients with the formula."""
    if case["dtype"] is torch.float64:
        case["dtype"] = wide(backend)
    leaves, starts = leaves_of(case)
    truth = by_formula(case, leaves, starts, torch.float64)
    same = by_formula(case, leaves, starts, case["dtype"])
    device = device_of(backend)
    there = {name: t.to(device) for name, t in leaves.items()}
    longest = [max(n, default=0) for n in case["lengths"]]
    options = {name: case[name] for name in ("causal", "softcap", "normalize")}
    with path(way):
        out = flash.flash_attn_varlen_func(
            there["q"], there["k"], there["v"], *(t.to(device) for t in starts), *longest, window_size=case["window"],
            softmax_scale=case["scale"], alibi_slopes=there.get("slopes"), sigmoid_bias=there.get("bias", case["bias"]),
            attn_mask=there.get("mask"), backend=backend, **options,
        ).cpu()  # fmt: skip
        ours = gradients(out, leaves)
    size = max(1.0, truth.abs().max().item()) if truth.numel() else 1.0
    logits = 150 if case["bias"] == -150 else 1  # with which their rounding errors scale
    assert_as_good_as_formula(out, truth, same.to(out.dtype), 4 * size * logits, "output")
    if truth.requires_grad and truth.numel():
        expected, in_dtype = gradients(truth, leaves), gradients(same, leaves)
        for name, g in ours.items():
            rows = max(*case["lengths"][0], *case["lengths"][1], 1)
            largest = expected[name].abs().max().item() if g.numel() else 0.0
            most = 4 * max(1.0, largest, rows**0.5) * (8 if g.dim() < 3 else 1)
            most *= case["dv"] * logits if case["normalize"] else 1  # dS is a difference of sums over features of V
            assert_as_good_as_formula(g, expected[name].double(), in_dtype[name], most, name, case["dtype"])
    if case["beyond"]:
        assert not out[-case["beyond"] :].any()
        assert not any(ours[name][-case["beyond"] :].any() for name in "qkv")


@pytest.mark.parametrize(("n", "m", "causal", "softcap"), [(5, 40, False, 0.0), (40, 5, True, 1.5)])
def test_dense_alignment(n, m, causal, softcap):
    """The last query is aligned with the last key (causality, windows, ALiBi); gradients too. ALiBi is not capped."""
    leaves = {"q": torch.randn(2, n, 4, 16), "k": torch.randn(2, m, 2, 16), "v": torch.randn(2, m, 2, 8)}
    leaves |= {"slopes": torch.rand(2, 4) / 8, "bias": torch.randn(1, 4), "mask": torch.randn(2, 4, n, m)}
    leaves = {name: t.requires_grad_() for name, t in leaves.items()}
    q, k, v, slopes, bias, mask = leaves.values()
    options = {"causal": causal, "softcap": softcap}
    more = {"alibi_slopes": slopes, "sigmoid_bias": bias, "attn_mask": mask, "deterministic": causal}
    out = flash.flash_attn_func(q, k, v, window_size=(7, 3), **more, **options)
    assert out.is_contiguous()
    samples = zip(*(t.unbind() for t in (q, k, v, slopes, mask)), strict=True)
    options |= {"window": (7, 3), "bias": bias[0]}
    expected = torch.stack([one_sequence(*qkv, slopes=s, mask=each, **options) for *qkv, s, each in samples])
    torch.testing.assert_close(out, expected.float(), atol=1e-5, rtol=1e-4)
    for (name, g), e in zip(gradients(out, leaves).items(), gradients(expected, leaves).values(), strict=True):
        torch.testing.assert_close(g, e, atol=1e-4, rtol=1e-4, msg=name)


def test_packed_operands_give_the_same_result():
    qkv, kv = torch.randn(2, 6, 3, 4, 16), torch.randn(2, 9, 2, 2, 16)
    q = qkv[:, :, 0]
    options = {"causal": True, "sigmoid_bias": -1.0}
    plain = flash.flash_attn_func
    together = flash.flash_attn_qkvpacked_func(qkv, **options)
    torch.testing.assert_close(together, plain(*qkv.unbind(2), **options))
    torch.testing.assert_close(flash.flash_attn_kvpacked_func(q, kv, **options), plain(q, *kv.unbind(2), **options))
    starts_q, starts_k = (torch.tensor([0, n, 2 * n]) for n in (6, 9))
    rows = flash.flash_attn_varlen_qkvpacked_func(qkv.flatten(0, 1), starts_q, 6, **options)
    torch.testing.assert_close(rows.view(together.shape), together)
    rows = flash.flash_attn_varlen_kvpacked_func(q.flatten(0, 1), kv.flatten(0, 1), starts_q, starts_k, 6, 9, **options)
    torch.testing.assert_close(rows.view(2, 6, 4, 16), plain(q, *kv.unbind(2), **options))


@pytest.mark.parametrize("backend", SUPPORTING)
def test_dropout_of_packed_and_padded_agrees(backend):
    """A weight is dropped in every layout and backend or in none; the backward pass drops the same weights."""
    device = device_of(backend)
    leaves = [t.requires_grad_() for t in torch.randn(3, 2, 20, 2, 8).unbind()]
    q, k, v, starts = (t.to(device) for t in (*leaves, torch.tensor([0, 20, 40])))
    options = {"dropout_p": 0.4, "causal": True, "sigmoid_bias": -1.0}
    results = []
    for packed in (False, True):
        torch.manual_seed(4)
        if packed:
            flat = (t.flatten(0, 1) for t in (q, k, v))
            out = flash.flash_attn_varlen_func(*flat, starts, starts, 20, 20, backend=backend, **options).view(q.shape)
        else:
            out = flash.flash_attn_func(q, k, v, **options)
        results.append([out.cpu(), *torch.autograd.grad(out.square().sum(), leaves)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_compile_and_opcheck():
    """In one graph; forward mode, and the reference in a graph, raise by name."""
    q, k, v = (torch.randn(12, 2, 8, requires_grad=True) for _ in range(3))
    starts = torch.tensor([0, 5, 12], dtype=torch.int32)

    def call(q, k, v):
        return flash.flash_attn_varlen_func(q, k, v, starts, starts, 7, 7, causal=True, backend="blocked")

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v), call(q, k, v))
    a, b = (torch.autograd.grad(f(q, k, v).square().sum(), (q, k, v)) for f in (compiled, call))
    torch.testing.assert_close(a, b)
    reference = torch.compile(flash.flash_attn_varlen_func, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="'reference' does not support this call: it reads the lengths of sequences"):
        reference(q, k, v, starts, starts, 7, 7, backend="reference")

    tensors = [t.detach() for t in (q, k, v)]
    tensors += [torch.randn(2, 1, 1, 1), torch.randn(1, 2, 7, 1), torch.rand(1, 2, 2), starts, starts]
    args = (*tensors, None, 7, 7, None, 3, 0, 0.0, False, False, 2.5, True, "blocked")
    torch.library.opcheck(torch.ops.sigattn.varlen_forward.default, (*args, False))
    with torch._C._AutoDispatchBelowAutograd():
        result = torch.ops.sigattn.varlen_forward.default(*args, False)
    needs = [True, False, True, True, True, True]
    torch.library.opcheck(torch.ops.sigattn.varlen_backward.default, (torch.randn(12, 2, 8), *result, *args, needs))
    with pytest.raises(RuntimeError, match='backend="reference"'):
        torch.func.jvp(call, (q, k, v), (q, k, v))


def test_precision():
    """The setting is validated and passed on; without a faster form, results stay accurate."""
    q = torch.randn(1, 8, 2, 8)
    try:
        set_sigmoid_precision("fast")
        accurate = flash.flash_attn_func(q, q, q, sigmoid_precision="accurate")
        torch.testing.assert_close(flash.flash_attn_func(q, q, q), accurate)
        with pytest.raises(ValueError, match=r"unknown precision 'quick'; choose one of 'accurate', 'fast'$"):
            set_sigmoid_precision("quick")
    finally:
        set_sigmoid_precision("accurate")
    with pytest.raises(ValueError, match="unknown sigmoid precision"):
        flash.flash_attn_func(q, q, q, sigmoid_precision="tanh")


FLASH_ATTN_2_8 = {
    "dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size": (-1, -1), "softcap": 0.0,
    "alibi_slopes": None, "deterministic": False, "return_attn_probs": False,
}  # fmt: skip
OURS = ["sigmoid_bias", "sigmoid_precision", "backend", "attn_mask", "normalize"]
OF_BOTH = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
SIGNATURES = {
    "flash_attn_func": ["q", "k", "v", *FLASH_ATTN_2_8],
    "flash_attn_qkvpacked_func": ["qkv", *FLASH_ATTN_2_8],
    "flash_attn_kvpacked_func": ["q", "kv", *FLASH_ATTN_2_8],
    "flash_attn_varlen_func": ["q", "k", "v", *OF_BOTH, *FLASH_ATTN_2_8, "block_table"],
    "flash_attn_varlen_qkvpacked_func": ["qkv", "cu_seqlens", "max_seqlen", *FLASH_ATTN_2_8],
    "flash_attn_varlen_kvpacked_func": ["q", "kv", *OF_BOTH, *FLASH_ATTN_2_8],
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_order_of_arguments_is_that_of_flash_attn(name):
    parameters = inspect.signature(getattr(flash, name)).parameters
    assert list(parameters) == SIGNATURES[name] + OURS
    assert {p: parameters[p].default for p in FLASH_ATTN_2_8} == FLASH_ATTN_2_8


Q = torch.randn(2, 5, 4, 8)
P, S = torch.randn(10, 4, 8), torch.tensor([0, 5, 10])


def dense(*args, **options):
    return lambda: flash.flash_attn_func(*(args or (Q, Q, Q)), **options)


def packed(*args, **options):
    return lambda: flash.flash_attn_varlen_func(P, P, P, *args, **options)


WRONG = {  # what the operators do not check for sigmoid_attention, or under another name
    "probs": (dense(return_attn_probs=True), ValueError, "flash_attn_func: .*attention_statistics"),
    "rank": (dense(P, P, P), ValueError, r"4 dimensions.*q \(10, 4, 8\)"),
    "other layout": (
        dense(Q, Q[:, :, :3], Q[:, :, :3]),
        ValueError,
        r"4 heads of q are not a multiple of the 3 of k.*as in PyTorch's .*, call sigattn.sigmoid_att",
    ),
    "not a tensor": (dense(None, Q, Q), TypeError, "q must be a tensor"),
    "bias shape": (dense(sigmoid_bias=torch.zeros(3)), ValueError, r"\(B,\) = \(2,\)"),
    "slopes": (dense(alibi_slopes=torch.ones(3)), ValueError, r"slopes must be \(Hq,\), \(B, Hq\); got q \(2, 5"),
    "window": (dense(window_size=3), TypeError, "window_size must be a pair"),
    "causal": (dense(causal="no"), TypeError, "causal must be True or False, got 'no'"),
    "mask": (dense(attn_mask=torch.ones(5, 6) > 0), ValueError, r"func: attn_mask does not br.* = \(2, 4, 5, 5\)"),
    "flash-attn 3's order": (dense(Q, Q, Q, 0.25, True), TypeError, "softmax_scale must be a number, got True"),
    "its scale None": (dense(Q, Q, Q, None, True), TypeError, "dropout_p must be a number, got None"),
    "qkv": (lambda: flash.flash_attn_qkvpacked_func(Q), ValueError, r"\(batch, length, 3, heads, head_dim\)"),
    "starts dtype": (packed(S.float(), S, 5, 5), TypeError, "cu_seqlens_q must be a tensor of integers"),
    "starts count": (packed(S[:2], S, 5, 5), ValueError, "as many sequences"),
    "starts last": (packed(S, S * 2, 5, 10), ValueError, "end at most at 10"),
    "starts fall": (packed(S[[0, 2, 1]], S, 10, 5), ValueError, "never descend"),
    "longest": (packed(S, S, 4, 5), ValueError, r"flash_attn_varlen_func\): max_seqlen_q \(max_q\) is 4, but"),
    "longest type": (packed(S, S, torch.tensor([5]), 5), TypeError, "max_seqlen_q must be an integer"),
    "packed mask": (packed(S, S, 5, 5, attn_mask=torch.ones(3, 1, 5, 5)), ValueError, "func: attn_mask does not broad"),
}


@pytest.mark.parametrize("what", WRONG)
def test_error_messages(what):
    call, error, message = WRONG[what]
    with pytest.raises(error, match=f"(?s){message}"):
        call()
