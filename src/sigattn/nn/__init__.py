"""Layers of transformers with sigmoid attention (Sect. 5 and the practitioner's guide of the paper)."""

from sigattn.nn.attention import Attention as Attention
from sigattn.nn.bias import BatchLengthBias as BatchLengthBias
from sigattn.nn.bias import ConstantBias as ConstantBias
from sigattn.nn.bias import ContextLengthBias as ContextLengthBias
from sigattn.nn.bias import LearnableBias as LearnableBias
from sigattn.nn.bias import NoBias as NoBias
from sigattn.nn.bias import QueryBias as QueryBias
from sigattn.nn.bias import SampleLengthBias as SampleLengthBias
from sigattn.nn.bias import VisibleKeysBias as VisibleKeysBias
from sigattn.nn.block import Block as Block
from sigattn.nn.cape import Cape as Cape
from sigattn.nn.cape import ImageCape as ImageCape
from sigattn.nn.conformer import ConformerBlock as ConformerBlock
from sigattn.nn.conversion.convert import sigmoidify as sigmoidify
from sigattn.nn.feedforward import MLP as MLP
from sigattn.nn.feedforward import SwiGLU as SwiGLU
from sigattn.nn.guide import Recommendation as Recommendation
from sigattn.nn.guide import recommend as recommend
from sigattn.nn.position import Alibi as Alibi
from sigattn.nn.position import LearnableEmbedding as LearnableEmbedding
from sigattn.nn.position import RotaryEmbedding as RotaryEmbedding
from sigattn.nn.position import SinusoidalEmbedding as SinusoidalEmbedding
from sigattn.nn.residual_branch import DropPath as DropPath
from sigattn.nn.residual_branch import LayerScale as LayerScale
