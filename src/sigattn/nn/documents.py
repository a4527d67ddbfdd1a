"""Boundaries of the documents packed into rows of tokens, for document-masked training."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Documents(NamedTuple):
    """Document boundaries of a batch of rows of packed tokens. The first token of a row always starts a document."""

    ids: Tensor  # (B, N), index of each token's document within its row: 0, 0, 1, 1, 1, …
    positions: Tensor  # (B, N), position of each token within its document, from 0
    cu_seqlens: Tensor  # (documents + 1,) int32, index of each first token in the concatenated rows, then B · N

    @classmethod
    def from_end_token(cls, tokens: Tensor, end_token: int) -> "Documents":
        """Find the documents of tokens (B, N) in which each document's last token is ``end_token``.

        >>> Documents.from_end_token(torch.tensor([[5, 0, 7, 7, 0, 3]]), 0).ids.tolist()
        [[0, 0, 1, 1, 1, 2]]
        """
        is_end = tokens == end_token
        return cls.from_starts(F.pad(is_end, (1, 0), value=True)[:, :-1])

    @classmethod
    def from_starts(cls, is_start: Tensor) -> "Documents":
        """Find the documents whose first tokens are marked in (B, N) bool; the first token of each row must be."""
        index = torch.arange(is_start.shape[1], device=is_start.device).expand_as(is_start)
        starts = is_start.flatten().nonzero().squeeze(1)
        return cls(
            ids=is_start.long().cumsum(1) - 1,
            positions=index - torch.where(is_start, index, 0).cummax(1).values,
            cu_seqlens=torch.cat((starts, starts.new_full((1,), is_start.numel()))).int(),
        )

    @property
    def mask(self) -> Tensor:
        """Return (B, 1, N, N), True where two tokens belong to the same document."""
        return (self.ids[:, :, None] == self.ids[:, None, :]).unsqueeze(1)
