"""Validation of the arguments of ``sigattn.flash``, and their conversion for the operators."""

from typing import Any

from torch import Tensor

from sigattn.ops import scalars, settings, validation
from sigattn.ops.validation import raise_error


def options(
    caller: str, q: Tensor, batch: int, dropout_p: Any, softmax_scale: Any, causal: Any, window_size: Any, softcap: Any,
    alibi_slopes: Any, deterministic: Any, sigmoid_bias: Any, sigmoid_precision: str | None, backend: Any,
    normalize: Any, queries: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return the options of a call as arguments of ``ops.problem.make_problem``; raise unless they fit q.

    batch: number of samples or sequences. queries: number of entries of a bias along queries; None if it has none.
    """
    dropout_p, scale, window, softcap = validation.numbers(
        caller, dropout_p, softmax_scale, window_size, softcap, scale_name="softmax_scale", window_name="window_size"
    )
    validation.flag(caller, "causal", causal)
    validation.flag(caller, "deterministic", deterministic)
    validation.flag(caller, "normalize", normalize)
    validation.choice(caller, "backend", backend, settings.BACKENDS)
    if alibi_slopes is not None:
        validation.slopes(caller, alibi_slopes, q, batch, q.shape[-2], two_sided=False, query_name="q")
    b = None if sigmoid_bias is None else bias(caller, sigmoid_bias, q, batch, queries)
    return {
        "dropout_p": dropout_p, "scale": scale, "is_causal": causal, "window": window, "softcap": softcap,
        "alibi_slopes": alibi_slopes, "deterministic": deterministic, "bias": b, "precision": sigmoid_precision,
        "normalize": normalize,
    }  # fmt: skip


def refuse_weights(caller: str, return_attn_probs: bool) -> None:
    """Raise ValueError if the weights or their row sums are requested."""
    if return_attn_probs:
        raise ValueError(
            f"{caller}: return_attn_probs=True is not supported: a sigmoid has no log-sum-exp, and the weights are "
            "never stored; see sigattn.attention_statistics"
        )


def cache(caller: str, q: Any, k_cache: Any, v_cache: Any, k: Any, v: Any, batch_idx: Any, table: Any) -> Any:
    """Return the table of pages, None if sample b has cache b; raise unless q (B, N, Hq, D) and the cache fit."""
    if batch_idx is not None and table is not None:
        raise_error(caller, ValueError, "cache_batch_idx and block_table exclude each other: pass one of them",
              cache_batch_idx=batch_idx, block_table=table)  # fmt: skip
    if batch_idx is not None:
        shape = (q.shape[0],) if isinstance(q, Tensor) and q.dim() else (None,)
        device = q.device if isinstance(q, Tensor) else None
        validation.integers(caller, "cache_batch_idx", batch_idx, shape, "(B,)", device)
        table = batch_idx.unsqueeze(1)
    validation.cache(caller, q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v, block_table=table)
    return table


def pages(caller: str, q: Tensor, k: Tensor, v: Tensor, table: Any, batch: int) -> None:
    """Raise unless k (pages, page_size, Hkv, D), v (pages, page_size, Hkv, Dv) and block_table (B, …) fit together."""
    if not k.dim() == v.dim() == 4 or k.shape[:3] != v.shape[:3]:
        message = "with block_table, k and v must be (pages, page_size, heads, head_dim), alike but for head_dim"
        raise_error(caller, ValueError, message, k=k, v=v, block_table=table)
    validation.integers(caller, "block_table", table, (batch, None), "(B, pages of each)", q.device)


def rotary(caller: str, cos: Any, sin: Any, q: Tensor, k: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return k, cos and sin; raise unless the tables are (positions, rotary_dim / 2), with rotary_dim ≤ head_dim."""
    rotary = {"rotary_cos": cos, "rotary_sin": sin}
    if k is None:
        raise_error(caller, ValueError, "rotary_cos and rotary_sin apply to new keys: pass k and v as well", **rotary)
    if not isinstance(cos, Tensor) or not isinstance(sin, Tensor) or not cos.is_floating_point():
        raise_error(caller, TypeError, "rotary_cos and rotary_sin must be floating-point tensors", **rotary)
    if cos.dim() != 2 or cos.shape != sin.shape or 2 * cos.shape[1] > q.shape[-1] or not cos.shape[1]:
        message = "rotary_cos and rotary_sin must be (positions, rotary_dim / 2), rotary_dim at most head_dim"
        raise_error(caller, ValueError, message, q=q, **rotary)
    for name, t in rotary.items():
        validation.same_device(caller, name, t, q, "q")
    return k, cos, sin


def packed_together(caller: str, name: str, t: Any, dimensions: int, parts: int) -> tuple[Tensor, ...]:
    """Return the parts of (…, parts, heads, head_dim), unbound along the third dimension from the end."""
    if not isinstance(t, Tensor):
        raise_error(caller, TypeError, f"{name} must be a tensor", **{name: t})
    if t.dim() != dimensions or t.shape[-3] != parts:
        shape = "(batch, length, " if dimensions == 5 else "(total, "
        raise_error(caller, ValueError, f"{name} must be {shape}{parts}, heads, head_dim)", **{name: t})
    return t.unbind(-3)


def bias(caller: str, b: Any, q: Tensor, batch: int, queries: int | None = None) -> float | Tensor:
    """Return b as the operators take it, a number or (B or 1, Hq or 1, N or 1, 1); raise for another shape or type.

    It must be a number or a tensor (), (B,), (B or 1, Hq or 1) or, with ``queries``, one for each query.
    """
    heads = q.shape[-2]
    if not isinstance(b, Tensor):
        return scalars.real(caller, "sigmoid_bias, if not a tensor,", b)
    if not b.is_floating_point():
        raise_error(caller, TypeError, "sigmoid_bias must be floating point", sigmoid_bias=b)
    full = (batch, heads) if queries is None or b.dim() < 3 else (batch, heads, queries)
    broadcasts = b.dim() == len(full) and validation.broadcasts(b.shape, full)
    if b.dim() and tuple(b.shape) != (batch,) and not broadcasts:
        message = f"sigmoid_bias must be (), (B,) = ({batch},) or (B or 1, Hq or 1) = ({batch} or 1, {heads} or 1)"
        if queries is not None:
            message += f" or (B or 1, Hq or 1, N or 1) = ({batch} or 1, {heads} or 1, {queries} or 1)"
        raise_error(caller, ValueError, message, sigmoid_bias=b)
    validation.same_device(caller, "sigmoid_bias", b, q, "q")
    return b.reshape({0: (1, 1, 1, 1), 1: (-1, 1, 1, 1), 2: (*b.shape, 1, 1), 3: (*b.shape, 1)}[b.dim()])
