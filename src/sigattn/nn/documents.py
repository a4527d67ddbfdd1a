"""Boundaries of the documents packed into rows of tokens, for document-masked training."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Documents(NamedTuple):
    """Document boundaries of a batch of rows of packed tokens. The first token of a row always starts a document.

    Attributes:
        ids: (B, N), index of each token's document within its row: 0, 0, 1, 1, 1, …
        positions: (B, N), position of each token within its document, from 0.
        cu_seqlens: (documents + 1,) int32, index of each document's first token in the concatenated rows, then B · N.
    """

    ids: Tensor
    positions: Tensor
    cu_seqlens: Tensor

    @classmethod
    def from_end_token(cls, tokens: Tensor, end_token: int) -> Documents:
        """Find the documents of tokens (B, N) in which each document's last token is ``end_token``.

        >>> Documents.from_end_token(torch.tensor([[5, 0, 7, 7, 0, 3]]), 0).ids.tolist()
        [[0, 0, 1, 1, 1, 2]]
        """
        batch, length = tokens.shape
        ends = (tokens == end_token).long()
        number = ends.cumsum(1) - ends
        begins = torch.cat((torch.ones_like(ends[:, :1]), ends[:, :-1]), 1).bool()  # (B, N)
        at = torch.arange(length, device=tokens.device).expand(batch, -1)
        position = at - torch.where(begins, at, 0).cummax(1).values
        last = torch.tensor([batch * length], device=tokens.device)
        starts = torch.cat((begins.flatten().nonzero().squeeze(1), last)).int()
        return cls(number, position, starts)

    @property
    def mask(self) -> Tensor:
        """Return (B, 1, N, N), True where two tokens belong to the same document."""
        return (self.ids[:, :, None] == self.ids[:, None, :]).unsqueeze(1)
