"""Layers that write their softmax out: sigmoid weights of the same logits, compared with the formula in float64."""

import copy
import pickle

import pytest
import torch
from torch import nn

from sigattn import convert, restore
from tests.conversion.layers import Written


class MaskedSoftmax(torch.autograd.Function):
    """With a backward pass of its own, as ``XSoftmax`` of DeBERTa's first code."""

    @staticmethod
    def forward(ctx, logits):
        hidden = logits < -1000
        weights = torch.softmax(logits.masked_fill(hidden, torch.finfo(logits.dtype).min), -1)
        ctx.save_for_backward(weights.masked_fill_(hidden, 0))
        return weights

    @staticmethod
    def backward(ctx, grad):
        (weights,) = ctx.saved_tensors
        return weights * (grad - (grad * weights).sum(-1, keepdim=True))


class Halved(MaskedSoftmax):
    @staticmethod
    def backward(ctx, grad):
        return MaskedSoftmax.backward(ctx, grad / 2)


class OwnBackward(Written):
    def weights(self, logits):
        self.seen = MaskedSoftmax.apply(logits)
        return self.seen


class HalvedGradient(Written):
    def weights(self, logits):
        return Halved.apply(logits)


class Forgetful(Written):
    """Removes its buffers, which ConViT replaces: activations then have their addresses."""

    def __init__(self):
        super().__init__()
        for i in range(64):
            self.register_buffer(f"table{i}", torch.zeros(3), persistent=False)

    def forward(self, x, mask=None):
        for i in range(64):
            setattr(self, f"table{i}", None)
        return super().forward(x, mask)


def with_formula(layer, normalize=True):
    """Return a layer in float64 with weights σ(logits + b), 0 where masked; b is the rule of the visible keys."""
    layer = copy.deepcopy(layer).double()

    def weights(logits):
        visible = logits > -1000
        b = -visible.sum(-1, keepdim=True).clamp(min=1).double().log() - (6 if normalize else 0)
        weights = torch.where(visible, torch.sigmoid(logits + b), 0.0)
        return weights / weights.sum(-1, keepdim=True).clamp(min=1e-300) if normalize else weights

    layer.weights = weights
    return layer


def hidden(value):
    """Return a mask that hides keys 3 and 4 of sample 0, and all keys of its last query."""
    mask = torch.zeros(2, 1, 6, 6)
    mask[0, :, :, 3:5] = value
    mask[0, :, -1] = value
    return mask


@pytest.mark.parametrize("value", [-torch.inf, torch.finfo(torch.float32).min, -1e9, -1e4])
@pytest.mark.parametrize("normalize", [True, False])
def test_masks_of_every_kind_hide(value, normalize):
    layer, x = Written(), torch.randn(2, 6, 16).requires_grad_()
    wide = x.detach().double().requires_grad_()
    expected = with_formula(layer, normalize)(wide, hidden(value).double())
    report = convert(layer, example=(x, hidden(value)), normalize=normalize)
    assert [(s.outcome, s.call) for s in report.softmax] == [("materialised", "softmax")]
    out = layer(x, hidden(value))
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    grads = [torch.autograd.grad(o.square().sum(), i)[0].double() for o, i in ((out, x), (expected, wide))]
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-6)


def test_hidden_keys_have_no_part_in_a_row_of_low_logits():
    layer, x = Written(), torch.randn(2, 6, 16)
    mask = torch.where(hidden(-1e4) == 0, -500.0, -1e4)
    expected = with_formula(layer)(x.double(), mask.double())
    convert(layer, example=(x, mask), normalize=True)
    torch.testing.assert_close(layer(x, mask).double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("normalize", [True, False])
def test_weights_of_bfloat16_are_rounded_once(normalize):
    class Recorded(Written):
        def weights(self, logits):
            self.seen = logits, super().weights(logits)
            return self.seen[1]

    layer, x = Recorded().bfloat16(), torch.randn(2, 6, 16, dtype=torch.bfloat16)
    convert(layer, example=(x,), bias=-7.7, normalize=normalize)
    layer(x)
    logits, weights = layer.seen
    expected = torch.sigmoid(logits.double() - 7.7)
    if normalize:
        expected = expected / expected.sum(-1, keepdim=True)
    torch.testing.assert_close(weights.double(), expected, rtol=2**-8, atol=0)


def test_gradients_dtypes_and_copies():
    layer, x = Written(), torch.randn(2, 6, 16)
    softmax, reference = copy.deepcopy(layer), with_formula(layer)
    convert(layer, example=(x,))
    for other in (
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        torch.compile(layer, fullgraph=True, backend="eager"),
    ):
        torch.testing.assert_close(other(x), layer(x))
    ours, theirs = (
        torch.autograd.grad(m(t).square().sum(), list(m.parameters())) for m, t in ((layer, x), (reference, x.double()))
    )
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)
    half, plain = (copy.deepcopy(m).bfloat16()(x.bfloat16()) for m in (layer, softmax))
    assert half.dtype is torch.bfloat16
    allowed = 2 * (plain - softmax.double()(x.double())).abs().max() + 1e-3
    assert (half - reference(x.double())).abs().max() <= allowed


def test_buffers_that_are_removed_in_the_forward():
    """A sum of weights, as in ConViT: tests/integrations/test_timm.py."""
    (softmax,) = convert(Forgetful(), example=(torch.randn(2, 6, 16),)).softmax
    assert softmax.outcome == "materialised"


@pytest.mark.parametrize("normalize", [True, False])
def test_an_autograd_function_around_the_softmax(normalize):
    """Its backward pass is softmax's, and does not run; softmax layers keep it."""
    layer, x, mask = OwnBackward(), torch.randn(2, 6, 16), hidden(-1e4)
    softmax, kept = Written(), OwnBackward()
    softmax.load_state_dict(kept.state_dict())
    expected = torch.autograd.grad(
        with_formula(layer, normalize)(y := x.double().requires_grad_(), mask.double()).sum(), y
    )
    convert(layer, example=(x, mask), normalize=normalize)
    found = torch.autograd.grad(layer(z := x.clone().requires_grad_(), mask).sum(), z)
    torch.testing.assert_close(found[0].double(), expected[0], rtol=1e-4, atol=1e-6)
    assert torch.equal(layer.seen == 0, (mask < -1000).expand_as(layer.seen))
    x.requires_grad_()
    theirs, ours = (torch.autograd.grad(m(x, hidden(-1e4)[1:]).sum(), x)[0] for m in (softmax, kept))
    torch.testing.assert_close(ours, theirs)
    assert "SoftmaxBackward" in type(kept.seen.grad_fn).__name__


def test_an_autograd_function_with_another_derivative_is_refused():
    layer, x = HalvedGradient(), torch.randn(2, 6, 16, requires_grad=True)
    convert(layer, example=(x,))
    with pytest.raises(RuntimeError, match=r"HalvedGradient .* an autograd.Function, around its attention function"):
        layer(x)


def test_nan_is_not_masked():
    layer, x = Written(), torch.randn(2, 6, 16)
    convert(layer, example=(x,))
    mask = torch.zeros(2, 1, 6, 6)
    mask[0, :, 2, 1] = torch.nan
    assert torch.equal(layer(x, mask).isnan().any(-1).nonzero(), torch.tensor([[0, 2]]))


@torch.no_grad()
@pytest.mark.parametrize("kind", [Written, OwnBackward])
def test_fitted_weights_are_nearly_those_of_softmax(kind):
    torch.manual_seed(0)
    layer = kind()
    nn.init.normal_(layer.qkv.weight, std=0.5)  # logits of several nats
    softmax = copy.deepcopy(layer)
    batches = [(torch.randn(2, 6, 16), hidden(-1e4)) for _ in range(4)]
    report = convert(layer, batches)
    assert report.layers[0].error < 2e-3  # rows without visible keys, where softmax has weights, do not count
    x, mask = torch.randn(2, 6, 16), hidden(-1e4)
    rows = mask.amax(-1).view(2, 6) == 0
    torch.testing.assert_close(layer(x, mask)[rows], softmax(x, mask)[rows], rtol=2e-2, atol=2e-3)
    loaded = copy.deepcopy(softmax)
    restore(loaded, layer.state_dict(), example=batches[0])
    assert torch.equal(loaded(x, mask), layer(x, mask))
