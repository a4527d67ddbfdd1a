"""Recipes of speech recognition (Table "asr-training-details"). Batch sizes are in seconds of speech.

The paper does not state the factor of its step-wise schedule; here the learning rate is halved. Its softmax baselines
have neither QK-norm nor LayerScale; the twins here drop QK-norm but keep LayerScale, so that they differ in the
attention only. With the front end that the text describes the conformer has 97M parameters, not the table's 104M.
"""

from typing import Any

from sigattn.models.speech import SpeechModelConfig
from sigattn.recipes.datasets import SpeechSource
from sigattn.recipes.recipe import Recipe
from sigattn.tasks.ctc import CTC
from sigattn.train.config import TrainConfig

LS960 = ("train-clean-100", "train-clean-360", "train-other-500")
LS100 = LS960[:1]


def _speech(
    name: str, about: str, paper: str, parts: tuple[str, ...], model: dict[str, Any], *,
    spec_augment_from: int = 0, minutes: int = 5, hours: float, **training: Any,
) -> Recipe:  # fmt: skip
    """Return a recipe for parts of LibriSpeech, with ``hours`` of speech in a batch."""
    size = "960" if parts == LS960 else "100"
    return Recipe(
        name,
        f"{about}, LibriSpeech {size} h",
        "8 GPUs of 80 GB",
        f"word error rate on test-clean / test-other {paper}",
        domain="ASR",
        objective="Supervised (CTC)",
        model=SpeechModelConfig(**model),
        task=CTC(),
        training=TrainConfig(
            batch_size=round(hours * 3600), precision="bfloat16", schedule="steps", validate_every=2000,
            eval_batch_size=600, checkpoint_every=2000, log_attention_every=100, **training,
        ),
        tiny_training={"max_steps": 1000, "batch_size": 60, "learning_rate": 2e-3},
        tiny_minutes=minutes,
        data=SpeechSource(name=f"LibriSpeech {size} h", librispeech=parts, spec_augment_from=spec_augment_from),
        softmax_changes={"qk_norm": "none"},
    )  # fmt: skip


def _ls960(name: str, about: str, paper: str, **model: Any) -> Recipe:
    return _speech(
        name, about, paper, LS960, {"dropout": 0.1, "layer_drop": 0.1, **model},
        max_steps=400_000, hours=3.56, learning_rate=1e-3, warmup_steps=64_000, decay_start=250_000,
        decay_every=50_000, betas=(0.9, 0.999), weight_decay=1e-6,
    )  # fmt: skip


def _ls100(layers: int, parameters: str, paper: str) -> Recipe:
    return _speech(
        f"asr-ls100-{layers}",
        f"{layers}-layer transformer ({parameters}), CAPE, b = -log of each sample's length, no QK-norm",
        paper,
        LS100,
        {"num_layers": layers, "qk_norm": "none", "dropout": 0.3, "layer_drop": 0.3},
        max_steps=400_000, hours=1.1, learning_rate=0.1, warmup_steps=64_000, decay_start=200_000,
        decay_every=30_000, optimizer="adagrad", weight_decay=0.0,
    )  # fmt: skip


RECIPES = (
    _ls960(
        "asr-ls960",
        "255M-parameter transformer, CAPE, b = -log of each sample's length",
        "2.4 / 5.5, softmax 2.3 / 5.7; also with RoPE (2.3 / 5.4) and ALiBi (2.3 / 5.1): --model.position",
    ),
    _ls960(
        "asr-ls960-hybrid",
        "asr-ls960 with RoPE, and LayerNorm after attention instead of bias, QK-norm and the attention's LayerScale",
        '2.2 / 5.0 (Table "asr-results-ext"), softmax 2.2 / 5.5',
        position="rope", qk_norm="none", attention_bias=0.0, norm_placement="hybrid_attention",
    ),
    _speech(
        "asr-conformer-ls960",
        "conformer of 16 layers, RoPE, b = -log of each sample's length",
        "2.5 / 5.8, softmax 2.5 / 5.6",
        LS960,
        {"num_layers": 16, "embed_dim": 512, "num_heads": 4, "mlp_dim": 2048, "block_kind": "conformer",
         "position": "rope", "dropout": 0.1},
        max_steps=400_000, hours=4.44, learning_rate=2e-3, warmup_steps=10_000, decay_start=250_000,
        decay_every=50_000, betas=(0.9, 0.98), max_grad_norm=0.5, weight_decay=1e-6, spec_augment_from=10_000,
        minutes=8,
    ),
    _ls100(36, "255M", "7.3 / 20.5, softmax 7.1 / 20.4"),
    _ls100(24, "170M", "7.3 / 21.3, softmax 6.8 / 20.5"),
    _ls100(12, "85M", "8.7 / 25.2, softmax 8.7 / 25.4"),
    _speech(
        "asr-ls100-post",
        "Post-norm transformer of 36 layers, with which sigmoid does not match softmax in the paper",
        "8.4 / 22.7 with CAPE, softmax 6.5 / 18.2",
        LS100,
        {"norm_placement": "post", "position": "cape", "dropout": 0.3, "layer_drop": 0.3},
        max_steps=500_000, hours=1.1, learning_rate=0.03, warmup_steps=64_000, decay_start=330_000,
        decay_every=50_000, optimizer="adagrad", weight_decay=0.0,
    ),
)  # fmt: skip
