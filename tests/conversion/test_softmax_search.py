"""Every softmax of a model is converted, refused by name, or listed."""

import functools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention as attend
from torch.nn.functional import softmax as normalise
from torch.overrides import TorchFunctionMode

from sigattn.conversion import SoftmaxLayer
from sigattn.nn import Attention
from tests.conversion.replacing import converted, replace

aten = torch.ops.aten
SDPA = "scaled_dot_product_attention"
BOTH_SEARCHES = pytest.mark.parametrize("by_example", [False, True], ids=["code", "run"])


def eager(q, k, v):
    return F.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v


def eager_further_away(q, k, v):
    return eager(q, k, v)


@torch.jit.ignore
@functools.wraps(eager)
def decorated(q, k, v):
    return eager(q, k, v)


def fused(q, k, v):
    return attend(q, k, v)


def scores(q, k):
    return q @ k.mT * q.shape[-1] ** -0.5


class Mixer(nn.Module):
    """(B, N, 8) → (B, N, 8); its class is not named after attention, and says nothing about the calls of ``mix``."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = (t.unsqueeze(1) for t in self.qkv(x).chunk(3, -1))  # (B, 1, N, 8) each
        return self.mix(q, k, v).squeeze(1)

    def formula(self, x, bias):
        q, k, v = self.qkv(x).chunk(3, -1)
        return (q @ k.mT * 8**-0.5 + bias).sigmoid() @ v


def mixer(name, mix=None, base=Mixer, **attributes):
    """Make a class of mixers with a method ``mix``, and attributes that functions return."""

    def init(self):
        base.__init__(self)
        for attribute, make in attributes.items():
            setattr(self, attribute, make())

    return type(name, (base,), {"__init__": init, **({} if mix is None else {"mix": mix})})


class Fused(Mixer):
    def mix(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


class Default(Mixer):
    def mix(self, q, k, v, function=F.scaled_dot_product_attention):
        return function(q, k, v)


class Processor:
    """An object that is no module, as in diffusers."""

    def __call__(self, layer, q, k, v):
        return fused(q, k, v)


class Helper:
    """No layer."""

    @staticmethod
    def static(q, k, v):
        return fused(q, k, v)

    def method(self, q, k, v):
        return self.static(q, k, v)

    def unrelated(self, q, k, v):
        return eager(q, k, v)


helper = Helper()
SERVED = [
    Fused,
    Default,
    mixer("Inherited", base=Fused),
    mixer("Renamed", lambda self, q, k, v: attend(q, k, v)),
    mixer("Function", lambda self, q, k, v: fused(q, k, v)),
    mixer("Builtin", lambda self, q, k, v: torch._C._nn.scaled_dot_product_attention(q, k, v)),
    mixer("Operator", lambda self, q, k, v: torch.ops.aten.scaled_dot_product_attention(q, k, v)),
    mixer("Overload", lambda self, q, k, v: aten.scaled_dot_product_attention.default(q, k, v)),
    mixer("Stored", lambda self, q, k, v: self.stored(q, k, v), stored=lambda: functools.partial(fused)),
    mixer("Held", lambda self, q, k, v: self.held(q, k, v), held=lambda: F.scaled_dot_product_attention),
    mixer("Processed", lambda self, q, k, v: self.processor(self, q, k, v), processor=Processor),
    mixer("HeldInTable", lambda self, q, k, v: self.table["fused"][0](q, k, v),
          table=lambda: {"fused": [functools.partial(F.scaled_dot_product_attention, dropout_p=0.0)]}),
    mixer("OfClass", staticmethod(F.scaled_dot_product_attention)),
    mixer("ByClass", lambda self, q, k, v: Helper.static(q, k, v)),
    mixer("ByObject", lambda self, q, k, v: helper.method(q, k, v)),
    mixer("ByHeldObject", lambda self, q, k, v: self.helper.method(q, k, v), helper=Helper),
    mixer("ByNewObject", lambda self, q, k, v: Processor()(self, q, k, v)),
]  # fmt: skip


class Projected(Mixer):
    """The layer around it calls its method, not its forward."""

    class Inner(Fused):
        def forward(self, x):
            raise AssertionError

    def __init__(self):
        super().__init__()
        self.inner = self.Inner()

    def mix(self, q, k, v):
        return self.inner.mix(q, k, v)


class EagerProcessor:
    def __call__(self, q, k, v):
        return eager(q, k, v)


class Product(nn.Module):
    def forward(self, x, y):
        return torch.matmul(x, y)


TorchSoftmax = mixer("TorchSoftmax", lambda self, q, k, v: torch.softmax(scores(q, k), -1) @ v)


class SuperSoftmax(TorchSoftmax):
    def forward(self, x):
        return super().forward(x) + x


class TalkingHeads(Mixer):
    """The weights pass a learned matrix over heads before they meet the values."""

    def __init__(self):
        super().__init__()
        self.heads = nn.Linear(1, 1)

    def mix(self, q, k, v):
        weights = scores(q, k).softmax(-1).permute(0, 2, 3, 1)
        return self.heads(weights).permute(0, 3, 1, 2) @ v


class Router(Mixer):
    """Its logits are a layer's, and its weights are those of four functions of the input."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 4)

    def mix(self, q, k, v):
        return (self.gate(q).softmax(-1).unsqueeze(-2) @ torch.stack([q, k, v, v], -2)).squeeze(-2)


KINDS = {"eager": eager, "fused": None}
WRITTEN = [
    TorchSoftmax,
    SuperSoftmax,
    TalkingHeads,
    mixer("InheritedSoftmax", base=TorchSoftmax),
    mixer("MethodSoftmax", lambda self, q, k, v: torch.einsum("bhnm,bhmd->bhnd", scores(q, k).softmax(-1), v)),
    mixer("FunctionalSoftmax", lambda self, q, k, v: torch.bmm(normalise(scores(q, k), -1)[:, 0], v[:, 0])[:, None]),
    mixer("NamedSoftmax", lambda self, q, k, v: getattr(torch, "softmax")(scores(q, k), -1) @ v),  # noqa: B009
    mixer("ModuleSoftmax", lambda self, q, k, v: F.dropout(self.softmax(scores(q, k)), 0.1, self.training) @ v,
          softmax=lambda: nn.Softmax(-1)),
    mixer("ModulesOnly", lambda self, q, k, v: self.product(self.softmax(self.product(q, k.mT) * 8**-0.5), v),
          softmax=lambda: nn.Softmax(-1), product=Product),  # as SqueezeBERT
    mixer("Made", lambda self, q, k, v: nn.Softmax(-1)(scores(q, k)) @ v),
    mixer("FunctionSoftmax", lambda self, q, k, v: eager_further_away(q, k, v)),
    mixer("DecoratedSoftmax", lambda self, q, k, v: decorated(q, k, v)),
    mixer("TableSoftmax", lambda self, q, k, v: KINDS["eager"](q, k, v)),
    mixer("ProcessorSoftmax", lambda self, q, k, v: self.processor(q, k, v), processor=EagerProcessor),
    mixer("StoredSoftmax", lambda self, q, k, v: self.stored(q, k, v), stored=lambda: lambda *qkv: eager(*qkv)),
    mixer("Compiled", lambda self, q, k, v: self.stored(q, k, v), stored=lambda: torch.compile(eager, backend="eager")),
    mixer("Averaged", lambda self, q, k, v: scores(q, k).softmax(-1).mean(1, keepdim=True).cumsum(1) @ v),
]  # fmt: skip
LowLevelSoftmax = mixer("LowLevelSoftmax", lambda self, q, k, v: torch._softmax(scores(q, k), -1, False).matmul(v))
REFUSED = [
    Router,
    LowLevelSoftmax,
    mixer("OperatorSoftmax", lambda self, q, k, v: torch.matmul(aten._softmax(scores(q, k), -1, False), v)),
    mixer("FlashOperator", lambda self, q, k, v: aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0]),
    mixer("Flex", lambda self, q, k, v: flex_attention(q, k, v)),
]


class Net(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture
def x():
    return torch.randn(2, 5, 8)


def by_column_of_ones(s, v):
    out = s.exp() @ torch.cat([v, torch.ones_like(v[..., :1])], -1)
    return out[..., :-1] / out[..., -1:]


IDIOMS = {
    "largest first": lambda s, v: (w := (s - s.amax(-1, keepdim=True)).exp()) / w.sum(-1, keepdim=True) @ v,
    "late": lambda s, v: (w := s.exp()) @ v / w.sum(-1, keepdim=True),
    "log-softmax": lambda s, v: F.log_softmax(s, -1).exp() @ v,
    "log-sum-exp": lambda s, v: (s - s.logsumexp(-1, keepdim=True)).exp() @ v,
    "log-sum-exp, late": lambda s, v: (s.exp() @ v) * (-s.logsumexp(-1, keepdim=True)).exp(),
    "its exponential": lambda s, v: (s.exp() @ v) / s.logsumexp(-1, keepdim=True).exp(),
    "reciprocal": lambda s, v: (s.exp() * (1 / s.exp().sum(-1, keepdim=True))) @ v,
    "power -1": lambda s, v: (s.exp() * s.exp().sum(-1, keepdim=True).pow(-1)) @ v,
    "reciprocal, late": lambda s, v: s.exp().sum(-1, keepdim=True).reciprocal() * (s.exp() @ v),
    "normalize": lambda s, v: F.normalize(s.exp(), p=1, dim=-1) @ v,
    "norm": lambda s, v: s.exp() / torch.linalg.vector_norm(s.exp(), 1, dim=-1, keepdim=True) @ v,
    "mean": lambda s, v: s.exp() / s.exp().mean(-1, keepdim=True) @ v / 5,
    "cumulative sum": lambda s, v: s.exp() / s.exp().cumsum(-1)[..., -1:] @ v,
    "powers of 2": lambda s, v: s.exp2() / s.exp2().sum(-1, keepdim=True) @ v,
    "powers of e": lambda s, v: (math.e**s @ v) / (math.e**s).sum(-1, keepdim=True),
    "product with ones": lambda s, v: (s.exp() @ v) / (s.exp() @ torch.ones_like(v[..., :1])),
    "column of ones": by_column_of_ones,
}
NO_SOFTMAX = {
    "a gate": lambda s, v: (s.exp() * 0.1) @ v,
    "a norm of the output": lambda s, v: F.normalize(s.exp() @ v, dim=-1),
    "another function's sum": lambda s, v: s.relu() / (1 + s.relu().sum(-1, keepdim=True)) @ v,
    "a log-sum-exp of the output": lambda s, v: (s.sigmoid() @ v).logsumexp(-1, keepdim=True).expand_as(v),
    "another exponential's sum": lambda s, v: (-s.square()).exp() @ v / 5 + v.exp() / (2 * v).exp().sum(-1, True),
}


@pytest.mark.parametrize("idiom", IDIOMS)
def test_idioms_of_a_softmax_are_refused_with_an_example(idiom, x):
    kind = mixer("Idiom", lambda self, q, k, v: IDIOMS[idiom](scores(q, k), v))
    with pytest.raises(ValueError, match=r"cannot be replaced: 'layers\.1' \(Idiom: exp\)"):
        replace(Net(Fused(), kind()), (x,))


@pytest.mark.parametrize("function", NO_SOFTMAX)
def test_other_functions_of_exponentials_are_no_softmax(function, x):
    other = mixer("Other", lambda self, q, k, v: NO_SOFTMAX[function](scores(q, k), v))
    assert [r.name for r in replace(Net(Fused(), other()), (x,))] == ["layers.0"]


@pytest.mark.parametrize(
    "softmax",
    [
        lambda z: z.softmax(-1),
        lambda z: aten._softmax.default(z, -1, False),
        lambda z: aten.softmax.int(z, -1),
        lambda z: aten._scaled_dot_product_flash_attention_for_cpu.default(z[None], z[None], z[None])[0][0],
    ],
)
def test_a_converted_layer_refuses_every_softmax_of_its_forward(softmax):
    """Also one that is called as an operator, on a path that was not searched."""

    class Later(nn.Module):
        more = None

        def forward(self, x):
            out = F.scaled_dot_product_attention(x, x, x)
            return out if self.more is None else out + self.more(x @ x.mT) @ x

    layer = Later()
    replace(layer)
    layer.more = softmax
    with pytest.raises(RuntimeError, match="this forward computes a softmax itself"):
        layer(torch.randn(2, 5, 8))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@BOTH_SEARCHES
@pytest.mark.parametrize("whole", [False, True])
def test_a_traced_layer_is_refused(by_example, whole, x):
    """Its code is a graph, which replacing its class would not change; the model stays as it was."""
    traced = torch.jit.trace(Fused(), x)
    net = traced if whole else Net(Fused(), traced)
    expected = net(x)
    with pytest.raises(ValueError, match=rf"traced or exported graphs cannot be replaced: .*{SDPA}"):
        replace(net, (x,) if by_example else None, bias=-1.0)
    torch.testing.assert_close(net(x), expected, rtol=0, atol=0)


class Gated(nn.Module):
    """Experts weighted by a softmax that is no attention."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(8, 2)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        weights = self.router(x).softmax(-1)
        return sum(weights[..., i, None] * expert(x) for i, expert in enumerate(self.experts))


class Pool(nn.Module):
    """One query, the mean, against every position, through PyTorch's function with separate projections."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        x = x.transpose(0, 1)  # (N, B, 8)
        options = {f"{name}_proj_weight": getattr(self, name).weight for name in "qkv"}
        pooled, _ = F.multi_head_attention_forward(
            query=x.mean(0, keepdim=True), key=x, value=x, embed_dim_to_check=8, num_heads=2,
            in_proj_weight=torch.empty(0),  # as in WavLM
            in_proj_bias=torch.cat([self.q.bias, self.k.bias, self.v.bias]),
            bias_k=None, bias_v=None, add_zero_attn=False, dropout_p=0.0,
            out_proj_weight=self.out.weight, out_proj_bias=self.out.bias, training=self.training,
            need_weights=False, use_separate_proj_weight=True, **options,
        )  # fmt: skip
        return pooled.squeeze(0)


@BOTH_SEARCHES
@pytest.mark.parametrize("kind", SERVED)
def test_every_spelling_of_the_function_is_served(kind, by_example, x):
    net = Net(kind())
    (entry,) = replace(net, (x,) if by_example else None)
    assert entry == converted("layers.0", kind.__name__, SDPA)
    torch.testing.assert_close(net(x), net.layers[0].formula(x, -math.log(5)))


class Around(nn.Module):
    """Calls the forward of a layer, so that no hooks run."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner.forward(x)


@BOTH_SEARCHES
def test_methods_that_the_layer_around_calls(by_example, x):
    example, net = (x,) if by_example else None, Net(Projected())
    assert "layers.0.inner" in [r.name for r in replace(net, example)]
    torch.testing.assert_close(net(x), net.layers[0].formula(x, -math.log(5)))
    net = Net(Around(Fused()))
    assert [r.name for r in replace(net, example)] == ["layers.0.inner"]
    torch.testing.assert_close(net(x), net.layers[0].inner.formula(x, -math.log(5)))
    with pytest.raises(ValueError, match=r"cannot be replaced: 'layers\.0\.inner'"):
        replace(Net(Around(LowLevelSoftmax())), example)


class SigmoidInstead(TorchFunctionMode):
    """Computes σ(logits - log 5) wherever a layer computes a softmax of its own."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") == "softmax":
            return (args[0] - math.log(5)).sigmoid()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", WRITTEN)
@pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")
def test_every_spelling_of_a_softmax_is_replaced_with_an_example(kind, x):
    net = Net(kind()).eval()
    with torch.no_grad(), SigmoidInstead():
        expected = net(x)
    report = replace(net, (x,))
    assert [(r.name.removesuffix(".softmax"), r.outcome) for r in report] == [("layers.0", "materialised")]
    with torch.no_grad():
        torch.testing.assert_close(net(x), expected)


@pytest.mark.parametrize(
    ("kind", "by_example"), [*((kind, True) for kind in REFUSED), *((kind, False) for kind in REFUSED + WRITTEN)]
)
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_every_other_spelling_of_a_softmax_is_refused_by_name(kind, by_example, x):
    net, example = Net(Fused(), kind(), Fused()), (x,) if by_example else None
    advice = "Let them" if by_example else "Only their code"
    with pytest.raises(ValueError, match=rf"cannot be replaced: 'layers\.1(\.softmax)?' \(\w+: \w+\)\. {advice}"):
        replace(net, example)
    assert type(net.layers[0]) is Fused
    assert [r.outcome for r in replace(net, example, keep=["layers.1*"])] == ["converted", "kept", "converted"]
    first, kept, last = net.eval().layers
    with torch.no_grad():
        expected = last.formula(kept(first.formula(x, -math.log(5))), -math.log(5))
        torch.testing.assert_close(net(x), expected)


class Scripted(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ x.mT, -1) @ x


@BOTH_SEARCHES
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is")
def test_a_scripted_layer_and_a_performer_are_refused(by_example, x):
    """A performer is softmax attention by random features, which no replacement of a call converts."""
    example, net = (x,) if by_example else None, Net(Fused(), torch.jit.script(Scripted()))
    with pytest.raises(ValueError, match=r"cannot be replaced: 'layers\.1'"):
        replace(net, example)
    layer = Attention(8, 2, activation="performer", attention_bias=None, causal=True)
    with pytest.raises(ValueError, match=r"'layers\.1' has activation='performer'"):
        replace(Net(Fused(), layer), example)


@BOTH_SEARCHES
def test_a_pool_through_multi_head_attention_forward(by_example, x):
    net = Net(Fused(), Pool())
    report = replace(net, (x,) if by_example else None)
    assert report[1] == converted("layers.1", "Pool", "multi_head_attention_forward")
    y, pool = net.layers[0](x), net.layers[1]
    pairs = (pool.q, y.mean(1, keepdim=True)), (pool.k, y), (pool.v, y)
    q, k, v = (f(t).unflatten(-1, (2, 4)).transpose(1, 2) for f, t in pairs)
    expected = (q @ k.mT / 2 - math.log(5)).sigmoid() @ v
    torch.testing.assert_close(net(x), pool.out(expected.transpose(1, 2).flatten(1)))


Causal = mixer("Causal", lambda self, q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", [Causal, Pool])
def test_compiled_and_exported(kind, x):
    net = Net(kind()).eval()
    replace(net)
    if kind is Pool:
        torch.testing.assert_close(torch.compile(net, backend="aot_eager", fullgraph=True)(x), net(x))
    exported = torch.export.export(net, (x,), dynamic_shapes=({1: torch.export.Dim("n", min=2)},))
    longer = torch.randn(2, 9, 8)
    torch.testing.assert_close(exported.module()(longer), net(longer))


class Both(Fused):
    """With a softmax that is no attention, of a layer inside or in the same forward."""

    def __init__(self, inside):
        super().__init__()
        self.gate = Gated() if inside else None

    def combine(self, x, attended):
        return self.gate(attended) if self.gate is not None else attended * self.qkv(x)[..., :8].softmax(-1)

    def forward(self, x):
        return self.combine(x, super().forward(x))


class TestWhatIsNoAttention:
    def test_an_example_tells_a_router_apart(self, x):
        net = Net(Fused(), Gated())
        assert replace(net, (x,))[1] == SoftmaxLayer("layers.1", "Gated", "softmax", "not attention")
        torch.testing.assert_close(net(x), net.layers[1](net.layers[0].formula(x, -math.log(5))))

    def test_code_without_a_matrix_product_does_too(self):
        report = replace(Net(Fused(), Gated(), nn.Sequential(nn.Linear(8, 2), nn.Softmax(-1))))
        assert [r.name for r in report if r.outcome != "converted"] == ["layers.1", "layers.2.1"]

    @pytest.mark.parametrize("inside", [True, False])
    def test_a_layer_with_both(self, inside, x):
        layer = Both(inside)
        expected = layer.combine(x, layer.formula(x, -math.log(5)))
        assert replace(layer, (x,)) == [
            converted("", "Both", SDPA),
            SoftmaxLayer("gate" if inside else "", "Gated" if inside else "Both", "softmax", "not attention"),
        ]
        torch.testing.assert_close(layer(x), expected)


class Flagged(Mixer):
    """As timm writes it: a flag selects the function or a submodule's softmax."""

    def __init__(self):
        super().__init__()
        self.fused_attn, self.softmax = False, nn.Softmax(-1)

    def mix(self, q, k, v):
        if self.fused_attn:
            return F.scaled_dot_product_attention(q, k, v)
        return self.softmax(scores(q, k)) @ v


@BOTH_SEARCHES
def test_timm_s_flag_is_set_unless_the_model_is_refused(by_example, x):
    net, example = Net(Flagged(), LowLevelSoftmax()), (x,) if by_example else None
    with pytest.raises(ValueError, match=r"cannot be replaced: 'layers\.1'"):
        replace(net, example)
    assert net.layers[0].fused_attn is False
    net = Net(net.layers[0])
    assert [r.name for r in replace(net, example)] == ["layers.0"]
    torch.testing.assert_close(net(x), net.layers[0].formula(x, -math.log(5)))
    net.layers[0].fused_attn = False
    with pytest.raises(RuntimeError, match=r"Flagged was converted .* this forward computes a softmax"):
        net(x)


def test_layers_that_the_example_does_not_reach(x):
    class Half(Net):
        def forward(self, x):
            return self.layers[0](x)

    assert [r.name for r in replace(Half(Fused(), Fused()), (x,))] == ["layers.0", "layers.1"]
    with pytest.raises(ValueError, match=r"'layers\.1' \(TorchSoftmax: softmax\)"):
        replace(Half(Fused(), TorchSoftmax()), (x,))


class Holder(nn.Module):
    def __init__(self, held):
        super().__init__()
        self.first, self.held = Fused(), held

    def forward(self, x):
        return next(iter(self.held[0].values()))(self.first(x))


def test_modules_that_are_not_registered(x):
    model = Holder([{"second": nn.Sequential(Fused())}])
    with pytest.raises(ValueError, match=r"'' \(Holder: .* in self\.held, which is not registered\).*example"):
        replace(model)
    model.held[0]["second"].parent = [model]  # back to the holder
    with pytest.raises(ValueError, match=r"'second' \(Sequential: .* in self\.parent"):
        replace(nn.ModuleDict(model.held[0]))
    expected = model.held[0]["second"][0].formula(model.first.formula(x, -math.log(5)), -math.log(5))
    replace(model, (x,))
    torch.testing.assert_close(model(x), expected)
    registered = Fused()
    assert len(replace(nn.Sequential(registered, Holder([{"first": registered}, nn.Linear(8, 8)])))) == 2


def test_layers_may_be_kept(x):
    net = Net(Fused(), Fused())
    kept = SoftmaxLayer("layers.0", "Fused", SDPA, "kept")
    assert replace(net, (x,), keep=["layers.0"]) == [kept, converted("layers.1", "Fused", SDPA)]
    assert type(net.layers[0]) is Fused
    with pytest.raises(ValueError, match=r"keep=\['head'\] matches no layer.*'layers\.0'"):
        replace(Net(Fused()), keep=["layers.*", "head"])
    with pytest.raises(TypeError, match="sequence of names, got the string"):
        replace(Net(Fused()), keep="layers.0")
    with pytest.raises(ValueError, match="keep both or neither"):
        replace(mixer("Outer", base=Fused, inner=Fused)(), keep=["inner"])


@BOTH_SEARCHES
def test_this_library_s_own_layers(by_example, x):
    sigmoid = {"activation": "sigmoid", "attention_bias": -1.0}
    net = Net(Attention(8, 2, **sigmoid), Attention(8, 2, activation="softmax", attention_bias=None))
    twin = Attention(8, 2, **sigmoid)
    twin.load_state_dict(net.layers[1].state_dict())
    expected = twin(net.layers[0](x))
    (entry,) = replace(net, (x,) if by_example else None, bias=-1.0)
    assert entry == converted("layers.1", "Attention", SDPA)
    torch.testing.assert_close(net(x), expected)


class Sparse(nn.Module):
    """Attention whose values are sparse, in a layer with a sparse buffer: neither has a storage."""

    def __init__(self):
        super().__init__()
        self.query_key = nn.Linear(8, 16)
        self.register_buffer("graph", torch.eye(4).to_sparse())

    def forward(self, x):
        query, key = self.query_key(x).chunk(2, -1)
        return torch.sparse.mm((query @ key.mT).softmax(-1), x.to_sparse())


def test_sparse_values_are_activations():
    layer, x = Sparse(), torch.randn(4, 8)
    query, key = layer.query_key(x).chunk(2, -1)
    expected = (query @ key.mT - math.log(4)).sigmoid() @ x
    replace(model := nn.Sequential(layer), (x,))
    torch.testing.assert_close(model(x), expected)


class Loading(nn.Module):
    """As those with which transformers loads models, which name kernels of attention."""

    def choose(self):
        return flex_attention

    def attend(self, x):
        return F.scaled_dot_product_attention(x, x, x)


def test_methods_of_a_base_class_without_a_forward_count_where_they_are_used():
    class Model(Loading):
        def __init__(self):
            super().__init__()
            self.layer = Fused()

        def forward(self, x):
            return self.layer(x)

    class Layer(Loading):
        def forward(self, x):
            return self.attend(x)

    assert [r.name for r in replace(nn.Sequential(Model(), Layer()))] == ["0.layer", "1"]
