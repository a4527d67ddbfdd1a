"""Statistics of an attention layer: row mass, output norm, largest logit, sparsity (Sect. 5, App. G.5)."""

from typing import NamedTuple

import torch
from torch import Tensor

from sigattn.ops import mask, reference, validation
from sigattn.ops.attention import with_checked_lengths
from sigattn.ops.problem import Problem, make_problem
from sigattn.ops.settings import without_autocast

_NAME = "attention_statistics"


class AttentionStatistics(NamedTuple):
    """Statistics of the weights P and the output O = P V of each head, over its N queries. Each is (B, Hq), float32.

    Attributes:
        row_mass_mean, row_mass_min, row_mass_max: mean, minimum and maximum over queries of Σ_j P_ij. About 1 with
            b = -log n at initialisation; always 1 with softmax, and with ``normalize``.
        output_norm: the Frobenius norm ‖P V‖ (the "attention norm" of the paper's Figs. 3-6).
        max_logit: the largest logit that is not masked; -inf if there is none.
        hoyer_sparsity: the mean over queries of (√n - Σ|P| / √(Σ P²)) / (√n - 1) for n visible keys: 0 if all weights
            are equal, 1 if only one is not zero. Queries with fewer than two visible keys, or whose weights are all 0,
            are excluded; NaN if no query remains.
    """

    row_mass_mean: Tensor
    row_mass_min: Tensor
    row_mass_max: Tensor
    output_norm: Tensor
    max_logit: Tensor
    hoyer_sparsity: Tensor


@torch.no_grad()
def attention_statistics(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False, *, bias: float | Tensor | None = None,
    window: tuple[int, int] | None = None, alibi_slopes: Tensor | None = None, key_lengths: Tensor | None = None,
    softcap: float = 0.0, normalize: bool = False, activation: str = "sigmoid",
) -> AttentionStatistics:  # fmt: skip
    """Compute statistics of attention weights and outputs, in memory linear in the length, without gradient.

    Args:
        query, key, value, attn_mask, is_causal, scale, enable_gqa, bias, window, alibi_slopes, key_lengths, softcap: as
            in ``sigmoid_attention``, with four dimensions and one batch size, and attn_mask not a ``BlockMask``. The
            weights are those before dropout.
        normalize: as in ``sigmoid_attention``; for "sigmoid" only.
        activation: "sigmoid", or for comparison "softmax", "relu", "relu2", "gelu", "tanh" or "identity", for which
            bias=None is 0.

    Returns:
        An ``AttentionStatistics`` of (B, Hq) tensors.

    Raises:
        ValueError, TypeError: as in ``sigmoid_attention``; ValueError for an unknown activation, or N = 0.

    >>> query, key, value = torch.randn(3, 2, 4, 128, 64).unbind()
    >>> attention_statistics(query, key, value).row_mass_mean.shape
    torch.Size([2, 4])
    """
    attn_mask, is_causal, window = mask.resolve(_NAME, attn_mask, is_causal, window, query, key)
    validation.operands(_NAME, validation.HEADS_FIRST, enable_gqa=enable_gqa, query=query, key=key, value=value)
    batch, heads, n, _ = query.shape
    options = validation.options(
        _NAME, query, (batch, heads, n, 1), (batch, heads, n, key.shape[2]), key=key, attn_mask=attn_mask,
        is_causal=is_causal, scale=scale, bias=bias, window=window, alibi_slopes=alibi_slopes, key_lengths=key_lengths,
        softcap=softcap, normalize=normalize,
    )  # fmt: skip
    validation.choice(_NAME, "activation", activation, tuple(reference.ACTIVATIONS), optional=False)
    if normalize and activation != "sigmoid":
        raise ValueError(f'{_NAME}: normalize=True needs activation="sigmoid", got {activation!r}')
    if n == 0:
        raise ValueError(f"{_NAME}: there must be at least one query; got {validation.describe(query=query, key=key)}")
    problem = with_checked_lengths(make_problem(Problem, query, key, value, **options), _NAME)
    with without_autocast(query.device.type):
        parts = [_of_rows(problem.rows(i, stop), activation) for i, stop in reference.row_blocks(problem)]
    mass, square, largest, hoyer, counted = (torch.cat(p, dim=-1) for p in zip(*parts, strict=True))  # each (B, Hq, N)
    return AttentionStatistics(
        row_mass_mean=mass.mean(-1),
        row_mass_min=mass.amin(-1),
        row_mass_max=mass.amax(-1),
        output_norm=square.sum(-1).sqrt(),
        max_logit=largest.amax(-1),
        hoyer_sparsity=hoyer.sum(-1) / counted.sum(-1),
    )


def _of_rows(problem: Problem, activation: str) -> tuple[Tensor, ...]:
    """Return row mass, ‖O‖², largest logit, Hoyer sparsity (0 if undefined) and 1 if that is defined, per query."""
    logits, visible = reference.masked_logits(problem, activation)  # (B, Hq, R, M)
    weights = reference.weights_of(logits, visible, activation, problem.normalize)
    out = reference.combine(problem, weights)  # (B, Hq, R, Dv)
    n = visible.sum(-1)
    norm = weights.square().sum(-1).sqrt()
    root = n.to(norm.dtype).sqrt()  # of integers, sqrt has torch's default dtype
    defined = (n > 1) & (norm > 0)
    hoyer = (root - weights.abs().sum(-1) / norm) / (root - 1)
    if logits.shape[-1] == 0:
        largest = torch.full_like(norm, -torch.inf)
    else:
        largest = logits.masked_fill(~visible, -torch.inf).amax(-1)
    square = out.square().sum(-1)
    result = (weights.sum(-1), square, largest, hoyer.masked_fill(~defined, 0), defined)
    return tuple(t.to(torch.float32) for t in result)
