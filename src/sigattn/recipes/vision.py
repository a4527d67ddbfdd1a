"""Recipes of vision: the paper's four ImageNet experiments (App. "Vision", hyper-parameters).

Values that the paper does not state (temperature and projector of SimCLR and BYOL, the decoder of MAE) are those of
the papers from which it took the recipes: MoCo v3, and He et al., 2022.
"""

from __future__ import annotations

from typing import Any

from sigattn.models.autoencoder import MaskedAutoencoderConfig
from sigattn.models.vision import SIZES, ViTConfig
from sigattn.recipes.datasets import ImageSource
from sigattn.recipes.recipe import Recipe
from sigattn.tasks.byol import BYOL
from sigattn.tasks.classification import Classification
from sigattn.tasks.mae import MaskedAutoencoding
from sigattn.tasks.simclr import SimCLR
from sigattn.train.config import TrainConfig

BATCH = 4096
STEPS_OF_AN_EPOCH = 1_281_167 // BATCH  # ImageNet-1k; the last batch of an epoch would be incomplete
TINY = {"max_steps": 800, "batch_size": 128, "learning_rate": 2e-3}


def vit_supervised() -> Recipe:
    """ViT-B/16, supervised, ImageNet-1k, 300 epochs.

    sigattn train vit-supervised --data IMAGENET        (--tiny: digits, about a minute on 2 cores)

    Hardware: 8 GPUs of 80 GB. Paper: sigmoid matches softmax in training loss and test top-1 (Fig.
    "test_top1_results"); without LayerScale its top-1 is 1 % lower (Fig. "imagenet_top_1_ablations").
    """
    return Recipe(
        name="vit-supervised",
        domain="Vision",
        objective="Supervised",
        model=ViTConfig(position="learnable", drop_path=0.28),
        task=Classification(),
        training=_training(300, 20, rate=1e-4, weight_decay=0.3),
        tiny_training=TINY,
        data=ImageSource(name="ImageNet-1k", augmentation="randaugment"),
    )


def vit_byol() -> Recipe:
    """ViT-B/16, BYOL, ImageNet-1k, 600 epochs.

    sigattn train vit-byol --data IMAGENET              (--tiny: digits, about 3 minutes on 2 cores)

    Hardware: 32 GPUs of 80 GB. Paper: the linear probe matches softmax's.
    """
    return Recipe(
        name="vit-byol",
        domain="Vision",
        objective="BYOL",
        model=ViTConfig(position="learnable", drop_path=0.2, dynamic_img_size=True),
        task=BYOL(momentum=0.996),
        training=_training(600, 40, rate=1e-4, weight_decay=0.3),
        tiny_training=TINY,
        data=ImageSource(name="ImageNet-1k", augmentation="multicrop", jitter=1.0),
    )


def vit_simclr() -> Recipe:
    """ViT-B/16, SimCLR, ImageNet-1k, 300 epochs.

    sigattn train vit-simclr --data IMAGENET            (--tiny: digits, about 2 minutes on 2 cores)

    Hardware: 16 GPUs of 80 GB. Paper: the linear probe matches softmax's.
    """
    return Recipe(
        name="vit-simclr",
        domain="Vision",
        objective="SimCLR",
        model=ViTConfig(position="sincos", initialization="moco_v3", freeze_patch_embed=True),
        task=SimCLR(),
        training=_training(300, 10, rate=2e-4, weight_decay=0.1),
        tiny_training=TINY,
        data=ImageSource(name="ImageNet-1k", augmentation="simclr"),
    )


def vit_mae() -> Recipe:
    """ViT-L/16, masked autoencoder, ImageNet-1k, 400 epochs; the only vision recipe with a bias.

    sigattn train vit-mae --data IMAGENET               (--tiny: digits, about a minute on 2 cores)

    Hardware: 8 GPUs of 80 GB. Paper: matches softmax after fine-tuning.
    """
    encoder = ViTConfig(**SIZES["L"], position="learnable", attention_bias="log_batch", num_classes=0)
    return Recipe(
        name="vit-mae",
        domain="Vision",
        objective="MAE",
        model=MaskedAutoencoderConfig(encoder=encoder, mask_ratio=0.75),
        task=MaskedAutoencoding(),
        training=_training(400, 40, rate=1.5e-4, weight_decay=0.05, final_learning_rate=0.0),
        tiny_training=TINY,
        data=ImageSource(name="ImageNet-1k", augmentation="crop"),
    )


def _training(epochs: int, warmup: int, *, rate: float, **settings: Any) -> TrainConfig:
    """Return the settings that the four tables share; ``rate`` is for a batch of 256 and scaled linearly."""
    peak = rate * BATCH / 256
    fixed: dict[str, Any] = {
        "final_learning_rate": 1e-6 / peak,
        "betas": (0.9, 0.95),
        "max_grad_norm": None,
        **settings,
    }
    return TrainConfig(
        max_steps=epochs * STEPS_OF_AN_EPOCH,
        batch_size=BATCH,
        precision="bfloat16",
        learning_rate=peak,
        warmup_steps=warmup * STEPS_OF_AN_EPOCH,
        validate_every=STEPS_OF_AN_EPOCH,
        checkpoint_every=STEPS_OF_AN_EPOCH,
        log_attention_every=100,
        **fixed,
    )


RECIPES = (vit_supervised, vit_byol, vit_simclr, vit_mae)
