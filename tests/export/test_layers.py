"""The layers of ``sigattn.nn``, and converted ones, in torch.export: no size of the traced call is fixed."""

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from sigattn import convert
from sigattn.nn import (
    MLP,
    Alibi,
    AlibiQuadraticBias,
    BatchLengthBias,
    Block,
    Cape,
    ConformerBlock,
    Documents,
    QuadraticBias,
    QueryBias,
    RotaryEmbedding,
    SampleLengthBias,
    SinusoidalEmbedding,
    VisibleKeysBias,
    VisibleKeysLinearBias,
)
from tests.export.programs import (
    BATCH,
    KEYS,
    ROWS,
    B,
    D,
    E,
    H,
    M,
    N,
    assert_exported,
    attention,
    causal_mask,
    features,
    lengths,
    padding,
)
from tests.ops.cases import COMPILER_NOISE

pytestmark = [
    pytest.mark.usefixtures("unchecked"),
    *(pytest.mark.filterwarnings(w) for w in COMPILER_NOISE),
    pytest.mark.filterwarnings("ignore:.*enable_nested_tensor"),
]


def test_activations_biases_and_positions():
    recording, cross = attention(), attention(causal=False)
    recording.record = "everything"
    layers = {
        "relu": attention(activation="relu"),
        "batch": attention(BatchLengthBias()),
        "query": attention(QueryBias()),
        "quadratic": attention(QuadraticBias(H, D, D)),
        "softmax_alibi": attention(None, "softmax", position=Alibi(H)),
        "alibi_quadratic": attention(AlibiQuadraticBias(H, D, D), position=Alibi(H)),
        "split": attention(causal=False, position=Alibi(H, "split")),
        "rope": attention(position=RotaryEmbedding(D), num_kv_heads=2),
        "window": attention(VisibleKeysBias(), window=(3, 1)),
        "length_power": attention(length_power=0.5, temperature=1.0),
        "block": Block(cross, MLP(E, 64), E, drop_path=0.1, norm_placement="hybrid"),
        "cape": Cape(E),
        "sincos": SinusoidalEmbedding(E),
        "recorded": lambda x: (recording(x), recording.output_frobenius_norm, *recording.statistics),
    }
    assert_exported(lambda b, n, m: (features(b, n),), (ROWS,), **layers)


def test_inputs_of_layers():
    sample, cross = attention(SampleLengthBias(), causal=False), attention(causal=False)
    performer = attention(None, "performer", causal=False)
    causal, conformer = attention(), ConformerBlock(attention(causal=False), E, 64, kernel_size=3).eval()

    def documents(x, *_):
        is_start = torch.arange(x.shape[1]).expand(x.shape[:2]) % 4 == 0
        return causal(x, documents=Documents.from_starts(is_start))

    assert_exported(
        lambda b, n, m: (features(b, n), lengths(b, n), features(b, m)),
        (ROWS, BATCH, KEYS),
        sample=lambda x, k, _: sample(x, key_lengths=k),
        performer=lambda x, k, _: performer(x, key_lengths=k),
        conformer=lambda x, k, _: conformer(x, k),
        cross=lambda x, _, y: cross(x, kv_input=y),
        documents=documents,
    )


# -- layers written for softmax ---------------------------------------------------------------------------------------


class Layer(nn.Module):
    """Layer that calls PyTorch's attention function."""

    def __init__(self, **options):
        super().__init__()
        self.projection = nn.Linear(E, E)
        self.options = options

    def forward(self, x, y, attn_mask=None):
        query, key = (self.projection(t).unflatten(-1, (H, D)).transpose(1, 2) for t in (x, y))
        return scaled_dot_product_attention(query, key, key, attn_mask, **self.options)


def sigmoid(layer, bias=None):
    model = nn.Sequential(layer)
    convert(model, bias=bias)
    return model[0].eval()


def test_layers_that_call_an_attention_function():
    plain, causal, linear = (
        sigmoid(Layer()),
        sigmoid(Layer(is_causal=True)),
        sigmoid(Layer(), VisibleKeysLinearBias(H)),
    )
    assert_exported(
        lambda b, n, m: (features(b, n), features(b, m), torch.rand(b, 1, n, m) > 0.3),
        (ROWS, KEYS, {0: B, 2: N, 3: M}),
        masked=plain,
        linear=linear,
        cross=lambda x, y, _: plain(x, y),
        causal=lambda x, *_: causal(x, x),
        causal_cross=lambda x, y, _: causal(x, y),
    )


@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects")  # the count of calls
def test_strict_export_of_a_layer_that_calls_an_attention_function():
    assert_exported(
        lambda b, n, m: (features(b, n), features(b, m)),
        (ROWS, KEYS),
        strict=True,
        causal_cross=sigmoid(Layer(is_causal=True)),
    )


@pytest.mark.parametrize("bias", [None, VisibleKeysLinearBias(H)], ids=["visible", "linear"])
def test_multihead_attention(bias):
    layer = sigmoid(nn.MultiheadAttention(E, H, batch_first=True), bias)
    assert_exported(
        lambda b, n, m: (features(b, n), features(b, m), padding(b, m), torch.rand(H * b, n, m) > 0.5),
        (ROWS, KEYS, KEYS, {0: H * B, 1: N, 2: M}),
        weights=lambda x, y, *_: layer(x, y, y),
        masked=lambda x, y, hidden, mask: layer(x, y, y, hidden, attn_mask=mask, need_weights=False)[0],
    )


def test_other_forms_of_multihead_attention():
    layer, with_key = (sigmoid(nn.MultiheadAttention(E, H, add_bias_kv=x, add_zero_attn=x)) for x in (False, True))

    def causal(x):
        return layer(x, x, x, attn_mask=causal_mask(x.shape[0]), is_causal=True, need_weights=False)[0]

    assert_exported(
        lambda b, n, m: (torch.randn(n, b, E),),
        ({0: N, 1: B},),
        causal=causal,
        unbatched=lambda x: layer(x[:, 0], x[:, 0], x[:, 0]),
        learned_key=lambda x: with_key(x, x, x),
    )


def test_pytorchs_transformers():
    options = {"dim_feedforward": 48, "batch_first": True, "dropout": 0.0}
    encoder = sigmoid(nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, **options), 1))
    number = sigmoid(nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, norm_first=True, **options), 1), -2.0)
    decoder = sigmoid(nn.TransformerDecoder(nn.TransformerDecoderLayer(E, H, **options), 1))
    assert_exported(
        lambda b, n, m: (features(b, n), features(b, m), padding(b, n)),
        (ROWS, KEYS, ROWS),
        encoder=lambda x, _, hidden: encoder(x, src_key_padding_mask=hidden),
        number=lambda x, *_: number(x, mask=causal_mask(x.shape[1]), is_causal=True),
        decoder=lambda x, y, _: decoder(x, y, tgt_mask=causal_mask(x.shape[1]), tgt_is_causal=True),
    )
