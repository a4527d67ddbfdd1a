"""Conversion of layers, compared with the formula in float64: PyTorch's functions, and softmax that is written out."""

import copy
import math
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.compatibility.reference import SoftmaxOperators
from sigattn import convert, restore
from sigattn.models import LanguageModel, saving
from sigattn.nn import BatchLengthBias, ContextLengthBias, LearnableBias
from tests.conversion import layers
from tests.conversion.layers import TOKENS, Attend, EagerAttention, Net, Written, converted, language, replace

X = layers.X[0]


class Locked(Attend):
    """With a lock, which its state leaves out."""

    def __getstate__(self):
        return {name: value for name, value in vars(self).items() if name != "lock"}


class Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return F.scaled_dot_product_attention(x, x, x)


CALLS_WITH_OWN_BACKWARD = {
    "checkpoint": lambda _, x: checkpoint(F.scaled_dot_product_attention, x, x, x, use_reentrant=False),
    "reentrant checkpoint": lambda _, x: checkpoint(F.scaled_dot_product_attention, x, x, x, use_reentrant=True),
    "autograd function": lambda _, x: Recomputed.apply(x),
    "held autograd function": lambda layer, x: layer.function(x),
}


class Shaped(Attend):
    """With query, key and value of other shapes than (B, H, N, D), in which the heads are anywhere."""

    def __init__(self, shape):
        super().__init__()
        self.shape = shape

    def forward(self, x, mask=None):
        query, key = self.shape(self.q(x)), self.shape(self.kv(x))
        return F.scaled_dot_product_attention(query, key, key, mask, is_causal=mask is None)


class TestLayersThatCallTheFunction:
    def test_each_layer_learns_its_own_bias(self):
        net = Net(Attend(), Attend())
        replace(net, bias=LearnableBias(-1.0))
        net(X)[..., 0].sum().backward()
        biases = [p for n, p in net.named_parameters() if "sigmoid_bias" in n]
        assert len(biases) == 2
        assert all(p.grad.abs() > 0 for p in biases)

    @torch.no_grad()
    @pytest.mark.parametrize(
        ("shape", "mask"),
        [
            (lambda t: t[0], torch.ones(7, 7).tril(2) > 0),
            (lambda t: t, None),
            (lambda t: t, torch.arange(7) < torch.tensor([7, 4]).view(2, 1, 1)),
            (lambda t: t.unflatten(-1, (2, 1, 8)).movedim(1, 3), torch.randn(2, 1, 1, 7, 7)),
        ],
        ids=["(N, D)", "(B, N, D)", "(B, N, D), padded", "(B, H, 1, N, D)"],
    )
    def test_fitted_with_any_number_of_dimensions(self, shape, mask):
        softmax = Shaped(shape)
        nn.init.normal_(softmax.q.weight, std=0.5)
        layer = copy.deepcopy(softmax)
        convert(layer, [(x, mask) for x in layers.X])
        torch.testing.assert_close(layer(X, mask), softmax(X, mask), rtol=5e-3, atol=5e-4)
        loaded = copy.deepcopy(softmax)
        restore(loaded, layer.state_dict(), example=(X, mask))
        assert torch.equal(loaded(X, mask), layer(X, mask))

    def test_a_forward_without_attention_raises(self):
        class Sometimes(Attend):
            def forward(self, x, skip=False):
                return x if skip else super().forward(x)

        layer = Sometimes()
        replace(layer)
        assert layer(X).shape == X.shape
        with pytest.raises(RuntimeError, match=r"Sometimes was converted .* this forward did not call"):
            layer(X, skip=True)

    def test_copies_and_pickles_of_a_layer_with_a_state_of_its_own(self):
        net = Net(Locked())
        net.layers[0].lock = threading.Lock()  # cannot be copied
        replace(net, bias=-1.0)
        for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
            torch.testing.assert_close(other(X), net(X))
            other.layers[0].q.weight.data.zero_()
            assert not torch.allclose(other(X), net(X))

    @pytest.mark.parametrize("call", CALLS_WITH_OWN_BACKWARD)
    def test_a_call_with_a_backward_pass_of_its_own_is_refused(self, call):
        """It would be softmax's, or repeat the call after the forward."""
        layer = type("Layer", (nn.Module,), {"forward": CALLS_WITH_OWN_BACKWARD[call]})()
        layer.function = Recomputed.apply
        assert len(replace(nn.Sequential(Attend(), layer))) == 2
        with pytest.raises(
            RuntimeError, match=r"Layer .* torch.utils.checkpoint, or an autograd.Function, around its attention fun"
        ):
            layer(X.clone().requires_grad_())

    @pytest.mark.usefixtures("unchecked")
    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    @pytest.mark.parametrize(
        ("kind", "compiler"),
        [("method", None), ("reentrant", None), ("method", "eager"), ("local", "aot_eager"), ("function", "eager")],
    )
    def test_checkpoints_that_are_served(self, kind, compiler):
        """A method of the layer; and all where torch.compile traces a function outside of the layer's mode."""

        class Checkpointed(nn.Module):
            def forward(self, x):
                def inside(x):
                    return F.scaled_dot_product_attention(x, x, x)

                if kind == "function":
                    return checkpoint(F.scaled_dot_product_attention, x, x, x, use_reentrant=False)
                return checkpoint(inside if kind == "local" else self.around, x, use_reentrant=kind == "reentrant")

            def around(self, x):
                return F.scaled_dot_product_attention(x, x, x)

        layer, x = Checkpointed(), X.clone().requires_grad_()
        replace(layer, bias=-1.0)
        torch.compiler.reset()
        function = layer if compiler is None else torch.compile(layer, backend=compiler)
        function(x).square().sum().backward()  # torch.autograd.grad does not support reentrant checkpoints
        (expected,) = torch.autograd.grad(((x @ x.mT * 16**-0.5 - 1).sigmoid() @ x).square().sum(), x)
        torch.testing.assert_close(x.grad, expected)

    @pytest.mark.parametrize("normalize", [True, False])
    def test_the_rule_of_nested_sequences_is_that_of_each(self, normalize):
        model = nn.Sequential(layers.Plain())
        convert(model, normalize=normalize)
        sequences = [torch.randn(n, 2, 8) for n in (3, 5)]
        nested = torch.nested.nested_tensor(sequences, layout=torch.jagged).transpose(1, 2)
        for sequence, out in zip(sequences, model(nested).transpose(1, 2).unbind(), strict=True):
            torch.testing.assert_close(out, model(sequence.transpose(0, 1)[None])[0].transpose(0, 1))


class Inherits(nn.MultiheadAttention):
    pass


class OwnForward(nn.MultiheadAttention):
    def forward(self, *args, **kwargs):
        out, weights = super().forward(*args, **kwargs)
        return 2 * out, weights


class TestMultiheadAttention:
    """Every option: tests/nn/test_converted_layers.py."""

    @pytest.mark.parametrize(
        "masks",
        [
            {"attn_mask": torch.zeros(3, 4, 5)},  # of the batch, or of as many heads
            {"attn_mask": torch.zeros(1, 5)},
            {"attn_mask": torch.zeros(4, 1, dtype=torch.bool)},
            {"key_padding_mask": torch.zeros(1, 5, dtype=torch.bool)},
            {"key_padding_mask": torch.zeros(3, 1, dtype=torch.bool)},
        ],
        ids=lambda masks: str({name: tuple(t.shape) for name, t in masks.items()}),
    )
    def test_masks_that_pytorch_refuses(self, masks):
        """They would broadcast to other queries, samples or heads than meant."""
        layer = nn.MultiheadAttention(9, 3, batch_first=True)
        q, k = torch.randn(3, 4, 9), torch.randn(3, 5, 9)
        with pytest.raises((RuntimeError, AssertionError)):
            layer(q, k, k, **masks)
        replace(layer)
        with pytest.raises(ValueError, match=rf"multi_head_attention_forward: {next(iter(masks))} must be \("):
            layer(q, k, k, **masks)

    @pytest.mark.parametrize("kind", [nn.MultiheadAttention, Inherits, OwnForward])
    @pytest.mark.parametrize("padded", [False, True])
    @pytest.mark.parametrize("example", [None, (torch.randn(2, 5, 8),)], ids=["code", "run"])
    def test_pytorch_s_fused_encoder_does_not_bring_softmax_back(self, kind, padded, example):
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        layer.self_attn = kind(8, 2, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 2)
        names = [f"layers.{i}.self_attn" for i in range(2)]
        call = "multi_head_attention_forward"
        assert replace(encoder, example, bias=-1.0) == [converted(name, kind.__name__, call) for name in names]
        x, padding = torch.randn(2, 5, 8), torch.tensor([[False] * 5, [False] * 3 + [True] * 2]) if padded else None
        training = encoder.train()(x, src_key_padding_mask=padding)
        for other in (encoder, copy.deepcopy(encoder), pickle.loads(pickle.dumps(encoder))):
            for without_gradient in (torch.no_grad, torch.inference_mode):
                with without_gradient(), SoftmaxOperators() as operators:
                    fast = other.eval()(x, src_key_padding_mask=padding)
                assert not operators.names
                torch.testing.assert_close(fast, training)
        attention, plain = encoder.layers[0].self_attn, nn.MultiheadAttention(8, 2, batch_first=True)
        plain.load_state_dict(attention.state_dict())
        replace(plain, bias=-1.0)
        (out, weights), expected = attention(x, x, x, padding), plain(x, x, x, padding)
        torch.testing.assert_close((out / (2 if kind is OwnForward else 1), weights), expected)

    @pytest.mark.parametrize("options", [{}, {"kdim": 12, "vdim": 20}, {"bias": False}, {"add_bias_kv": True}])
    def test_parameters_are_initialised_as_those_of_pytorch(self, options):
        layer = nn.MultiheadAttention(16, 4, **options)
        sigmoid_layer = copy.deepcopy(layer)
        convert(sigmoid_layer)
        for module in (layer, sigmoid_layer):
            torch.manual_seed(1)
            module._reset_parameters()
        for (name, expected), parameter in zip(layer.named_parameters(), sigmoid_layer.parameters(), strict=True):
            assert torch.equal(parameter, expected), name


@pytest.mark.parametrize(
    ("bias", "normalize", "recorded"),
    [
        (None, False, "log_visible"),
        (-2.0, False, -2.0),
        (ContextLengthBias(7), True, -math.log(7) - 6),
    ],  # a rule is less
)
def test_a_model_of_transformers_records_its_bias(bias, normalize, recorded):
    """Outputs and saved models: tests/integrations."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 50}
    model = transformers.BertModel(transformers.BertConfig(**sizes, num_hidden_layers=1))
    report = replace(model, bias=bias, normalize=normalize)
    assert report == [converted("encoder.layer.0.attention.self", "BertSelfAttention", "attention interface")]
    assert model.config.sigmoid_bias == pytest.approx(recorded)
    assert model.config.sigmoid_normalize is normalize


@pytest.mark.parametrize("kind", ["bart", "gemma3", "mpt"])
def test_without_batches_it_is_two_settings_of_a_model_of_transformers(kind):
    """Also in one of several parts, and where layers write their softmax out."""
    pytest.importorskip("transformers")
    from tests.integrations.small_models import inputs_of, model_of

    model, other, inputs = model_of(kind, spread=0.3), model_of(kind, spread=0.3), inputs_of(kind)
    convert(model)
    other.config.sigmoid_normalize = True
    other.set_attn_implementation("sigmoid")
    assert model.config.to_dict() == other.config.to_dict()
    with torch.no_grad():
        assert torch.equal(model(**inputs)[0], other(**inputs)[0])


@pytest.mark.parametrize("make", [lambda: None, lambda: -2.0, BatchLengthBias, lambda: LearnableBias(-1.0, 4)])
def test_a_model_of_this_library_is_saved_as_sigmoid(make, tmp_path):
    model, tokens = language().eval(), TOKENS[0]
    softmax = model(tokens)
    replace(model, bias=make())
    assert not torch.allclose(model(tokens), softmax)
    expected = LanguageModel(model.config).eval()
    expected.load_state_dict(model.state_dict())
    saving.save(model, tmp_path / "model")
    for other in (expected, saving.load(tmp_path / "model").eval()):
        torch.testing.assert_close(other(tokens), model(tokens))


def test_the_report_lists_what_becomes_of_each_softmax():
    report = convert(Net(Attend(), EagerAttention()), keep=["layers.1"])
    assert str(report).splitlines() == [
        "(model)   Net             softmax                       not attention",
        "layers.0  Attend          scaled_dot_product_attention  converted",
        "layers.1  EagerAttention  softmax                       kept",
    ]
    for arguments in ({"batches": [X, X]}, {"example": (X,)}, {"example": {"x": X}}):
        report = convert(Net(Attend()), **arguments)
        assert [(s.name, s.outcome) for s in report.softmax] == [("", "not attention"), ("layers.0", "converted")]
    assert report.softmax[1] == converted("layers.0", "Attend", layers.SDPA)


# -- softmax that is written out ---------------------------------------------------------------------------------------


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


def sees_keys(mask):  # (2, 6)
    """Return False for the queries that see no key."""
    return mask.amax((1, 3)) > -1000


@pytest.mark.parametrize("value", [-torch.inf, torch.finfo(torch.float32).min, -1e9, -1e4])
@pytest.mark.parametrize("normalize", [True, False])
def test_masks_of_every_kind_hide(value, normalize):
    """Without a visible key, weights are those of softmax with `normalize`, unless it has none, and 0 without."""
    layer, x, mask = Written(), torch.randn(2, 6, 16).requires_grad_(), hidden(value)
    softmax, wide = copy.deepcopy(layer), x.detach().double().requires_grad_()
    expected = with_formula(layer, normalize)(wide, mask.double())
    report = convert(layer, example=(x, mask), normalize=normalize)
    assert [(s.outcome, s.call) for s in report.softmax] == [("materialised", "softmax")]
    out, sees = layer(x, mask), sees_keys(mask)
    cases = [(out[sees], expected[sees], wide)]
    is_softmax = normalize and value > -torch.inf
    cases.append((out[~sees], softmax(x, mask)[~sees], x) if is_softmax else (out[~sees], expected[~sees], wide))
    for ours, theirs, leaf in cases:
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-5, atol=1e-6)
        pairs = ((ours, x), (theirs, leaf))
        grads = [torch.autograd.grad(o.square().sum(), i, retain_graph=True)[0].double() for o, i in pairs]
        torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("arguments", [{"example": (torch.ones(1, 6, 16),), "normalize": True}, {"batches": 2}])
def test_low_logits_of_a_whole_row_are_no_mask(arguments):
    """As of points that are far from all others, where a logit is a distance."""

    class Shifted(Written):
        shift = 0.0

        def weights(self, logits):
            return super().weights(logits + self.shift)

    layer, x = Shifted(), torch.randn(2, 6, 16)
    softmax = copy.deepcopy(layer)
    convert(layer, **{name: [(x,)] * 2 if name == "batches" else value for name, value in arguments.items()})
    layer.shift = softmax.shift = -2000.0
    torch.testing.assert_close(layer(x), softmax(x))


def test_hidden_keys_have_no_part_in_a_row_of_low_logits():
    layer, x = Written(), torch.randn(2, 6, 16)
    mask = torch.where(hidden(-1e4) == 0, -500.0, -1e4)
    expected = with_formula(layer)(x.double(), mask.double())
    convert(layer, example=(x, mask), normalize=True)
    sees = sees_keys(mask)
    torch.testing.assert_close(layer(x, mask)[sees].double(), expected[sees], rtol=1e-4, atol=1e-5)


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


def test_copies_and_a_compiled_layer_compute_the_same():
    layer, x = Written(), torch.randn(2, 6, 16)
    convert(layer, example=(x,))
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), compiled):
        torch.testing.assert_close(other(x), layer(x))


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


def test_no_tokens():
    layer = Written()
    convert(layer, example=(torch.randn(2, 6, 16),), normalize=True)
    assert layer(torch.randn(2, 0, 16)).shape == (2, 0, 16)


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
    assert report.layers[0].error < 2e-3
    x, mask = torch.randn(2, 6, 16), hidden(-1e4)
    torch.testing.assert_close(layer(x, mask), softmax(x, mask), rtol=2e-2, atol=2e-3)
    loaded = copy.deepcopy(softmax)
    restore(loaded, layer.state_dict(), example=batches[0])
    assert torch.equal(loaded(x, mask), layer(x, mask))
