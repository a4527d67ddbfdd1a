"""Rows of tokens that hold several documents, none of which may look into another (document-masked training)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Documents(NamedTuple):
    """Where documents begin in a batch of rows of packed tokens. A row's first token always begins one.

    Attributes:
        number: (B, N), of each token's document within its row: 0, 0, 1, 1, 1, …
        position: (B, N), of each token within its document, from 0.
        starts: (documents + 1,) int32, where each begins when rows are laid one after another; B · N at the end.
    """

    number: Tensor
    position: Tensor
    starts: Tensor

    @classmethod
    def ending_with(cls, tokens: Tensor, end_token: int) -> Documents:
        """Those of tokens (B, N) in which each document's last token is ``end_token``.

        >>> Documents.ending_with(torch.tensor([[5, 0, 7, 7, 0, 3]]), 0).number.tolist()
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
        """(B, 1, N, N), True where two tokens are of one document."""
        return (self.number[:, :, None] == self.number[:, None, :]).unsqueeze(1)
