"""Conversion without batches: models of others compared with the formula, and refusals by name."""

import copy
import functools
import math
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from sigattn import convert
from sigattn.models import LanguageModel, LanguageModelConfig, saving
from sigattn.nn import (
    AlibiKeysBias,
    BatchLengthBias,
    ContextLengthBias,
    LearnableBias,
    QuadraticBias,
    QueryBias,
    SampleLengthBias,
    VisibleKeysBias,
)
from tests.conversion.replacing import converted, replace


class FusedAttention(nn.Module):
    """As timm writes it."""

    def __init__(self, width=8, heads=2):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, mask=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.proj(x.transpose(1, 2).flatten(2))


class Locked(FusedAttention):
    """With a lock, which its state leaves out."""

    def __getstate__(self):
        return {name: value for name, value in vars(self).items() if name != "lock"}


class EagerAttention(nn.Module):
    def forward(self, x):
        return (x @ x.mT).softmax(-1) @ x


class Net(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x).softmax(-1)  # no attention


X = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))
SDPA = "scaled_dot_product_attention"


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


class TestLayersThatCallTheFunction:
    def test_each_layer_learns_its_own_bias(self):
        net = Net(FusedAttention(), FusedAttention())
        replace(net, bias=LearnableBias(-1.0))
        net(torch.randn(2, 5, 8))[..., 0].sum().backward()
        biases = [p for n, p in net.named_parameters() if "sigmoid_bias" in n]
        assert len(biases) == 2
        assert all(p.grad.abs() > 0 for p in biases)

    def test_a_forward_without_attention_raises(self):
        class Sometimes(FusedAttention):
            def forward(self, x, skip=False):
                return x if skip else super().forward(x)

        layer, x = Sometimes(), torch.randn(2, 5, 8)
        replace(layer)
        assert layer(x).shape == x.shape
        with pytest.raises(RuntimeError, match=r"Sometimes was converted .* this forward did not call"):
            layer(x, skip=True)

    def test_copies_and_pickles_of_a_layer_with_a_state_of_its_own(self):
        net, x = Net(Locked()), torch.randn(2, 5, 8)
        net.layers[0].lock = threading.Lock()  # cannot be copied
        replace(net, bias=-1.0)
        for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
            torch.testing.assert_close(other(x), net(x))
            other.layers[0].qkv.weight.data.zero_()
            assert not torch.allclose(other(x), net(x))

    def test_biases_that_need_more(self):
        for bias in (SampleLengthBias(), QueryBias(), AlibiKeysBias(), QuadraticBias(2, 4, 4)):
            with pytest.raises(ValueError, match=f"{type(bias).__name__} needs .* use another bias"):
                replace(Net(FusedAttention()), bias=bias)

    @pytest.mark.parametrize("kind", [FusedAttention, lambda: nn.MultiheadAttention(8, 2)])
    def test_a_forward_of_the_instance_is_refused(self, kind):
        """The hooks of accelerate, and torch.compile(layer.forward), call the forward of the class before."""
        model = nn.Sequential(kind(), kind())
        model[1].forward = functools.partial(model[1].forward)
        before = [type(m) for m in model.modules()]
        with pytest.raises(ValueError, match=r"cannot be replaced: '1' \(\w+: \w+\). Its forward was set on the inst"):
            replace(model)
        assert [type(m) for m in model.modules()] == before
        replace(model, keep=["1"])

    @pytest.mark.parametrize("call", CALLS_WITH_OWN_BACKWARD)
    def test_a_call_with_a_backward_pass_of_its_own_is_refused(self, call):
        """It would be softmax's, or repeat the call after the forward."""
        layer = type("Layer", (nn.Module,), {"forward": CALLS_WITH_OWN_BACKWARD[call]})()
        layer.function = Recomputed.apply
        assert len(replace(nn.Sequential(FusedAttention(), layer))) == 2
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
        (expected,) = torch.autograd.grad(((x @ x.mT * 8**-0.5 - 1).sigmoid() @ x).square().sum(), x)
        torch.testing.assert_close(x.grad, expected)


class Inherits(nn.MultiheadAttention):
    pass


class OwnForward(nn.MultiheadAttention):
    def forward(self, *args, **kwargs):
        out, weights = super().forward(*args, **kwargs)
        return 2 * out, weights


class OwnSoftmax(nn.MultiheadAttention):
    def forward(self, query, key, value, **_):
        return (query @ key.mT).softmax(-1) @ value, None


class Operators(TorchDispatchMode):
    """Notes the operators of softmax attention."""

    def __init__(self):
        super().__init__()
        self.softmax = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(s in func.name() for s in ("softmax", "attention", "transformer_encoder")):
            self.softmax.append(func.name())
        return func(*args, **(kwargs or {}))


class TestMultiheadAttention:
    @staticmethod
    def truth(layer, x, seen):
        """Self-attention of (B, N, E) with b = -1, and weights (every option: tests/nn/test_converted_layers.py)."""
        q, k, v = F.linear(x, layer.in_proj_weight, layer.in_proj_bias).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (layer.num_heads, -1)).transpose(1, 2) for t in (q, k, v))
        weights = (q @ k.mT * q.shape[-1] ** -0.5 - 1).sigmoid().masked_fill(~seen, 0)
        return layer.out_proj((weights @ v).transpose(1, 2).flatten(2)), weights

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

    @pytest.mark.parametrize("padded", [False, True])
    def test_pytorch_s_fused_encoder_does_not_bring_softmax_back(self, padded):
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 2)
        replace(encoder, bias=-1.0)
        x = torch.randn(2, 5, 8)
        padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2]) if padded else None
        training = encoder.train()(x, src_key_padding_mask=padding)
        with torch.no_grad(), Operators() as seen:
            fast = encoder.eval()(x, src_key_padding_mask=padding)
        assert not seen.softmax
        with torch.inference_mode():
            torch.testing.assert_close(encoder(x, src_key_padding_mask=padding), training)
        torch.testing.assert_close(fast, training)
        seen = torch.ones(2, 1, 1, 5).bool() if padding is None else ~padding[:, None, None]
        y, first = x, encoder.layers[0]
        y = first.norm1(y + self.truth(first.self_attn, y, seen)[0])
        y = first.norm2(y + first.linear2(F.relu(first.linear1(y))))
        torch.testing.assert_close(first(x, src_key_padding_mask=padding), y)

    @pytest.mark.parametrize("own_forward", [False, True])
    @pytest.mark.parametrize("by_example", [False, True])
    def test_subclasses(self, own_forward, by_example):
        kind = OwnForward if own_forward else Inherits
        encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        encoder.self_attn = kind(8, 2, batch_first=True)
        x, layer = torch.randn(2, 4, 8), encoder.self_attn
        report = replace(encoder, (x,) if by_example else None, bias=-1.0)
        assert report == [converted("self_attn", kind.__name__, "multi_head_attention_forward")]
        assert isinstance(layer, kind)
        expected, weights = self.truth(layer, x, torch.ones(4, 4, dtype=torch.bool))
        out, average = layer(x, x, x)
        torch.testing.assert_close(out, expected * (2 if own_forward else 1))
        torch.testing.assert_close(average, weights.mean(1))
        for other in (copy.deepcopy(encoder), pickle.loads(pickle.dumps(encoder))):
            with torch.no_grad(), Operators() as seen:
                torch.testing.assert_close(other.eval()(x), encoder.train()(x))
            assert not seen.softmax

    def test_a_subclass_with_a_softmax_of_its_own_is_refused(self):
        with pytest.raises(ValueError, match=r"cannot be replaced: '1' \(OwnSoftmax: softmax\)"):
            replace(nn.Sequential(nn.MultiheadAttention(8, 2), OwnSoftmax(8, 2)))


@pytest.mark.parametrize("options", [{}, {"kdim": 12, "vdim": 20}, {"bias": False}, {"add_bias_kv": True}])
def test_parameters_are_initialised_as_those_of_pytorch(options):
    layer = nn.MultiheadAttention(16, 4, **options)
    sigmoid_layer = copy.deepcopy(layer)
    convert(sigmoid_layer)
    torch.manual_seed(1)
    layer._reset_parameters()
    torch.manual_seed(1)
    sigmoid_layer._reset_parameters()
    for (name, expected), parameter in zip(layer.named_parameters(), sigmoid_layer.parameters(), strict=True):
        assert torch.equal(parameter, expected), name


@pytest.mark.parametrize(("implementation", "bias", "recorded"), [("sdpa", None, "log_visible"), ("eager", -2.0, -2.0)])
def test_a_model_of_transformers_is_saved_as_sigmoid(implementation, bias, recorded, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=50
    )
    tokens = torch.randint(50, (2, 7))
    model = transformers.BertModel._from_config(config, attn_implementation=implementation).eval()
    layer, x = model.encoder.layer[0].attention.self, torch.randn(2, 7, 16)
    q, k, v = (p(x).unflatten(-1, (2, 8)).transpose(1, 2) for p in (layer.query, layer.key, layer.value))
    out = (q @ k.mT * 8**-0.5 + (-math.log(7) if recorded == "log_visible" else recorded)).sigmoid() @ v
    other = copy.deepcopy(model)
    report = replace(model, bias=bias)
    names = [f"encoder.layer.{i}.attention.self" for i in range(2)]
    assert report == [converted(name, type(layer).__name__, "attention interface") for name in names]
    torch.testing.assert_close(layer(x)[0], out.transpose(1, 2).flatten(2))
    assert model.config.sigmoid_bias == recorded
    model.save_pretrained(tmp_path)
    loaded = transformers.BertModel.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded(tokens).last_hidden_state, model(tokens).last_hidden_state)
    with pytest.raises(ValueError, match="BertModel has sigmoid attention already"):
        replace(model)
    convert(other, bias=ContextLengthBias(7))
    assert other.config.sigmoid_bias == pytest.approx(-math.log(7) - 6)  # numbers are as given, rules are 6 less


def test_a_model_of_this_library_is_saved_as_sigmoid(tmp_path):
    """Its configuration names the bias, or the call raises."""
    tokens = torch.randint(32, (1, 8))
    config = LanguageModelConfig(
        activation="softmax", num_layers=1, embed_dim=16, num_heads=2, vocab_size=32, max_seq_len=16
    )
    for bias in (None, -2.0, BatchLengthBias(), LearnableBias(-1.0), LearnableBias(-1.0, 2)):
        model = LanguageModel(config).eval()
        softmax = model(tokens)
        replace(model, bias=bias)
        expected = LanguageModel(model.config).eval()
        expected.load_state_dict(model.state_dict())
        assert not torch.allclose(model(tokens), softmax)
        torch.testing.assert_close(model(tokens), expected(tokens))
        saving.save(model, tmp_path / type(bias).__name__)
        torch.testing.assert_close(saving.load(tmp_path / type(bias).__name__).eval()(tokens), model(tokens))
    model = LanguageModel(config)
    with pytest.raises(ValueError, match=r"no configuration of sigattn\.models names Twice"):
        replace(model, bias=Twice())
    assert model.blocks[0].attention.activation == "softmax"


class Twice(VisibleKeysBias):
    pass


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loss": lambda model, batch: 0}, "loss applies only with batches"),
        ({"max_error": 0.1}, "max_error applies only with batches, got max_error=0.1"),
        ({"batches": [X], "example": (X,)}, "example applies only without batches"),
        ({"batches": [X], "bias": -2.0}, "bias applies only without batches, got bias=-2.0"),
        ({"batches": [X], "normalize": False}, "normalize=False applies only without batches"),
        ({"batches": [X], "max_error": -1.0}, "max_error must be positive, got -1"),
        (
            {"batches": [X, X], "keep": ["a"]},
            r"keep=\['a'\] matches no layer with a softmax; there are: '', 'layers.0'",
        ),
        ({"batches": [X, X], "max_error": 1e-9}, "error of every layer is above max_error=1e-09"),
    ],
)
def test_arguments_that_exclude_each_other(arguments, message):
    net = Net(FusedAttention())
    with pytest.raises(ValueError, match=message):
        convert(net, **arguments)
    assert type(net.layers[0]) is FusedAttention


def test_the_report_lists_what_becomes_of_each_softmax():
    report = convert(Net(FusedAttention(), EagerAttention()), keep=["layers.1"])
    assert str(report).splitlines() == [
        "(model)   Net             softmax                       not attention",
        "layers.0  FusedAttention  scaled_dot_product_attention  converted",
        "layers.1  EagerAttention  softmax                       kept",
    ]
    for arguments in ({"batches": [X, X]}, {"example": (X,)}, {"example": {"x": X}}):
        report = convert(Net(FusedAttention()), **arguments)
        assert {(s.name, s.kind, s.outcome) for s in report.softmax} == {
            ("", "Net", "not attention"), ("layers.0", "FusedAttention", "converted")
        }  # fmt: skip


class Fused(nn.Module):
    def forward(self, x, mask=None):
        return F.scaled_dot_product_attention(x, x, x, mask)


@pytest.mark.parametrize("normalize", [True, False])
def test_the_rule_of_nested_sequences_is_that_of_each(normalize):
    model = nn.Sequential(Fused())
    convert(model, normalize=normalize)
    sequences = [torch.randn(n, 2, 8) for n in (3, 5)]
    nested = torch.nested.nested_tensor(sequences, layout=torch.jagged).transpose(1, 2)
    for sequence, out in zip(sequences, model(nested).transpose(1, 2).unbind(), strict=True):
        torch.testing.assert_close(out, model(sequence.transpose(0, 1)[None])[0].transpose(0, 1))
