"""Weights divided by their row's sum: every magnitude and level of the logits, and what the fuzz does not cover."""

import pytest
import torch
from torch.nn import functional as F

from sigattn import sigmoid_attention, sigmoid_varlen_attention
from sigattn.models import LanguageModelConfig
from tests.ops.cases import SUPPORTING, device_of
from tests.ops.truth import assert_as_good_as_formula, formula


def operands(n, magnitude=1.0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 16, generator=generator) for _ in range(3))
    return [t.to(dtype).requires_grad_() for t in (q * magnitude, k, v)]


@pytest.mark.parametrize("backend", SUPPORTING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("level", [0.0, -30.0, -70.0, -1e4, 1e4])
def test_accurate_at_every_magnitude_and_level(backend, dtype, level):
    if backend == "llvm" and dtype is torch.float16:
        pytest.skip("not supported")
    n, device = 40, device_of(backend)
    for magnitude in (1e-3, 1.0, 100.0, 1e4):
        inputs = operands(n, magnitude, dtype)
        grad_out = torch.randn(1, 2, n, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
        results = []
        for kind in (torch.float64, torch.float32, None):
            leaves = [t.detach().requires_grad_() for t in inputs]
            if kind is None:
                there = [t.to(device) for t in leaves]
                out = sigmoid_attention(*there, is_causal=True, bias=level, normalize=True, backend=backend).cpu()
            else:  # in float32 for half precision too, in which the plain formula has no correct digit at 1e4
                out = formula(*leaves, causal=True, bias=level, normalize=True, dtype=kind)
            results.append((out, *torch.autograd.grad(out, leaves, grad_out.to(out.dtype))))
        truth, same, ours = results
        scores = 1 + abs(level) * 1e-2 + 4 * magnitude  # the sizes of the sums whose rounding is an error of W
        for name, *tensors in zip(("output", "query", "key", "value"), ours, truth, same, strict=True):
            most = scores * 40 * (magnitude if name == "key" else 1.0)
            assert_as_good_as_formula(tensors[0], tensors[1].double(), tensors[2].to(dtype), most, name)
            assert tensors[0].isfinite().all()


@pytest.mark.parametrize("backend", SUPPORTING)
def test_far_below_zero_it_is_softmax(backend):
    q, k, v = operands(70)
    device = device_of(backend)
    out = sigmoid_attention(*(t.to(device) for t in (q, k, v)), bias=-500.0, normalize=True, backend=backend).cpu()
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("backend", SUPPORTING)
def test_a_query_without_visible_keys_has_output_and_gradient_0(backend):
    """Next to rows that underflow, so that the second pass sees both."""
    inputs, device = operands(6), device_of(backend)
    mask = torch.tensor([True, False, True, True, False, True])[:, None].expand(6, 6)
    there = [t.to(device) for t in inputs]
    out = sigmoid_attention(*there, mask.to(device), bias=-300.0, normalize=True, backend=backend).cpu()
    grads = torch.autograd.grad(out, inputs, torch.randn_like(out))
    assert not out[:, :, [1, 4]].any()
    assert out[:, :, [0, 2, 3, 5]].all()
    assert not grads[0][:, :, [1, 4]].any()
    assert all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("backend", [*SUPPORTING, "packed"])
def test_dropout_applies_to_the_divided_weights(backend):
    """The sum is that of all weights: each weight is kept, times 1 / (1 - p), or 0."""
    n, device = 24, device_of(backend)
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, n, 8, generator=generator).to(device) for _ in range(2))
    v = torch.eye(n).view(1, 1, n, n).to(device)
    if backend == "packed":
        packed, starts = (t[0].transpose(0, 1) for t in (q, k, v)), torch.tensor([0, n])
        out = sigmoid_varlen_attention(*packed, starts, starts, n, n, dropout_p=0.25, normalize=True)
        out = out.transpose(0, 1)[None]
    else:
        out = sigmoid_attention(q, k, v, dropout_p=0.25, normalize=True, backend=backend)
    weights = formula(q.cpu(), k.cpu(), v.cpu(), normalize=True, dtype=torch.float32) / 0.75
    torch.testing.assert_close(weights.sum(-1) * 0.75, torch.ones(1, 1, n))
    kept = out.cpu() != 0
    torch.testing.assert_close(out.cpu(), weights * kept)
    assert 0.6 < kept.double().mean() < 0.9


@pytest.mark.parametrize("backend", [b for b in SUPPORTING if b != "triton"])
def test_second_derivatives(backend):
    dtype = torch.float32 if backend == "llvm" else torch.float64
    q, k, v = (t.detach().to(dtype).requires_grad_() for t in operands(5))
    bias = torch.full((2, 1, 1), -1.0, dtype=dtype, requires_grad=True)

    def penalty(function, dtype):
        leaves = [t.detach().to(dtype).requires_grad_() for t in (q, k, v, bias)]
        grads = torch.autograd.grad(function(*leaves).square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), leaves)

    ours = penalty(lambda *t: sigmoid_attention(*t[:3], bias=t[3], normalize=True, backend=backend), dtype)
    truth = penalty(lambda *t: formula(*t[:3], bias=t[3], normalize=True), torch.float64)
    for a, b in zip(ours, truth, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4 if dtype is torch.float32 else 1e-10)


@pytest.mark.filterwarnings("ignore:.*deprecat", "ignore::FutureWarning")
def test_compiled_exported_and_mapped():
    class Layer(torch.nn.Module):
        def forward(self, q, k, v):
            return sigmoid_attention(q, k, v, is_causal=True, normalize=True)

    inputs = operands(12)
    expected = Layer()(*inputs)
    grads = torch.autograd.grad(expected.square().sum(), inputs)
    compiled = torch.compile(Layer(), backend="aot_eager", fullgraph=True)(*inputs)
    torch.testing.assert_close(compiled, expected)
    for a, b in zip(torch.autograd.grad(compiled.square().sum(), inputs), grads, strict=True):
        torch.testing.assert_close(a, b)
    length = torch.export.Dim("length", min=2, max=64)
    shapes = ({2: length},) * 3
    exported = torch.export.export(Layer(), tuple(t.detach() for t in inputs), dynamic_shapes=shapes).module()
    others = operands(31)
    torch.testing.assert_close(exported(*others), Layer()(*others))
    mapped = [t.detach().expand(3, *t.shape) * torch.arange(1, 4).view(3, 1, 1, 1, 1) for t in inputs]
    each = torch.stack([Layer()(*(t[i] for t in mapped)) for i in range(3)])
    torch.testing.assert_close(torch.vmap(Layer())(*mapped), each)
    per_sample = torch.vmap(torch.func.grad(lambda *t: Layer()(*t).square().sum()))(*mapped)
    first = torch.func.grad(lambda *t: Layer()(*t).square().sum())(*(t[0] for t in mapped))
    torch.testing.assert_close(per_sample[0], first)


@torch.no_grad()
def test_a_language_model_decodes_as_it_computes_whole_texts():
    torch.manual_seed(0)
    config = LanguageModelConfig(vocab_size=11, num_layers=2, embed_dim=32, num_heads=2, max_seq_len=24, normalize=True)
    model = config.build().eval()
    tokens = torch.randint(11, (2, 12))
    whole = model(tokens)
    plain = LanguageModelConfig(**{**vars(config), "normalize": False}).build().eval()
    plain.load_state_dict(model.state_dict())
    assert not torch.allclose(plain(tokens), whole, atol=1e-3)
    cache = model.new_kv_cache()
    pieces = [model(tokens[:, i : i + 1], cache) for i in range(12)]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-4, atol=1e-4)


def test_nested_sequences_are_computed_as_each_of_them():
    sequences = [torch.randn(n, 2, 8) for n in (3, 9)]
    nested = torch.nested.as_nested_tensor(sequences, layout=torch.jagged).transpose(1, 2)
    out = sigmoid_attention(nested, nested, nested, is_causal=True, normalize=True)
    for one, x in zip(out.unbind(), sequences, strict=True):
        x = x.transpose(0, 1)[None]
        torch.testing.assert_close(one[None], formula(x, x, x, causal=True, normalize=True, dtype=torch.float32))


def test_normalize_is_a_flag():
    q, k, v = operands(3)
    nested = torch.nested.as_nested_tensor([torch.randn(3, 2, 8)], layout=torch.jagged).transpose(1, 2)
    for operand in ((q, k, v), (nested, nested, nested)):
        with pytest.raises(TypeError, match="sigmoid_attention: normalize must be True or False, got 1"):
            sigmoid_attention(*operand, normalize=1)
