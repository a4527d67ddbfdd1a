"""Batch normalisation of padded sequences."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from sigattn.shapes import Float


@contextmanager
def unchanged_running_stats(module: nn.Module) -> Iterator[None]:
    """Restore the running statistics of a module's batch norms at the end of the context.

    Within it they are copies, because ``checkpoint`` needs the same operations as in the first forward.
    """
    norms = [m for m in module.modules() if isinstance(m, nn.BatchNorm1d)]
    running_stats = [(norm, dict(norm.named_buffers(recurse=False))) for norm in norms]
    try:
        for norm, buffers in running_stats:
            for name, buffer in buffers.items():
                setattr(norm, name, buffer.clone())
        yield
    finally:
        for norm, buffers in running_stats:
            for name, buffer in buffers.items():
                setattr(norm, name, buffer)


class BatchNorm(nn.BatchNorm1d):
    """``nn.BatchNorm1d`` whose running statistics are updated with a given mean and variance."""

    @torch.no_grad()
    def update_running_stats(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        """Update the running statistics with the mean and the biased variance of ``count`` values for each channel."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        assert self.momentum is not None
        self.num_batches_tracked.add_(1)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
        unbiased = variance * count / (count - 1).clamp(min=1)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), self.momentum)


class MaskedBatchNorm(BatchNorm):
    """Batch normalisation of padded sequences: padding counts neither in the mean nor in the variance."""

    def forward(
        self, x: Float[Tensor, "batch channels length"], valid: Tensor | None = None
    ) -> Float[Tensor, "batch channels length"]:
        """Normalise each channel; ``valid``, (B, 1, length) bool, is False for padding."""
        if valid is None or not self.training:
            return super().forward(x)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))  # 16 bits cannot represent the number of frames
        count = valid.sum().clamp(min=1).to(wide.dtype)
        mean = (wide * valid).sum((0, 2)) / count  # (channels,)
        centred = (wide - mean[:, None]) * valid
        variance = centred.square().sum((0, 2)) / count
        self.update_running_stats(mean.detach(), variance.detach(), count)
        scale = self.weight * torch.rsqrt(variance + self.eps)
        return (centred * scale[:, None] + self.bias[:, None]).to(x.dtype)
