"""Layers and models that several tests convert, and conversion without batches."""

import math
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sigattn import convert
from sigattn.conversion import SoftmaxLayer
from sigattn.conversion.fit import MARGIN, SPREAD
from sigattn.models import LanguageModel, LanguageModelConfig

SDPA = "scaled_dot_product_attention"
X = torch.randn(6, 2, 7, 16, generator=torch.Generator().manual_seed(3))  # six batches
TOKENS = torch.randint(32, (6, 2, 9), generator=torch.Generator().manual_seed(0))


def replace(model, example=None, **options):
    """Convert a model to the paper's sigmoid attention, and return every softmax and its outcome."""
    return list(convert(model, example=example, **{"normalize": False, **options}).softmax)


def converted(name, kind, call=SDPA):
    return SoftmaxLayer(name, kind, call, "converted")


def changed(model, change):
    change(model)
    return model


def state_of(model):
    """Return values, classes and settings of a model's layers."""
    modules = list(model.modules())
    settings = [
        {k: v if isinstance(v, (bool, int, float, str)) else type(v) for k, v in vars(m).items()} for m in modules
    ]
    configs = [str(m.config) for m in modules if hasattr(m, "config")]
    return pickle.dumps(model.state_dict()), [type(m) for m in modules], settings, configs


def refused(model, message, **options):
    """Expect an error of ``convert`` with this message, and a model that is as before."""
    before = state_of(model)
    with pytest.raises((ValueError, TypeError), match=message):
        convert(model, **options)
    assert state_of(model) == before


def least_squares(x, y):
    """Minimise mean (y - c - a x)² + 0.01 (a + 1)², as rows of a design matrix; return c, below the margin, and a."""
    count = len(x)
    design = np.concatenate([np.stack([np.ones(count), x], 1), [[0, math.sqrt(0.01 * count)]]])
    c, a = np.linalg.lstsq(design, np.concatenate([y, [-math.sqrt(0.01 * count)]]), rcond=None)[0]
    return c - MARGIN - SPREAD * (y - c - a * x).std(), a


def language(**changes):
    sizes = {"num_layers": 2, "embed_dim": 16, "num_heads": 4, "vocab_size": 32, "max_seq_len": 24}
    return LanguageModel(LanguageModelConfig(**{"activation": "softmax", **sizes, **changes}))


class Attend(nn.Module):
    """Self- or cross-attention of (B, N, 16) by PyTorch's function, with the options that it takes."""

    def __init__(self):
        super().__init__()
        self.q, self.kv = nn.Linear(16, 16), nn.Linear(16, 16)

    def heads(self, x, y):
        q = self.q(x).unflatten(-1, (4, 4)).transpose(1, 2)
        k, v = self.kv(y).unflatten(-1, (2, 2, 4)).permute(2, 0, 3, 1, 4)  # two key heads
        return q, k, v

    def forward(self, x, y=None, **options):
        out = F.scaled_dot_product_attention(*self.heads(x, x if y is None else y), enable_gqa=True, **options)
        return out.transpose(1, 2).flatten(2)


class Both(nn.Module):
    def __init__(self, second):
        super().__init__()
        self.first, self.second = Attend(), second

    def forward(self, x):
        return self.second(self.first(x))


class Net(nn.Module):
    """Layers that are added to their input, and a softmax that is no attention."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x).softmax(-1)


class Plain(nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x)


class EagerAttention(nn.Module):
    def forward(self, x):
        return (x @ x.mT).softmax(-1) @ x


class Written(nn.Module):
    """Attention that writes its softmax out; its weights are a function of its logits."""

    def __init__(self, width=16, heads=2):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def weights(self, logits):
        return F.softmax(logits, dim=-1)

    def forward(self, x, mask=None):
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        logits = query @ key.mT / query.shape[-1] ** 0.5
        weights = self.weights(logits if mask is None else logits + mask)
        return self.out((weights @ value).transpose(1, 2).flatten(2))
