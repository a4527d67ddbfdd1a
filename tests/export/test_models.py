"""The models in torch.export, with and without caches: no size of the traced call is fixed."""

import pytest
import torch
from torch.export import Dim

from sigattn.models import (
    LanguageModel,
    LanguageModelConfig,
    MaskedAutoencoder,
    MaskedAutoencoderConfig,
    SpeechModel,
    SpeechModelConfig,
    ViT,
    ViTConfig,
)
from sigattn.nn import Documents, KVCache
from tests.export.programs import BATCH, B, E, H, assert_exported, attention, lengths
from tests.ops.cases import COMPILER_NOISE

pytestmark = [pytest.mark.usefixtures("unchecked"), *(pytest.mark.filterwarnings(w) for w in COMPILER_NOISE)]

LANGUAGE = {"vocab_size": 50, "max_seq_len": 64, "num_layers": 1, "embed_dim": E, "num_heads": H}
SHORT, NEW = Dim("n", max=32), Dim("m", max=32)  # together at most the context


def language_model(**settings):
    return LanguageModel(LanguageModelConfig(**{**LANGUAGE, **settings}))


def tokens(b, n):
    return torch.randint(50, (b, n))


def test_language_models():
    loss = language_model()
    assert_exported(
        lambda b, n, m: (tokens(b, n),),
        ({0: B, 1: Dim("n", max=64)},),
        rope=language_model(position="rope", num_kv_heads=2),
        alibi=language_model(position="alibi", attention_bias="log_alibi"),
        quadratic=language_model(attention_bias="log_visible", learn_bias="quadratic", length_power=0.5),
        documents=lambda x: loss(x, documents=Documents.from_end_token(x % 5, 0)),
        loss=lambda x: loss.loss(x, x),
    )


def test_language_models_and_layers_with_a_cache():
    model, layer = language_model(), attention()

    def cached(attend, new_cache):
        def call(first, then, left):
            cache = new_cache(left)
            return attend(first, cache), attend(then, cache)

        return call

    def layer_cached(x, y, left):
        attend = cached(lambda t, cache: layer(model.embedding(t), cache=cache), lambda left: KVCache(64, left))
        return attend(x, y, left)

    def inputs(b, n, m):
        return tokens(b, n), tokens(b, m), torch.arange(b) % n

    assert_exported(
        inputs,
        ({0: B, 1: SHORT}, {0: B, 1: NEW}, BATCH),
        left_padding=cached(model, model.new_kv_cache),
        one_token=lambda x, y, left: cached(model, lambda left: model.new_kv_cache())(x, y[:, :1], left),
        layer=layer_cached,
    )


def test_speech_models():
    def model(**settings):
        model = SpeechModel(
            SpeechModelConfig(num_layers=1, embed_dim=E, num_heads=H, num_mel_bins=8, vocab_size=9, **settings)
        )
        return model.eval()

    transformer = model()
    assert_exported(
        lambda b, n, m: (torch.randn(b, n + 20, 8), lengths(b, n) + 19),
        ({0: B, 1: Dim("n", min=20)}, BATCH),
        transformer=transformer,
        unpadded=lambda x, _: transformer(x),
        alibi=model(position="alibi", attention_bias="log_batch"),
        conformer=model(block_kind="conformer", conformer_kernel_size=3, position="sincos"),
    )


VISION = {"num_layers": 1, "embed_dim": E, "num_heads": H, "image_size": 8, "patch_size": 4, "channels": 1}
VISION |= {"num_classes": 10}


def test_models_of_one_length():
    images = ViTConfig(**{**VISION, "position": "sincos"})
    autoencoder = MaskedAutoencoder(
        MaskedAutoencoderConfig(encoder=images, decoder_num_layers=1, decoder_embed_dim=E, decoder_num_heads=H)
    )
    assert_exported(
        lambda b, n, m: (torch.randn(b, 1, 8, 8),),
        (BATCH,),
        cape=ViT(ViTConfig(**VISION, position="cape", pool="average")),
        encoder=autoencoder.encoder,
        autoencoder=lambda x: autoencoder(x)[0] * 0,  # its order of patches is random
    )


def test_images_of_any_size():
    def model(position):
        return ViT(ViTConfig(**VISION, position=position, dynamic_img_size=True, attention_bias="log_batch"))

    assert_exported(
        lambda b, n, m: (torch.randn(b, 1, 4 * n, 4 * m),),
        ({0: B, 2: 4 * Dim("rows"), 3: 4 * Dim("columns")},),
        **{position: model(position) for position in ("learnable", "sincos", "cape")},
    )
