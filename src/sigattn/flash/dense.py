"""``flash_attn_func`` and its packed forms: a batch of sequences of one length (``sigattn.flash``)."""

from torch import Tensor

from sigattn.flash import validation as flash_validation
from sigattn.ops import block_mask, validation
from sigattn.ops.attention import DENSE
from sigattn.ops.problem import Problem, cast_operands, make_problem

_NAME = "flash_attn_func"


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, sigmoid_bias: float | Tensor | None = None,
    sigmoid_precision: str | None = None, backend: str | None = None, attn_mask: Tensor | None = None,
    normalize: bool = False,
) -> Tensor:  # fmt: skip
    """Compute sigmoid attention of a batch of sequences of one length.

    Args:
        q: (B, N, Hq, D).
        k: (B, M, Hkv, D), Hq a multiple of Hkv.
        v: (B, M, Hkv, Dv).
        dropout_p: probability in [0, 1) of dropping a weight; pass 0 when not training.
        softmax_scale: factor of Q Kᵀ (the name is flash-attn's); None for D^-1/2.
        causal: query i sees keys j ≤ i + M - N.
        window_size: (left, right): query i sees keys i + M - N - left … i + M - N + right; -1 is unlimited.
        softcap: c > 0 caps the scaled product, c · tanh(softmax_scale · Q Kᵀ / c), before ALiBi and sigmoid_bias are
            added, as in flash-attn; 0 for no cap.
        alibi_slopes: (Hq,) or (B, Hq): ``slope · |i + M - N - j|`` is subtracted from the logits. With gradient.
        deterministic: True for a backward pass that repeats bitwise, as with ``torch.use_deterministic_algorithms``.
        return_attn_probs: must be False.
        sigmoid_bias, sigmoid_precision, backend, normalize: see ``sigattn.flash``.
        attn_mask: bool (True = attend) or floating point (added to the logits, with gradient), broadcastable to
            (B, Hq, N, M), or a ``BlockMask`` of FlexAttention. It combines with causal and window_size.

    Returns:
        Attention output, (B, N, Hq, Dv), contiguous, in q's dtype.

    Raises:
        ValueError: shapes, devices or values that do not fit, or an argument that is not supported.
        TypeError: an argument of the wrong type, or tensors of mixed or unsupported dtypes.

    >>> q, k, v = torch.randn(3, 2, 128, 4, 64).unbind()
    >>> flash_attn_func(q, k, v, causal=True).shape
    torch.Size([2, 128, 4, 64])
    """
    flash_validation.refuse_weights(_NAME, return_attn_probs)
    validation.operands(_NAME, validation.ROWS_FIRST, q=q, k=k, v=v)
    (batch, n, heads, _), m = q.shape, k.shape[1]
    options = flash_validation.options(
        _NAME, q, batch, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        sigmoid_bias, sigmoid_precision, backend, normalize,
    )  # fmt: skip
    query, key, value = (t.transpose(1, 2) for t in cast_operands(q, k, v))
    if block_mask.is_block_mask(attn_mask):
        options |= block_mask.resolve(attn_mask, query, key, value, _NAME)
        attn_mask = None
    if attn_mask is not None:
        validation.mask(_NAME, attn_mask, q, (batch, heads, n, m), query_name="q")
    problem = make_problem(Problem, query, key, value, attn_mask=attn_mask, query_offset=m - n, **options)
    return DENSE(problem, backend).transpose(1, 2).contiguous()


def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, sigmoid_bias: float | Tensor | None = None,
    sigmoid_precision: str | None = None, backend: str | None = None, attn_mask: Tensor | None = None,
    normalize: bool = False,
) -> Tensor:  # fmt: skip
    """Compute ``flash_attn_func`` of qkv, (B, N, 3, H, D)."""
    q, k, v = flash_validation.packed_together("flash_attn_qkvpacked_func", "qkv", qkv, 5, 3)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs, sigmoid_bias, sigmoid_precision, backend, attn_mask, normalize,
    )  # fmt: skip


def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, sigmoid_bias: float | Tensor | None = None,
    sigmoid_precision: str | None = None, backend: str | None = None, attn_mask: Tensor | None = None,
    normalize: bool = False,
) -> Tensor:  # fmt: skip
    """Compute ``flash_attn_func`` of q, (B, N, Hq, D), and kv, (B, M, 2, Hkv, D)."""
    k, v = flash_validation.packed_together("flash_attn_kvpacked_func", "kv", kv, 5, 2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs, sigmoid_bias, sigmoid_precision, backend, attn_mask, normalize,
    )  # fmt: skip
