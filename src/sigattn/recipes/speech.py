"""Recipes of speech recognition (Table "asr-training-details"). Batch sizes are in seconds of speech.

The paper does not state the factor of its step-wise schedule; here the learning rate is halved. Its softmax baselines
have neither QK-norm nor LayerScale; the twins here drop QK-norm but keep LayerScale, so that they differ in the
attention only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sigattn.models.speech import SpeechModelConfig
from sigattn.recipes.datasets import SpeechSource
from sigattn.recipes.recipe import Recipe
from sigattn.tasks.ctc import CTC
from sigattn.train.config import TrainConfig

HOUR = 3600
LS960 = SpeechSource(
    name="LibriSpeech 960 h",
    librispeech=("train-clean-100", "train-clean-360", "train-other-500"),
    spec_augment_from=0,
)
LS100 = SpeechSource(name="LibriSpeech 100 h", librispeech=("train-clean-100",), spec_augment_from=0)


def asr_ls960() -> Recipe:
    """255M-parameter transformer, LibriSpeech 960 h, CAPE, b = -log of each sample's length.

    sigattn train asr-ls960 --data LIBRISPEECH          (--tiny --data FSDD: spoken digits, 5 minutes on 2 cores)

    Hardware: 8 GPUs of 80 GB. Paper: word error rate 2.4 / 5.5 on test-clean / test-other, softmax 2.3 / 5.7; also with
    RoPE (2.3 / 5.4) and ALiBi (2.3 / 5.1): ``--model.position``.
    """
    return _ls960("asr-ls960")


def asr_ls960_hybrid() -> Recipe:
    """asr-ls960 with RoPE, and LayerNorm after attention instead of bias, QK-norm and the attention's LayerScale.

    sigattn train asr-ls960-hybrid --data LIBRISPEECH   (--tiny --data FSDD: spoken digits, 5 minutes on 2 cores)

    Hardware: 8 GPUs of 80 GB. Paper: word error rate 2.2 / 5.0 on test-clean / test-other (Table "asr-results-ext"),
    softmax 2.2 / 5.5.
    """
    return _ls960("asr-ls960-hybrid", position="rope", qk_norm="none", attention_bias=0.0,
                  norm_placement="hybrid_attention")  # fmt: skip


def asr_conformer_ls960() -> Recipe:
    """Conformer of 16 layers, LibriSpeech 960 h, RoPE, b = -log of each sample's length.

    sigattn train asr-conformer-ls960 --data LIBRISPEECH    (--tiny --data FSDD: spoken digits, 8 minutes on 2 cores)

    Hardware: 8 GPUs of 80 GB. Paper: word error rate 2.5 / 5.8 on test-clean / test-other, softmax 2.5 / 5.6. With the
    front end that the text describes the model has 97M parameters, not the table's 104M.
    """
    model = SpeechModelConfig(
        num_layers=16, embed_dim=512, num_heads=4, mlp_dim=2048, block_kind="conformer", position="rope", dropout=0.1
    )
    training = _training(
        steps=400_000, hours=4.44, rate=2e-3, warmup=10_000, start=250_000, every=50_000, betas=(0.9, 0.98),
        max_grad_norm=0.5, weight_decay=1e-6,
    )  # fmt: skip
    data = replace(LS960, spec_augment_from=10_000)
    return _speech("asr-conformer-ls960", model, training, data)


def asr_ls100_post() -> Recipe:
    """Post-norm transformer of 36 layers, LibriSpeech 100 h, with which sigmoid does not match softmax in the paper.

    sigattn train asr-ls100-post --data LIBRISPEECH     (--tiny --data FSDD: spoken digits, 5 minutes on 2 cores)

    Hardware: 8 GPUs of 80 GB. Paper: word error rate 8.4 / 22.7 on test-clean / test-other with CAPE, softmax 6.5 /
    18.2.
    """
    model = SpeechModelConfig(norm_placement="post", position="cape", dropout=0.3, layer_drop=0.3)
    training = _training(
        steps=500_000, hours=1.1, rate=0.03, warmup=64_000, start=330_000, every=50_000, optimizer="adagrad"
    )
    return _speech("asr-ls100-post", model, training, LS100)


def _ls960(name: str, **model: Any) -> Recipe:
    training = _training(
        steps=400_000, hours=3.56, rate=1e-3, warmup=64_000, start=250_000, every=50_000, betas=(0.9, 0.999),
        weight_decay=1e-6,
    )  # fmt: skip
    return _speech(name, SpeechModelConfig(dropout=0.1, layer_drop=0.1, **model), training, LS960)


def _asr_ls100(layers: int, parameters: str, sigmoid: str, softmax: str) -> Callable[[], Recipe]:
    """Return the recipe function of a depth."""

    def recipe() -> Recipe:
        model = SpeechModelConfig(num_layers=layers, qk_norm="none", dropout=0.3, layer_drop=0.3)
        training = _training(
            steps=400_000, hours=1.1, rate=0.1, warmup=64_000, start=200_000, every=30_000, optimizer="adagrad"
        )
        return _speech(f"asr-ls100-{layers}", model, training, LS100)

    recipe.__name__ = f"asr_ls100_{layers}"
    recipe.__doc__ = f"""{layers}-layer transformer ({parameters}), LibriSpeech 100 h, CAPE, b = -log n of a sample.

    sigattn train asr-ls100-{layers} --data LIBRISPEECH       (--tiny --data FSDD: spoken digits, 5 minutes on 2 cores)

    No QK-norm. Hardware: 8 GPUs of 80 GB. Paper: word error rate {sigmoid} on test-clean / test-other, softmax
    {softmax}.
    """
    return recipe


def _speech(name: str, model: SpeechModelConfig, training: TrainConfig, data: SpeechSource) -> Recipe:
    return Recipe(
        name=name,
        domain="ASR",
        objective="Supervised (CTC)",
        model=model,
        task=CTC(),
        training=training,
        tiny_training={"max_steps": 1000, "batch_size": 60, "learning_rate": 2e-3},
        data=data,
        softmax_changes={"qk_norm": "none"},
    )


def _training(
    *, steps: int, hours: float, rate: float, warmup: int, start: int, every: int, **settings: Any
) -> TrainConfig:
    fixed: dict[str, Any] = {"weight_decay": 0.0, "max_grad_norm": 1.0, **settings}
    return TrainConfig(
        max_steps=steps,
        batch_size=round(hours * HOUR),
        precision="bfloat16",
        learning_rate=rate,
        schedule="steps",
        warmup_steps=warmup,
        decay_start=start,
        decay_every=every,
        validate_every=2000,
        eval_batch_size=600,
        checkpoint_every=2000,
        log_attention_every=100,
        **fixed,
    )


RECIPES = (
    asr_ls960,
    asr_ls960_hybrid,
    asr_conformer_ls960,
    _asr_ls100(36, "255M", "7.3 / 20.5", "7.1 / 20.4"),
    _asr_ls100(24, "170M", "7.3 / 21.3", "6.8 / 20.5"),
    _asr_ls100(12, "85M", "8.7 / 25.2", "8.7 / 25.4"),
    asr_ls100_post,
)
