"""Validation of arguments, with error messages that name the function and restate the arguments.

Only types, shapes, dtypes and devices are checked, not the values of tensors, so that validation neither synchronises
nor breaks a compiled graph. ``caller`` is the name of the public function; operands are passed under the names that
they have there.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from sigattn.ops import scalars
from sigattn.ops.mask import refuse_subclass

ROWS_FIRST = ("batch", "length", "heads", "head_dim")
HEADS_FIRST = ("batch", "heads", "length", "head_dim")
PACKED = ("total", "heads", "head_dim")
_MOST_POSITION = 1 << 30  # because GPU kernels compute positions in 32 bits
_NO_DISTANCE = (1 << 31) - 1  # of a query and a key
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_PLURALS = {"heads": "number of heads", "batch": "batch size", "pages": "number of pages"}
_OTHER_LAYOUT = (
    "for tensors of (batch, length, heads, head_dim), as in flash-attn and triton-sigmoid, call sigattn.flash, or "
    "transpose: t.transpose(1, 2) (docs/coming-from.md)"
)

_HEADS_FIRST_GIVEN = (
    "for tensors of (batch, heads, length, head_dim), as in PyTorch's scaled_dot_product_attention, call "
    "sigattn.sigmoid_attention, or transpose: t.transpose(1, 2)"
)


def describe(**arguments: Any) -> str:
    """Return a text of the arguments: shape, dtype and device of tensors, the value of others."""
    return ", ".join(
        f"{name} {scalars.describe(value)}" if isinstance(value, Tensor) else f"{name} = {value!r}"
        for name, value in arguments.items()
    )


def raise_error(caller: str, error: type[Exception], message: str, **arguments: Any) -> NoReturn:
    """Raise an error whose message restates these arguments."""
    raise error(f"{caller}: {message}; got {describe(**arguments)}")


def choice(caller: str, name: str, value: Any, allowed: Sequence[str], *, optional: bool = True) -> None:
    """Raise ValueError unless value is one of the allowed strings, or None if that is optional."""
    if value not in ((*allowed, None) if optional else allowed):
        or_none = " or None" if optional else ""
        raise ValueError(f"{caller}: unknown {name} {value!r}; choose one of {', '.join(map(repr, allowed))}{or_none}")


def flag(caller: str, name: str, value: Any) -> None:
    """Raise TypeError unless value is a bool."""
    if not isinstance(value, (bool, torch.SymBool)):
        hint = "; pass a mask as attn_mask" if isinstance(value, Tensor) else ""
        raise TypeError(f"{caller}: {name} must be True or False, got {scalars.describe(value)}{hint}")


# -- operands ---------------------------------------------------------------------------------------------------------


def tensors(caller: str, **arguments: Any) -> None:
    """Raise unless these are dense floating-point tensors of one dtype on one device."""
    for name, t in arguments.items():
        if not isinstance(t, Tensor):
            raise TypeError(f"{caller}: {name} must be a tensor, got {type(t).__name__}")
        if t.is_nested or t.layout is not torch.strided:
            raise_error(caller, TypeError, f"{name} must be a dense tensor", **{name: t.layout})
    first, *others = arguments.values()
    dtype, device, all_of_them = first.dtype, first.device, _listed(arguments)
    if dtype not in _DTYPES:
        message = f"{all_of_them} must be floating point: float16, bfloat16, float32 or float64"
        raise_error(caller, TypeError, message, **arguments)
    if any(t.dtype != dtype for t in others):
        raise_error(caller, TypeError, f"{all_of_them} must have one dtype: convert with .to(dtype)", **arguments)
    if any(t.device != device for t in others):
        raise_error(caller, ValueError, f"{all_of_them} must be on one device: move with .to(device)", **arguments)


def operands(caller: str, layout: Sequence[str], *, enable_gqa: Any = True, **arguments: Any) -> None:
    """Raise unless query, key and value, by their names in the call, have the dimensions of a layout and fit together.

    All have the same "batch", if the layout names it first; key and value differ in the last dimension only.
    """
    tensors(caller, **arguments)
    flag(caller, "enable_gqa", enable_gqa)
    (q, query), (k, key), (v, value) = arguments.items()
    of_query, of_key, of_value = query.shape, key.shape, value.shape
    dimension = layout.index("heads")
    message = None
    if not len(of_query) == len(of_key) == len(of_value) == len(layout):
        message = f"{_listed(arguments)} must have {len(layout)} dimensions, ({', '.join(layout)})"
    elif layout[0] == "batch" and not of_query[0] == of_key[0] == of_value[0]:
        message = f"{_listed(arguments)} must have the same batch size (dimension 0)"
    elif of_query[-1] != of_key[-1]:
        message = f"{q} and {k} must have the same head_dim (the last dimension)"
    elif of_key[:-1] != of_value[:-1]:
        differs = next(i for i, (a, b) in enumerate(zip(of_key, of_value, strict=True)) if a != b)
        size = _PLURALS.get(layout[differs], layout[differs])
        message = f"{k} and {v} must have the same {size} (dimension {differs})"
    elif of_query[dimension] != of_key[dimension]:
        message = misfit_of_heads(of_query[dimension], of_key[dimension], q, k, enable_gqa)
        if message is not None and enable_gqa and layout == ROWS_FIRST and of_query[1] == of_key[1]:
            message += f"; {_HEADS_FIRST_GIVEN}"
    if message is not None:
        raise_error(caller, ValueError, message, **arguments)


def misfit_of_heads(heads: int, shared: int, q: str, k: str, enable_gqa: bool) -> str | None:
    """Return why query heads cannot share key heads, or None."""
    if not enable_gqa:
        return f"{q} has {heads} heads and {k} {shared}: pass enable_gqa=True if query heads share key heads"
    if not heads or not shared or heads % shared:
        return f"the {heads} heads of {q} are not a multiple of the {shared} of {k}"
    return None


def _listed(arguments: dict[str, Any]) -> str:
    *first, last = arguments
    return f"{', '.join(first)} and {last}"


def cache(caller: str, *, enable_gqa: bool = True, **arguments: Any) -> None:
    """Raise unless these fit together, by their names in the call and in this order.

    Queries (B, N, Hq, D); keys and values of a cache, (B, M, Hkv, ·), or with a table pages (P, page_size, Hkv, ·); new
    keys and values, (B, N_new, Hkv, ·), or both None; the table (B, pages of each), or None.
    """
    (q, query), (kc, key_cache), (vc, value_cache), (k, key), (v, value), (t, table) = arguments.items()
    layout = ("pages", "page_size", "heads", "head_dim") if table is not None else ("samples", *ROWS_FIRST[1:])
    caches = {kc: key_cache, vc: value_cache}
    operands(caller, layout, enable_gqa=enable_gqa, **{q: query, **caches})
    if (key is None) != (value is None):
        raise_error(caller, ValueError, f"{k} and {v} must both be given, or neither", **{k: key, v: value})
    if key is not None:
        operands(caller, ROWS_FIRST, **{q: query, k: key, v: value})
        if (*key.shape[2:], value.shape[3]) != (*key_cache.shape[2:], value_cache.shape[3]):
            message = f"{k} and {v} must have the cache's heads and head_dim"
            raise_error(caller, ValueError, message, **{k: key, v: value}, **caches)
    if table is not None:
        integers(caller, t, table, (query.shape[0], None), "(B, pages of each sample)", query.device)
    elif key_cache.shape[0] != query.shape[0]:
        message = f"the cache must have {q}'s batch size; for pages pass {t}"
        raise_error(caller, ValueError, message, **{q: query}, **caches)


# -- options ----------------------------------------------------------------------------------------------------------


def options(
    caller: str, query: Tensor, bias_target: Sequence[int], mask_target: Sequence[int | None],
    mask_layout: str = "(B, Hq, N, M)", *, key: Tensor | None = None, attn_mask: Any = None, dropout_p: Any = 0.0,
    is_causal: Any = False, scale: Any = None, bias: Any = None, window: Any = None, alibi_slopes: Any = None,
    key_lengths: Any = None, softcap: Any = 0.0, normalize: Any = False,
) -> dict[str, Any]:  # fmt: skip
    """Return the options of a call that are given, as arguments of ``make_problem``; raise unless they fit the query.

    A bias broadcasts to bias_target, (B, Hq, N or 1, 1), a mask to mask_target (None for any size), whose dimensions
    are mask_layout. The key is for advice on the layout of the operands.
    """
    flag(caller, "is_causal", is_causal)
    flag(caller, "normalize", normalize)
    given: dict[str, Any] = {"is_causal": is_causal, "normalize": normalize}
    if attn_mask is not None:
        mask(caller, attn_mask, query, mask_target, mask_layout, key=key)
        given["attn_mask"] = attn_mask
    if bias is not None:
        _bias(caller, bias, query, bias_target)
        given["bias"] = bias
    if alibi_slopes is not None:
        slopes(caller, alibi_slopes, query, *bias_target[:2])
        given["alibi_slopes"] = alibi_slopes
    if key_lengths is not None:
        integers(caller, "key_lengths", key_lengths, bias_target[:1], "(B,)")
        given["key_lengths"] = key_lengths
    given["dropout_p"], given["scale"], given["window"], given["softcap"] = numbers(
        caller, dropout_p, scale, window, softcap
    )
    return given


def numbers(
    caller: str, dropout_p: Any, scale: Any, window: Any, softcap: Any = 0.0, *,
    scale_name: str = "scale", window_name: str = "window",
) -> tuple[float, float | None, tuple[int, int] | None, float]:  # fmt: skip
    """Return dropout_p, scale, window and softcap as Python's own numbers; raise unless they are in their ranges."""
    dropout_p = scalars.real(caller, "dropout_p", dropout_p)
    if not 0 <= dropout_p < 1:
        raise ValueError(f"{caller}: dropout_p is a probability in [0, 1), got {dropout_p!r}")
    if scale is not None:
        scale = scalars.real(caller, scale_name, scale)
        if scale != scale:
            raise ValueError(f"{caller}: {scale_name} is NaN")
    softcap = scalars.real(caller, "softcap", softcap)
    if not 0 <= softcap < float("inf"):
        raise ValueError(f"{caller}: softcap must be finite and at least 0 (0 is without a cap), got {softcap!r}")
    return dropout_p, scale, None if window is None else _window(caller, window_name, window), softcap


def _window(caller: str, name: str, window: Any) -> tuple[int, int]:
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"{caller}: {name} must be a pair (left, right), got {window!r}")
    left, right = (scalars.integer(caller, f"each side of {name}", side) for side in window)
    if left < -1 or right < -1:
        raise ValueError(
            f"{caller}: the sides of {name} must be at least 0, or -1 for unlimited, got {tuple(window)!r}"
        )
    # the largest integers, which some write for unlimited, would overflow where kernels add them to positions
    return -1 if left >= _NO_DISTANCE else left, -1 if right >= _NO_DISTANCE else right


def count(caller: str, name: str, value: Any) -> int:
    """Return an integer, at least 0, as int; raise for anything else. A symbol of a traced graph may be anything."""
    number = scalars.integer(caller, name, value)
    if not torch.compiler.is_compiling() and number < 0:
        raise ValueError(f"{caller}: {name} must not be negative, got {value!r}")
    return number


def position(caller: str, name: str, value: Any) -> int:
    """Return an integer in ±2^30 as int; raise for anything else. A symbol of a traced graph may be anything."""
    number = scalars.integer(caller, name, value)
    if not torch.compiler.is_compiling() and isinstance(number, int) and abs(number) > _MOST_POSITION:
        raise ValueError(f"{caller}: {name} must lie in -2^30 … 2^30, got {value!r}")
    return number


def mask(
    caller: str, attn_mask: Any, query: Tensor, target: Sequence[Any], names: str = "(B, Hq, N, M)",
    key: Tensor | None = None, query_name: str = "query",
) -> None:  # fmt: skip
    """Raise unless attn_mask is bool or floating point, broadcastable to the target, and on the query's device.

    A size of None in the target allows any size; the mask must have that dimension if it is the last. With ``key``, the
    message may advise on the layout of query and key.
    """
    if not isinstance(attn_mask, Tensor) or attn_mask.dtype not in (torch.bool, *_DTYPES):
        message = "attn_mask must be a tensor, bool (True = attend) or floating point of 16 bits and more (added)"
        hint = f"; {_OTHER_LAYOUT}" if isinstance(attn_mask, bool) else ""
        raise TypeError(f"{caller}: {message}, got {_type_of(attn_mask)}{hint}")
    refuse_subclass(caller, "attn_mask", attn_mask)
    if not broadcasts(attn_mask.shape, target) or (target[-1] is None and not attn_mask.dim()):
        shape = f"({', '.join('K' if size is None else str(size) for size in target)})"
        advice = "" if key is None else layout_hint(query, key, attn_mask)
        if tuple(attn_mask.shape) == (target[0], target[-1]):
            advice = "; for a mask of each sample's keys, (B, M), pass attn_mask[:, None, None, :]"
            advice += "" if key is None else " or key_lengths"
        message = f"attn_mask does not broadcast to {names} = {shape}{advice}"
        raise_error(caller, ValueError, message, **{query_name: query}, attn_mask=attn_mask)
    same_device(caller, "attn_mask", attn_mask, query, query_name)


def _bias(caller: str, b: Any, query: Tensor, target: Sequence[int]) -> None:
    """Raise unless b is a number, or a floating-point tensor broadcastable to the target on the query's device."""
    if not isinstance(b, Tensor):
        scalars.real(caller, "bias, if not a tensor,", b)
        return
    if b.dtype not in _DTYPES:
        raise_error(caller, TypeError, "bias must be floating point, of 16 bits and more", bias=b)
    if b.is_nested or not broadcasts(b.shape, target):
        rows, of_query = ("1", "") if target[2] == 1 else ("N", ", per query (N, 1)")
        message = (
            f"bias does not broadcast to (B, Hq, {rows}, 1) = {tuple(target)}: a bias per head is (Hq, 1, 1), per "
            f"sample (B, 1, 1, 1){of_query}; pass one per key as an additive attn_mask"
        )
        raise_error(caller, ValueError, message, query=query, bias=b)
    same_device(caller, "bias", b, query)


def slopes(
    caller: str, s: Any, query: Tensor, batch: int, heads: int, *, two_sided: bool = True, query_name: str = "query"
) -> None:
    """Raise unless alibi_slopes fits this batch size and number of heads."""
    if not isinstance(s, Tensor) or s.dtype not in _DTYPES:
        message = "alibi_slopes must be a floating-point tensor of 16 bits and more"
        raise TypeError(f"{caller}: {message}, got {scalars.describe(s)}")
    allowed = [(heads,), (batch, heads), *([(batch, heads, 2), (1, heads, 2)] if two_sided else [])]
    # with shapes of as many dimensions only, because comparing symbolic sizes adds a guard
    if not any(len(shape) == s.dim() and tuple(s.shape) == shape for shape in allowed):
        either = " or (B or 1, Hq, 2; one slope before, one after the query)" if two_sided else ""
        message = f"alibi_slopes must be (Hq,), (B, Hq){either}"
        raise_error(caller, ValueError, message, **{query_name: query}, alibi_slopes=s)
    same_device(caller, "alibi_slopes", s, query, query_name)


def integers(
    caller: str, name: str, t: Any, shape: Sequence[int | None], layout: str, device: torch.device | None = None
) -> None:
    """Raise unless t is a tensor of integers of a shape (None for any size), on a device unless that is None."""
    if not isinstance(t, Tensor) or not scalars.is_integral(t):
        raise TypeError(f"{caller}: {name} must be a tensor of integers, got {_type_of(t)}")
    if t.dim() != len(shape) or any(a is not None and a != b for a, b in zip(shape, t.shape, strict=True)):
        sizes = "" if None in shape else f" = {tuple(shape)}"
        raise_error(caller, ValueError, f"{name} must be {layout}{sizes}", **{name: t})
    if device is not None and t.device != device:
        message = f"{name} must be on {device}, as the query is: move it with .to(device)"
        raise_error(caller, ValueError, message, **{name: t})


def sequence_offsets(caller: str, query: Tensor, **cu_seqlens: Any) -> None:
    """Raise unless each tensor is (B + 1,) integers on the query's device, with the same B."""
    layout = "(B + 1,): 0, then the end of each sequence"
    for name, t in cu_seqlens.items():
        integers(caller, name, t, (None,), layout, query.device)
        if not t.shape[0]:
            raise_error(caller, ValueError, f"{name} must be {layout}", **{name: t})
    first, *others = (t.shape[0] for t in cu_seqlens.values())
    if any(size != first for size in others):  # a set would make a graph of torch.compile for each size
        raise_error(caller, ValueError, "there must be as many sequences of queries as of keys", **cu_seqlens)


def refuse_gradients(caller: str, *tensors: Any) -> None:
    """Raise RuntimeError if a gradient would be needed."""
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tensors):
        raise RuntimeError(f"{caller} has no gradient: call it under torch.no_grad() or torch.inference_mode()")


def same_device(caller: str, name: str, t: Tensor, query: Tensor, query_name: str = "query") -> None:
    """Raise unless a tensor is on the query's device."""
    if t.device != query.device:
        message = f"{name} must be on the query's device: move it with .to(device)"
        raise_error(caller, ValueError, message, **{query_name: query, name: t})


def broadcasts(shape: Sequence[int], target: Sequence[int | None]) -> bool:
    """Return True if a tensor of this shape can be expanded to the target, where None is any size."""
    if len(shape) > len(target):
        return False
    return all(b is None or a in (1, b) for a, b in zip(reversed(shape), reversed(target), strict=False))


def layout_hint(query: Tensor, key: Tensor, attn_mask: Tensor | None = None) -> str:
    """Return advice for a call that failed, if the shapes may be those of (batch, length, heads, head_dim), else ''."""
    if query.dim() != 4 or key.dim() != 4:
        return ""
    lengths = (query.shape[1], key.shape[1])
    if attn_mask is None:
        fits = query.shape[2] == key.shape[2] and lengths[0] != lengths[1]
    else:
        fits = attn_mask.dim() >= 2 and tuple(attn_mask.shape[-2:]) == lengths
    return f"; {_OTHER_LAYOUT}" if fits else ""


def _type_of(t: Any) -> str:
    return scalars.describe(t) if isinstance(t, Tensor) else type(t).__name__
