"""Language, vision and speech models of the same block, each built from a frozen configuration.

``SIZES`` has the sizes of vision transformers, Ti to L, as settings of ``ViTConfig``.
"""

from sigattn.models.autoencoder import MaskedAutoencoder, MaskedAutoencoderConfig
from sigattn.models.config import ModelConfig, TransformerConfig
from sigattn.models.generation import SamplingConfig
from sigattn.models.language import LanguageModel, LanguageModelConfig
from sigattn.models.saving import MODELS, ModelError, build, load, save
from sigattn.models.speech import SpeechModel, SpeechModelConfig
from sigattn.models.transformer import Transformer, recording
from sigattn.models.vision import SIZES, ViT, ViTConfig

__all__ = [
    "MODELS", "SIZES", "LanguageModel", "LanguageModelConfig", "MaskedAutoencoder", "MaskedAutoencoderConfig",
    "ModelConfig", "ModelError", "SamplingConfig", "SpeechModel", "SpeechModelConfig", "Transformer",
    "TransformerConfig", "ViT", "ViTConfig", "build", "load", "recording", "save",
]  # fmt: skip
