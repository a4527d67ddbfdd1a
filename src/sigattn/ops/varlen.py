"""Public operator ``sigmoid_varlen_attention``: packed sequences of different lengths."""

import torch
from torch import Tensor
from torch.overrides import has_torch_function

from sigattn.ops import blocked, llvm, reference, triton, validation
from sigattn.ops.custom_ops import Backend, Operator, record
from sigattn.ops.problem import VarlenProblem, cast_operands, make_problem
from sigattn.ops.settings import BACKENDS

_NAME = "sigmoid_varlen_attention"
_CALLERS = f"{_NAME} (flash_attn_varlen_func)"  # of the op, which does not know who calls


def with_checked_sequences(problem: VarlenProblem) -> VarlenProblem:
    """Return a problem with copies of its cu_seqlens; raise ValueError unless they and a mask fit.

    On a CPU, cu_seqlens must ascend from 0 and fit the rows; on an accelerator reading them would synchronise. Copies,
    because whoever shares the memory of the originals may change it before they are used; on an accelerator kernels use
    them in the order of the stream.
    """
    p = problem
    if p.cu_seqlens_q.device.type == "cpu":
        p = p._replace(cu_seqlens_q=p.cu_seqlens_q.clone(), cu_seqlens_k=p.cu_seqlens_k.clone())
    longest = (p.max_seqlen_q, p.max_seqlen_k)
    if p.attn_mask is not None and any(a not in (1, b) for a, b in zip(p.attn_mask.shape[2:], longest, strict=True)):
        raise ValueError(
            f"{_CALLERS}: attn_mask must be broadcastable to (B, Hq, longest query sequence, longest key sequence), "
            f"whose last two are {longest}; got {tuple(p.attn_mask.shape)}"
        )
    for side, starts, total, most in (
        ("q", p.cu_seqlens_q, p.query.shape[0], p.max_seqlen_q),
        ("k", p.cu_seqlens_k, p.key.shape[0], p.max_seqlen_k),
    ):
        if starts.device.type != "cpu":
            continue
        lengths = starts.diff()
        if starts[0] != 0 or (lengths < 0).any() or starts[-1] > total:
            raise ValueError(
                f"{_CALLERS}: cu_seqlens_{side} (cu_seq_{side}) must begin at 0, never descend and end at most "
                f"at {total}, the number of rows; got {starts.tolist()}"
            )
        if len(lengths) and lengths.max() > most:
            raise ValueError(
                f"{_CALLERS}: max_seqlen_{side} (max_{side}) is {most}, but the longest sequence has {lengths.max()} "
                "rows"
            )
    return p


def _formula_unavailable(_: VarlenProblem) -> str | None:
    if torch.compiler.is_compiling():
        return "it reads the lengths of sequences, which a compiled graph does not know"
    return None


VARLEN: Operator[VarlenProblem] = Operator(
    "varlen",
    _NAME,
    VarlenProblem,
    {
        "triton": Backend(triton.forward, triton.backward, triton.unavailable, device_type="cuda", prepares=True),
        "llvm": Backend(
            llvm.varlen_forward, llvm.varlen_backward, llvm.unavailable, can_be_default=llvm.can_be_default
        ),
        "blocked": Backend(blocked.varlen_forward, blocked.varlen_backward),
    },
    reference.varlen_attention,
    with_checked_sequences,
    lambda shapes: shapes.max_seqlen_k,  # an upper bound, because a counter does not know lengths
    formula_unavailable=_formula_unavailable,
)


def sigmoid_varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    enable_gqa: bool = False,
    is_causal: bool = False,
    bias: float | Tensor | None = None,
    attn_mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    softcap: float = 0.0,
    normalize: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Compute sigmoid attention of B sequences of different lengths, concatenated without padding (Sect. 2, Eq. 3).

    The first seven arguments are those of ``torch.nn.attention.varlen.varlen_attn``. Sequence s has the rows
    cu_seq[s] … cu_seq[s + 1] - 1 of query, and of key and value; it may be empty. Its last query is aligned with its
    last key. The output of queries without visible keys is 0; output and gradient of rows beyond the last sequence
    are 0.

    Args:
        query: (total_q, Hq, D).
        key: (total_k, Hkv, D).
        value: (total_k, Hkv, Dv).
        cu_seq_q, cu_seq_k: (B + 1,) integers on the query's device, from 0, not decreasing: the start of each sequence,
            and the end of the last. (On an accelerator the values are not checked, because reading them would
            synchronise.)
        max_q, max_k: lengths of the longest sequences; longer ones would be cut. Pass Python integers: reading a tensor
            on an accelerator synchronises.
        window: (left, right): the query aligned with key p attends to keys p - left … p + right; -1 is unlimited.
        is_causal: if True, a query attends to keys up to the one it is aligned with.
        bias: b, a number or a floating-point tensor broadcastable to (B, Hq, 1, 1), with gradient. None is the paper's
            rule (App. E), -log of each sequence's number of keys; 6 less with ``normalize``.
        attn_mask: bool (True = attend) or floating point (added to the logits, with gradient), broadcastable to (B, Hq,
            max_q, max_k): entry [s, h, i, j] is for query i and key j of sequence s, counted from its first. It
            combines with is_causal and window.
        scale, enable_gqa, alibi_slopes, dropout_p, softcap, normalize: as in ``sigmoid_attention``.
        backend: as in ``sigmoid_attention``.

    Returns:
        (total_q, Hq, Dv), in the query's order in memory, in the query's dtype (under autocast, in autocast's dtype).

    Raises:
        ValueError: shapes, devices or values that do not fit, or an unknown backend; the message restates the call.
        TypeError: an argument of the wrong type, or tensors of mixed or unsupported dtypes.
        RuntimeError: forward-mode differentiation through an explicit backend other than "reference".

    >>> query, key, value = torch.randn(3, 10, 4, 64).unbind()
    >>> cu_seq = torch.tensor([0, 3, 3, 10], dtype=torch.int32)
    >>> sigmoid_varlen_attention(query, key, value, cu_seq, cu_seq, 7, 7, is_causal=True).shape
    torch.Size([10, 4, 64])
    """
    if not isinstance(query, Tensor) and has_torch_function((query, key, value)):  # type: ignore[unreachable]
        return record(sigmoid_varlen_attention, locals())  # type: ignore[unreachable]
    arguments = (
        query, key, value, bias, attn_mask, alibi_slopes, cu_seq_q, cu_seq_k, dropout_p, max_q, max_k, scale, window,
        enable_gqa, is_causal, softcap, normalize, backend,
    )  # fmt: skip
    if (known := VARLEN.recall(arguments)) is not None:
        return VARLEN.run(*known)
    query, key, value = cast_operands(query, key, value)
    validation.operands(_NAME, validation.PACKED, enable_gqa=enable_gqa, query=query, key=key, value=value)
    validation.sequence_offsets(_NAME, query, cu_seq_q=cu_seq_q, cu_seq_k=cu_seq_k)
    max_q, max_k = validation.count(_NAME, "max_q", max_q), validation.count(_NAME, "max_k", max_k)
    batch, heads = cu_seq_q.shape[0] - 1, query.shape[1]
    options = validation.options(
        _NAME, query, (batch, heads, 1, 1), mask_target(batch, heads, max_q, max_k), "(B, Hq, max_q, max_k)",
        attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale, bias=bias, window=window,
        alibi_slopes=alibi_slopes, softcap=softcap, normalize=normalize,
    )  # fmt: skip
    validation.choice(_NAME, "backend", backend, BACKENDS)
    problem = make_problem(
        VarlenProblem, query, key, value, cu_seqlens_q=cu_seq_q, cu_seqlens_k=cu_seq_k, max_seqlen_q=max_q,
        max_seqlen_k=max_k, **options,
    )  # fmt: skip
    return VARLEN(problem, backend, arguments)


def mask_target(batch: int, heads: int, max_q: int, max_k: int) -> tuple[int | None, ...]:
    """Return the shape that a mask broadcasts to; None for a symbolic length, which the op checks."""
    return (batch, heads, *(n if isinstance(n, int) else None for n in (max_q, max_k)))
