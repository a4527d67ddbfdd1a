"""Inputs of the attention benchmarks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sigattn.validation import SettingsError

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Options:
    """Options of an attention call: the bias b of sigmoid attention, causality, and ALiBi's slopes, (H,), or None."""

    bias: float
    causal: bool = False
    slopes: Tensor | None = None


@dataclass(frozen=True)
class Inputs:
    """Query, key, value and the gradient of the output, each (B, H, n, D), with the options of the call."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad_out: Tensor
    options: Options

    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value as new leaves that require gradients."""
        q, k, v = (t.detach().requires_grad_() for t in (self.query, self.key, self.value))
        return q, k, v


def random_inputs(
    batch_size: int,
    num_heads: int,
    n: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    causal: bool = False,
    alibi: bool = False,
    contiguous: bool = False,
) -> Inputs:
    """Return normally distributed inputs with b = -log n, in the memory order of projections, (B, n, H, D).

    contiguous: in the order of the dimensions instead.
    """
    generator = torch.Generator(device).manual_seed(n)
    shape = (batch_size, n, num_heads, head_dim)
    made = (torch.randn(shape, generator=generator, device=device).to(dtype).transpose(1, 2) for _ in range(4))
    q, k, v, g = (t.contiguous() if contiguous else t for t in made)
    slopes = torch.tensor([2 ** (-8 * (h + 1) / num_heads) for h in range(num_heads)], device=device) if alibi else None
    return Inputs(q, k, v, g, Options(-math.log(n), causal, slopes))


def check_not_empty(config: object, *names: str) -> None:
    """Require tuples of at least one element."""
    for name in names:
        if not getattr(config, name):
            raise SettingsError(f"{name} must name at least one, got none")
