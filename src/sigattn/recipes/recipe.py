"""Recipes: complete training configurations with a softmax twin and a tiny form that trains in minutes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from sigattn.data.task import Task
from sigattn.data.transforms import SMALL_VIEWS, Augmentation
from sigattn.models.autoencoder import MaskedAutoencoderConfig
from sigattn.models.config import TransformerConfig
from sigattn.models.language import LanguageModelConfig
from sigattn.models.saving import ModelConfig, build
from sigattn.models.sequence import SequenceModelConfig
from sigattn.models.speech import SpeechModelConfig
from sigattn.models.vision import ViTConfig
from sigattn.tasks.byol import BYOL
from sigattn.tasks.simclr import SimCLR
from sigattn.train.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Training data of a recipe and its augmentation.

    Attributes:
        name: name of the data set.
        librispeech: training folders of LibriSpeech; empty for other recordings, the spoken digits.
        spec_augment_from: step from which recordings are masked by SpecAugment; None turns it off.
        augmentation: augmentation of image folders (``ImageFolder``).
        jitter: strength of the colour jitter of image folders.
    """

    name: str
    librispeech: tuple[str, ...] = ()
    spec_augment_from: int | None = None
    augmentation: Augmentation = "none"
    jitter: float = 0.5


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Complete training configuration.

    Attributes:
        name: name on the command line.
        domain: domain in the paper's practitioner's guide.
        objective: objective in the practitioner's guide.
        model: configuration of the model.
        task: training objective.
        training: settings of the training loop.
        data: data set and augmentation.
        paper: results that the paper reports.
        softmax_changes: fields of the model that the softmax twin changes in addition to activation and bias.
    """

    name: str
    domain: str
    objective: str
    model: ModelConfig
    task: Task
    training: TrainConfig
    data: DataConfig
    paper: str = ""
    softmax_changes: dict[str, Any] = field(default_factory=dict)

    @property
    def transformer(self) -> TransformerConfig:
        """Configuration of the transformer blocks: the model's, or its encoder's."""
        return self.model.encoder if isinstance(self.model, MaskedAutoencoderConfig) else self.model

    def with_transformer(self, **changes: Any) -> Recipe:
        """Return a copy with fields of ``transformer`` changed."""
        if isinstance(self.model, MaskedAutoencoderConfig):
            return replace(self, model=replace(self.model, encoder=replace(self.model.encoder, **changes)))
        return replace(self, model=replace(self.model, **changes))

    def with_training(self, **changes: Any) -> Recipe:
        """Return a copy with settings of training changed."""
        return replace(self, training=replace(self.training, **changes))

    def softmax(self) -> Recipe:
        """Return the softmax twin, which differs in the attention only."""
        twin = self.with_transformer(activation="softmax", attention_bias=None, learn_bias="no", **self.softmax_changes)
        return replace(twin, name=f"{self.name}-softmax")

    def parameters(self) -> int:
        """Return the number of the model's parameters."""
        return sum(p.numel() for p in build(self.model, "meta").parameters())

    def tokens(self) -> float:
        """Return the number of tokens (patches, frames) of all training steps."""
        model, samples = self.model, self.training.max_steps * self.training.batch_size
        if isinstance(model, LanguageModelConfig):
            return float(samples * model.max_seq_len)
        if isinstance(model, SpeechModelConfig):
            return samples / (model.step * model.frames_per_step)
        if isinstance(model, MaskedAutoencoderConfig):
            return samples * model.encoder.grid_size**2 * (1 - model.mask_ratio)
        if isinstance(model, SequenceModelConfig):
            return float(samples * model.seq_len)
        # BYOL: two large and the small views, and the teacher's forward pass (a third of the FLOPs) of two large views
        views = {SimCLR: 2.0, BYOL: 2 + SMALL_VIEWS * (96 / 224) ** 2 + 2 / 3}.get(type(self.task), 1.0)
        return samples * model.num_tokens * views

    def gpu_hours(self, utilisation: float = 0.4) -> float:
        """Return an estimate of the H100 hours of the training: 6 FLOPs per parameter and token at 989 TFLOP/s.

        Args:
            utilisation: fraction of the peak that the training reaches.
        """
        module: nn.Module = build(self.model, "meta")
        blocks = sum(p.numel() for n, p in module.named_parameters() if "embedding" not in n)
        return 6 * blocks * self.tokens() / (utilisation * 989e12) / 3600

    def tiny(self) -> Recipe:
        """Return a small form that trains in minutes on 2 cores on small data sets.

        Depth, width and length shrink; the guide's choices (positions, norms, QK-norm, LayerScale, bias) stay.
        LayerScale starts at 0.01: within some hundred steps it does not grow enough from 1e-4, and from 0.1 sigmoid
        attention without a bias learns less well (docs/log.md).
        """
        changes, training, data = _TINY[type(self.transformer)]
        recipe = self.with_transformer(**{**_small_transformer(self.transformer), **changes})
        model, task, steps = recipe.model, self.task, training["max_steps"]
        if isinstance(model, MaskedAutoencoderConfig):
            model = replace(model, decoder_num_layers=1, decoder_embed_dim=64, decoder_num_heads=4)
        if isinstance(task, (SimCLR, BYOL)):
            task = replace(task, projector_dim=128, output_dim=32)
        usual = {"warmup_steps": steps // 10, "validate_every": steps // 2, "checkpoint_every": steps // 2}
        small: dict[str, Any] = {"model": model, "task": task, "paper": ""}
        small["data"] = replace(self.data, **data)
        recipe = recipe.with_training(**{**_SMALL_TRAINING, **usual, **training})
        return replace(recipe, name=f"{self.name}-tiny", **small)

    def guide_row(self) -> dict[str, str]:
        """Return the recipe as a row of the practitioner's guide's table, by column."""
        t = self.transformer
        names = {"learnable": "Learnable", "sincos": "SinCos", "cape": "CAPE", "rope": "RoPE", "alibi": "ALiBi"}
        structures = {"pre": "Pre-Norm", "post": "Post-Norm"}
        bias = t.DEFAULT_BIAS if t.attention_bias is None else t.attention_bias
        position = getattr(t, "position", "none")
        return {
            "Domain": self.domain,
            "Objective": self.objective,
            "Model Size": _size(self.parameters()),
            "Pos Embed": names.get(position, position),
            "QK Norm": "No" if t.qk_norm == "none" else "Yes",
            "LayerScale": "No" if t.init_values is None else "Yes",
            "Sigmoid Bias": "No" if bias == 0.0 else "Yes",
            "Norm Strategy": structures.get(t.norm_placement, "Hybrid-Norm"),
        }


def _size(parameters: int) -> str:
    return f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.{0 if parameters >= 1e7 else 1}f}M"


_SMALL_TRAINING: dict[str, Any] = {
    "grad_accum_steps": 1,
    "precision": "float32",
    "max_grad_norm": 1.0,
    "optimizer": "adamw",
    "weight_decay": 0.05,
    "independent_decay": False,
    "schedule": "cosine",
    "final_learning_rate": 0.05,
    "parallel": "ddp",
    "checkpoint_activations": False,
    "log_attention_every": 1,
}
# changes of the transformer, the training and the data
_TINY: dict[type, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    LanguageModelConfig: (
        {"vocab_size": 256, "max_seq_len": 256},
        {"max_steps": 600, "batch_size": 16, "learning_rate": 4e-3},
        {"name": "CPython's documentation, as bytes"},
    ),
    ViTConfig: (
        {"image_size": 8, "patch_size": 2, "channels": 1, "num_classes": 10},
        {"max_steps": 800, "batch_size": 128, "learning_rate": 2e-3},
        {"name": "scikit-learn's handwritten digits"},
    ),
    SpeechModelConfig: (
        {"conformer_kernel_size": 15, "layer_drop": 0.0, "dropout": 0.1},
        {"max_steps": 1000, "batch_size": 60, "learning_rate": 2e-3},
        # SpecAugment's masks are made for recordings of fifteen seconds; these have about two
        {"name": "spoken digits (FSDD)", "librispeech": (), "spec_augment_from": None},
    ),
    SequenceModelConfig: (
        {"mlp_dims": (64, 64)},
        {"max_steps": 500, "batch_size": 128, "learning_rate": 2e-3, "optimizer": "adam"},
        {},
    ),
}


def _small_transformer(transformer: TransformerConfig) -> dict[str, Any]:
    """Return the changes that all tiny forms share."""
    heads, shared = 4, transformer.num_kv_heads
    return {
        "num_layers": transformer.num_layers if isinstance(transformer, SequenceModelConfig) else 2,
        "embed_dim": 64,
        "num_heads": heads,
        "mlp_dim": None,
        "num_kv_heads": None if shared is None else max(1, heads * shared // transformer.num_heads),
        "init_values": None if transformer.init_values is None else 0.01,
        "drop_path": min(transformer.drop_path, 0.1),
    }
