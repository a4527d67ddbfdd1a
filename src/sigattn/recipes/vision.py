"""Recipes of vision: the paper's four ImageNet experiments (App. "Vision", hyper-parameters).

Values that the paper does not state (temperature and projector of SimCLR and BYOL, the decoder of MAE) are those of
the papers from which it took the recipes: MoCo v3, and He et al., 2022.
"""

from sigattn.data.images import Augmentation
from sigattn.models.autoencoder import MaskedAutoencoderConfig
from sigattn.models.config import ModelConfig
from sigattn.models.vision import SIZES, ViTConfig
from sigattn.recipes.datasets import ImageSource
from sigattn.recipes.recipe import Recipe
from sigattn.tasks import BYOL, Classification, MaskedAutoencoding, SimCLR, Task
from sigattn.train.config import TrainConfig

BATCH = 4096
STEPS_OF_AN_EPOCH = 1_281_167 // BATCH  # ImageNet-1k; the last batch of an epoch would be incomplete


def _vision(
    name: str, objective: str, about: str, gpus: int, paper: str, model: ModelConfig, task: Task, data: ImageSource, *,
    epochs: int, warmup: int, rate: float, weight_decay: float, minutes: int, final_rate: float = 1e-6,
) -> Recipe:  # fmt: skip
    """Return a recipe; the peak learning rate is ``rate`` for a batch of 256 and scaled linearly."""
    peak = rate * BATCH / 256
    training = TrainConfig(
        max_steps=epochs * STEPS_OF_AN_EPOCH, batch_size=BATCH, precision="bfloat16", learning_rate=peak,
        final_learning_rate=final_rate / peak, weight_decay=weight_decay, max_grad_norm=None,
        warmup_steps=warmup * STEPS_OF_AN_EPOCH, validate_every=STEPS_OF_AN_EPOCH, checkpoint_every=STEPS_OF_AN_EPOCH,
        log_attention_every=100,
    )  # fmt: skip
    return Recipe(
        name,
        f"{about}, ImageNet-1k, {epochs} epochs",
        f"{gpus} GPUs of 80 GB",
        paper,
        domain="Vision",
        objective=objective,
        model=model,
        task=task,
        training=training,
        tiny_training={"max_steps": 800, "batch_size": 128, "learning_rate": 2e-3},
        tiny_minutes=minutes,
        data=data,
    )


def _imagenet(augmentation: Augmentation, jitter: float = 0.5) -> ImageSource:
    return ImageSource(name="ImageNet-1k", augmentation=augmentation, jitter=jitter)


RECIPES = (
    _vision(
        "vit-supervised", "Supervised", "ViT-B/16, supervised", 8,
        'sigmoid matches softmax in training loss and test top-1 (Fig. "test_top1_results"); without LayerScale its '
        'top-1 is 1 % lower (Fig. "imagenet_top_1_ablations")',
        ViTConfig(position="learnable", drop_path=0.28), Classification(), _imagenet("randaugment"),
        epochs=300, warmup=20, rate=1e-4, weight_decay=0.3, minutes=1,
    ),
    _vision(
        "vit-byol", "BYOL", "ViT-B/16, BYOL", 32, "the linear probe matches softmax's",
        ViTConfig(position="learnable", drop_path=0.2, dynamic_img_size=True), BYOL(), _imagenet("multicrop", 1.0),
        epochs=600, warmup=40, rate=1e-4, weight_decay=0.3, minutes=3,
    ),
    _vision(
        "vit-simclr", "SimCLR", "ViT-B/16, SimCLR", 16, "the linear probe matches softmax's",
        ViTConfig(position="sincos", initialization="moco_v3", freeze_patch_embed=True), SimCLR(), _imagenet("simclr"),
        epochs=300, warmup=10, rate=2e-4, weight_decay=0.1, minutes=2,
    ),
    _vision(
        "vit-mae", "MAE", "ViT-L/16, masked autoencoder, with a bias", 8, "matches softmax after fine-tuning",
        MaskedAutoencoderConfig(
            encoder=ViTConfig(**SIZES["L"], position="learnable", attention_bias="log_batch", num_classes=0),
            mask_ratio=0.75,
        ),
        MaskedAutoencoding(), _imagenet("crop"),
        epochs=400, warmup=40, rate=1.5e-4, weight_decay=0.05, final_rate=0.0, minutes=1,
    ),
)  # fmt: skip
