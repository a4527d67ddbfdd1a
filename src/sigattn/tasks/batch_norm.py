"""Batch normalisation synchronised over all processes, on CPU too (PyTorch's ``SyncBatchNorm`` needs GPUs)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch import distributed as dist

from sigattn.nn.batch_norm import BatchNorm


class SyncBatchNorm(BatchNorm):
    """``BatchNorm1d`` of (B, C) whose mean and variance in training are those of the samples of all processes.

    The result does not depend on the number of processes that share a batch. With one process it is ``BatchNorm``.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (PyTorch's name)
        """Normalise (B, C) → (B, C); B may differ between processes."""
        single_process = not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1
        if single_process or not self.training:
            return super().forward(input)
        x = input.to(torch.promote_types(input.dtype, torch.float32))
        ones = x.new_full((1,), float(len(x)))
        total = _Sum.apply(torch.cat((ones, x.sum(0))))  # (1 + C,)
        count, mean = total[0], total[1:] / total[0]
        centred = x - mean
        variance = _Sum.apply(centred.square().sum(0)) / count  # (C,); in one pass, E[x²] - E[x]² would cancel
        self.update_running_stats(mean.detach(), variance.detach(), count.detach())
        out = centred * torch.rsqrt(variance + self.eps)
        if self.affine:
            out = out * self.weight + self.bias
        return out.to(input.dtype)


class _Sum(torch.autograd.Function):
    """Sum over all processes. Each process uses the sum, so the gradient is the sum of the processes' gradients."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad
