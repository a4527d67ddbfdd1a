"""Feed-forward layers, blocks, batch norm, Performer's features and initialisation against independent formulas."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sigattn.nn.attention import Attention
from sigattn.nn.batch_norm import MaskedBatchNorm
from sigattn.nn.bias import LearnableBias, SampleLengthBias
from sigattn.nn.block import Block
from sigattn.nn.conformer import ConformerBlock
from sigattn.nn.feedforward import MLP, SwiGLU
from sigattn.nn.initialization import initialize, mup_simple
from sigattn.nn.performer import PerformerFeatures
from sigattn.nn.residual_branch import DropPath, LayerScale


def by_lengths():
    return Attention(8, 2, activation="sigmoid", attention_bias=SampleLengthBias(), causal=False)


def softmax_block(**options):
    return Block(Attention(8, 2, activation="softmax", attention_bias=None), SwiGLU(8, 16), 8, **options)


def layer_norm(t):
    return F.layer_norm(t, (8,), eps=1e-6)


def rms_norm(t):
    return t / (t.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def test_feed_forward_layers():
    x, swiglu, mlp = torch.randn(3, 5), SwiGLU(5, 7), MLP(5, 7)
    gate, value = x @ swiglu.gate.weight.T, x @ swiglu.value.weight.T
    torch.testing.assert_close(swiglu(x), (gate * torch.sigmoid(gate) * value) @ swiglu.output.weight.T)
    hidden = x @ mlp.input.weight.T + mlp.input.bias
    hidden = hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5))
    torch.testing.assert_close(mlp(x), hidden @ mlp.output.weight.T + mlp.output.bias)


@pytest.mark.parametrize(
    ("structure", "norm"),
    [("pre", rms_norm), ("hybrid", rms_norm), ("hybrid_attention", layer_norm), ("post", rms_norm)],
)
def test_norms_are_placed_as_the_paper_says(structure, norm):
    """App. ASR: "LayerScale after attention is replaced to LayerNorm", and kept on the feed-forward branch."""
    name = "layer" if norm is layer_norm else "rms"
    block, x = softmax_block(norm_placement=structure, norm=name, init_values=0.5), torch.randn(2, 5, 8)
    if structure == "post":
        y = norm(x + 0.5 * block.attention(x))
        expected = norm(y + 0.5 * block.feed_forward(y))
    else:
        branch, last = block.attention(norm(x)), norm if structure == "hybrid" else lambda t: t
        y = x + (norm(branch) if structure == "hybrid_attention" else 0.5 * last(branch))
        expected = y + 0.5 * last(block.feed_forward(norm(y)))
    torch.testing.assert_close(block(x), expected)
    if structure == "hybrid":  # its further norms have no parameters
        assert len(list(block.parameters())) == len(list(softmax_block(init_values=0.5).parameters()))


def test_post_norm_with_a_sigmoid_is_warned_of():
    with pytest.warns(UserWarning, match="App. ASR"):
        Block(Attention(8, 2, activation="sigmoid", attention_bias=0.0), SwiGLU(8, 16), 8, norm_placement="post")


def test_stochastic_depth():
    layer = DropPath(0.25)
    out = layer(torch.ones(4000, 2, 3))
    dropped = (out == 0).all((1, 2))
    assert 0.2 < dropped.double().mean() < 0.3
    assert (out[~dropped] == 1 / 0.75).all()
    layer.eval()
    assert (layer(torch.ones(5, 2)) == 1).all()


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-7), (torch.bfloat16, 2**-8)])
def test_masked_batch_norm_is_batch_norm_of_what_is_there(dtype, rtol):
    """It counts and adds in float32 or better: the output is rounded to bfloat16 once."""
    wide = torch.promote_types(dtype, torch.float32)
    ours, truth = MaskedBatchNorm(3).to(wide), nn.BatchNorm1d(3).to(wide)
    with torch.no_grad():
        for norm in (ours, truth):
            norm.weight.copy_(torch.tensor([1.0, 2.0, 3.0]))
            norm.bias.copy_(torch.tensor([0.0, 1.0, -1.0]))
    x, lengths = (torch.randn(4, 3, 701) + 5).to(dtype), torch.tensor([701, 2, 500, 0])
    valid = (torch.arange(701) < lengths[:, None]).unsqueeze(1)

    def there(t):
        return torch.cat([t[b, :, :n] for b, n in enumerate(lengths)], 1).to(wide)

    out = ours(x, valid)
    assert out.dtype is dtype
    torch.testing.assert_close(there(out), truth(there(x).T).T, rtol=rtol, atol=1e-5)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        torch.testing.assert_close(getattr(ours, name), getattr(truth, name))
    torch.testing.assert_close(ours.eval()(x, valid).to(wide), truth.eval()(x.to(wide)), rtol=rtol, atol=1e-5)


def test_the_conformer_block_is_gulati_s():
    block = ConformerBlock(by_lengths(), 8, 16, kernel_size=3, init_values=0.5).eval()
    x, lengths = torch.randn(2, 6, 8), torch.tensor([6, 6])

    def half(mlp, t):
        return 0.25 * mlp.output(F.silu(mlp.input(layer_norm(t))))

    y = x + half(block.first, x)
    y = y + 0.5 * block.attention(layer_norm(y), key_lengths=lengths)
    c = block.convolution
    a, b = c.input(layer_norm(y)).chunk(2, -1)
    z = (a * b.sigmoid()).mT
    z = F.conv1d(z, c.depthwise.weight, c.depthwise.bias, padding=1, groups=8) / (1 + 1e-5) ** 0.5
    y = y + 0.5 * c.output((z * z.sigmoid()).mT)
    y = y + half(block.last, y)
    torch.testing.assert_close(block(x, lengths), layer_norm(y))


@pytest.mark.parametrize("training", [False, True])
def test_padding_does_not_change_a_conformer_s_frames(training):
    block = ConformerBlock(by_lengths(), 8, 16, kernel_size=5).train(training)
    short, lengths = torch.randn(2, 4, 8), torch.tensor([4, 3])
    padded = torch.cat([short, 1e3 * torch.randn(2, 5, 8)], 1)
    for b, n in enumerate(lengths):
        torch.testing.assert_close(block(padded, lengths)[b, :n], block(short, lengths)[b, :n], rtol=1e-4, atol=1e-5)


class TestPerformer:
    def test_it_approaches_softmax(self):
        """The estimate is unbiased: its error falls as the root of the number of features."""
        q, k, v = (torch.randn(1, 2, 30, 8) * scale for scale in (0.4, 0.4, 1))
        truth = F.scaled_dot_product_attention(q, k, v)
        few, many = (
            torch.stack([(PerformerFeatures(8, m)(q, k, v) - truth).norm() for _ in range(8)]).mean() for m in (16, 256)
        )
        assert many < 0.4 * few
        assert many < 0.3 * truth.norm()

    def test_no_direction_is_preferred_and_those_of_a_block_are_orthogonal(self):
        w, x = PerformerFeatures(2, 1000).directions, 0.5 * torch.tensor([[1.0, 0], [-1, 0], [0, 1], [0, -1]])
        estimate = (2 * x @ w.T - x.square().sum(-1, keepdim=True)).exp().mean(-1)  # of e^(x·x)
        torch.testing.assert_close(estimate, torch.full((4,), math.exp(0.25)), rtol=0.2, atol=0)
        for block in PerformerFeatures(8, 16).directions.split(8):
            directions = F.normalize(block, dim=-1)
            torch.testing.assert_close(directions @ directions.T, torch.eye(8), atol=1e-5, rtol=0)

    def test_padding_shared_heads_and_large_inputs(self):
        layer = PerformerFeatures(4, 12)
        q, k, v = torch.randn(2, 4, 6, 4), torch.randn(2, 2, 6, 4), torch.randn(2, 2, 6, 4)
        lengths = torch.tensor([6, 4])
        out = layer(q, k, v, lengths)
        torch.testing.assert_close(out[1:, 2:3], layer(q[1:, 2:3], k[1:, 1:, :4], v[1:, 1:, :4]))
        k[1, :, 4:], v[1, :, 4:] = 1e4, torch.nan
        torch.testing.assert_close(layer(q, k, v, lengths), out)
        assert layer(100 * q, 100 * k, v.nan_to_num()).isfinite().all()
        assert layer(q, k, v, torch.tensor([0, 4]))[0].eq(0).all()


def model_of_sevens():
    """Return an embedding, a block and a convolution, whose parameters are all 7."""
    bias = LearnableBias(-3.0)
    layer = Attention(64, 4, activation="sigmoid", attention_bias=bias, temperature=2.0, use_bias=True)
    block = Block(layer, SwiGLU(64, 128), 64, init_values=1e-4)
    model = nn.Sequential(nn.Embedding(500, 64), block, nn.Conv1d(64, 32, 3)).requires_grad_(False)
    for p in model.parameters():
        p.fill_(7.0)
    return model


@pytest.mark.parametrize(
    ("kind", "spreads"),
    [
        ("fan_in", {"0": 1 / 8, "1.feed_forward.output": 128**-0.5, "2": (3 * 64) ** -0.5}),
        ("trunc_normal", {"1.attention.query": 0.02}),
        ("moco_v3", {"1.attention.query": (2 / 128) ** 0.5, "1.attention.key": (2 / 128) ** 0.5}),
    ],
)
def test_every_parameter_is_drawn_anew(kind, spreads):
    model = model_of_sevens()
    initialize(model, kind)
    for module in model.modules():
        if isinstance(module, (nn.RMSNorm, LayerScale)):
            assert (module.weight == (1 if isinstance(module, nn.RMSNorm) else 1e-4)).all()
        elif isinstance(getattr(module, "bias", None), torch.Tensor):
            assert (module.bias == 0).all()
    assert model[1].attention.attention_bias.value == -3
    assert model[1].attention.temperature == 2
    assert not any((p == 7).any() for p in model.parameters())
    for name, expected in spreads.items():
        assert model.get_parameter(f"{name}.weight").std() == pytest.approx(expected, rel=0.05)
    if kind == "moco_v3":  # uniform
        assert model[1].attention.query.weight.abs().max() == pytest.approx((6 / 128) ** 0.5, rel=0.01)


def test_weights_that_are_computed_from_others():
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(64, 32))
    before = layer.weight.clone()
    initialize(layer, "trunc_normal")
    assert not torch.equal(layer.weight, before)
    assert layer.weight.std().item() == pytest.approx(0.02, rel=0.1)
    with pytest.warns(FutureWarning):
        older = nn.utils.weight_norm(nn.Linear(64, 32))
    with pytest.raises(TypeError, match="weight of Linear is no parameter but computed from others"):
        initialize(older, "fan_in")


def test_mup_simple_slows_the_matrices_within_blocks():
    factors = mup_simple(model_of_sevens(), embed_dim=1536)
    slow = {name for name, factor in factors.items() if factor == 0.5}
    parts = {"attention": ("query", "key", "value", "output"), "feed_forward": ("gate", "value", "output")}
    assert slow == {f"1.{part}.{name}.weight" for part, names in parts.items() for name in names}
    assert set(factors.values()) == {0.5, 1.0}
    assert set(mup_simple(model_of_sevens(), embed_dim=384).values()) == {1.0}
