"""Conformer block (Gulati et al., 2020): feed-forward layer, attention, convolution, feed-forward layer."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sigattn.nn.attention import Attention
from sigattn.nn.batch_norm import MaskedBatchNorm
from sigattn.nn.feedforward import MLP
from sigattn.nn.norm import make_norm
from sigattn.nn.residual_branch import LayerScale
from sigattn.shapes import Float, Int


class ConvolutionModule(nn.Module):
    """Pointwise convolution and GLU, depthwise convolution, batch norm, swish, pointwise convolution.

    Padding beyond a sample's length affects neither its frames nor the batch's statistics.

    Args:
        embed_dim: number of features. kernel_size: of the depthwise convolution, in frames; odd.
        dropout: dropout probability of the output, while training.
    """

    def __init__(self, embed_dim: int, kernel_size: int = 31, dropout: float = 0.0) -> None:
        super().__init__()
        if kernel_size % 2 == 0:
            raise ValueError(f"ConvolutionModule: kernel_size must be odd, got {kernel_size}")
        self.input: nn.Linear = nn.Linear(embed_dim, 2 * embed_dim)
        self.depthwise: nn.Conv1d = nn.Conv1d(
            embed_dim, embed_dim, kernel_size, padding=kernel_size // 2, groups=embed_dim
        )
        self.norm: MaskedBatchNorm = MaskedBatchNorm(embed_dim)
        self.output: nn.Linear = nn.Linear(embed_dim, embed_dim)
        self.dropout: nn.Dropout = nn.Dropout(dropout)

    def forward(
        self, x: Float[Tensor, "batch length embed_dim"], lengths: Int[Tensor, " batch"] | None = None
    ) -> Float[Tensor, "batch length embed_dim"]:
        """Convolve along the length; lengths: number of frames of each padded sample."""
        y = F.glu(self.input(x)).transpose(1, 2)  # (B, embed_dim, length)
        valid = None
        if lengths is not None:
            valid = (torch.arange(x.shape[1], device=x.device) < lengths[:, None].to(x.device)).unsqueeze(1)
            y = y * valid
        y = F.silu(self.norm(self.depthwise(y), valid))
        return self.dropout(self.output(y.transpose(1, 2)))


class ConformerBlock(nn.Module):
    """Sequence x + ½ f(x), x + attention(x), x + convolution(x), x + ½ f'(x), norm; a LayerNorm precedes each branch.

    Args:
        attention: attention layer of the same embed_dim.
        embed_dim: number of features. mlp_dim: number of features within the two feed-forward layers.
        kernel_size: kernel size of the convolution.
        init_values: initial value of LayerScale's factors on each branch; None for no LayerScale.
        dropout: dropout probability of branches and within feed-forward layers, while training.
    """

    def __init__(
        self, attention: Attention, embed_dim: int, mlp_dim: int, *, kernel_size: int = 31,
        init_values: float | None = None, dropout: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.first: MLP = MLP(embed_dim, mlp_dim, dropout, activation="swish")
        self.last: MLP = MLP(embed_dim, mlp_dim, dropout, activation="swish")
        self.attention = attention
        self.convolution: ConvolutionModule = ConvolutionModule(embed_dim, kernel_size, dropout)
        self.attention_dropout: nn.Dropout = nn.Dropout(dropout)
        self.norms: nn.ModuleList = nn.ModuleList(make_norm("layer", embed_dim) for _ in range(5))
        scales = [nn.Identity() if init_values is None else LayerScale(embed_dim, init_values) for _ in range(4)]
        self.scales: nn.ModuleList = nn.ModuleList(scales)

    def forward(
        self, x: Float[Tensor, "batch length embed_dim"], key_lengths: Int[Tensor, " batch"] | None = None
    ) -> Float[Tensor, "batch length embed_dim"]:
        """Return the block's output; key_lengths: number of frames of each padded sample."""
        norms, scales = self.norms, self.scales
        x = x + 0.5 * scales[0](self.first(norms[0](x)))
        x = x + scales[1](self.attention_dropout(self.attention(norms[1](x), key_lengths=key_lengths)))
        x = x + scales[2](self.convolution(norms[2](x), key_lengths))
        x = x + 0.5 * scales[3](self.last(norms[3](x)))
        return norms[4](x)
