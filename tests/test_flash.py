"""sigattn.flash: flash-attn's layouts, alignment, padding and packed sequences, against the formula in float64."""

import inspect

import pytest
import torch

from sigattn import flash, set_sigmoid_precision
from sigattn.flash import index_first_axis, pad_input, unpad_input
from tests.ops.cases import COMPILER_NOISE, ON_CPU, SUPPORTING, Draws, device_of, numbers, path, spread, ways
from tests.ops.truth import assert_as_good_as_formula, one_sequence

pytestmark = [pytest.mark.filterwarnings(w) for w in COMPILER_NOISE]


class Packed:
    """A random call of packed sequences, whose keys may be in pages that several of them share."""

    def __init__(self, number, backend):
        r = Draws(number, backend)
        torch.manual_seed(number)
        count = r.randint(0, 2 if r.interpreted else 4)
        lengths = [[r.some(0, 1, 2, 7, 16, 31, 32, 33, 50) for _ in range(count)] for _ in range(2)]
        self.lengths = r.some(lengths, [lengths[0]] * 2)
        self.starts = [torch.tensor([0, *n]).cumsum(0).to(torch.int32) for n in self.lengths]
        self.longest = [max(n, default=0) for n in self.lengths]
        self.heads = hq, hkv = r.some((1, 1), (2, 2), (2, 1), *([] if r.interpreted else [(4, 2), (3, 1)]))
        self.dtype, self.beyond, page = r.dtype(), r.some(0, 3), r.some(None, None, 4, 7) if count else None
        self.index = torch.arange(sum(self.lengths[1])).split(self.lengths[1])  # of the keys of each sequence
        of_keys, self.table = (sum(self.lengths[1]) + self.beyond,), None
        if page:
            of_keys, self.table = (5, page), torch.randint(5, (count, -(-self.longest[1] // page) + 1))
            self.table[:, -1] = -1  # unused
            slots = (self.table[..., None] * page + torch.arange(page)).flatten(1)
            self.index = [row[:m] for row, m in zip(slots, self.lengths[1], strict=True)]
        d, dv = r.head_dim(1, 8, 16, 20), r.head_dim(8, 13)
        wide = self.dtype if self.dtype is torch.float64 else torch.float32
        self.bias = r.some(None, -2.0, -150.0, *(torch.randn(s, dtype=wide) for s in ((), count, (1, hq), (count, hq))))
        self.leaves = {
            "q": torch.randn(sum(self.lengths[0]) + self.beyond, hq, d, dtype=self.dtype),
            "k": torch.randn(*of_keys, hkv, d, dtype=self.dtype),
            "v": torch.randn(*of_keys, hkv, dv, dtype=self.dtype),
            "sigmoid_bias": self.bias,
            "alibi_slopes": r.some(None, *(torch.rand(s, dtype=wide) / 8 for s in (hq, (count, hq)))),
            "attn_mask": r.mask(r.broadcastable(count, hq, *self.longest), wide),
        }
        if backend == "llvm" and self.leaves["attn_mask"] is not None:
            self.leaves["attn_mask"] = self.leaves["attn_mask"] > 0
        self.leaves = {name: t for name, t in self.leaves.items() if isinstance(t, torch.Tensor)}
        self.floating = [t.requires_grad_() for t in self.leaves.values() if t.is_floating_point()]
        self.options = {"causal": r.either(), "normalize": r.either()}
        self.options["softcap"] = 0.0 if backend == "llvm" else r.some(0.0, 0.7, 15.0)
        self.window, self.scale = r.some((-1, -1), (r.randint(-1, 40), r.randint(-1, 40))), r.some(None, 0.3)

    def run(self, backend):
        device = device_of(backend)
        q, k, v, *rest = (t.to(device) for t in self.leaves.values())
        options = self.options | {"sigmoid_bias": self.bias} | dict(zip(list(self.leaves)[3:], rest, strict=True))
        options["block_table"] = None if self.table is None else spread(self.table.to(device))
        starts = [spread(t.to(device)) for t in self.starts]
        return flash.flash_attn_varlen_func(
            q, k, v, *starts, *self.longest, softmax_scale=self.scale, window_size=self.window, backend=backend,
            **options,
        ).cpu()  # fmt: skip

    def formula(self, dtype):
        """Compute each sequence separately."""
        count, (hq, _) = len(self.lengths[0]), self.heads
        q, k, v = (self.leaves[name] for name in "qkv")
        k, v = (t.flatten(0, -3) for t in (k, v))
        bias, slopes, mask = (self.leaves.get(name) for name in ("sigmoid_bias", "alibi_slopes", "attn_mask"))
        bias = bias if bias is None or bias.dim() != 1 else bias[:, None]
        outs = []
        for s, (rows, keys) in enumerate(zip(q.split([*self.lengths[0], self.beyond]), self.index, strict=False)):
            of_sequence = {
                "bias": self.bias if bias is None else bias.to(dtype).expand(count, hq)[s],
                "slopes": None if slopes is None else slopes.expand(count, hq)[s],
                "mask": None if mask is None else mask.expand(count, hq, *self.longest)[s, :, : len(rows), : len(keys)],
            }
            options = self.options | of_sequence | {"window": self.window, "scale": self.scale}
            outs.append(one_sequence(rows, k[keys], v[keys], dtype, **options))
        return torch.cat([*outs, q.new_zeros(self.beyond, hq, v.shape[-1], dtype=dtype)])

    def gradients(self, out):
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(self.dtype).to(out.dtype)
        found = torch.autograd.grad(out, self.floating, grad, allow_unused=True)
        return [torch.zeros_like(t) if g is None else g for t, g in zip(self.floating, found, strict=True)]


@pytest.mark.parametrize(
    ("backend", "number"), [(b, n) for b in (*ON_CPU, "triton") for n in numbers(12 if b == "triton" else 27)]
)
def test_packed_sequences_match_the_formula(backend, number):
    call = Packed(number, backend)
    truth, same = (call.formula(dtype) for dtype in (torch.float64, call.dtype))
    with path(ways(backend)[number % len(ways(backend))]):
        out = call.run(backend)
        ours = call.gradients(out)
    size = max(1.0, truth.abs().max().item()) if truth.numel() else 1.0
    logits = 150 if isinstance(call.bias, float) and call.bias == -150 else 1  # with which their rounding errors scale
    assert_as_good_as_formula(out, truth, same, 4 * size * logits, "output")
    if truth.requires_grad and truth.numel():
        rows = max(*call.lengths[0], *call.lengths[1], 1)
        for t, g, expected, in_dtype in zip(
            call.floating, ours, call.gradients(truth), call.gradients(same), strict=True
        ):
            largest = expected.abs().max().item() if g.numel() else 0.0
            most = 4 * max(1.0, largest, rows**0.5) * (8 if g.dim() < 3 else 1)
            # with normalize, dS is a difference of sums over the features of V
            most *= call.leaves["v"].shape[-1] * logits if call.options["normalize"] else 1
            assert_as_good_as_formula(g, expected.double(), in_dtype, most, str(tuple(t.shape)), call.dtype)
    if call.beyond:
        assert not out[-call.beyond :].any()
        of_tokens = ours[: 3 if call.table is None else 1]
        assert not any(g[-call.beyond :].any() for g in of_tokens)


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
    grad = torch.randn_like(out)
    ours, truth = (torch.autograd.grad(t, list(leaves.values()), grad.to(t)) for t in (out, expected))
    torch.testing.assert_close(ours, truth, atol=1e-4, rtol=1e-4)


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
@pytest.mark.parametrize("normalize", [False, True])
def test_dropout_of_packed_and_padded_agrees(backend, normalize):
    """A weight is dropped in every layout and backend or in none; the backward pass drops the same weights."""
    device = device_of(backend)
    leaves = [t.requires_grad_() for t in torch.randn(3, 2, 20, 2, 8).unbind()]
    q, k, v, starts = (t.to(device) for t in (*leaves, torch.tensor([0, 20, 40])))
    options = {"dropout_p": 0.4, "causal": True, "sigmoid_bias": -1.0, "normalize": normalize}
    results = []
    for packed in (False, True):
        torch.manual_seed(4)
        if packed:
            flat = (t.flatten(0, 1) for t in (q, k, v))
            out = flash.flash_attn_varlen_func(*flat, starts, starts, 20, 20, backend=backend, **options).view(q.shape)
        else:
            out = flash.flash_attn_func(q, k, v, **options)
        results.append([out.cpu(), *torch.autograd.grad(out.square().sum(), leaves)])
    torch.testing.assert_close(*results)


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


PADDED_LENGTHS = torch.tensor([3, 0, 5, 1])
MASK = torch.arange(5) < PADDED_LENGTHS[:, None]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64])
def test_round_trip(dtype):
    hidden = torch.randn(4, 5, 2, 3, dtype=torch.float64, requires_grad=True)
    packed, indices, cu_seqlens, longest, used = unpad_input(hidden, MASK.to(dtype))
    want = [hidden[b, i] for b in range(4) for i in range(5) if i < PADDED_LENGTHS[b]]
    assert torch.equal(packed, torch.stack(want))
    assert cu_seqlens.tolist() == [0, 3, 3, 8, 9]
    assert cu_seqlens.dtype is torch.int32
    assert (longest, used.tolist()) == (5, [3, 0, 5, 1])
    padded = pad_input(packed, indices, 4, 5)
    assert torch.equal(padded, torch.where(MASK[..., None, None], hidden, 0))
    assert torch.equal(index_first_axis(hidden.flatten(0, 1), indices), packed)
    rows = torch.ones(3, requires_grad=True)
    index_first_axis(rows, torch.tensor([1, 1, 0])).sum().backward()
    assert rows.grad.tolist() == [1, 2, 0]
    grad = torch.randn_like(padded)
    (ours,) = torch.autograd.grad(padded, hidden, grad)
    assert torch.equal(ours, torch.where(MASK[..., None, None], grad, 0))


def test_a_mask_with_holes_and_unused_positions():
    hidden = torch.randn(2, 4, 3)
    mask = torch.tensor([[0, 1, 0, 1], [1, 0, 0, 0]])
    unused = torch.tensor([[0, 0, 1, 0], [0, 0, 0, 1]])
    packed, indices, cu_seqlens, longest, used = unpad_input(hidden, mask, unused)
    assert torch.equal(packed, torch.stack([hidden[0, 1], hidden[0, 2], hidden[0, 3], hidden[1, 0], hidden[1, 3]]))
    assert indices.tolist() == [1, 2, 3, 4, 7]
    assert cu_seqlens.tolist() == [0, 3, 5]
    assert (longest, used.tolist()) == (3, [2, 1])


def test_no_sequence():
    packed, indices, cu_seqlens, longest, used = unpad_input(torch.randn(0, 5, 3), torch.zeros(0, 5, dtype=torch.bool))
    assert (packed.shape, indices.shape, cu_seqlens.tolist(), longest, used.shape) == ((0, 3), (0,), [0], 0, (0,))
