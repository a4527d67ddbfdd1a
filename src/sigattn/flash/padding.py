"""Conversion of padded batches to packed sequences and back, as in ``flash_attn.bert_padding`` of flash-attn 2.8."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sigattn.ops import scalars, validation


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Pack the valid positions of a padded batch, for ``flash_attn_varlen_func``.

    Args:
        hidden_states: (B, L, …).
        attention_mask: (B, L), bool or integers: valid if not 0.
        unused_mask: (B, L): positions that are packed but not counted in seqused; None for none.

    Returns:
        hidden_states: (total, …), the valid and the unused positions in order; with gradient.
        indices: (total,), their indices among the B · L positions.
        cu_seqlens: (B + 1,), int32, start of each sequence, and end of the last.
        max_seqlen: length of the longest sequence. Reading it synchronises with an accelerator.
        seqused: (B,), int32, the number of valid positions of each sequence.

    Raises:
        ValueError, TypeError: masks that do not fit.

    >>> hidden, mask = torch.randn(2, 3, 8), torch.tensor([[1, 1, 0], [1, 1, 1]])
    >>> packed, indices, cu_seqlens, max_seqlen, _ = unpad_input(hidden, mask)
    >>> packed.shape, cu_seqlens.tolist(), max_seqlen
    (torch.Size([5, 8]), [0, 2, 5], 3)
    """
    _check_tensor("unpad_input", "hidden_states", hidden_states, "(B, L, …)", 2)
    valid = _mask("attention_mask", attention_mask, hidden_states)
    stored = valid if unused_mask is None else valid | _mask("unused_mask", unused_mask, hidden_states)
    lengths = stored.sum(-1, dtype=torch.int32)
    indices = stored.flatten().nonzero().flatten()
    longest: Any = lengths.max().item() if lengths.shape[0] else 0
    packed = hidden_states.flatten(0, 1).index_select(0, indices)
    cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return packed, indices, cu_seqlens, longest, valid.sum(-1, dtype=torch.int32)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Return packed sequences (total, …) as a padded batch (B, L, …), with 0 as padding; with gradient.

    Args:
        hidden_states: (total, …).
        indices: (total,), from ``unpad_input``.
        batch, seqlen: B and L.

    Raises:
        ValueError, TypeError: tensors that do not fit.

    >>> pad_input(torch.ones(3, 2), torch.tensor([0, 1, 3]), 2, 2)[..., 0]
    tensor([[1., 1.],
            [0., 1.]])
    """
    _check_tensor("pad_input", "hidden_states", hidden_states, "(total, …)", 1)
    batch, seqlen = scalars.integer("pad_input", "batch", batch), scalars.integer("pad_input", "seqlen", seqlen)
    validation.integers("pad_input", "indices", indices, hidden_states.shape[:1], "(total,)")
    _check_range("pad_input", indices, batch * seqlen, "batch * seqlen positions")
    padded = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return padded.index_copy(0, indices.long(), hidden_states).unflatten(0, (batch, seqlen))


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:  # noqa: A002 (flash-attn's name)
    """Return the rows of input (rows, …) with the given indices (n,); the gradients of repeated indices are summed.

    Raises:
        TypeError: an input that is no tensor (rows, …), or indices that are not integers.
        ValueError: an index beyond the rows, on a CPU. (On an accelerator reading the indices would synchronise.)
    """
    _check_tensor("index_first_axis", "input", input, "(rows, …)", 1)
    validation.integers("index_first_axis", "indices", indices, (None,), "(n,)")
    _check_range("index_first_axis", indices, input.shape[0], "rows of input")
    return input.index_select(0, indices)


def _check_tensor(caller: str, name: str, value: Any, shape: str, dimensions: int) -> None:
    if not isinstance(value, Tensor) or value.dim() < dimensions:
        raise TypeError(f"{caller}: {name} must be a tensor {shape}, got {scalars.describe(value)}")


def _mask(name: str, mask: Any, hidden_states: Tensor) -> Tensor:
    if not isinstance(mask, Tensor) or mask.is_floating_point() or mask.is_complex():
        raise TypeError(f"unpad_input: {name} must be bool or integers (0 = padding), got {scalars.describe(mask)}")
    if mask.shape != hidden_states.shape[:2]:
        expected = tuple(hidden_states.shape[:2])
        raise ValueError(f"unpad_input: {name} must be (B, L) = {expected}, got {scalars.describe(mask)}")
    return mask != 0


def _check_range(caller: str, indices: Tensor, stop: int, kind: str) -> None:
    """Raise ValueError unless the indices of a CPU lie in 0 … stop - 1."""
    if indices.device.type != "cpu" or torch.compiler.is_compiling() or not indices.shape[0]:
        return
    first, last = (int(t) for t in indices.aminmax())
    if first < 0 or last >= stop:
        raise ValueError(f"{caller}: indices must lie in 0 … {stop - 1}, for {stop} {kind}, got {first} … {last}")
