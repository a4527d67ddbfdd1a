"""Public operator ``sigmoid_attention``: checks the arguments, brings them to canonical form and selects a backend."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sigattn.ops import block_mask, broadcasting, custom_ops, mask, nested, reference, settings, validation, varlen
from sigattn.ops.block_mask import Blocks
from sigattn.ops.cpu import short
from sigattn.ops.problem import UNLIMITED, Problem, VarlenProblem

BACKENDS = ("reference", *custom_ops.KERNELS)


def sigmoid_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    bias: float | Tensor | None = None,
    window: tuple[int, int] | None = None,
    alibi_slopes: Tensor | None = None,
    key_lengths: Tensor | None = None,
    softcap: float = 0.0,
    backend: str | None = None,
) -> Tensor:
    """Compute sigmoid attention ``O = σ(scale · Q Kᵀ + b) V``, without row normalisation (Sect. 2, Eq. 3).

    The signature extends that of ``torch.nn.functional.scaled_dot_product_attention``. Masks combine: a key is visible
    to a query if ``attn_mask``, ``is_causal``, ``window`` and ``key_lengths`` all allow it. The weight of a key that is
    not visible is exactly 0, so a query without visible keys has output 0 and gradient 0.

    Args:
        query: (B, Hq, N, D).
        key: (B, Hkv, M, D).
        value: (B, Hkv, M, Dv). As in PyTorch's function, query, key and value may have any number of dimensions from
            two on, and the dimensions before the last two broadcast. B below stands for all dimensions before the
            heads. Also nested tensors of the jagged layout, (B, H, ragged, D), as in PyTorch's function; these do not
            support attn_mask and key_lengths.
        attn_mask: bool (True = attend) or floating point (added to the logits), broadcastable to (B, Hq, N, M); or a
            ``torch.nn.attention.bias.CausalBias``; or a ``BlockMask`` of ``torch.nn.attention.flex_attention``, whose
            masked blocks are not computed.
        dropout_p: probability in [0, 1) of dropping a weight; the others are multiplied by 1 / (1 - dropout_p). Applied
            whenever it is not 0, so pass 0 in evaluation. The seed is drawn from PyTorch's generator of the query's
            device (``torch.manual_seed``).
        is_causal: if True, query i attends to keys j ≤ i, also if N and M differ (aligned to the top left, as in
            PyTorch's function).
        scale: factor of Q Kᵀ; None for D^-1/2.
        enable_gqa: allow fewer key/value heads than query heads, Hq a multiple of Hkv; query head h uses key head
            h // (Hq / Hkv). Key and value may then differ in their numbers of heads.
        bias: b, a number or a floating-point tensor broadcastable to (B, Hq, N, 1), with gradient. None is the paper's
            rule -log M (App. E), or -log of each sample's number of keys with ``key_lengths``. With a KV cache, M
            grows from call to call: pass the number that the model was trained with.
        window: (left, right): query i attends to keys i - left ≤ j ≤ i + right; -1 is unlimited.
        alibi_slopes: slopes of the term -slope · |i - j| added to the logits: (Hq,), (B, Hq), or (B or 1, Hq, 2) with
            one slope for keys before the query (j < i) and one for keys after it. With gradient.
        key_lengths: (B,) integers in 0…M, the number of keys of each padded sample. Keys and values beyond are ignored,
            also if they are NaN, and their gradient is 0. (On an accelerator the range is not checked, because reading
            it would synchronise.)
        softcap: c > 0 caps the scaled product before bias, ALiBi and mask are added: the logits are
            c · tanh(scale · Q Kᵀ / c) + b + …, as in flash-attn. 0 for no cap.
        backend: "reference" (materialises the weights; supports forward-mode and second derivatives), "blocked" (memory
            linear in the length; any device) or "triton" (GPU kernels, memory linear in the length: float16, bfloat16
            and float32, head_dim up to 256); None for the fastest that supports the call.

    Returns:
        (B, Hq, N, Dv), the dimensions before the last two broadcast, in the query's dtype (under autocast, in
        autocast's dtype). Contiguous; from the GPU kernels in the memory order of the query, so that the following
        projection needs no copy.

    Raises:
        ValueError: shapes, devices or values that do not fit, or an unknown backend; the message restates the call.
        TypeError: an argument of the wrong type, or tensors of mixed or unsupported dtypes.
        RuntimeError: forward-mode or second differentiation through a backend other than "reference".

    >>> query, key, value = torch.randn(3, 2, 4, 128, 64).unbind()
    >>> sigmoid_attention(query, key, value, is_causal=True).shape
    torch.Size([2, 4, 128, 64])
    """
    blocks = None
    if block_mask.is_block_mask(attn_mask):
        attn_mask, blocks = None, block_mask.resolve(attn_mask, query, key)
    attn_mask, is_causal, window = mask.resolve(attn_mask, is_causal, window, query, key)
    unusual = attn_mask, blocks, window, alibi_slopes, key_lengths, backend
    if all(x is None for x in unusual) and dropout_p == softcap == 0.0 and not isinstance(bias, Tensor):
        plain = short.fast_path(query, key, value, is_causal, scale, bias)
        if plain is not None:
            return plain
    if isinstance(query, Tensor) and custom_ops.is_autocast_enabled(query.device.type):
        query, key, value = (autocast(t) for t in (query, key, value))
    if nested.is_nested(query, key, value):
        return _on_nested(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, bias, window, alibi_slopes,
            key_lengths, softcap, backend,
        )  # fmt: skip
    shape = None
    if broadcasting.is_needed(query, key, value, enable_gqa):
        batched = broadcasting.flatten(query, key, value, attn_mask, bias, alibi_slopes, key_lengths, enable_gqa)
        query, key, value, attn_mask, bias, alibi_slopes, key_lengths, shape = batched
        enable_gqa = True
    validation.operands(query, key, value, enable_gqa)
    dropout_p, scale, window = validation.options(
        query, key, attn_mask, dropout_p, bias, window, alibi_slopes, key_lengths, scale
    )
    softcap = validation.softcap(softcap)
    validation.choice("backend", backend, BACKENDS)
    problem = canonical(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        bias,
        window,
        alibi_slopes,
        key_lengths,
        softcap=softcap,
        blocks=blocks,
    )
    if backend == "reference":
        out = _on_reference(problem)
    else:
        out = custom_ops.call(problem, custom_ops.choose(problem, backend))
    return out if shape is None else out.reshape(shape)


def _on_nested(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    bias: float | Tensor | None,
    window: tuple[int, int] | None,
    alibi_slopes: Tensor | None,
    key_lengths: Tensor | None,
    softcap: float,
    backend: str | None,
) -> Tensor:
    """Compute the attention of nested tensors; arguments as in ``sigmoid_attention``."""
    nested.refuse(attn_mask, key_lengths)
    nested.check(query, key, value, enable_gqa)
    validation.choice("backend", backend, BACKENDS)
    if nested.has_ragged_batch(query):
        out = sigmoid_attention(
            query.values(), key.values(), value.values(), None, dropout_p, is_causal, scale, enable_gqa,
            bias=bias, window=window, alibi_slopes=alibi_slopes, softcap=softcap, backend=backend,
        )  # fmt: skip
        return nested.like_transposed(query, out)
    if backend == "reference":
        raise ValueError('sigmoid_attention: backend="reference" does not support nested tensors: unbind() them')
    parts = nested.pack(query, key, value)
    batch, heads = len(query), query.shape[1]
    bias = validation.bias_of_sequences(bias, query, batch, heads)
    dropout_p, scale, window = validation.numbers("sigmoid_attention", dropout_p, scale, window)
    softcap = validation.softcap(softcap)
    if alibi_slopes is not None:
        validation.slopes(alibi_slopes, parts.query, batch, heads)
    left, right = sides(window, is_causal)
    positions = left != UNLIMITED or right != UNLIMITED or alibi_slopes is not None
    if positions and not nested.has_equal_lengths(query, key):
        raise ValueError(
            "sigmoid_attention: is_causal, window and alibi_slopes need nested query and key of the same lengths: make "
            "both with the same offsets tensor, or use sigattn.flash.flash_attn_varlen_func, which aligns their ends"
        )
    problem = VarlenProblem(
        *parts[:3],
        bias_operand(bias, query, 2),
        None,
        None if alibi_slopes is None else two_sided(alibi_slopes),
        *parts[3:5],
        new_seed(dropout_p, query.device),
        *parts[5:],
        scale=scale,
        left=left,
        right=right,
        dropout_p=dropout_p,
        fast=settings.is_fast(None),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        softcap=softcap,
    )
    return nested.like(query, varlen.call(problem, custom_ops.choose(problem, backend)))


def canonical(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    bias: float | Tensor | None = None,
    window: tuple[int, int] | None = None,
    alibi_slopes: Tensor | None = None,
    key_lengths: Tensor | None = None,
    query_offset: int = 0,
    fast: bool | None = None,
    deterministic: bool | None = None,
    softcap: float = 0.0,
    blocks: Blocks | None = None,
) -> Problem:
    """Bring checked arguments to the canonical form of the backends.

    Defaults that depend on a size (scale, bias) stay None and are computed inside the op, where sizes are numbers, so
    that a graph compiled for any length does not specialise on one.
    """
    left, right = sides(window, is_causal)
    return Problem(
        query,
        key,
        value,
        bias_operand(bias, query),
        None if attn_mask is None else four_dimensional(attn_mask),
        None if alibi_slopes is None else two_sided(alibi_slopes),
        key_lengths,
        new_seed(dropout_p, query.device),
        None if blocks is None else blocks.table,
        None if blocks is None else blocks.tiles,
        scale,
        left,
        right,
        dropout_p,
        query_offset,
        settings.is_fast(None) if fast is None else fast,
        torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic,
        softcap,
    )


def sides(window: tuple[int, int] | None, is_causal: bool) -> tuple[int, int]:
    """Return the window (left, right) that combines ``window`` and ``is_causal``."""
    left, right = window if window is not None else (UNLIMITED, UNLIMITED)
    if is_causal:
        right = 0 if right == UNLIMITED else min(right, 0)
    return left, right


def new_seed(dropout_p: float, device: torch.device) -> Tensor | None:
    """Return the seed of a call's dropout, drawn from PyTorch's generator of a device; None without dropout."""
    return torch.randint(1 << 62, (), dtype=torch.int64, device=device) if dropout_p else None


def _on_reference(problem: Problem) -> Tensor:
    if torch._C._is_tracing():
        raise RuntimeError(
            'sigmoid_attention: torch.jit.trace would record backend="reference" for the lengths traced only; use '
            "another backend, which is recorded for all lengths"
        )
    if not torch.compiler.is_compiling():
        custom_ops.check_lengths(problem)
    with custom_ops.without_autocast(problem):
        return reference.attention(problem)


def autocast(t: Tensor) -> Tensor:
    """Return t in the dtype to which autocast casts the operands of a matrix product."""
    if isinstance(t, Tensor) and t.is_floating_point() and t.dtype is not torch.float64:
        return t.to(torch.get_autocast_dtype(t.device.type))
    return t


def bias_operand(bias: Any, query: Tensor, dimensions: int = 4) -> Tensor | None:
    """Return the bias as an operand of the ops.

    Args:
        bias: None, a tensor, or a number, which becomes a 0-d tensor on the CPU, so that backends read it without
            synchronising.
        query: the query. In a graph compiled for a device other than the CPU, a number becomes a tensor on the query's
            device, because a CUDA graph would replay the number it was recorded with; in float32, or the query's dtype
            if that is wider.
        dimensions: number of dimensions of that tensor, and least number of dimensions of a tensor that is passed.
    """
    if bias is None:
        return None
    if isinstance(bias, Tensor):
        return bias if bias.dim() >= dimensions else bias[(None,) * (dimensions - bias.dim())]
    if not isinstance(bias, (float, int, torch.SymFloat, torch.SymInt)):  # another library's number
        bias = float(bias)
    if not torch.compiler.is_compiling():
        return torch.tensor(bias, dtype=torch.float64, device="cpu")
    # a sum, because the compiler keeps a number symbolic in a sum
    if query.device.type == "cpu":
        return torch.zeros((), dtype=torch.float64, device="cpu") + bias
    dtype = torch.promote_types(query.dtype, torch.float32)
    return torch.zeros((1,) * dimensions, dtype=dtype, device=query.device) + bias


def four_dimensional(t: Tensor) -> Tensor:
    """Return t with leading dimensions of size 1, four in all."""
    return t if t.dim() == 4 else t[(None,) * (4 - t.dim())]


def two_sided(slopes: Tensor) -> Tensor:  # (B or 1, Hq, 2)
    """Return slopes of any allowed shape as one slope for keys before the query and one for keys after it."""
    if slopes.dim() == 3:
        return slopes
    slopes = slopes if slopes.dim() == 2 else slopes.unsqueeze(0)
    return slopes.unsqueeze(-1).expand(*slopes.shape, 2)
