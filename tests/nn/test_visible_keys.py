"""The default bias of converted layers counts the visible keys of each sample, without padding."""

import copy
import math

import pytest
import torch
from torch import nn

from sigattn import convert
from sigattn.nn import Attention, BatchLengthBias, ContextLengthBias, LearnableBias, VisibleKeysBias
from sigattn.nn.bias_rules import make_bias
from tests.nn.test_attention import E, H
from tests.nn.test_fitted_bias import Attend


@pytest.fixture
def layer():
    layer = Attend()
    convert(layer, normalize=False)
    return layer


def padding(*lengths, size):
    return torch.arange(size) < torch.tensor(lengths)[:, None]  # (B, M), True = a key


def added(seen, value):
    return torch.zeros(seen.shape).masked_fill(~seen, value)[:, None, None]


MASKS = {
    "bool": lambda seen: seen[:, None, None],
    "bool, each query": lambda seen: seen[:, None, None].expand(-1, H, seen.shape[1], -1),
    "-inf": lambda seen: added(seen, -math.inf),
    "smallest": lambda seen: added(seen, torch.finfo().min),
    "-1e4": lambda seen: added(seen, -1e4),
    "square": lambda seen: (seen[:, :, None] & seen[:, None]).unsqueeze(1),  # rows of padding see nothing
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("padded", [5, 9])
def test_padding_is_not_counted(layer, mask, padded):
    """A sample gives what it gives alone, whatever the length to which its batch is padded."""
    x = torch.randn(2, padded, E)
    out = layer(x, attn_mask=MASKS[mask](padding(3, 5, size=padded)))
    for sample, length in enumerate((3, 5)):
        alone = x[sample : sample + 1, :length]
        torch.testing.assert_close(out[sample : sample + 1, :, :length], layer(alone))
        q, k, v = layer.heads(alone)
        torch.testing.assert_close(layer(alone), (q @ k.mT / 2 - math.log(length)).sigmoid() @ v)


def test_keys_that_any_head_and_query_sees_are_counted(layer):
    x, mask = torch.randn(2, 5, E), torch.zeros(2, H, 5, 5, dtype=torch.bool)
    mask[..., 0] = mask[0, 1, 2, 3] = mask[0, 2, 4, 1] = True
    q, k, v = layer.heads(x)
    logits = q @ k.mT / 2 - torch.tensor([3.0, 1.0]).log().view(2, 1, 1, 1)
    torch.testing.assert_close(layer(x, attn_mask=mask), logits.sigmoid().masked_fill(~mask, 0) @ v)


@pytest.mark.parametrize("bias", [None, VisibleKeysBias()])
def test_a_position_bias_hides_nothing(bias):
    layer, x, penalty = Attend(), torch.randn(2, 5, E), torch.linspace(-70, 70, H * 25).view(1, H, 5, 5)
    convert(layer, normalize=False, bias=bias)
    q, k, v = layer.heads(x)
    expected = (q @ k.mT / 2 + penalty - math.log(5)).sigmoid() @ v
    torch.testing.assert_close(layer(x, attn_mask=penalty), expected)


@pytest.mark.parametrize("form", ["key_padding_mask", "added", "attn_mask"])
def test_multihead_attention(form):
    layer = nn.MultiheadAttention(8, 2, batch_first=True)
    convert(layer, normalize=False)
    x, seen = torch.randn(2, 6, 8), padding(3, 5, size=6)
    options = {
        "key_padding_mask": {"key_padding_mask": ~seen},
        "added": {"key_padding_mask": torch.zeros(2, 6).masked_fill(~seen, torch.finfo().min)},
        "attn_mask": {"attn_mask": ~seen[:, None, None].expand(2, 2, 6, 6).flatten(0, 1)},
    }[form]
    out, _ = layer(x, x, x, **options)
    for sample, length in enumerate((3, 5)):
        alone = x[sample : sample + 1, :length]
        torch.testing.assert_close(out[sample : sample + 1, :length], layer(alone, alone, alone)[0])
        number = nn.MultiheadAttention(8, 2, batch_first=True)
        number.load_state_dict(layer.state_dict())
        convert(number, bias=-math.log(length), normalize=False)
        torch.testing.assert_close(layer(alone, alone, alone)[0], number(alone, alone, alone)[0])


RULES = [ContextLengthBias(9), BatchLengthBias(), VisibleKeysBias(), "log_context", "log_sample"]


def test_rules_are_six_less_with_normalize():
    """In layers of this library and of others, by module or by name; numbers and parameters are as given."""
    x, lengths = torch.randn(2, 9, E), torch.tensor([9, 9])

    def attend(bias, **options):
        torch.manual_seed(0)
        bias = make_bias(bias, max_seq_len=9, num_heads=2) if isinstance(bias, str) else bias
        return Attention(E, 2, activation="sigmoid", attention_bias=bias, causal=False, normalize=True, **options)

    expected = attend(-math.log(9) - 6)(x)
    for rule in RULES:
        torch.testing.assert_close(attend(rule)(x, key_lengths=lengths), expected)
    torch.testing.assert_close(attend(LearnableBias(-math.log(9) - 6))(x), expected)
    for bias in (None, VisibleKeysBias()):
        for layer in (Attend(), nn.MultiheadAttention(E, 2, batch_first=True)):
            number = copy.deepcopy(layer)
            convert(layer, bias=bias)
            convert(number, bias=-math.log(9) - 6)
            results = [m(x) if isinstance(m, Attend) else m(x, x, x)[0] for m in (layer, number)]
            torch.testing.assert_close(*results)
