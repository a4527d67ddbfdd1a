"""The default bias of converted layers counts the visible keys of each sample, without padding."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sigattn import convert
from sigattn.nn import Attention, BatchLengthBias, ContextLengthBias, LearnableBias, VisibleKeysBias
from sigattn.nn.bias_rules import make_bias
from sigattn.nn.visible_keys import count_keys_per_query, count_visible_keys


class Attend(nn.Module):
    """Self-attention of (B, N, 8) with two heads and whatever else the function takes."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x, **options):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2).flatten(2)

    def formula(self, x, bias):
        q, k, v = self.qkv(x).double().unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return ((q @ k.mT / 2 + bias).sigmoid() @ v).transpose(1, 2).flatten(2).float()


@pytest.fixture
def layer():
    layer = Attend()
    convert(layer, normalize=False)
    return layer


def padding(*lengths, size):
    return torch.arange(size) < torch.tensor(lengths)[:, None]  # (B, M), True = a key


MASKS = {
    "bool": lambda seen: seen[:, None, None],
    "bool, each query": lambda seen: seen[:, None, None].expand(-1, 2, seen.shape[1], -1),
    "-inf": lambda seen: torch.zeros(seen.shape).masked_fill(~seen, -math.inf)[:, None, None],
    "smallest": lambda seen: torch.zeros(seen.shape).masked_fill(~seen, torch.finfo().min)[:, None, None],
    "-1e4": lambda seen: torch.zeros(seen.shape).masked_fill(~seen, -1e4)[:, None, None],
    "square": lambda seen: (seen[:, :, None] & seen[:, None]).unsqueeze(1),  # rows of padding see nothing
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("padded", [5, 9])
def test_padding_is_not_counted(layer, mask, padded):
    """A sample gives what it gives alone, whatever the length to which its batch is padded."""
    x = torch.randn(2, padded, 8)
    out = layer(x, attn_mask=MASKS[mask](padding(3, 5, size=padded)))
    for sample, length in enumerate((3, 5)):
        alone = x[sample : sample + 1, :length]
        torch.testing.assert_close(out[sample : sample + 1, :length], layer(alone))
        torch.testing.assert_close(layer(alone), layer.formula(alone, -math.log(length)))


def test_a_position_bias_hides_nothing(layer):
    x, added = torch.randn(2, 5, 8), torch.randn(1, 2, 5, 5)
    q, k, v = layer.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
    expected = (q @ k.mT / 2 + added - math.log(5)).sigmoid() @ v
    torch.testing.assert_close(layer(x, attn_mask=added), expected.transpose(1, 2).flatten(2))


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


def test_counts():
    seen = torch.zeros(2, 3, 4, 5, dtype=torch.bool)
    assert count_visible_keys(seen, 5).tolist() == [[[[1]]], [[[1]]]]  # at least one
    seen[0, 0, 1, 2] = seen[0, 2, 3, 4] = True
    assert count_visible_keys(seen, 5).flatten().tolist() == [2, 1]
    assert count_visible_keys(seen[0], 5).tolist() == [[[2]]]
    assert count_visible_keys(seen[0], 5, has_heads=False).flatten().tolist() == [1, 1, 1]
    assert count_visible_keys(seen[0, 0], 5).tolist() == [[1]]
    assert count_visible_keys(torch.ones(2, 1, 4, 1, dtype=torch.bool), 5).flatten().tolist() == [5, 5]
    assert count_visible_keys(torch.ones(5, dtype=torch.bool), 5).tolist() == [5]


def test_a_sentence_embedding_does_not_depend_on_its_batch():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=50
    )
    model = transformers.BertModel(config).eval()
    tokens = torch.randint(50, (2, 9))
    seen = padding(9, 4, size=9)
    convert(model, example={"input_ids": tokens})
    with torch.no_grad():
        together = model(tokens, attention_mask=seen.long()).last_hidden_state[1, :4]
        alone = model(tokens[1:, :4], attention_mask=torch.ones(1, 4, dtype=torch.long)).last_hidden_state[0]
    torch.testing.assert_close(together, alone)


@pytest.mark.parametrize("hidden", [-torch.inf, torch.finfo().min, -1e9, -1e4])
def test_keys_of_each_query(hidden):
    """Models hide keys by different numbers; a bias such as ALiBi's hides none."""
    causal = torch.full((3, 3), hidden).triu(1)
    assert count_keys_per_query(causal, 3).flatten().tolist() == [1, 2, 3]
    assert count_keys_per_query(torch.full((3, 1), -70.0), 5).flatten().tolist() == [5, 5, 5]


RULES = [ContextLengthBias(9), BatchLengthBias(), VisibleKeysBias(), "log_context", "log_sample"]


def test_rules_are_six_less_with_normalize():
    """In layers of this library and of others, by module or by name; numbers and parameters are as given."""
    x, lengths = torch.randn(2, 9, 8), torch.tensor([9, 9])

    def attend(bias, **options):
        torch.manual_seed(0)
        bias = make_bias(bias, max_seq_len=9, num_heads=2) if isinstance(bias, str) else bias
        return Attention(8, 2, activation="sigmoid", attention_bias=bias, causal=False, normalize=True, **options)

    expected = attend(-math.log(9) - 6)(x)
    for rule in RULES:
        torch.testing.assert_close(attend(rule)(x, key_lengths=lengths), expected)
    torch.testing.assert_close(attend(LearnableBias(-math.log(9) - 6))(x), expected)
    for bias in (None, VisibleKeysBias()):
        for layer in (Attend(), nn.MultiheadAttention(8, 2, batch_first=True)):
            number = copy.deepcopy(layer)
            convert(layer, bias=bias)
            convert(number, bias=-math.log(9) - 6)
            results = [m(x) if isinstance(m, Attend) else m(x, x, x)[0] for m in (layer, number)]
            torch.testing.assert_close(*results)
