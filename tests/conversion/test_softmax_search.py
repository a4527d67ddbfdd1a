"""Every softmax of a model is converted, refused by name, or listed."""

import copy
import functools
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention as attend
from torch.nn.functional import softmax as normalise
from torch.nn.utils import parametrizations
from torch.overrides import TorchFunctionMode

from sigattn.conversion import ConversionError, SoftmaxLayer, convert
from sigattn.nn import Attention
from tests.conversion.layers import SDPA, EagerAttention, changed, converted, replace

aten = torch.ops.aten
X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
EXAMPLES = pytest.mark.parametrize("example", [None, (X,)], ids=["code", "run"])
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.*"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
    pytest.mark.filterwarnings("ignore:flex_attention called without"),
]


class SigmoidInstead(TorchFunctionMode):
    """Computes σ(logits - log 5) in the place of the softmax of a layer, or of PyTorch's function."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "").partition(".")[0]
        if name == "softmax":
            return ((args[0] if args else kwargs["input"]) - math.log(5)).sigmoid()
        if name == SDPA:
            return (scores(*args[:2]) - math.log(5)).sigmoid() @ args[2]
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def truth(layer, x=X):
    with SigmoidInstead(), torch.compiler.set_stance("force_eager"):
        return layer.eval()(x)


class Net(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Mixer(nn.Module):
    """(B, N, 8) → (B, N, 8); its class is not named after attention, and says nothing about the calls of ``mix``."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = (t.unsqueeze(1) for t in self.qkv(x).chunk(3, -1))  # (B, 1, N, 8) each
        return self.mix(q, k, v).squeeze(1)


def mixer(mix=None, base=Mixer, **attributes):
    def init(self):
        base.__init__(self)
        for attribute, make in attributes.items():
            setattr(self, attribute, make())

    return type("Mix", (base,), {"__init__": init, **({} if mix is None else {"mix": mix})})


def scores(q, k):
    return q @ k.mT * q.shape[-1] ** -0.5


def eager(q, k, v):
    return F.softmax(scores(q, k), -1) @ v


@torch.jit.ignore
@functools.wraps(eager)
def decorated(q, k, v):
    return eager(q, k, v)


def fused(q, k, v):
    return attend(q, k, v)


class Fused(Mixer):
    def mix(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


class Projected(Mixer):
    class Inner(Fused):
        def forward(self, x):
            raise AssertionError

    def __init__(self):
        super().__init__()
        self.inner = self.Inner()

    def mix(self, q, k, v):
        return self.inner.mix(q, k, v)


class Helper:
    @staticmethod
    def static(q, k, v):
        return fused(q, k, v)

    def method(self, q, k, v):
        return self.static(q, k, v)

    def unrelated(self, q, k, v):
        return eager(q, k, v)


class Processor:
    def __call__(self, q, k, v):
        return fused(q, k, v)


helper = Helper()
SERVED = {
    "function": Fused,
    "default": mixer(lambda self, q, k, v, function=F.scaled_dot_product_attention: function(q, k, v)),
    "inherited": mixer(base=Fused),
    "weight norm": lambda: changed(Fused(), lambda layer: parametrizations.weight_norm(layer.qkv)),
    "renamed": mixer(lambda self, q, k, v: attend(q, k, v)),
    "further away": mixer(lambda self, q, k, v: fused(q, k, v)),
    "builtin": mixer(lambda self, q, k, v: torch._C._nn.scaled_dot_product_attention(q, k, v)),
    "operator": mixer(lambda self, q, k, v: torch.ops.aten.scaled_dot_product_attention(q, k, v)),
    "overload": mixer(lambda self, q, k, v: aten.scaled_dot_product_attention.default(q, k, v)),
    "partial": mixer(lambda self, q, k, v: self.stored(q, k, v), stored=lambda: functools.partial(fused)),
    "held": mixer(lambda self, q, k, v: self.held(q, k, v), held=lambda: F.scaled_dot_product_attention),
    "in a table": mixer(lambda self, q, k, v: self.table["fused"][0](q, k, v),
                        table=lambda: {"fused": [functools.partial(F.scaled_dot_product_attention, dropout_p=0.0)]}),
    "of the class": mixer(staticmethod(F.scaled_dot_product_attention)),
    "of another class": mixer(lambda self, q, k, v: Helper.static(q, k, v)),
    "of an object": mixer(lambda self, q, k, v: helper.method(q, k, v)),
    "of a held object": mixer(lambda self, q, k, v: self.processor.method(q, k, v), processor=Helper),
    "a held object": mixer(lambda self, q, k, v: self.processor(q, k, v), processor=Processor),
    "a new object": mixer(lambda self, q, k, v: Processor()(q, k, v)),
    "a layer inside": Projected,
    "one key head": mixer(lambda self, q, k, v: attend(torch.cat([q, -q], 1), k, v).mean(1, True)),
    "an operator without a tensor": mixer(lambda self, q, k, v: attend(q, k, v) * (1 - torch.equal(q, k))),
    "five dimensions": mixer(lambda self, q, k, v: attend(q[:, None], k[:, None], v[:, None])[:, 0]),
}  # fmt: skip


class Product(nn.Module):
    def forward(self, x, y):
        return torch.matmul(x, y)


TorchSoftmax = mixer(lambda self, q, k, v: torch.softmax(scores(q, k), -1) @ v)


class SuperSoftmax(TorchSoftmax):
    def forward(self, x):
        return super().forward(x) + x


class Sparse(Mixer):
    """Its values are sparse, in a layer with a sparse buffer: neither has a storage."""

    def __init__(self):
        super().__init__()
        self.register_buffer("graph", torch.eye(4).to_sparse())

    def mix(self, q, k, v):
        weights = scores(q, k).softmax(-1)
        return torch.stack([torch.sparse.mm(w[0], u[0].to_sparse()) for w, u in zip(weights, v, strict=True)])[:, None]


WRITTEN = {
    "torch": TorchSoftmax,
    "with super": SuperSoftmax,
    "inherited": mixer(base=TorchSoftmax),
    # the weights pass a learned matrix over heads before they meet the values
    "mixed heads": mixer(lambda self, q, k, v: self.heads(scores(q, k).softmax(-1).movedim(1, -1)).movedim(-1, 1) @ v,
                         heads=lambda: nn.Linear(1, 1)),
    "sparse": Sparse,
    "method": mixer(lambda self, q, k, v: torch.einsum("bhnm,bhmd->bhnd", scores(q, k).softmax(-1), v)),
    "renamed": mixer(lambda self, q, k, v: torch.bmm(normalise(scores(q, k), -1)[:, 0], v[:, 0])[:, None]),
    "in float64": mixer(lambda self, q, k, v: F.softmax(scores(q, k), dim=-1, dtype=torch.float64).to(v) @ v),
    "over its last of 4": mixer(lambda self, q, k, v: torch.softmax(scores(q, k), 3) @ v),
    "by keywords": mixer(lambda self, q, k, v: F.softmax(input=scores(q, k), dim=-1) @ v),
    "by name": mixer(lambda self, q, k, v: getattr(torch, "softmax")(scores(q, k), -1) @ v),  # noqa: B009
    "module": mixer(lambda self, q, k, v: F.dropout(self.softmax(scores(q, k)), 0.1, self.training) @ v,
                    softmax=lambda: nn.Softmax(-1)),
    "modules only": mixer(lambda self, q, k, v: self.product(self.softmax(self.product(q, k.mT) * 8**-0.5), v),
                          softmax=lambda: nn.Softmax(-1), product=Product),  # as SqueezeBERT
    "new module": mixer(lambda self, q, k, v: nn.Softmax(-1)(scores(q, k)) @ v),
    "decorated": mixer(lambda self, q, k, v: decorated(q, k, v)),
    "compiled": mixer(lambda self, q, k, v: self.stored(q, k, v),
                      stored=lambda: torch.compile(eager, backend="eager")),
    "averaged": mixer(lambda self, q, k, v: scores(q, k).softmax(-1).mean(1, keepdim=True).cumsum(1) @ v),
}  # fmt: skip


def in_thread(layer, x):
    results = []
    thread = threading.Thread(target=lambda: results.append(layer(x)))
    thread.start()
    thread.join()
    return results[0]


def in_pool(layer, x):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(layer, x).result()


POOL = ThreadPoolExecutor(1)  # its thread is older than the model


def in_threads(run, function):
    """Attention in this thread and in another: only the first would become sigmoid attention."""
    return mixer(lambda self, q, k, v: attend(q, k, v) + run(lambda x: function(x, x, x), v))


# its logits are a layer's, and its weights are those of four functions of the input
Router = mixer(
    lambda self, q, k, v: (self.gate(q).softmax(-1).unsqueeze(-2) @ torch.stack([q, k, v, v], -2)).squeeze(-2),
    gate=lambda: nn.Linear(8, 4),
)
LowLevel = mixer(lambda self, q, k, v: torch._softmax(scores(q, k), -1, False).matmul(v))
REFUSED = {
    "router": Router,
    "low level": LowLevel,
    "operator": mixer(lambda self, q, k, v: torch.matmul(aten._softmax(scores(q, k), -1, False), v)),
    "flash": mixer(lambda self, q, k, v: aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0]),
    "script": lambda: torch.jit.script(EagerAttention()),
    "thread": in_threads(in_thread, attend),
    "thread, written": in_threads(in_thread, functools.partial(eager)),
    "pool": in_threads(in_pool, attend),
    "pool, written": in_threads(in_pool, functools.partial(eager)),
    "older pool": in_threads(lambda function, x: next(POOL.map(function, [x])), attend),
}
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
    "column of ones": lambda s, v: (
        out := s.exp() @ torch.cat([v, torch.ones_like(v[..., :1])], -1))[..., :-1] / out[..., -1:],
}  # fmt: skip
NO_SOFTMAX = {
    "a gate": lambda s, v: (s.exp() * 0.1) @ v,
    "a norm of the output": lambda s, v: F.normalize(s.exp() @ v, dim=-1),
    "another function's sum": lambda s, v: s.relu() / (1 + s.relu().sum(-1, keepdim=True)) @ v,
    "a log-sum-exp of the output": lambda s, v: (s.sigmoid() @ v).logsumexp(-1, keepdim=True).expand_as(v),
    "another exponential's sum": lambda s, v: (-s.square()).exp() @ v / 5 + v.exp() / (2 * v).exp().sum(-1, True),
}


def by_formula(function):
    return mixer(lambda self, q, k, v: function(scores(q, k), v))


CASES = [
    *((kind, "converted", "converted", name) for name, kind in SERVED.items()),
    *((kind, "refused", "materialised", f"written, {name}") for name, kind in WRITTEN.items()),
    *((kind, "refused", "refused", f"refused, {name}") for name, kind in REFUSED.items()),
    (mixer(lambda self, q, k, v: flex_attention(q, k, v)), None, "refused", "flex"),
    *((by_formula(function), None, "refused", f"exp, {name}") for name, function in IDIOMS.items()),
    *((by_formula(function), None, "absent", name) for name, function in NO_SOFTMAX.items()),
]


@pytest.mark.parametrize(
    ("kind", "outcome", "example"),
    [
        pytest.param(kind, outcome, example, id=f"{name}, {'run' if example else 'code'}")
        for kind, by_code, by_run, name in CASES
        for example, outcome in ((None, by_code), ((X,), by_run))
        if outcome is not None
    ],
)
def test_every_spelling(kind, outcome, example):
    """The layer is replaced by the formula; or the model is refused, and converted where the layer is kept."""
    net, keep = Net(Fused(), kind(), Fused()).eval(), []
    before = [type(layer) for layer in net.layers]
    if outcome == "refused":
        advice = "Let them" if example else "Only their code"
        with pytest.raises(
            ValueError, match=rf"cannot be replaced: 'layers\.1(\.softmax)?' \(.*: [\w, ]+\)\. {advice}"
        ):
            replace(net, example)
        assert [type(layer) for layer in net.layers] == before
        outcome, keep = "kept", ["layers.1*"]
    first, second, last = net.layers
    changes = outcome in ("converted", "materialised")
    with torch.no_grad():
        y = truth(first)
        expected = truth(last, truth(second, y) if changes else second(y))
    report = replace(net, example, keep=keep)
    assert {r.outcome for r in report if r.name.startswith("layers.1")} == {outcome} - {"absent"}
    assert {r.outcome for r in report if r.name in ("layers.0", "layers.2")} == {"converted"}
    with torch.no_grad():
        torch.testing.assert_close(net(X), expected)


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
            out = attend(x, x, x)
            return out if self.more is None else out + self.more(x @ x.mT) @ x

    layer = Later()
    replace(layer)
    layer.more = softmax
    with pytest.raises(RuntimeError, match="this forward computes a softmax itself"):
        layer(X)


class Around(nn.Module):
    """Adds a layer's output to that of attention of its own; ``run`` says how the layer is called."""

    def __init__(self, run, inner):
        super().__init__()
        self.run, self.first, self.inner = run, Fused(), inner

    def forward(self, x):
        return self.first(x) + self.run(self.inner, x)


RUNS = {
    "forward": lambda layer, x: layer.forward(x),  # no hooks run
    "new pool": in_pool,
    "old pool": lambda layer, x: POOL.submit(layer, x).result(),
    "thread": in_thread,
    "partial": lambda layer, x: POOL.submit(functools.partial(layer, x=x)).result(),
    "fork": lambda layer, x: torch.jit.wait(torch.jit.fork(layer, x)),  # runs it in the same thread
    # a run does not see in which thread a layer's replica, copy or method is called
    "replica": lambda layer, x: in_thread(layer._replicate_for_data_parallel(), x),  # as ``nn.DataParallel``
    "method": lambda layer, x: POOL.submit(layer.forward, x).result(),
    "copy": lambda layer, x: in_thread(copy.deepcopy(layer), x),
}


@EXAMPLES
@pytest.mark.parametrize("run", RUNS)
def test_every_way_to_run_a_layer(run, example):
    """Attention of any thread is replaced; a softmax that is written out, where a run sees it."""
    model = Around(RUNS[run], Fused())
    expected = truth(model.first) + truth(model.inner)
    assert [r.name for r in replace(model, example)] == ["first", "inner"]
    torch.testing.assert_close(model(X), expected)
    for kind, is_seen in ((LowLevel, False), (TorchSoftmax, run not in ("replica", "method", "copy"))):
        model = Around(RUNS[run], kind())
        if example and is_seen:
            expected = truth(model.first) + truth(model.inner)
            replace(model, example)
            torch.testing.assert_close(model(X), expected)
        else:
            with pytest.raises(ValueError, match=r"cannot be replaced: 'inner' \(Mix: \w+\)"):
                replace(model, example)


class Sometimes(Fused):
    def forward(self, x, skip=True):
        return x if skip else super().forward(x)


def test_attention_that_the_example_does_not_call():
    """In a layer that it runs it is listed, and in other layers judged by the code."""
    expected = [converted("0", "Fused", SDPA), SoftmaxLayer("1", "Sometimes", SDPA, "not called")]
    assert replace(nn.Sequential(Fused(), Sometimes()), (X,)) == expected
    with pytest.raises(ConversionError, match=r"do not reach the attention of '1' \(Sometimes: .*keep=\['1'\]"):
        convert(nn.Sequential(Fused(), Sometimes()), list(torch.randn(2, 1, 5, 8)))

    class Half(Net):
        def forward(self, x):
            return self.layers[0](x)

    assert [r.name for r in replace(Half(Fused(), Fused()), (X,))] == ["layers.0", "layers.1"]
    with pytest.raises(ValueError, match=r"'layers\.1' \(Mix: softmax\)"):
        replace(Half(Fused(), TorchSoftmax()), (X,))


class OwnHook(nn.Identity):
    def __init__(self):
        super().__init__()
        self.register_forward_hook(self.attend)

    def attend(self, module, inputs, output):
        return F.scaled_dot_product_attention(output, output, output)


def attend_in_hook(module, inputs, output=None):
    x = inputs[0] if output is None else output
    return attend(x, x, x)


def softmax_in_hook(module, inputs, out):
    return eager(out, out, out)


HOOKS = {  # functions that give a layer a hook
    "forward": lambda layer: layer.register_forward_hook(attend_in_hook),
    "before": lambda layer: layer.register_forward_pre_hook(attend_in_hook),
    "partial": lambda layer: layer.register_forward_hook(functools.partial(attend_in_hook)),
    "method": lambda layer: layer.register_forward_hook(OwnHook().attend),
    "written": lambda layer: layer.register_forward_hook(softmax_in_hook),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_attention_in_a_hook_is_refused_unless_a_run_shows_the_layer_around_it(kind):
    def make():
        return OwnHook() if kind == "method" else changed(nn.Identity(), HOOKS[kind])

    call = "softmax" if kind == "written" else SDPA
    for example in (None, (X,)) if kind == "written" else (None,):
        with pytest.raises(ValueError, match=rf"'1' \(\w+: {call} in a hook\)"):
            replace(nn.Sequential(Fused(), make()), example)
    for example in (None, (X,)):
        with pytest.raises(ValueError, match=rf"'' \(Sequential: {call} in a hook\)"):
            replace(changed(nn.Sequential(Fused(), nn.Identity()), HOOKS[kind]), example)
    if kind != "written":
        model = Around(lambda layer, x: layer(x), nn.Sequential(make()))
        expected = truth(model.first) + (scores(X, X) - math.log(5)).sigmoid() @ X
        assert [r.name for r in replace(nn.Sequential(model), (X,)) if r.outcome == "converted"] == ["0", "0.first"]
        torch.testing.assert_close(model(X), expected)


@EXAMPLES
def test_a_softmax_in_a_hook_that_is_no_attention_is_listed(example):
    model, seen = nn.Sequential(Fused(), nn.Identity()), []
    model[1].register_forward_hook(lambda module, inputs, output: seen.append(output.softmax(-1)))
    report = replace(model, example)
    assert {r.call: r.outcome for r in report} == {SDPA: "converted", "softmax in a hook": "not attention"}


class Gate(nn.Module):
    def forward(self, x):
        return x * x.softmax(-1)


def test_code_without_a_matrix_product_tells_a_gate_apart():
    """With an example: test_families.py."""
    report = replace(Net(Fused(), Gate(), nn.Sequential(nn.Linear(8, 2), nn.Softmax(-1))))
    assert [(r.name, r.outcome) for r in report[1:]] == [("layers.1", "not attention"), ("layers.2.1", "not attention")]


# as timm writes it: a flag selects the function or a submodule's softmax
Flagged = mixer(
    lambda self, q, k, v: (
        F.scaled_dot_product_attention(q, k, v) if self.fused_attn else self.softmax(scores(q, k)) @ v
    ),
    fused_attn=lambda: False,
    softmax=lambda: nn.Softmax(-1),
)


@EXAMPLES
def test_timm_s_flag_is_set_unless_the_model_is_refused(example):
    net = Net(Flagged(), LowLevel())
    expected = truth(net.layers[0])
    with pytest.raises(ValueError, match=r"cannot be replaced: 'layers\.1'"):
        replace(net, example)
    assert net.layers[0].fused_attn is False
    net = Net(net.layers[0])
    assert [r.name for r in replace(net, example)] == ["layers.0"]
    torch.testing.assert_close(net(X), expected)
    net.layers[0].fused_attn = False
    with pytest.raises(RuntimeError, match=r"Mix was converted .* this forward computes a softmax"):
        net(X)


class Holder(nn.Module):
    def __init__(self, held):
        super().__init__()
        self.first, self.held = Fused(), held

    def forward(self, x):
        return next(iter(self.held[0].values()))(self.first(x))


def test_modules_that_are_not_registered():
    model = Holder([{"second": nn.Sequential(Fused())}])
    second = model.held[0]["second"]
    second.parent = [model]  # back to the holder
    with pytest.raises(ValueError, match=r"'' \(Holder: .* in self\.held, which is not registered\).*example"):
        replace(model)
    with pytest.raises(ValueError, match=r"'second' \(Sequential: .* in self\.parent"):
        replace(nn.ModuleDict(model.held[0]))
    expected = truth(second[0], truth(model.first))
    replace(model, (X,))
    torch.testing.assert_close(model(X), expected)
    registered = Fused()
    assert len(replace(nn.Sequential(registered, Holder([{"first": registered}, nn.Linear(8, 8)])))) == 2


@EXAMPLES
def test_this_library_s_own_layers(example):
    sigmoid = {"activation": "sigmoid", "attention_bias": -1.0}
    net = Net(Attention(8, 2, **sigmoid), Attention(8, 2, activation="softmax", attention_bias=None))
    twin = Attention(8, 2, **sigmoid)
    twin.load_state_dict(net.layers[1].state_dict())
    expected = twin(net.layers[0](X))
    assert replace(net, example, bias=-1.0) == [converted("layers.1", "Attention", SDPA)]
    torch.testing.assert_close(net(X), expected)


def test_methods_of_a_base_class_without_a_forward_count_where_they_are_used():
    class Loading(nn.Module):
        """As those with which transformers loads models, which name kernels of attention."""

        def choose(self):
            return flex_attention

        def attend(self, x):
            return attend(x, x, x)

    class Other(Loading):
        def forward(self, x):
            return x

    class Layer(Loading):
        def forward(self, x):
            return self.attend(x)

    assert [r.name for r in replace(nn.Sequential(Other(), Layer()))] == ["1"]
