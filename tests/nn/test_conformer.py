"""The conformer block, its masked batch norm, and initialisation."""

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
from sigattn.nn.residual_branch import LayerScale


def attention(width=8, **options):
    return Attention(width, 2, activation="sigmoid", attention_bias=SampleLengthBias(), causal=False, **options)


def test_masked_batch_norm_is_batch_norm_of_what_is_there():
    ours, truth = MaskedBatchNorm(3).double(), nn.BatchNorm1d(3).double()
    with torch.no_grad():
        for norm in (ours, truth):
            norm.weight.copy_(torch.tensor([1.0, 2.0, 3.0]))
            norm.bias.copy_(torch.tensor([0.0, 1.0, -1.0]))
    x, lengths = torch.randn(4, 3, 7, dtype=torch.float64, requires_grad=True), torch.tensor([7, 2, 5, 0])
    valid = (torch.arange(7) < lengths[:, None]).unsqueeze(1)
    expected = truth(torch.cat([x[b, :, :n] for b, n in enumerate(lengths)], 1).T).T
    out = ours(x, valid)
    torch.testing.assert_close(torch.cat([out[b, :, :n] for b, n in enumerate(lengths)], 1), expected)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        torch.testing.assert_close(getattr(ours, name), getattr(truth, name))
    torch.testing.assert_close(ours.eval()(x, valid), truth.eval()(x))


def test_masked_batch_norm_counts_and_adds_in_float32():
    x, valid = torch.randn(3, 4, 701) + 5, torch.ones(3, 1, 701, dtype=torch.bool)
    ours, truth = MaskedBatchNorm(4), nn.BatchNorm1d(4)
    half = x.bfloat16()
    out, expected = ours(half, valid), truth(half.float())
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(out.float(), expected, rtol=2**-8, atol=1e-5)  # the output's rounding alone
    torch.testing.assert_close(ours.running_mean, truth.running_mean)
    torch.testing.assert_close(ours.running_var, truth.running_var)


def test_the_block_is_gulati_s():
    block = ConformerBlock(attention(), 8, 16, kernel_size=3, init_values=0.5).eval()
    x, lengths = torch.randn(2, 6, 8), torch.tensor([6, 6])

    def half(mlp, t):
        return 0.25 * mlp.output(F.silu(mlp.input(F.layer_norm(t, (8,), eps=1e-6))))

    y = x + half(block.first, x)
    y = y + 0.5 * block.attention(F.layer_norm(y, (8,), eps=1e-6), key_lengths=lengths)
    c = block.convolution
    a, b = c.input(F.layer_norm(y, (8,), eps=1e-6)).chunk(2, -1)
    z = (a * b.sigmoid()).mT
    z = F.conv1d(z, c.depthwise.weight, c.depthwise.bias, padding=1, groups=8) / (1 + 1e-5) ** 0.5
    y = y + 0.5 * c.output((z * z.sigmoid()).mT)
    y = y + half(block.last, y)
    torch.testing.assert_close(block(x, lengths), F.layer_norm(y, (8,), eps=1e-6))


@pytest.mark.parametrize("training", [False, True])
def test_padding_changes_nothing(training):
    block = ConformerBlock(attention(), 8, 16, kernel_size=5).train(training)
    short = torch.randn(2, 4, 8)
    lengths = torch.tensor([4, 3])
    padded = torch.cat([short, 1e3 * torch.randn(2, 5, 8)], 1)
    for b, n in enumerate(lengths):
        torch.testing.assert_close(block(padded, lengths)[b, :n], block(short, lengths)[b, :n], rtol=1e-4, atol=1e-5)


def test_hybrid_attention_norms_the_attention_alone():
    """App. ASR: "LayerScale after attention is replaced to LayerNorm", and kept on the feed-forward branch."""
    block = Block(attention(), MLP(8, 16), 8, norm_placement="hybrid_attention", norm="layer", init_values=0.5)
    x, lengths = torch.randn(2, 5, 8), torch.tensor([5, 5])

    def norm(t):
        return F.layer_norm(t, (8,), eps=1e-6)

    y = x + norm(block.attention(norm(x), key_lengths=lengths))
    torch.testing.assert_close(block(x, lengths), y + 0.5 * block.feed_forward(norm(y)))


class TestInitialization:
    @staticmethod
    def model():
        bias = LearnableBias(-3.0)
        layer = Attention(64, 4, activation="sigmoid", attention_bias=bias, temperature=2.0, use_bias=True)
        parts = [nn.Embedding(500, 64), Block(layer, SwiGLU(64, 128), 64, init_values=1e-4), nn.Conv1d(64, 32, 3)]
        model = nn.Sequential(*parts)
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(7.0)
        return model

    @pytest.mark.parametrize("kind", ["fan_in", "trunc_normal", "moco_v3"])
    def test_every_parameter_is_drawn_anew(self, kind):
        model = self.model()
        initialize(model, kind)
        for module in model.modules():
            if isinstance(module, nn.RMSNorm):
                assert (module.weight == 1).all()
            elif isinstance(module, LayerScale):
                assert (module.weight == 1e-4).all()
            elif getattr(module, "bias", None) is not None and isinstance(module.bias, torch.Tensor):
                assert (module.bias == 0).all()
        block = model[1]
        assert block.attention.attention_bias.value == -3
        assert block.attention.temperature == 2
        assert not any((p == 7).any() for p in model.parameters())

    def test_spreads(self):
        model = self.model().requires_grad_(False)
        initialize(model, "fan_in")
        embedding, block, convolution = model
        assert embedding.weight.std() == pytest.approx(1 / 8, rel=0.05)
        assert block.feed_forward.output.weight.std() == pytest.approx(128**-0.5, rel=0.05)
        assert convolution.weight.std() == pytest.approx((3 * 64) ** -0.5, rel=0.05)
        initialize(model, "trunc_normal")
        assert block.attention.query.weight.std() == pytest.approx(0.02, rel=0.05)
        initialize(model, "moco_v3")
        for weight in (block.attention.query.weight, block.attention.key.weight):
            assert weight.abs().max() == pytest.approx((6 / 128) ** 0.5, rel=0.01)

    def test_weights_that_are_computed_from_others(self):
        layer = nn.utils.parametrizations.weight_norm(nn.Linear(64, 32))
        before = layer.weight.clone()
        initialize(layer, "trunc_normal")
        assert not torch.equal(layer.weight, before)
        assert layer.weight.std().item() == pytest.approx(0.02, rel=0.1)
        with pytest.warns(FutureWarning):
            older = nn.utils.weight_norm(nn.Linear(64, 32))
        with pytest.raises(TypeError, match="weight of Linear is no parameter but computed from others"):
            initialize(older, "fan_in")

    def test_mup_simple_slows_the_matrices_within_blocks(self):
        factors = mup_simple(self.model(), embed_dim=1536)
        slow = {name for name, factor in factors.items() if factor == 0.5}
        parts = {"attention": ("query", "key", "value", "output"), "feed_forward": ("gate", "value", "output")}
        assert slow == {f"1.{part}.{name}.weight" for part, names in parts.items() for name in names}
        assert set(factors.values()) == {0.5, 1.0}
        assert set(mup_simple(self.model(), embed_dim=384).values()) == {1.0}
