"""Attention over channels gets no bias that is tied to the number of positions; other attention gets one."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sigattn.conversion import ConversionError, convert, restore
from sigattn.nn import VisibleKeysLinearBias


class Channels(nn.Module):
    """Cross-covariance attention of (B, N, 16) as in XCiT: queries are channels, features are positions."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 4, 1)  # (B, 2, 8, N) each
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        out = F.scaled_dot_product_attention(q, k, v, scale=1.0)
        return out.permute(0, 3, 1, 2).flatten(2)


class Core(nn.Module):
    """Attention without weights, of projected queries, keys and values."""

    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


class Images(nn.Module):
    """Attention of images (B, 16, H, W) with convolutions, over channels as in Restormer, or over positions."""

    def __init__(self, *, channels):
        super().__init__()
        self.qkv, self.core, self.channels = nn.Conv2d(16, 48, 1), Core(), channels

    def forward(self, x):
        q, k, v = self.qkv(x).flatten(2).unflatten(1, (3, 2, 8)).unbind(1)  # (B, 2, 8, H · W) each
        out = self.core(q, k, v) if self.channels else self.core(q.mT, k.mT, v.mT).mT
        return out.reshape(x.shape)


class Positions(nn.Module):
    """Ordinary attention of (B, N, 16), with a mask."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x, mask=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)


SEQUENCES = list(torch.randn(3, 2, 9, 16, generator=torch.Generator().manual_seed(0)))
PICTURES = list(torch.randn(3, 2, 16, 4, 4, generator=torch.Generator().manual_seed(0)))
OVER_CHANNELS = {
    "linear": (Channels, SEQUENCES, r"''|'0'"),
    "convolution": (lambda: Images(channels=True), PICTURES, "'core'|'0.core'"),
}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("kind", OVER_CHANNELS)
def test_attention_over_channels_is_refused_and_the_advice_works(kind, inside):
    make, batches, name = OVER_CHANNELS[kind]

    def model():
        return nn.Sequential(make(), nn.Identity()) if inside else make()

    converted = model()
    with pytest.raises(ConversionError, match=rf"({name}) \(.*attention over channels.*bias=VisibleKeysLinearBias$"):
        convert(converted, batches)
    convert(converted, batches, bias=VisibleKeysLinearBias, refine_steps=2)
    larger = batches[0].repeat_interleave(2, -2)
    again = model()
    restore(again, converted.state_dict())
    torch.testing.assert_close(again(larger), converted(larger))
    assert converted(larger).isfinite().all()


def test_as_many_positions_as_channels_cannot_be_told_apart_and_other_sizes_raise():
    model = Channels()
    convert(model, [x[:, :8] for x in SEQUENCES], refine_steps=2)
    with pytest.raises(ValueError, match=r"must be .* as the parameters, got \(2, 2, 8, 9\)"):
        model(SEQUENCES[0])


CAUSAL = torch.ones(9, 9, dtype=torch.bool).tril()
ORDINARY = {  # layer, batches, arguments of another size
    "linear": (Positions, SEQUENCES, (torch.randn(2, 12, 16),)),
    "masked": (Positions, [(x, CAUSAL) for x in SEQUENCES], (torch.randn(2, 12, 16),)),
    "single position": (Positions, [x[:, :1] for x in SEQUENCES], (torch.randn(2, 12, 16),)),
    "convolution": (lambda: Images(channels=False), PICTURES, (torch.randn(2, 16, 6, 6),)),
    "core alone": (Core, [(x.unsqueeze(1),) * 3 for x in SEQUENCES], (torch.randn(2, 1, 12, 16),) * 3),
}


@pytest.mark.parametrize("kind", ORDINARY)
def test_ordinary_attention_gets_a_bias_with_a_term_in_each_query(kind):
    make, batches, other = ORDINARY[kind]
    model = make()
    convert(model, batches, refine_steps=2)
    assert model(*other).isfinite().all()
