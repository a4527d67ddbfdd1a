"""Rotation of new queries and keys by flash-attn's tables of cosines and sines."""

import torch
from torch import Tensor

from sigattn.ops import validation


def rotate(
    x: Tensor, cos: Tensor, sin: Tensor, starts: Tensor, interleaved: bool, *, same_position: bool = False
) -> Tensor:
    """Return x (B, N, H, D) with its first features rotated by the angles of its positions, starts (B,) + i.

    The tables are (positions, rotary_dim / 2); on a CPU, ValueError is raised for positions that they do not contain.
    With ``same_position`` all rows of a sample have the position of the first.
    """
    steps = torch.arange(x.shape[1], device=starts.device) * (not same_position)
    positions = starts.long()[:, None] + steps  # (B, N)
    reads_values = positions.device.type == "cpu" and not torch.compiler.is_compiling()
    if reads_values and positions.numel() and not 0 <= positions.min() <= positions.max() < cos.shape[0]:
        raise ValueError(
            f"flash_attn_with_kvcache: rotary_cos does not contain the positions {int(positions.min())} … "
            f"{int(positions.max())}; got {validation.describe(rotary_cos=cos)}"
        )
    cos, sin = (t[positions].unsqueeze(2) for t in (cos, sin))  # (B, N, 1, rotary_dim / 2)
    rotary_dim = 2 * cos.shape[-1]
    rotated = rotate_pairs(x[..., :rotary_dim], cos, sin, interleaved=interleaved)
    return torch.cat((rotated, x[..., rotary_dim:]), -1)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Return x (…, E) with pairs of features rotated by angles whose cosines and sines broadcast to (…, E / 2).

    A pair consists of the features 2i and 2i + 1 if ``interleaved``, else of i and i + E / 2. Computed in float32 or
    float64.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    x_wide, cos, sin = (t.to(wide) for t in (x, cos, sin))
    a, b = (x_wide[..., ::2], x_wide[..., 1::2]) if interleaved else x_wide.chunk(2, -1)
    pair = (a * cos - b * sin, a * sin + b * cos)
    rotated = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return rotated.to(x.dtype)
