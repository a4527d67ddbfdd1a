"""Layers of transformers with sigmoid attention (Sect. 5 and the practitioner's guide of the paper)."""

from sigattn.nn.attention import Attention
from sigattn.nn.batch_norm import MaskedBatchNorm
from sigattn.nn.bias import (
    AlibiKeysBias,
    AttentionBias,
    BatchLengthBias,
    ConstantBias,
    ContextLengthBias,
    LearnableBias,
    QueryBias,
    SampleLengthBias,
    VisibleKeysBias,
    VisibleKeysLinearBias,
)
from sigattn.nn.bias_rules import make_bias
from sigattn.nn.block import Block
from sigattn.nn.cape import Cape, ImageCape
from sigattn.nn.conformer import ConformerBlock, ConvolutionModule
from sigattn.nn.documents import Documents
from sigattn.nn.feedforward import MLP, SwiGLU
from sigattn.nn.functional import MaskSpec
from sigattn.nn.guide import Recommendation, recommend
from sigattn.nn.initialization import initialize, mup_simple
from sigattn.nn.kv_cache import KVCache
from sigattn.nn.multihead import SigmoidMultiheadAttention
from sigattn.nn.norm import LayerNorm, RMSNorm
from sigattn.nn.performer import PerformerFeatures
from sigattn.nn.position import Alibi, LearnableEmbedding, RotaryEmbedding, SinusoidalEmbedding, alibi_slopes
from sigattn.nn.residual_branch import DropPath, LayerScale

__all__ = [
    "MLP", "Alibi", "AlibiKeysBias", "Attention", "AttentionBias",
    "BatchLengthBias", "Block", "Cape", "ConformerBlock", "ConstantBias", "ContextLengthBias", "ConvolutionModule",
    "Documents", "DropPath", "ImageCape", "KVCache", "LayerNorm", "LayerScale", "LearnableBias", "LearnableEmbedding",
    "MaskSpec", "MaskedBatchNorm", "PerformerFeatures", "QueryBias", "RMSNorm", "Recommendation",
    "RotaryEmbedding", "SampleLengthBias", "SigmoidMultiheadAttention", "SinusoidalEmbedding", "SwiGLU",
    "VisibleKeysBias", "VisibleKeysLinearBias", "alibi_slopes", "initialize", "make_bias", "mup_simple", "recommend",
]  # fmt: skip
