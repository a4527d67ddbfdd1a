"""Public operator ``sigmoid_attention``: validates the arguments, makes a problem of them, and calls its op."""

from typing import Any

from torch import Tensor
from torch.overrides import has_torch_function

from sigattn.ops import block_mask, blocked, broadcasting, llvm, mask, nested, reference, triton, validation, vmap
from sigattn.ops.custom_ops import Backend, Operator, has_values, record
from sigattn.ops.problem import Problem, VarlenProblem, cast_operands, make_problem
from sigattn.ops.settings import BACKENDS
from sigattn.ops.varlen import VARLEN

_NAME = "sigmoid_attention"


def with_checked_lengths(problem: Problem, caller: str = _NAME) -> Problem:
    """Return a problem with a copy of its key_lengths; raise ValueError unless they lie in 0…M.

    A copy, because whoever shares the memory of the original may change it before a kernel reads it. Lengths and query
    on an accelerator are not checked: its kernels limit them to M. Lengths of ``torch.vmap`` are checked by slices.
    """
    lengths, m = problem.key_lengths, problem.key.shape[2]
    if lengths is not None and problem.query.device.type == "cpu":
        lengths = lengths.cpu()  # whose kernels read them
    if lengths is None or not has_values(lengths):
        return problem
    lengths = lengths.clone()
    values = lengths.tolist()
    if values and (min(values) < 0 or max(values) > m):
        raise ValueError(f"{caller}: key_lengths must lie in 0…{m} (key has {m} keys), got {values}")
    return problem._replace(key_lengths=lengths)


DENSE: Operator[Problem] = Operator(
    "dense",
    _NAME,
    Problem,
    {
        "triton": Backend(triton.forward, triton.backward, triton.unavailable, device_type="cuda", prepares=True),
        "llvm": Backend(
            llvm.forward,
            llvm.backward,
            llvm.unavailable,
            llvm.saved_weights,
            can_be_default=llvm.can_be_default,
            prepares=True,
        ),
        "blocked": Backend(blocked.forward, blocked.backward, saved_weights=blocked.saved_weights),
    },
    reference.attention,
    with_checked_lengths,
    lambda shapes: shapes.key[2],
    traced_formula=reference.traced_attention,
    vmap_rules=(vmap.dense_forward, vmap.dense_backward),
)


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
    query_offset: int = 0,
    alibi_slopes: Tensor | None = None,
    key_lengths: Tensor | None = None,
    softcap: float = 0.0,
    normalize: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Compute sigmoid attention ``O = σ(scale · Q Kᵀ + b) V`` (Sect. 2, Eq. 3).

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
            rule -log M (App. E), or -log of each sample's number of keys with ``key_lengths``; 6 less with
            ``normalize``. With a KV cache, M grows from call to call: pass the number that the model was trained with.
        window: (left, right): query i attends to keys i - left ≤ j ≤ i + right; -1 is unlimited.
        query_offset: position of the first query relative to the keys, by which ``is_causal``, ``window`` and
            ``alibi_slopes`` count: query i is at i + query_offset. M - N aligns the last query with the last key.
        alibi_slopes: slopes of the term ``-slope · |i - j|`` added to the logits: (Hq,), (B, Hq), or (B or 1, Hq, 2)
            with one slope for keys before the query (j < i) and one for keys after it. With gradient.
        key_lengths: (B,) integers in 0…M, the number of keys of each padded sample. Keys and values beyond are ignored,
            also if they are NaN, and their gradient is 0. (On an accelerator the range is not checked, because reading
            it would synchronise.)
        softcap: c > 0 caps the scaled product before bias, ALiBi and mask are added: the logits are
            c · tanh(scale · Q Kᵀ / c) + b + …, as in flash-attn. 0 for no cap.
        normalize: if True, the weights of each row are divided by their sum (before dropout), as softmax's are. The
            result is finite and accurate for every logit; as b falls, it becomes softmax attention.
        backend: "reference" (materialises the weights; supports forward-mode derivatives), "blocked" (memory linear in
            the length; any device), "triton" (GPU kernels, memory linear in the length: float16, bfloat16 and float32,
            head_dim up to 256) or "llvm" (CPU kernels that llvmlite compiles, float32 and bfloat16, without softcap and
            the gradient of attn_mask); None for that of the context ``sigattn.backend``, or else the fastest of the
            others that supports the call. Second derivatives exist with every backend, and materialise the weights.

    Returns:
        (B, Hq, N, Dv), the dimensions before the last two broadcast, in the query's dtype (under autocast, in
        autocast's dtype). Batch, heads and rows have the query's order in memory, so that the following projection
        needs no copy: the output of a contiguous query is contiguous.

    Raises:
        ValueError: shapes, devices or values that do not fit, or an unknown backend; the message restates the call.
        TypeError: an argument of the wrong type, or tensors of mixed or unsupported dtypes.
        RuntimeError: forward-mode differentiation through an explicit backend other than "reference".

    >>> query, key, value = torch.randn(3, 2, 4, 128, 64).unbind()
    >>> sigmoid_attention(query, key, value, is_causal=True).shape
    torch.Size([2, 4, 128, 64])
    """
    if not isinstance(query, Tensor) and has_torch_function((query, key, value)):  # type: ignore[unreachable]
        return record(sigmoid_attention, locals())  # type: ignore[unreachable]
    arguments = (
        query, key, value, bias, attn_mask, alibi_slopes, key_lengths, dropout_p, None, None, is_causal, scale,
        enable_gqa, window, query_offset, softcap, normalize, backend,
    )  # fmt: skip
    if (known := DENSE.recall(arguments)) is not None:
        return DENSE.run(*known)
    blocks: dict[str, Any] = {}
    if attn_mask is not None:
        if block_mask.is_block_mask(attn_mask):
            attn_mask, blocks = None, block_mask.resolve(attn_mask, query, key, value)
        attn_mask, is_causal, window = mask.resolve(_NAME, attn_mask, is_causal, window, query, key, query_offset)
    validation.flag(_NAME, "enable_gqa", enable_gqa)
    query, key, value = cast_operands(query, key, value)
    if any(isinstance(t, Tensor) and t.is_nested for t in (query, key, value)):
        nested.check(query, key, value, attn_mask, key_lengths, query_offset)
        return _on_nested(
            query, key, value, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa, bias=bias,
            window=window, alibi_slopes=alibi_slopes, softcap=softcap, normalize=normalize, backend=backend,
        )  # fmt: skip
    query, key, value, attn_mask, bias, alibi_slopes, key_lengths, shape = broadcasting.flatten(
        query, key, value, attn_mask, bias, alibi_slopes, key_lengths, enable_gqa
    )
    batch, heads, n, _ = query.shape
    options = validation.options(
        _NAME, query, (batch, heads, n, 1), (batch, heads, n, key.shape[2]), key=key, attn_mask=attn_mask,
        dropout_p=dropout_p, is_causal=is_causal, scale=scale, bias=bias, window=window, alibi_slopes=alibi_slopes,
        key_lengths=key_lengths, softcap=softcap, normalize=normalize,
    )  # fmt: skip
    query_offset = validation.position(_NAME, "query_offset", query_offset)
    validation.choice(_NAME, "backend", backend, BACKENDS)
    problem = make_problem(Problem, query, key, value, query_offset=query_offset, **blocks, **options)
    out = DENSE(problem, backend, arguments)
    return out if shape is None else out.reshape(shape)


def _on_nested(query: Any, key: Any, value: Any, *, enable_gqa: bool, backend: Any, **options: Any) -> Tensor:
    """Compute the attention of checked nested tensors; arguments as in ``sigmoid_attention``."""
    validation.choice(_NAME, "backend", backend, BACKENDS)
    packed = nested.pack(query, key, value)
    operands = {name: packed[name] for name in ("query", "key", "value")}
    validation.operands(_NAME, validation.PACKED, enable_gqa=enable_gqa, **operands)
    options = validation.options(_NAME, packed["query"], (*query.shape[:2], 1, 1), (), **options)
    needs_positions = options["is_causal"] or "alibi_slopes" in options
    needs_positions = needs_positions or options["window"] not in (None, (-1, -1))
    if needs_positions and not nested.has_equal_lengths(query, key):
        raise ValueError(
            f"{_NAME}: is_causal, window and alibi_slopes need nested query and key of the same lengths: make both "
            "with the same offsets tensor, or use sigmoid_varlen_attention, which aligns their ends"
        )
    problem = make_problem(VarlenProblem, **packed, **options)
    return nested.like_transposed(query, VARLEN(problem, backend)).transpose(1, 2)
