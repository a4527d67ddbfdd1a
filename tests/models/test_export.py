"""Whole models through torch.export, and through AOTInductor into a package that runs by itself."""

import shutil

import pytest
import torch

from sigattn.models.language import LanguageModel, LanguageModelConfig
from sigattn.models.speech import SpeechModel, SpeechModelConfig
from sigattn.models.vision import ViT, ViTConfig
from tests.ops.cases import COMPILER_NOISE

pytestmark = [pytest.mark.usefixtures("unchecked"), *(pytest.mark.filterwarnings(w) for w in COMPILER_NOISE)]
LANGUAGE = {"vocab_size": 50, "max_seq_len": 64, "num_layers": 2, "embed_dim": 32, "num_heads": 4}


@pytest.mark.parametrize(
    "settings",
    [
        {"position": "alibi"},
        {"attention_bias": "log_visible", "norm_placement": "hybrid"},
        {"position": "alibi", "attention_bias": "log_alibi"},
        {"attention_bias": "log_batch", "num_layers": 1},
    ],
    ids=str,
)
def test_a_language_model_of_any_length(settings):
    model = LanguageModel(LanguageModelConfig(**{**LANGUAGE, **settings})).eval()
    lengths = {1: torch.export.Dim("n", min=2, max=64)}
    exported = torch.export.export(model, (torch.randint(50, (2, 20)),), dynamic_shapes=(lengths,)).module()
    for n in (3, 20, 61):
        tokens = torch.randint(50, (2, n))
        torch.testing.assert_close(exported(tokens), model(tokens), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore")  # the tracer's own: the checks compare sizes
@pytest.mark.parametrize(
    "settings", [{"length_power": 0.5}, {"attention_bias": "log_visible", "learn_bias": "quadratic"}], ids=str
)
def test_a_traced_model_counts_the_visible_keys_of_each_call(settings):
    torch.manual_seed(0)
    model = LanguageModel(LanguageModelConfig(**{**LANGUAGE, **settings, "num_layers": 1})).eval()
    traced = torch.jit.trace(model, (torch.randint(50, (2, 20)),), check_trace=False)
    for b, n in ((1, 61), (3, 5)):
        tokens = torch.randint(50, (b, n))
        torch.testing.assert_close(traced(tokens), model(tokens), rtol=1e-4, atol=1e-5)


def test_speech_of_any_batch_and_length():
    config = {"num_layers": 1, "embed_dim": 32, "num_heads": 4, "num_mel_bins": 8, "vocab_size": 9}
    model = SpeechModel(SpeechModelConfig(**config, position="alibi")).eval()
    auto = torch.export.Dim.AUTO
    frames = torch.randn(2, 40, 8)
    exported = torch.export.export(model, (frames,), dynamic_shapes=({0: auto, 1: auto},)).module()
    for b, n in ((3, 90), (2, 25)):
        frames = torch.randn(b, n, 8)
        torch.testing.assert_close(exported(frames)[0], model(frames)[0], rtol=1e-4, atol=1e-5)


def test_a_vision_transformer():
    config = ViTConfig(
        num_layers=2, embed_dim=32, num_heads=4, image_size=8, patch_size=4, channels=1, num_classes=10, init_values=0.1
    )
    model = ViT(config).eval()
    images = torch.randn(3, 1, 8, 8)
    batch = {0: torch.export.Dim("b", max=9)}
    exported = torch.export.export(model, (images,), dynamic_shapes=(batch,)).module()
    images = torch.randn(5, 1, 8, 8)
    torch.testing.assert_close(exported(images), model(images))


@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor compiles C++")
def test_ahead_of_time(tmp_path):
    config = {**LANGUAGE, "num_layers": 1}  # each kernel takes two seconds to compile
    model = LanguageModel(LanguageModelConfig(**config, position="alibi")).eval()
    lengths = {1: torch.export.Dim("n", min=2, max=64)}
    exported = torch.export.export(model, (torch.randint(50, (2, 20)),), dynamic_shapes=(lengths,))
    path = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "model.pt2"))
    package = torch._inductor.aoti_load_package(path)
    for n in (5, 33):
        tokens = torch.randint(50, (2, n))
        torch.testing.assert_close(package(tokens), model(tokens), rtol=1e-4, atol=1e-5)
