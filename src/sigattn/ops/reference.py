"""Reference implementation with materialised weights, against which the other backends are tested.

    S = cap(scale · Q Kᵀ) + b + position bias + mask        P = activation(S), exactly 0 where masked        O = P V

where cap(s) = c · tanh(s / c) with a ``softcap`` c > 0, else s. With ``normalize`` each row of P is divided by its sum,
which is a softmax of log σ(S), finite for every S.

It stores the (B, Hq, N, M) matrix, computes in float32 or better, and consists of PyTorch's own operations, so that
forward-mode and double differentiation, ``torch.func`` and ``vmap`` apply to it.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sigattn.ops.dropout import keep_mask, keep_scale
from sigattn.ops.gradients import Result, Saved, without_saved
from sigattn.ops.problem import (
    NORMALIZED_MARGIN,
    UNLIMITED,
    KVCacheProblem,
    Problem,
    VarlenProblem,
    in_order_of,
    new_output,
    scale_of,
    select_rows,
)

_BLOCK_BYTES = 8 << 20  # bytes of the float32 weights of one block of rows

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "softmax": lambda s: torch.softmax(s, dim=-1),
    "relu": torch.relu,
    "relu2": lambda s: torch.relu(s).square(),
    "gelu": F.gelu,
    "tanh": torch.tanh,
    "identity": lambda s: s,
}


def attention(problem: Problem, activation: str = "sigmoid") -> Tensor:  # (B, Hq, N, Dv)
    """Return the attention output, in the query's dtype and order of memory."""
    out = combine(problem, _drop(problem, attention_weights(problem, activation))).to(problem.query.dtype)
    return in_order_of(problem.query, out)


def traced_attention(*fields: Any) -> Tensor:  # (B, Hq, N, Dv)
    """Return the attention output, given the fields of a ``Problem``, in operators that a graph of any length holds."""
    p = Problem(*fields)
    dtype, device = torch.promote_types(p.query.dtype, torch.float32), p.query.device
    if p.bias is not None and not p.bias.dim():  # to read the number would fix it in the graph
        p = p._replace(bias=p.bias.to(device, dtype).view(1, 1, 1, 1))
    elif p.bias is None and p.key_lengths is None:
        num_keys = torch.full((1, 1, 1, 1), p.key.shape[2], dtype=dtype, device=device).clamp(min=1)
        p = p._replace(bias=-num_keys.log() - (NORMALIZED_MARGIN if p.normalize else 0.0))
    return attention(p)


def varlen_attention(problem: VarlenProblem) -> Tensor:  # (Tq, Hq, Dv)
    """Return the attention output of packed sequences, each by ``attention``; rows that belong to no sequence are 0."""
    p = problem
    parts = [attention(p.sequence(*of_sequence))[0].transpose(0, 1) for of_sequence in p.row_ranges()]
    zero = torch.stack([t[..., :0].sum() for t in (p.query, p.key, p.value)]).sum()  # with the gradient of each
    missing = p.query.shape[0] - sum(len(part) for part in parts)
    parts.append(zero.expand(missing, p.query.shape[1], p.value.shape[2]))
    return in_order_of(p.query, torch.cat(parts))


def kvcache_attention(problem: KVCacheProblem, saved: Saved | None = None) -> Result:
    """Return the attention output of queries against a cache, (B, N, Hq, Dv), and two empty tensors."""
    p = problem
    out = new_output(p.query, p.value.shape[3])
    for b, (first, length, end) in enumerate(p.key_ranges()):
        sample = slice(b, b + 1)
        out[sample] = attention(p.samples(sample, first, max(first, length), length, end)).transpose(1, 2)
    return without_saved(out)


def row_blocks(problem: Problem) -> Iterator[tuple[int, int]]:
    """Yield the first row and the end of each block of rows, so that the weights of a block fit ``_BLOCK_BYTES``."""
    batch, heads, n, _ = problem.query.shape
    if torch.compiler.is_compiling() or torch._C._is_tracing():  # the number of blocks would fix the length
        yield 0, n
        return
    step = max(1, _BLOCK_BYTES // 4 // max(1, batch * heads * problem.key.shape[2]))
    for start in range(0, n, step):
        yield start, min(start + step, n)


def largest_logits(problem: Problem, rows: Tensor) -> Tensor:  # (B, Hq, N)
    """Return the largest logit of each row, -inf where every key is masked. Others than ``rows`` may be any.

    rows: (B, Hq, N), boolean.
    """
    p = problem
    out = p.query.new_full(p.query.shape[:3], -torch.inf, dtype=torch.promote_types(p.query.dtype, torch.float32))
    for start, stop in row_blocks(p):
        # rows of padding see no key, and take no product
        if rows[:, :, start:stop].any() and (rows[:, :, start:stop] & visible_keys(p, (start, stop)).any(-1)).any():
            logits, visible = masked_logits(p, rows=(start, stop))
            out[:, :, start:stop] = logits.masked_fill(~visible, -torch.inf).amax(-1)
    return out


def combine(problem: Problem, weights: Tensor) -> Tensor:  # (B, Hq, N, M) → (B, Hq, N, Dv)
    """Return P V for given weights P, in the dtype of the weights."""
    return weights @ _repeat(problem, _existing(problem, problem.value).to(weights.dtype))


def attention_weights(problem: Problem, activation: str = "sigmoid") -> Tensor:  # (B, Hq, N, M)
    """Return P before dropout, in float32 or better. An entirely masked row is 0 for every activation."""
    return weights_of(*masked_logits(problem, activation), activation, problem.normalize)


def weights_of(logits: Tensor, visible: Tensor, activation: str, normalize: bool) -> Tensor:  # (..., M)
    """Return the activation of the logits, 0 where not visible, divided by the sum of a row if a sigmoid normalises."""
    if normalize and activation == "sigmoid":
        # log σ; ONNX's log_sigmoid is log(σ), which is -inf far below 0. Beyond 40 the softplus is linear to 4e-18
        logits, activation = -F.softplus(-logits, threshold=40), "softmax"
    if activation == "softmax":
        some = visible.any(-1, keepdim=True)
        logits = logits.masked_fill(~visible & some, -torch.inf).masked_fill(~some, 0)
    return ACTIVATIONS[activation](logits).masked_fill(~visible, 0)


def masked_logits(
    problem: Problem, activation: str = "sigmoid", rows: tuple[int, int] | None = None
) -> tuple[Tensor, Tensor]:  # each (B, Hq, N, M)
    """Return the logits S, 0 where masked, and the mask of visible keys; of the rows rows[0] … rows[1] - 1 only."""
    p, visible = problem, visible_keys(problem, rows)
    if rows is not None:
        p = p._replace(mask_table=None, mask_tiles=None).rows(*rows)
    wide = torch.promote_types(p.query.dtype, torch.float32)
    if activation != "sigmoid" and p.bias is None:  # the paper's rule applies to the sigmoid only
        p = p._replace(bias=torch.zeros((), dtype=wide, device="cpu"))
    key = _repeat(p, _existing(p, p.key).to(wide))  # (B, Hq, M, D)
    positions = (p.query_offset, p.query_offset + p.query.shape[2])
    columns = (0, p.key.shape[2])
    logits = scale_of(p) * p.query.to(wide) @ key.transpose(-1, -2)
    visible = visible.expand(logits.shape)
    added = p.attn_mask if p.attn_mask is not None and p.attn_mask.is_floating_point() else None
    if p.softcap:  # mask before tanh, because the derivative of tanh at a masked NaN would be NaN
        logits = p.softcap * torch.tanh(logits.masked_fill(~visible, 0) / p.softcap)
    logits = logits + (p.bias_value() if p.bias is None else p.bias)  # a fake tensor has no number
    if p.alibi_slopes is not None:
        logits = logits + alibi(p.alibi_slopes, positions, columns, wide)
    if added is not None:
        logits = logits + added.to(wide).masked_fill(added == -torch.inf, 0)
    return logits.to(wide).masked_fill(~visible, 0), visible


def visible_keys(problem: Problem, rows: tuple[int, int] | None = None) -> Tensor:  # broadcastable to (B, Hq, N, M)
    """Return True where a query sees a key; for the rows rows[0] … rows[1] - 1 only."""
    p, mask = problem, problem.attn_mask
    start, stop = (0, p.query.shape[2]) if rows is None else rows
    columns = 0, p.key.shape[2]
    visible = band(p.left, p.right, (p.query_offset + start, p.query_offset + stop), columns, p.query.device)
    if p.key_lengths is not None:
        visible = visible & _exists(p)[:, None, None, :]
    if p.blocks is not None:
        visible = visible & p.blocks.dense(slice(start, stop), slice(*columns))
    if mask is not None:
        mask = mask if rows is None else select_rows(mask, slice(*rows))
        visible = visible & (mask != -torch.inf if mask.is_floating_point() else mask)
    return visible


def _exists(p: Problem) -> Tensor:  # (B, M)
    assert p.key_lengths is not None
    j = torch.arange(p.key.shape[2], device=p.key.device)
    return j < p.key_lengths.to(j.device).unsqueeze(-1)


def _existing(p: Problem, t: Tensor) -> Tensor:  # (B, Hkv, M, E)
    """Return keys or values with 0 beyond key_lengths, so that a NaN there has no effect."""
    return t if p.key_lengths is None else t.masked_fill(~_exists(p)[:, None, :, None], 0)


def _repeat(p: Problem, t: Tensor) -> Tensor:  # (B, Hkv, M, E) → (B, Hq, M, E)
    """Repeat each key head for every query head that shares it."""
    times = p.query.shape[1] // max(t.shape[1], 1)
    return t if times == 1 else t.repeat_interleave(times, dim=1)


def _drop(p: Problem, weights: Tensor) -> Tensor:
    if p.seed is None:
        return weights
    batch, heads, n, m = weights.shape
    at = (torch.arange(batch * heads, device=weights.device) + p.first_head).view(batch, heads)
    i, j = torch.arange(p.query_offset, p.query_offset + n, device=at.device), torch.arange(m, device=at.device)
    return weights * keep_mask(p.seed, at, i, j, p.dropout_p) * keep_scale(p.dropout_p)


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
