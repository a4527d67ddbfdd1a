"""torch.export with symbolic batch and lengths: no size of the traced call is fixed.

Exported calls are compared with eager ones at other sizes. Calls of the same arguments are exported as one program.
"""

import inspect

import pytest
import torch
from torch import nn as torch_nn
from torch._dynamo.testing import CompileCounter
from torch.export import Dim
from torch.nn.functional import scaled_dot_product_attention

from sigattn import (
    attention_statistics,
    convert,
    flash,
    models,
    nn,
    sigmoid_attention,
    sigmoid_kvcache_attention,
    sigmoid_varlen_attention,
)
from tests.ops.cases import COMPILER_NOISE

pytestmark = [
    pytest.mark.usefixtures("unchecked"),
    *(pytest.mark.filterwarnings(w) for w in COMPILER_NOISE),
]

B, N, M = Dim("b"), Dim("n"), Dim("m")  # without bounds, so that a size that is fixed or compared raises
TRACED, OTHERS = (3, 11, 7), ((5, 29, 13), (2, 2, 3))  # n above and below m
ROWS, KEYS, BATCH = {0: B, 1: N}, {0: B, 1: M}, {0: B}
H, D, E = 4, 8, 32


class Program(torch_nn.Module):
    """Calls by name. Each takes the inputs that its parameters name, or all."""

    def __init__(self, calls, inputs):
        super().__init__()
        self.calls, self.names = calls, {}
        for name, call in calls.items():
            parameters = inspect.signature(getattr(call, "forward", call)).parameters
            self.names[name] = [n for n in parameters if n in inputs] or list(inputs)
            if isinstance(call, torch_nn.Module):  # parameters of others, in lambdas, are constants of the program
                self.add_module(name, call)

    def forward(self, inputs):
        return {name: call(*(inputs[n] for n in self.names[name])) for name, call in self.calls.items()}


def assert_exported(inputs, dims, *, strict=False, **calls):
    """Compare the exported calls with the eager ones.

    ``inputs`` returns tensors by name for b, n, m; ``dims`` has their dynamic dimensions.
    """
    traced = inputs(*TRACED)
    program = Program(calls, traced).eval()
    with torch.no_grad():
        exported = torch.export.export(program, (traced,), dynamic_shapes=(dims,), strict=strict).module()
        for size in OTHERS:
            arguments = inputs(*size)
            expected, actual = (call({n: t.clone() for n, t in arguments.items()}) for call in (program, exported))
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5, equal_nan=True)


def rows_first(b, n):
    return torch.randn(b, n, H, D)


def features(b, n):
    return torch.randn(b, n, E)


def lengths(b, n):
    return torch.arange(b) % n + 1


def padding(b, n):
    """True for padding; every sample has a key."""
    return torch.arange(n) > torch.arange(b)[:, None]


def starts(b, n):
    return torch.nn.functional.pad(lengths(b, n).cumsum(0), (1, 0)).int()


def packed(b, n):
    return torch.randn(int(starts(b, n)[-1]), H, D)


def attention(bias=-2.0, activation="sigmoid", **options):
    return nn.Attention(E, H, activation=activation, attention_bias=bias, **options)


# -- operators --------------------------------------------------------------------------------------------------------

BIAS = {"bias": -3.0}
LONGEST = (64, 64)


def test_attention():
    """Also under the names of flash-attn."""

    def rows(x):
        return x.transpose(1, 2)

    def inputs(b, n, m):
        masks = {"seen": torch.rand(b, 1, n, n) > 0.3, "added": torch.randn(n, n)}
        options = {"key_lengths": lengths(b, n), "bias": torch.randn(b, 1, n, 1), "slopes": torch.rand(b, H)}
        return {"x": torch.randn(b, H, n, D), "y": torch.randn(b, 2, m, D), **masks, **options}

    dims = {"x": {0: B, 2: N}, "y": {0: B, 2: M}, "seen": {0: B, 2: N, 3: N}, "added": {0: N, 1: N}}
    dims |= {"key_lengths": BATCH, "bias": {0: B, 2: N}, "slopes": BATCH}
    assert_exported(
        inputs,
        dims,
        causal=lambda x: sigmoid_attention(x, x, x, is_causal=True),
        window=lambda x: sigmoid_attention(x, x, x, window=(3, 1), softcap=3.0, normalize=True),
        three_dimensions=lambda x: sigmoid_attention(x[:, 0], x[:, 0], x[:, 0]),
        statistics=lambda x: tuple(attention_statistics(x, x, x, is_causal=True)),
        cross=lambda x, y: sigmoid_attention(x, y, y, enable_gqa=True, is_causal=True),
        broadcast=lambda x, y: sigmoid_attention(x, y[:1, :1], y[:1, :1]),
        key_lengths=lambda x, key_lengths: sigmoid_attention(x, x, x, key_lengths=key_lengths),
        seen=lambda x, seen: sigmoid_attention(x, x, x, seen),
        added=lambda x, added: sigmoid_attention(x, x, x, added),
        bias=lambda x, bias: sigmoid_attention(x, x, x, bias=bias),
        alibi=lambda x, slopes: sigmoid_attention(x, x, x, alibi_slopes=slopes),
        flash=lambda x, y: flash.flash_attn_func(rows(x), rows(y), rows(y), causal=True),
        flash_bias=lambda x, bias: flash.flash_attn_func(*[rows(x)] * 3, sigmoid_bias=bias[:, 0, 0, 0]),
        flash_kvpacked=lambda x, y: flash.flash_attn_kvpacked_func(rows(x), torch.stack([rows(y)] * 2, 2)),
    )


def test_packed_sequences_and_pages():
    def longest_in_the_graph(q, cu):
        longest = cu.diff().max().item()
        arguments = (q, q, q, cu, cu, longest, longest)
        return sigmoid_varlen_attention(*arguments), flash.flash_attn_varlen_func(*arguments)

    def inputs(b, n, m):
        cu, table = starts(b, 9), torch.arange(3 * b).view(b, 3).int()
        options = {"bias": torch.randn(b, 1, 1, 1), "slopes": torch.rand(b, H)}
        paged = {"x": rows_first(b, n), "pages": rows_first(3 * b, 4), "held": lengths(b, 9), "table": table}
        return {"q": packed(b, 9), "cu": cu, **options, **paged}

    dims = {"q": {0: Dim("t")}, "cu": {0: B + 1}, "bias": BATCH, "slopes": BATCH}
    assert_exported(
        inputs,
        dims | {"x": ROWS, "pages": {0: Dim("pages")}, "held": BATCH, "table": BATCH},
        causal=lambda q, cu: sigmoid_varlen_attention(q, q, q, cu, cu, *LONGEST, is_causal=True),
        longest_in_the_graph=longest_in_the_graph,
        bias=lambda q, cu, bias: sigmoid_varlen_attention(q, q, q, cu, cu, *LONGEST, bias=bias),
        alibi=lambda q, cu, slopes: sigmoid_varlen_attention(q, q, q, cu, cu, *LONGEST, alibi_slopes=slopes),
        paged_cache=lambda x, pages, held, table: sigmoid_kvcache_attention(
            x, pages, pages, cache_seqlens=held, block_table=table, **BIAS
        ),
        paged_sequences=lambda pages, table, q, cu: flash.flash_attn_varlen_func(
            q, pages, pages, cu, cu, 64, 12, block_table=table
        ),
    )


def test_padding_of_flash_attention():
    assert_exported(
        lambda b, n, m: {"h": features(b, n), "mask": ~padding(b, n), "indices": torch.arange(n * m) % b},
        {"h": ROWS, "mask": ROWS, "indices": {0: Dim("rows")}},
        strict=True,
        index_first_axis=lambda h, indices: flash.index_first_axis(h[:, 0], indices),
        unpad_input=lambda h, mask: flash.unpad_input(h, mask)[:3],
        pad_input=lambda h: flash.pad_input(h[:, 0], torch.arange(h.shape[0]), h.shape[0], 3),
    )


def test_caches():
    def append(q, cache, held):
        key_cache, value_cache = cache.clone(), cache.clone()
        options = {"cache_seqlens": held, "is_causal": True}
        return sigmoid_kvcache_attention(q, key_cache, value_cache, q, q, **options, **BIAS), key_cache, value_cache

    def rotated(q, cache, held, table):
        key_cache, tables = cache.clone(), {"rotary_cos": table, "rotary_sin": table}
        options = {"cache_seqlens": held, "causal": True, "sigmoid_bias": -3.0}
        return flash.flash_attn_with_kvcache(q, key_cache, cache.clone(), q, q, **tables, **options), key_cache

    assert_exported(
        lambda b, n, m: {
            "q": rows_first(b, n), "cache": rows_first(b, n + m), "held": lengths(b, m) - 1,
            "table": torch.randn(99, D // 2), "seen": torch.rand(b, 1, n, n) > 0.3,
        },
        {"q": ROWS, "cache": {0: B, 1: Dim("c")}, "held": BATCH, "table": {0: Dim("r")}, "seen": {0: B, 2: N, 3: N}},
        number=lambda q, cache: sigmoid_kvcache_attention(q, cache, cache, cache_seqlens=4, **BIAS),
        left_padding=lambda q, cache, held: sigmoid_kvcache_attention(
            q, cache, cache, cache_seqlens=held + 1, left_padding=held, **BIAS
        ),
        mask=lambda q, cache, held, seen: sigmoid_kvcache_attention(
            q, cache, cache, cache_seqlens=held + q.shape[1], attn_mask=seen, **BIAS
        ),
        append=append,
        index=lambda q, cache, held: flash.flash_attn_with_kvcache(
            q, cache, cache, cache_seqlens=held + q.shape[1], cache_batch_idx=held * 0, causal=True, sigmoid_bias=-3.0
        ),
        rotated=rotated,
    )  # fmt: skip


# -- layers -----------------------------------------------------------------------------------------------------------


def test_layers():
    recording, cross, performer = attention(), attention(causal=False), attention(None, "performer", causal=False)
    recording.record = "everything"
    assert_exported(
        lambda b, n, m: {"x": features(b, n), "lengths": lengths(b, n), "y": features(b, m)},
        {"x": ROWS, "lengths": BATCH, "y": KEYS},
        softmax_alibi=attention(None, "softmax", position=nn.Alibi(H)),
        split=attention(causal=False, position=nn.Alibi(H, "split")),
        window=attention(nn.VisibleKeysBias(), window=(3, 1)),
        recorded=lambda x: (recording(x), recording.output_frobenius_norm, *recording.statistics),
        performer=lambda x, lengths: performer(x, key_lengths=lengths),
        cross=lambda x, y: cross(x, kv_input=y),
    )


# -- layers written for softmax ---------------------------------------------------------------------------------------


class Layer(torch_nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.projection = torch_nn.Linear(E, E)
        self.options = options

    def forward(self, x, y, attn_mask=None):
        query, key = (self.projection(t).unflatten(-1, (H, D)).transpose(1, 2) for t in (x, y))
        return scaled_dot_product_attention(query, key, key, attn_mask, **self.options)


def sigmoid(layer, bias=None):
    model = torch_nn.Sequential(layer)
    convert(model, bias=bias)
    return model[0].eval()


@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects")  # the count of calls
@pytest.mark.parametrize("strict", [False, True])
def test_layers_that_call_an_attention_function(strict):
    masked, linear = sigmoid(Layer()), sigmoid(Layer(), nn.VisibleKeysLinearBias(H))
    calls = {"causal_cross": sigmoid(Layer(is_causal=True))}
    if not strict:
        calls["masked"] = lambda x, y, mask: masked(x, y, mask)
        calls["linear"] = lambda x, y, mask: linear(x, y, mask)
    assert_exported(
        lambda b, n, m: {"x": features(b, n), "y": features(b, m), "mask": torch.rand(b, 1, n, m) > 0.3},
        {"x": ROWS, "y": KEYS, "mask": {0: B, 2: N, 3: M}},
        strict=strict,
        **calls,
    )


def test_multihead_attention():
    layer = sigmoid(torch_nn.MultiheadAttention(E, H, batch_first=True))
    rows_first, with_key = (
        sigmoid(torch_nn.MultiheadAttention(E, H, add_bias_kv=a, add_zero_attn=a)) for a in (False, True)
    )

    def causal(x):
        x = x.transpose(0, 1)
        mask = torch_nn.Transformer.generate_square_subsequent_mask(x.shape[0])
        return rows_first(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]

    assert_exported(
        lambda b, n, m: {
            "x": features(b, n), "y": features(b, m), "hidden": padding(b, m), "mask": torch.rand(H * b, n, m) > 0.5
        },
        {"x": ROWS, "y": KEYS, "hidden": KEYS, "mask": {0: H * B, 1: N, 2: M}},
        weights=lambda x, y: layer(x, y, y),
        masked=lambda x, y, hidden, mask: layer(x, y, y, hidden, attn_mask=mask, need_weights=False)[0],
        causal=causal,
        learned_key=lambda x: with_key(x, x, x),
    )  # fmt: skip


# -- models -----------------------------------------------------------------------------------------------------------

LANGUAGE = {"vocab_size": 50, "max_seq_len": 64, "num_layers": 1, "embed_dim": E, "num_heads": H}
SHORT, NEW = Dim("n", max=32), Dim("m", max=32)  # together at most the context


def language_model(**settings):
    return models.LanguageModel(models.LanguageModelConfig(**LANGUAGE, **settings))


def test_language_models():
    model = language_model()
    rope = {"position": "rope", "num_kv_heads": 2, "attention_bias": "log_visible", "length_power": 0.5}
    assert_exported(
        lambda b, n, m: {"tokens": torch.randint(50, (b, n))},
        {"tokens": {0: B, 1: Dim("n", max=64)}},
        rope=language_model(**rope),
        alibi=language_model(position="alibi", attention_bias="log_alibi"),
        documents=lambda tokens: model(tokens, documents=nn.Documents.from_end_token(tokens % 5, 0)),
    )


def test_language_models_with_a_cache():
    model = language_model()

    def cached(cache, first, then):
        return model(first, cache), model(then, cache)

    assert_exported(
        lambda b, n, m: {"x": torch.randint(50, (b, n)), "y": torch.randint(50, (b, m)), "left": torch.arange(b) % n},
        {"x": {0: B, 1: SHORT}, "y": {0: B, 1: NEW}, "left": BATCH},
        left_padding=lambda x, y, left: cached(model.new_kv_cache(left), x, y),
        one_token=lambda x, y: cached(model.new_kv_cache(), x, y[:, :1]),
    )


def test_speech_models():
    def model(**settings):
        sizes = {"num_layers": 1, "embed_dim": E, "num_heads": H, "num_mel_bins": 8, "vocab_size": 9}
        return models.SpeechModel(models.SpeechModelConfig(**sizes, **settings)).eval()

    assert_exported(
        lambda b, n, m: {"frames": torch.randn(b, n + 20, 8), "lengths": lengths(b, n) + 19},
        {"frames": {0: B, 1: Dim("n", min=20)}, "lengths": BATCH},
        transformer=model(),
        conformer=model(block_kind="conformer", conformer_kernel_size=3, position="alibi", attention_bias="log_batch"),
    )


def test_vision_models():
    sizes = {"num_layers": 1, "embed_dim": E, "num_heads": H, "image_size": 8, "patch_size": 4, "channels": 1}
    sizes |= {"num_classes": 10}
    images = models.ViTConfig(**sizes, position="sincos")
    decoder = {"decoder_num_layers": 1, "decoder_embed_dim": E, "decoder_num_heads": H}
    autoencoder = models.MaskedAutoencoder(models.MaskedAutoencoderConfig(encoder=images, **decoder)).eval()
    of_any_size = {
        p: models.ViT(
            models.ViTConfig(**sizes, position=p, pool="average", dynamic_img_size=True, attention_bias="log_batch")
        )
        for p in ("learnable", "sincos", "cape")
    }
    assert_exported(
        lambda b, n, m: {"images": torch.randn(b, 1, 4 * n, 4 * m), "small": torch.randn(b, 1, 8, 8)},
        {"images": {0: B, 2: 4 * Dim("rows"), 3: 4 * Dim("columns")}, "small": BATCH},
        autoencoder=lambda small: autoencoder(small)[0] * 0,  # its order of patches is random
        **of_any_size,
    )


# -- graphs of torch.compile: their number does not grow with the numbers of packed sequences -------------------------


def test_one_graph_serves_all_numbers_of_packed_documents_in_training():
    torch._dynamo.reset()
    counter = CompileCounter()
    model = torch.compile(language_model(), backend=counter)
    for documents in (2, 3, 5, 8):
        tokens = torch.randint(1, 50, (2, 40))
        tokens[:, 4 : 4 + 2 * documents : 2] = 0
        model(tokens, documents=nn.Documents.from_end_token(tokens, 0)).square().mean().backward()
    assert counter.frame_count <= 2, "one for the first sizes, one for all others"
