"""Language, vision, speech and sequence models of the same block, each built from a frozen configuration.

``SIZES`` has the sizes of vision transformers, Ti to L, as settings of ``ViTConfig``.
"""

from sigattn.models.autoencoder import MaskedAutoencoder, MaskedAutoencoderConfig
from sigattn.models.config import ModelConfig, TransformerConfig
from sigattn.models.generation import SamplingConfig
from sigattn.models.language import LanguageModel, LanguageModelConfig
from sigattn.models.saving import ModelError, build, load, save
from sigattn.models.sequence import SequenceModel, SequenceModelConfig
from sigattn.models.speech import SpeechModel, SpeechModelConfig
from sigattn.models.text_classifier import TextClassifier, TextClassifierConfig
from sigattn.models.transformer import Transformer, recording
from sigattn.models.vision import SIZES, ViT, ViTConfig

__all__ = [
    "SIZES",
    "LanguageModel",
    "LanguageModelConfig",
    "MaskedAutoencoder",
    "MaskedAutoencoderConfig",
    "ModelConfig",
    "ModelError",
    "SamplingConfig",
    "SequenceModel",
    "SequenceModelConfig",
    "SpeechModel",
    "SpeechModelConfig",
    "TextClassifier",
    "TextClassifierConfig",
    "Transformer",
    "TransformerConfig",
    "ViT",
    "ViTConfig",
    "build",
    "load",
    "recording",
    "save",
]
