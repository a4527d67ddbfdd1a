"""CAPE: sinusoidal encodings of continuous positions that are augmented while training (Likhomanenko et al., 2021).

While training, all positions of a sample are shifted together (by up to ``max_global_shift``), each position on its own
(by up to ``max_local_shift``), and all are scaled (by up to ``max_scale`` or its inverse). A model then learns relative
distances and generalises to longer sequences than those of its training.
"""

import math

import torch
from torch import Tensor

from sigattn.nn.position import Float32Buffers
from sigattn.shapes import Float


class _Augmented(Float32Buffers):
    """Base class: the augmentation, and the encoding of augmented positions."""

    frequencies: Tensor

    def __init__(self, embed_dim: int, max_global_shift: float, max_local_shift: float, max_scale: float) -> None:
        super().__init__()
        name = type(self).__name__
        if embed_dim % 2:
            raise ValueError(f"{name} pairs sines with cosines, so embed_dim must be even, got {embed_dim}")
        if max_global_shift < 0 or not 0 <= max_local_shift <= 0.5 or max_scale < 1:
            raise ValueError(
                f"{name}: max_global_shift must be at least 0, max_local_shift within 0 … 0.5 (so that positions stay "
                f"in order) and max_scale at least 1, got {max_global_shift}, {max_local_shift}, {max_scale}"
            )
        self.max_global_shift: float = max_global_shift
        self.max_local_shift: float = max_local_shift
        self.max_scale: float = max_scale

    def extra_repr(self) -> str:
        names = ("max_global_shift", "max_local_shift", "max_scale")
        return ", ".join(f"{name}={getattr(self, name):g}" for name in names)

    def _encode(self, x: Tensor, positions: Tensor, distance: Tensor | float) -> Tensor:
        """Add the encoding of positions (length, axes); distance: along each axis from one position to the next."""
        (batch, *_), axes = x.shape, positions.shape[1]
        positions = positions.expand(batch, -1, -1)
        if self.training:
            positions = positions + distance * _uniform(positions.shape, self.max_local_shift, x.device)
            positions = positions + _uniform((batch, 1, axes), self.max_global_shift, x.device)
            positions = positions * _uniform((batch, 1, 1), math.log(self.max_scale), x.device).exp()
        # a sum, because autocast would round a product of matrices; (batch, length, embed_dim / 2)
        angles = (positions.unsqueeze(-1) * self.frequencies.view(axes, -1)).sum(-2)
        return x + torch.stack([angles.cos(), angles.sin()], -1).flatten(-2).to(x.dtype)


class Cape(_Augmented):
    """CAPE along time, added to the input.

    Feature 2k is cos(ω_k t), feature 2k + 1 is sin(ω_k t), with ω_k = frequency_scale · 10000^(-2k / embed_dim) and t
    in seconds. The defaults are those of CAPE's authors for speech (flashlight, branch "cape"): a position every 30 ms,
    shifts by up to 30 seconds, so that they cover a minute, and no scaling.

    Args:
        embed_dim: number of features, even.
        step: seconds from one position to the next.
        frequency_scale: factor of the frequencies; with 30 they are about those of frames of 30 ms by index.
        max_global_shift: in seconds, in both directions. max_local_shift: in steps; at most 0.5. max_scale: at least 1.

    Raises:
        ValueError: if embed_dim is odd, or an augmentation is out of its range.
    """

    def __init__(
        self, embed_dim: int, *, step: float = 0.03, frequency_scale: float = 30.0, max_global_shift: float = 30.0,
        max_local_shift: float = 0.5, max_scale: float = 1.0,
    ) -> None:  # fmt: skip
        super().__init__(embed_dim, max_global_shift, max_local_shift, max_scale)
        self.step: float = step
        self.frequency_scale: float = frequency_scale
        self.register_buffer("frequencies", torch.empty(embed_dim // 2, dtype=torch.float32), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        k = torch.arange(len(self.frequencies), device=self.frequencies.device, dtype=torch.float32)
        self.frequencies.copy_(self.frequency_scale * 10_000.0 ** (-k / len(self.frequencies)))

    def extra_repr(self) -> str:
        size = 2 * len(self.frequencies)
        return f"{size}, step={self.step:g}, frequency_scale={self.frequency_scale:g}, {super().extra_repr()}"

    def forward(self, x: Float[Tensor, "batch length embed_dim"]) -> Float[Tensor, "batch length embed_dim"]:
        seconds = self.step * torch.arange(x.shape[1], device=x.device, dtype=torch.float32)
        return self._encode(x, seconds.unsqueeze(-1), self.step)


class ImageCape(_Augmented):
    """CAPE of an image's patches, whose coordinates run from -1 to 1, added to the input.

    Feature 2k is cos(π ω_k · (x, y)), feature 2k + 1 the sine, with ω_k = 10^(2k / embed_dim) (cos k, sin k).

    Args:
        embed_dim: number of features, even. rows, columns: numbers of patches.
        max_global_shift: of each coordinate. max_scale: at least 1.
        max_local_shift: of each coordinate, as a fraction of the distance between patches; at most 0.5.

    Raises:
        ValueError: if embed_dim is odd, or an augmentation is out of its range.
    """

    coordinates: Tensor

    def __init__(
        self,
        embed_dim: int,
        rows: int,
        columns: int,
        *,
        max_global_shift: float = 0.5,
        max_local_shift: float = 0.5,
        max_scale: float = 1.4,
    ) -> None:
        super().__init__(embed_dim, max_global_shift, max_local_shift, max_scale)
        self.rows: int = rows
        self.columns: int = columns
        self.register_buffer("frequencies", torch.empty(2, embed_dim // 2, dtype=torch.float32), persistent=False)
        self.register_buffer("coordinates", torch.empty(rows * columns, 2, dtype=torch.float32), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        device = self.frequencies.device
        k = torch.arange(self.frequencies.shape[1], device=device, dtype=torch.float32)
        self.frequencies.copy_(10.0 ** (k / len(k)) * torch.stack([k.cos(), k.sin()]) * math.pi)
        # not linspace, because rows and columns may be symbols of an exported program
        sides = [
            (2 * torch.arange(n, device=device, dtype=torch.float32) - (n - 1)) / max(n - 1, 1)
            for n in (self.rows, self.columns)
        ]
        y, x = torch.meshgrid(*sides, indexing="ij")
        self.coordinates.copy_(torch.stack([x, y], -1).flatten(0, 1))

    def extra_repr(self) -> str:
        return f"{2 * self.frequencies.shape[1]}, rows={self.rows}, columns={self.columns}, {super().extra_repr()}"

    def forward(self, x: Float[Tensor, "batch length embed_dim"]) -> Float[Tensor, "batch length embed_dim"]:
        """Add the encoding to patches in row-major order."""
        distance = torch.tensor([2 / max(n - 1, 1) for n in (self.columns, self.rows)], device=x.device)
        return self._encode(x, self.coordinates, distance)


def _uniform(shape: tuple[int, ...], limit: float, device: torch.device) -> Tensor:
    return (2 * torch.rand(shape, device=device) - 1) * limit
