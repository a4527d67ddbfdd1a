"""Functions of the positions of queries and keys: visible bands, distances, ALiBi's term."""

from __future__ import annotations

import torch
from torch import Tensor

from sigattn.ops.problem import UNLIMITED


def band(
    left: int, right: int, rows: tuple[int, int], columns: tuple[int, int], device: torch.device
) -> Tensor:  # (rows, columns)
    """Return the mask that is True where i - left ≤ j ≤ i + right, for queries i in rows and keys j in columns."""
    i = torch.arange(*rows, device=device).unsqueeze(1)
    j = torch.arange(*columns, device=device)
    visible = torch.ones((), dtype=torch.bool, device=device).expand(i.shape[0], j.shape[0])
    if left != UNLIMITED:
        visible = visible & (i - j <= left)  # i - left may overflow, and so may i + right
    if right != UNLIMITED:
        visible = visible & (j - i <= right)
    return visible


def alibi(
    slopes: Tensor, rows: tuple[int, int], columns: tuple[int, int], dtype: torch.dtype
) -> Tensor:  # (B or 1, Hq, rows, columns)
    """Return ALiBi's term -slope · |i - j|, with one slope for keys before the query and one for keys after it."""
    before, after = distances(rows, columns, dtype, slopes.device)
    s = slopes.to(dtype).unflatten(-1, (2, 1, 1))
    return -(s[..., 0, :, :] * before + s[..., 1, :, :] * after)


def distances(
    rows: tuple[int, int], columns: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:  # each (rows, columns)
    """Return the distances max(i - j, 0) of keys before the query and max(j - i, 0) of keys after it."""
    offset = torch.arange(*rows, device=device).unsqueeze(1) - torch.arange(*columns, device=device)
    return offset.clamp(min=0).to(dtype), (-offset).clamp(min=0).to(dtype)
