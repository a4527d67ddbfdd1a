"""Functions of the rows of a tensor (B, H, N, D), with parameters for each head: a learned scale, and a quadratic form.

``sigattn.nn.fitted_bias`` uses them for models that were converted from softmax attention. On processors where backend
"llvm" is the default they run as its kernels, in training and inference; elsewhere, and where a call is compiled,
traced or transformed, as operators of PyTorch.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from sigattn.ops import llvm
from sigattn.ops.autocast import without_autocast
from sigattn.ops.autograd import is_intercepted
from sigattn.ops.row_constants import EPS, MAX_DIRECTIONS, MAX_LOG_SCALE


def scale_rows(output: Tensor, gain: Tensor, power: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows o times exp(g + β · log‖o‖ + w · o/‖o‖), limited to 1/150 … 150, and these factors.

    Args:
        output: (B, H, N, D). gain: g, (H,). power: β, (H,). direction: w of all heads, (H · D,).

    Returns:
        The scaled rows, in the dtype of ``output``, and the factors, (B, H, N, 1), in float32 or better.

    Raises:
        ValueError: if the rows are not those of the parameters' heads.
    """
    _check("scale_rows: output", output, len(gain), direction)
    # a compiler fuses the passes itself, and a trace with a Function cannot be saved
    plain = torch.compiler.is_compiling() or torch._C._is_tracing() or not torch.is_grad_enabled()
    scaled, factor, *_ = (_scale_rows if plain else _ScaleRows.apply)(output, gain, power, direction)
    return scaled, factor


def quadratic_form(
    query: Tensor, linear: Tensor, directions: Tensor, curvature: Tensor, lower: Tensor, upper: Tensor
) -> Tensor:
    """Return w·q + Σ_r λ_r (u_r·q)² of each row q, limited to ``lower`` … ``upper``.

    Args:
        query: (B, H, N, D). linear: w of all heads, (H · D,). directions: u of all heads, (H · D · R,).
        curvature: λ of all heads, (H · R,). lower, upper: (H,).

    Returns:
        (B, H, N, 1), in float32 or better.

    Raises:
        ValueError: if the rows are not those of the parameters' heads.
    """
    heads = len(lower)
    _check("quadratic_form: query", query, heads, linear)
    width = query.shape[3]
    forms = torch.cat([directions.view(heads, width, -1).mT, linear.view(heads, 1, width)], 1)
    given = query, forms, curvature, lower, upper
    if len(curvature) == MAX_DIRECTIONS * heads and _has_kernels(*given):
        if torch.is_grad_enabled():
            term: Tensor = _QuadraticForm.apply(*given)[0]
            return term
        from sigattn.ops.llvm import rows

        return rows.quadratic_term(*given)
    return _quadratic_form(*given)


def _check(name: str, rows: Tensor, heads: int, vectors: Tensor) -> None:
    """Raise ValueError unless rows are (B, heads, N, D), given one vector of D features for each head."""
    features = vectors.numel() // heads
    if rows.dim() != 4 or rows.shape[1] != heads or rows.shape[3] != features:
        raise ValueError(
            f"{name} must be (batch, {heads}, length, {features}), as the parameters have {heads} heads of {features}, "
            f"got {tuple(rows.shape)}"
        )


def _has_kernels(rows: Tensor, *others: Tensor) -> bool:
    """Return True if kernels compute a function of rows, given the rows and all other tensors of the call."""
    if is_intercepted((rows, *others)) or not llvm.has_row_kernels(rows) or any(t.dtype.itemsize > 4 for t in others):
        return False
    return not any(torch._C._functorch.is_legacy_batchedtensor(t) for t in (rows, *others))  # is_grads_batched


def _wide(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return tensors in their common dtype, or in float32 if that is less precise."""
    dtype = functools.reduce(torch.promote_types, (t.dtype for t in tensors), torch.float32)
    return tuple(t.to(dtype) for t in tensors)


# -- scale ------------------------------------------------------------------------------------------------------------


class _ScaleRows(Function):
    """Function of ``scale_rows``; its backward pass reads the rows half as often as autograd's own (docs/log.md)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(output: Tensor, gain: Tensor, power: Tensor, direction: Tensor) -> tuple[Tensor, ...]:
        return _scale_rows(output, gain, power, direction)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[2:])
        ctx.save_for_backward(*inputs, *output[1:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_scaled: Tensor, grad_factor: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        saved = ctx.saved_tensors
        if _has_kernels(*saved, grad_scaled, grad_factor):
            from sigattn.ops.llvm import rows

            grads = rows.scale_backward(grad_scaled, grad_factor, *saved)
        else:
            grads = _scale_rows_backward(grad_scaled, grad_factor, *saved)
        return tuple(g.to(t.dtype) for g, t in zip(grads, saved[:4], strict=True))


def _scale_rows(output: Tensor, gain: Tensor, power: Tensor, direction: Tensor) -> tuple[Tensor, ...]:
    """Return the scaled rows o in the output's dtype, their factors, ‖o‖ and w · o/‖o‖, the latter (B, H, N, 1)."""
    if _has_kernels(output, gain, power, direction):
        from sigattn.ops.llvm import rows

        return rows.scale(output, gain, power, direction)
    wide, gain, power, direction = _wide(output, gain, power, direction)
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    # not a product of matrices, which for one column takes longer
    cosine = (wide * direction.view(len(power), 1, -1)).sum(-1, keepdim=True) / (norm + EPS)
    factor = _exponent(gain, power, norm, cosine).clamp(-MAX_LOG_SCALE, MAX_LOG_SCALE).exp()
    return (wide * factor).to(output.dtype), factor, norm, cosine


def _scale_rows_backward(
    grad_scaled: Tensor, grad_factor: Tensor, *saved: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of output, gain, power and direction, given them, the factors, norms and cosines."""
    *given, factor, norm, cosine = saved
    output, gain, power, direction = _wide(*given)
    grad_scaled = grad_scaled.to(output.dtype)
    # with r = ‖o‖ + ε and c = w·o / r, the exponent is e = g + β log r + c, and de/do = (β - c) / r · o/‖o‖ + w / r
    exponent = _exponent(gain, power, norm, cosine)
    is_limited = exponent.abs() > MAX_LOG_SCALE
    grad = ((grad_scaled * output).sum(-1, keepdim=True) + grad_factor) * factor.masked_fill(is_limited, 0)
    grad_projection = grad / (norm + EPS)
    radial = grad_projection * (power.view(-1, 1, 1) - cosine) / norm.clamp(min=torch.finfo(norm.dtype).tiny)
    grad_output = torch.addcmul(grad_scaled * factor, output, radial)
    grad_output = torch.addcmul(grad_output, grad_projection, direction.view(len(power), 1, -1))
    with without_autocast(output.device.type):
        grad_direction = (grad_projection.mT @ output).sum((0, 2)).view(-1)
    grad_power = (grad * (norm + EPS).log()).sum((0, 2, 3))
    return grad_output, grad.sum((0, 2, 3)), grad_power, grad_direction


def _exponent(gain: Tensor, power: Tensor, norm: Tensor, cosine: Tensor) -> Tensor:
    """Return g + β · log‖o‖ + w · o/‖o‖, (B, H, N, 1)."""
    return gain.view(-1, 1, 1) + power.view(-1, 1, 1) * (norm + EPS).log() + cosine


# -- quadratic form ---------------------------------------------------------------------------------------------------


class _QuadraticForm(Function):
    """Function of ``quadratic_form`` by kernels; its second result are the linear forms of the rows."""

    @staticmethod
    def forward(query: Tensor, forms: Tensor, curvature: Tensor, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
        from sigattn.ops.llvm import rows

        return rows.quadratic(query, forms, curvature, lower, upper)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs, output[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_term: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        query, forms, curvature, lower, upper, values = ctx.saved_tensors
        if _has_kernels(query, forms, curvature, lower, upper, values, grad_term):
            from sigattn.ops.llvm import rows

            grads: tuple[Tensor, ...] = rows.quadratic_backward(
                grad_term, query, forms, curvature, lower, upper, values
            )
        else:  # several gradients at once
            with torch.enable_grad():
                q, f, c = (t.detach().requires_grad_() for t in (query, forms, curvature))
                grads = torch.autograd.grad(_quadratic_form(q, f, c, lower, upper), (q, f, c), grad_term)
        of_query, of_forms, of_curvature = grads
        return of_query.to(query.dtype), of_forms.to(forms.dtype), of_curvature.to(curvature.dtype), None, None


def _quadratic_form(query: Tensor, forms: Tensor, curvature: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """Return the limited quadratic forms, (B, H, N, 1), given the linear forms, (H, R + 1, D)."""
    # products with so few columns are slower on a CPU than transposed ones, (B, H, R + 1, N), of dense queries
    query, forms, curvature = _wide(query.contiguous(), forms, curvature)
    with without_autocast(query.device.type):
        y = forms @ query.mT
        squares = curvature.view(len(forms), 1, -1) @ y[:, :, :-1].square()
        term = (y[:, :, -1:] + squares).mT
    return term.clamp(lower.view(-1, 1, 1), upper.view(-1, 1, 1))
