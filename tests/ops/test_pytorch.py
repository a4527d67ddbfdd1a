"""The operator with PyTorch's transforms: compile, export, vmap, func, autocast, opcheck, FLOPs."""

import pytest
import torch
import torch._dynamo.testing
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.flop_counter import FlopCounterMode

from sigattn import FLOP_FORMULAS, flash, sigmoid_attention, sigmoid_kvcache_attention
from tests.ops.cases import COMPILER_NOISE, operands
from tests.ops.truth import formula

pytestmark = [pytest.mark.filterwarnings(w) for w in COMPILER_NOISE]


def inputs(n=7, m=9, dtype=torch.float64, batch=2):
    """Return leaves (B, H, N, D) whose rows come before their heads in memory, as those of models do."""
    tensors = operands(n, m, batch, key_heads=2, d=6, dv=5, dtype=dtype)
    return [t.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in tensors]


def extras(n=7, m=9, dtype=torch.float64, batch=2, heads=4):
    return {
        "bias": torch.randn(heads, 1, 1, dtype=dtype, requires_grad=True),
        "attn_mask": torch.randn(n, m, dtype=dtype, requires_grad=True),
        "alibi_slopes": torch.rand(heads, dtype=dtype, requires_grad=True),
        "key_lengths": torch.tensor([m, m - 4])[:batch],
    }


def with_gradients(out, leaves):
    return [out, *torch.autograd.grad(out.square().sum(), leaves)]


class TestCompile:
    @pytest.fixture(autouse=True)
    def _fresh(self):
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()

    def test_forward_and_backward_in_one_graph(self, monkeypatch):
        """Also where the compiler cannot trace the query whether autocast is available, as that of PyTorch 2.11."""
        monkeypatch.setattr(torch.amp, "is_autocast_available", torch._dynamo.disable(torch.amp.is_autocast_available))
        q, k, v = inputs()
        more = extras()
        leaves = [q, k, v, *(t for t in more.values() if t.is_floating_point())]

        def call(q, k, v, more):
            return sigmoid_attention(q, k, v, is_causal=True, enable_gqa=True, **more)

        compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
        ours, eager = (with_gradients(f(q, k, v, more), leaves) for f in (compiled, call))
        torch.testing.assert_close(ours, eager)
        with torch.autocast("cpu", torch.bfloat16):
            compiled = torch.compile(call, fullgraph=True, backend="eager")
            assert compiled(*(t.detach().float() for t in (q, k, v)), {}).dtype is torch.bfloat16

    @pytest.mark.usefixtures("unchecked")  # PyTorch 2.11 cannot trace the checks of a bias that changes
    def test_no_recompilation_for_another_bias_or_length(self):
        """PyTorch's default compiles the first call for its very numbers, and learns from the second what changes."""
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

        def call(q, k, v, b):
            plain = sigmoid_attention(q, k, v, enable_gqa=True)  # its bias follows the length
            return plain + sigmoid_attention(q, k, v, bias=b, is_causal=True, enable_gqa=True)

        compiled = torch.compile(call, fullgraph=True, backend=counter)
        counts = []
        for n, b in ((16, -1.0), (24, -2.5), (55, -3.25), (54, 0.5)):
            q, k, v = inputs(n, n)
            ours, eager = (with_gradients(f(q, k, v, b), (q, k, v)) for f in (compiled, call))
            torch.testing.assert_close(ours, eager)
            counts.append(counter.frame_count)
        assert counts == [1, *[counts[1]] * 3]

    def test_compiled_dropout_differs_between_calls_and_bad_values_still_raise(self):
        q, k, v = inputs()
        compiled = torch.compile(sigmoid_attention, backend="aot_eager")
        assert not torch.equal(*(compiled(q, k, v, dropout_p=0.5, enable_gqa=True) for _ in range(2)))
        with pytest.raises(ValueError, match="key_lengths must lie in 0…9"):
            compiled(q, k, v, key_lengths=torch.tensor([3, 10]), enable_gqa=True)


def test_fakes_of_symbolic_sizes_have_the_strides_of_results():
    """A compiled graph asserts them."""
    leaves = inputs()
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        fakes = [mode.from_tensor(t) for t in leaves]
        found = with_gradients(sigmoid_attention(*fakes, enable_gqa=True), fakes)
    expected = with_gradients(sigmoid_attention(*leaves, enable_gqa=True), leaves)
    assert not isinstance(found[0].stride(0), int)
    assert [list(map(int, t.stride())) for t in found] == [list(t.stride()) for t in expected]


def test_opcheck():
    """The strides of the fake implementations, which a compiled graph asserts, are those of rows before heads."""
    q, k, v = (t.detach().transpose(1, 2).contiguous().transpose(1, 2) for t in inputs())
    more = {name: t.detach() for name, t in extras().items()}
    slopes = more["alibi_slopes"].view(1, 4, 1).expand(1, 4, 2)
    for bias in (None, more["bias"].view(1, 4, 1, 1)):
        tensors = [q, k, v, bias, more["attn_mask"][None, None], slopes]
        normalize = save = bias is None
        rest = [more["key_lengths"], torch.tensor(5), None, None, None, 3, 0, 0.25, 1, False, False, 2.5, 0]
        arguments = *tensors, *rest, normalize, "blocked"
        every = {} if save else {"test_utils": ("test_schema", "test_faketensor")}
        torch.library.opcheck(torch.ops.sigattn.dense_forward.default, (*arguments, save), **every)
        with torch._C._AutoDispatchBelowAutograd():
            result = torch.ops.sigattn.dense_forward.default(*arguments, False)
        needs = [True, True, True, True, True, True] if bias is not None else [False, True, False, False, True, True]
        grad = torch.randn(2, 4, 7, 5, dtype=q.dtype)
        torch.library.opcheck(torch.ops.sigattn.dense_backward.default, (grad, *result, *arguments, needs), **every)


@pytest.mark.parametrize(
    ("mapped", "batch"),
    [(("q",), 1), (("k", "v"), 2), (("q", "k", "v"), 2), (("bias",), 1), (("mask",), 2), (("q", "bias", "slopes"), 1)],
)
def test_vmap(mapped, batch):
    """vmap over some arguments, at various dimensions, equals separate calls for each slice; gradients too."""
    size = 3
    base = dict(zip("qkv", (t.detach() for t in inputs(batch=batch)), strict=True))
    more = extras(batch=batch)
    base |= {"bias": more["bias"].detach(), "mask": more["attn_mask"].detach(), "slopes": more["alibi_slopes"].detach()}
    in_dims = {name: (1 if name in ("k", "mask") else 0) if name in mapped else None for name in base}
    given = {
        name: torch.stack([t + 0.1 * i for i in range(size)], in_dims[name]) if name in mapped else t
        for name, t in base.items()
    }

    def call(given):
        tensors = {"bias": given["bias"], "attn_mask": given["mask"], "alibi_slopes": given["slopes"]}
        return sigmoid_attention(given["q"], given["k"], given["v"], enable_gqa=True, normalize=batch == 2, **tensors)

    slices = [{n: t.select(in_dims[n], i) if n in mapped else t for n, t in given.items()} for i in range(size)]
    expected = torch.stack([call(s) for s in slices])
    torch.testing.assert_close(torch.vmap(call, in_dims=(in_dims,))(given), expected)
    # with constant bias, mask and slopes, the batches are folded together
    for names in (list(base), list("qkv")):

        def loss(leaves, rest):
            return call({**leaves, **rest}).square().sum()

        parts = [({n: d[n] for n in names}, {n: d[n] for n in d if n not in names}) for d in (given, in_dims, *slices)]
        found = torch.vmap(torch.func.grad(loss), in_dims=parts[1])(*parts[0])
        one_by_one = [torch.func.grad(loss)(*part) for part in parts[2:]]
        torch.testing.assert_close(found, {n: torch.stack([one[n] for one in one_by_one]) for n in names})


def test_vmap_of_a_mask_whose_gradient_is_taken_outside():
    """Within the map it is not seen that the mask needs a gradient, which not every backend computes."""
    q, mask = torch.randn(3, 1, 1, 40, 8), torch.zeros(3, 40, 40)

    def loss(mask, backend=None):
        return torch.vmap(lambda q, m: sigmoid_attention(q, q, q, m, backend=backend))(q, mask).square().sum()

    expected = torch.func.grad(loss)(mask, "blocked")
    torch.testing.assert_close(torch.func.grad(loss)(mask), expected)
    leaf = mask.clone().requires_grad_()
    loss(leaf).backward()
    torch.testing.assert_close(leaf.grad, expected)


def test_vmap_over_lengths():
    q, k, v = (t.detach() for t in inputs())
    new, caches = torch.randn(2, 1, 2, 4), torch.randn(2, 2, 9, 2, 4)
    lengths = torch.tensor([[9, 4], [1, 1], [5, 5]])
    for call in (
        lambda t: sigmoid_attention(q, k, v, key_lengths=t, enable_gqa=True),
        lambda t: sigmoid_attention(q, k, v, key_lengths=t, enable_gqa=True, backend="reference"),
        lambda t: sigmoid_kvcache_attention(new, *caches, cache_seqlens=t, bias=-1.0),
        lambda t: flash.flash_attn_with_kvcache(new, *caches, cache_seqlens=t, sigmoid_bias=-1.0),
    ):
        torch.testing.assert_close(torch.vmap(call)(lengths), torch.stack([call(one) for one in lengths]))
    with pytest.raises(ValueError, match="a cache of 9 keys"):
        torch.vmap(call)(lengths + 1)


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_vmap_over_dropout(randomness):
    q, k, v = (t.detach() for t in inputs())
    stack = torch.stack([q, q, q])

    def call(q):
        return sigmoid_attention(q, k, v, dropout_p=0.5, enable_gqa=True)

    out = torch.vmap(call, randomness=randomness)(stack)
    assert torch.equal(out[0], out[1]) == (randomness == "same")


class TestHigherDerivatives:
    def test_forward_mode_by_default_equals_the_product_with_the_jacobian(self):
        q, k, v = (t.detach() for t in inputs(n=3, m=4))
        tangent = torch.randn_like(q)

        def call(q):
            return sigmoid_attention(q, k, v, enable_gqa=True)

        expected = torch.einsum("bhndBHND,BHND->bhnd", torch.func.jacrev(call)(q), tangent)
        torch.testing.assert_close(torch.func.jvp(call, (q,), (tangent,))[1], expected)
        torch.testing.assert_close(torch.einsum("bhndBHND,BHND->bhnd", torch.func.jacfwd(call)(q), tangent), expected)
        with torch.autograd.forward_ad.dual_level():
            dual = call(torch.autograd.forward_ad.make_dual(q, tangent))
            torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(dual).tangent, expected)

    @pytest.mark.parametrize("normalize", [False, True])
    @pytest.mark.parametrize("backend", ["blocked", "reference"])
    def test_all_derivatives_of_a_gradient_penalty_equal_those_of_the_formula(self, backend, normalize):
        q, k, v = inputs()
        bias, mask, slopes, lengths = extras().values()

        def penalty(attend, **options):
            torch.manual_seed(0)
            leaves = [q, k, v, bias, mask, slopes]
            out = attend(q, k, v, mask, bias=bias, softcap=2.0, normalize=normalize, **options)
            gradients = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
            return torch.autograd.grad(sum(g.square().sum() for g in gradients), leaves)

        options = {"alibi_slopes": slopes, "key_lengths": lengths, "enable_gqa": True}
        ours = penalty(sigmoid_attention, backend=backend, **options)
        torch.testing.assert_close(ours, penalty(formula, slopes=slopes, lengths=lengths))
        dropped = [penalty(sigmoid_attention, backend=b, dropout_p=0.2, **options) for b in (backend, "reference")]
        torch.testing.assert_close(*dropped)
        assert not torch.allclose(dropped[0][0], ours[0])


@pytest.mark.parametrize("backend", [None, "reference"])
def test_autocast(backend):
    q, k, v = inputs(dtype=torch.float32)
    cast = [t.detach().bfloat16().requires_grad_() for t in (q, k, v)]
    with torch.autocast("cpu", torch.bfloat16):
        out = sigmoid_attention(q, k, v, enable_gqa=True, backend=backend)
        mixed = sigmoid_attention(q, k.bfloat16(), v, enable_gqa=True, backend=backend)
        left_alone = sigmoid_attention(*(t.double() for t in (q, k, v)), enable_gqa=True, backend=backend)
    assert left_alone.dtype is torch.float64
    gradients = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    expected = sigmoid_attention(*cast, enable_gqa=True, backend=backend)
    assert out.dtype is torch.bfloat16
    assert torch.equal(out, expected)
    assert torch.equal(mixed, expected)
    for g, e in zip(gradients, torch.autograd.grad(expected.float().square().sum(), cast), strict=True):
        assert g.dtype is torch.float32
        torch.testing.assert_close(g, e.float())


def test_flops_are_counted():
    q, k, v = inputs()
    (batch, heads, n, d), (m, dv) = q.shape, v.shape[2:]
    starts, packed = torch.tensor([0, 3, 7]), [t[0].transpose(0, 1)[:7] for t in (q, k, v)]
    counts = []
    for attend, args, options in (
        (sigmoid_attention, (q, k, v), {"enable_gqa": True}),
        (flash.flash_attn_varlen_func, (*packed, starts, starts, 4, 4), {}),
    ):
        with FlopCounterMode(display=False, custom_mapping=FLOP_FORMULAS) as counter:
            attend(*args, **options).sum().backward()
        counts.append(counter.get_total_flops())
    each = (d + dv) + (3 * d + 2 * dv)
    # each packed query counts as if it saw the longest sequence
    assert counts == [2 * batch * heads * n * m * each, 2 * heads * 7 * 4 * each]


def test_meta_tensors():
    q, k, v = (t.detach().to("meta").requires_grad_() for t in inputs())
    out = sigmoid_attention(q, k, v, enable_gqa=True, bias=-1.0, dropout_p=0.1)
    assert (out.device.type, out.shape) == ("meta", (2, 4, 7, 5))
    assert [g.shape for g in torch.autograd.grad(out.sum(), (q, k, v))] == [q.shape, k.shape, v.shape]
