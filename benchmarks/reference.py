"""Reference of the benchmarks: the definition in float64, and the check that each implementation passes before timing.

Compared are sample 0 of a batch, its first and last head, and at most 64 queries and keys spread over the sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.inputs import Inputs

_MAX_POSITIONS = 64


class WrongResultError(RuntimeError):
    """A result differs from the reference by more than rounding in its dtype explains."""


def tolerance(t: Tensor) -> float:
    """Return the largest error that rounding explains, relative to the largest value; a wrong formula exceeds it."""
    float32 = 1e-4 if t.device.type == "cpu" else 1e-2  # TF32 on GPUs
    return {torch.float16: 2e-2, torch.bfloat16: 6e-2, torch.float32: float32}[t.dtype]


def check(inputs: Inputs, softmax: bool, out: Tensor, gradients: Sequence[Tensor] = ()) -> tuple[float, float | None]:
    """Return the relative errors of an output and of the worst gradient (dQ, dK or dV; None without gradients).

    Raises:
        WrongResultError: if an error exceeds the tolerance of the dtype, or is NaN.
    """
    at = positions(inputs)
    expected = reference_results(inputs, at, softmax)
    errors = [relative_error(t, e, at) for t, e in zip((out, *gradients), expected, strict=False)]
    if not all(error <= tolerance(out) for error in errors):  # max() may skip NaN
        raise WrongResultError(f"wrong result for {tuple(out.shape)}, {out.dtype}: relative errors {errors}")
    return errors[0], max(errors[1:], default=None)


def positions(inputs: Inputs) -> Tensor:
    """Return the indices of the queries and keys that are compared."""
    n = inputs.query.shape[2]
    return torch.linspace(0, n - 1, min(n, _MAX_POSITIONS), device=inputs.query.device).long()


def relative_error(t: Tensor, expected: Tensor, at: Tensor) -> float:
    """Return the largest error of a (B, H, n, D) result at positions ``at``, relative to the largest expected value."""
    found = t[0, [0, t.shape[1] - 1]][:, at].double()
    return ((found - expected).abs().max() / expected.abs().max()).item()


def reference_results(inputs: Inputs, at: Tensor, softmax: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return output, dQ, dK and dV at positions ``at`` in float64, each (2, len(at), D), from the definition."""
    heads = [0, inputs.query.shape[1] - 1]
    q, k, v, g = (t[0, heads].double() for t in (inputs.query, inputs.key, inputs.value, inputs.grad_out))
    o = inputs.options
    n, scale = q.shape[1], q.shape[2] ** -0.5
    everything = torch.arange(n, device=q.device)

    def logits(rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        s = scale * q[:, rows] @ k[:, columns].mT
        if o.slopes is not None:
            s = s - o.slopes[heads].double()[:, None, None] * (rows[:, None] - columns).abs()
        return s, (rows[:, None] >= columns) | (not o.causal)

    lse, delta = _softmax_statistics(logits, v, g, n) if softmax else (q, q)

    def weights(rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:  # P and dS, (2, rows, columns)
        s, visible = logits(rows, columns)
        dp = g[:, rows] @ v[:, columns].mT
        if softmax:
            p = (s - lse[:, rows]).exp() * visible
            return p, p * (dp - delta[:, rows])
        p = torch.sigmoid(s + o.bias) * visible
        return p, p * (1 - p) * dp

    p, ds = weights(at, everything)
    p_of_keys, ds_of_keys = weights(everything, at)
    return p @ v, scale * ds @ k, scale * ds_of_keys.mT @ q, p_of_keys.mT @ g


def _softmax_statistics(
    logits: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], v: Tensor, g: Tensor, n: int
) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exp and dO · O of each row, (2, n, 1) each, from blocks of rows."""
    lse, delta = [], []
    columns = torch.arange(n, device=v.device)
    for rows in columns.split(2048):
        s, visible = logits(rows, columns)
        s = s.masked_fill(~visible, -math.inf)
        lse.append(s.logsumexp(-1, keepdim=True))
        delta.append((g[:, rows] * (s.softmax(-1) @ v)).sum(-1, keepdim=True))
    return torch.cat(lse, 1), torch.cat(delta, 1)
