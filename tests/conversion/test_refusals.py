"""Models, batches and arguments that ``convert`` refuses: the message, and a model that is as before."""

import functools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import sigattn
from sigattn.conversion import ConversionError, convert
from tests.conversion import layers
from tests.conversion.layers import SDPA, Attend, Both, Net, Written, X, changed, language, refused

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.*"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
    pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype"),
]
TOKENS = list(layers.TOKENS)


def softmax(**options):
    return sigattn.nn.Attention(16, 4, activation="softmax", attention_bias=None, **options)


def set_to_nan(name):
    return lambda model: model.get_parameter(name)[0].detach().fill_(math.nan)


def with_attention_function(model):
    model.blocks[0].attention.attention_fn = lambda *args: args[1]


def with_own_forward(kind):
    model = nn.Sequential(kind(), kind())
    model[1].forward = functools.partial(model[1].forward)
    return model


def parametrized():
    layer = nn.Linear(16, 16)
    parametrize.register_parametrization(layer, "weight", Mixed())
    return Net(Attend(), layer)


def loss_without_labels(model, batch):
    raise KeyError("labels")


class Twice(sigattn.nn.VisibleKeysBias):
    pass


class Mixed(nn.Module):
    def forward(self, x):
        return (x @ x.mT).softmax(-1) @ x


class Nested(Attend):
    def forward(self, x):
        lengths = torch.nested.nested_tensor([*x, x[0, :3]], layout=torch.jagged)
        q = self.q(lengths).unflatten(-1, (2, 8)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q).values()


class TwoSizes(Attend):
    def forward(self, x):
        q, k, v = self.heads(x, x)
        return super().forward(x) + F.scaled_dot_product_attention(q[:, :2], k, v).sum()


class OwnSoftmax(nn.MultiheadAttention):
    def forward(self, query, key, value, **_):
        return (query @ key.mT).softmax(-1) @ value, None


class Stack(nn.Sequential):
    """Attention in a container, which would run a bias as one of its layers."""

    def forward(self, x):
        return super().forward(F.scaled_dot_product_attention(x, x, x))


class Mixture(Written):
    def forward(self, x, mask=None):
        return super().forward(x, mask) * F.softmax(self.out.bias, dim=-1)


class OverQueries(Written):
    def weights(self, logits):
        return F.softmax(logits, dim=-2)


class Routed(Written):
    def __init__(self):
        super().__init__()
        self.router = nn.Sequential(nn.Linear(16, 4), nn.Softmax(-1))

    def forward(self, x):
        return super().forward(x) * self.router(x).amax(-1, keepdim=True)


class WithInner(Attend):
    def __init__(self):
        super().__init__()
        self.inner = Attend()


def batches_with(at, value):
    return [value if i == at else x for i, x in enumerate(X)]


WRONG, NAN = torch.zeros(2, 7, 5), X[0].index_fill(1, torch.tensor(3), math.nan)
CODE, RUN, BATCHES = {}, {"example": (X[0],)}, {"batches": list(X)}
OF_TOKENS = {"batches": TOKENS}
WRAPPED = [type(kind, (Both,), {}) for kind in ("DistributedDataParallel", "FSDPModule")]
IN_TRAINING = r"'' \(\w+\) is part of distributed training"  # it would not synchronise the gradients of biases
GRAPHS = f"exported graphs cannot be replaced: .*{SDPA}"
OTHER_BIASES = [sigattn.nn.SampleLengthBias(), sigattn.nn.QueryBias(), sigattn.nn.AlibiKeysBias()]
REFUSED = {  # name: model, part of the message, calls
    # batches and values
    "no batches": (Attend, "batches is empty", {"batches": []}),
    "a mapping": (Attend, "iterable of batches", {"batches": {"tokens": X[0]}}),
    "a tensor": (Attend, "iterable of batches", {"batches": X[0]}),
    "a text": (Attend, "iterable of batches", {"batches": "text"}),
    "pairs": (Attend, "arguments of one call: for pairs .* pass loss=…", {"batches": [(X[0], X[1], X[2])]}),
    "a wrong batch": (Attend, "does not run on batch 0 of 1: RuntimeError", {"batches": [WRONG]}),
    "a wrong batch, held out": (Attend, "does not run on batch 5 of 6", {"batches": batches_with(5, WRONG)}),
    "nothing but padding": (
        Attend, "no query of the batches sees a key in ''",
        {"batches": [{"x": x, "attn_mask": torch.zeros(7, 7, dtype=torch.bool)} for x in X]},
    ),
    "NaN in a query": (
        lambda: changed(language(), set_to_nan("blocks.1.attention.query.weight")),
        r"logits of 'blocks\.1\.attention' are not finite", OF_TOKENS,
    ),
    "NaN in a value": (
        lambda: changed(language(), set_to_nan("blocks.1.attention.value.weight")),
        r"outputs of 'blocks\.1\.attention' are not finite", OF_TOKENS,
    ),
    "NaN in a held-out batch": (lambda: Both(Attend()), "of 'first' are not finite", {"batches": batches_with(5, NAN)}),
    "an infinite loss": (language, "loss must be finite", {**OF_TOKENS, "loss": lambda m, b: m(b).sum() * math.inf}),
    "an error of the loss": (
        language, "loss fails on batch 0 of 6: KeyError: 'labels'", {**OF_TOKENS, "loss": loss_without_labels}
    ),
    "a bias that is no number": (Attend, "convert: bias must be finite, got nan", {"bias": math.nan}),
    # arguments
    "a loss": (Attend, "loss applies only with batches", {"loss": lambda model, batch: 0}),
    "a limit": (Attend, "max_error applies only with batches, got max_error=0.1", {"max_error": 0.1}),
    "a negative limit": (Attend, "max_error must be a positive number, got -1", {**BATCHES, "max_error": -1.0}),
    "a limit below all": (Attend, "error of every layer is above max_error=1e-09", {**BATCHES, "max_error": 1e-9}),
    "an example and batches": (Attend, "example applies only without batches", {**BATCHES, **RUN}),
    "a bias and batches": (Attend, "bias applies only without batches, got bias=-2.0", {**BATCHES, "bias": -2.0}),
    "no normalize": (Attend, "normalize=False applies only without batches", {**BATCHES, "normalize": False}),
    "keep, a string": (lambda: Net(Attend()), "sequence of names, got the string", {"keep": "layers.0"}),
    "keep, no layer": (
        lambda: Net(Attend()), r"keep=\['a'\] matches no layer with a softmax; there are: '', 'layers.0'",
        *({**way, "keep": ["layers.*", "a"]} for way in (CODE, RUN, BATCHES)),
    ),
    "keep, one of two": (WithInner, "keep both or neither", {"keep": ["inner"]}),
    "a bias of more than masks": (
        lambda: Net(Attend()), "needs lengths, ALiBi or the query, which 'layers.0' does not give; use another bias",
        *({"bias": b} for b in OTHER_BIASES),
    ),
    "a bias of no configuration": (
        language, r"no configuration of sigattn\.models names Twice", {"bias": Twice()}
    ),
    # models
    "no attention": (lambda: nn.Linear(16, 16), "Linear has no softmax attention", CODE, BATCHES),
    "attention that is not reached": (
        lambda: changed(language(), lambda model: model.register_module("unused", softmax())),
        "do not reach the attention of 'unused'", OF_TOKENS,
    ),
    "nested tensors": (Nested, r"'' must be called with plain tensors of shape \(B, H, N, D\), got nested", BATCHES),
    "two sizes": (lambda: Both(TwoSizes()), "'second' calls attention with 4 and with 2 heads", BATCHES),
    "an attention function": (
        lambda: changed(language(), with_attention_function), "has a custom attention_fn", CODE, OF_TOKENS
    ),
    "a performer": (
        lambda: Both(sigattn.nn.Attention(16, 4, activation="performer", attention_bias=None, causal=False)),
        "'second' has activation='performer'", CODE, RUN,
    ),
    "a forward of the instance": (
        lambda: with_own_forward(Attend), r"cannot be replaced: '1' \(\w+: \w+\). Its forward was set on the", CODE
    ),
    "a multihead forward of the instance": (
        lambda: with_own_forward(lambda: nn.MultiheadAttention(16, 2)), "'1' .* Its forward was set on the", CODE
    ),
    "a softmax in a subclass": (
        lambda: nn.Sequential(nn.MultiheadAttention(8, 2), OwnSoftmax(8, 2)),
        r"cannot be replaced: '1' \(OwnSoftmax: softmax\)", CODE,
    ),
    "a container": (
        lambda: Both(Stack(nn.Identity())),
        rf"cannot be replaced: 'second' \(Stack: {SDPA}\). A container would run its bias", CODE, RUN,
    ),
    "a parametrization": (parametrized, r"'layers\.1\.parametrizations\.weight\.0' \(Mixed: softmax\)", CODE, RUN),
    "a second softmax": (Mixture, r"softmax of these layers cannot be replaced: ''", RUN),
    "a softmax over queries": (OverQueries, r"softmax of these layers cannot be replaced: ''", RUN),
    "a written softmax": (Written, r"Only their code was examined: pass example=", CODE),
    "a router in a written attention": (Routed, "keeps its softmax", RUN),
    # graphs, which another class would not change
    "traced": (lambda: Both(torch.jit.trace(layers.Plain(), X[0])), GRAPHS, CODE, RUN),
    "all traced": (lambda: torch.jit.trace(layers.Plain(), X[0]), GRAPHS, CODE, RUN),
    "fx": (lambda: Both(torch.fx.symbolic_trace(layers.Plain())), GRAPHS, CODE, RUN),
    # training by several processes, whose classes are recognised by name
    "replicated": (lambda: WRAPPED[0](Attend()), IN_TRAINING, BATCHES, {"bias": sigattn.nn.LearnableBias(-1.0)}),
    "sharded": (lambda: WRAPPED[1](Attend()), IN_TRAINING, BATCHES, {"bias": sigattn.nn.LearnableBias(-1.0)}),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_converted_is_refused_and_unchanged(name):
    make, message, *calls = REFUSED[name]
    for options in calls:
        refused(make(), message, **options)


@pytest.mark.parametrize("kind", WRAPPED)
def test_biases_without_parameters_are_no_obstacle_to_distributed_training(kind):
    assert len(layers.replace(kind(Attend()))) == 2


def test_a_converted_model_is_not_converted_again():
    for model, batches in (language(), TOKENS), (Attend(), list(X)):
        convert(model, batches)
        with pytest.raises(ConversionError, match="has sigmoid attention already"):
            convert(model, batches)


@pytest.mark.usefixtures("unchecked")
def test_wrong_types():
    with pytest.raises(TypeError, match="convert: model must be a module, got str"):
        convert("bert-base-uncased")
    with pytest.raises(TypeError, match=r"example must hold arguments of the forward, .* pass \(tensor,\)"):
        convert(Attend(), example=X[0])
    with pytest.raises(ValueError, match="max_error must be a positive number, got True"):
        convert(Attend(), list(X), max_error=True)


def test_offloaded_weights_are_refused():
    accelerate = pytest.importorskip("accelerate")
    model = Both(Attend())
    accelerate.cpu_offload(model, execution_device="cpu")
    with pytest.raises(ConversionError, match="'first', 'second' are on the meta device"):
        convert(model, list(X))
    assert type(model.first) is Attend


def test_layers_may_be_kept():
    """Also those which cannot be replaced."""
    net = Net(Attend(), layers.EagerAttention())
    assert [(s.name, s.outcome) for s in layers.replace(net, RUN["example"], keep=["layers.0"])] == [
        ("", "not attention"), ("layers.0", "kept"), ("layers.1", "materialised")
    ]  # fmt: skip
    assert type(net.layers[0]) is Attend
    assert [s.outcome for s in layers.replace(with_own_forward(Attend), keep=["1"])] == ["converted", "kept"]
