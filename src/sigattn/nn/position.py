"""Positional encodings."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from sigattn.flash.rotary import rotate_pairs
from sigattn.shapes import Float, Int


class Float32Buffers(nn.Module):
    """Base class of modules whose buffers stay in float32 when the module is cast to 16 bits.

    RoPE's frequencies in bfloat16 (head_dim=128) give angles that are wrong by up to 2.4 radians at position 2,000.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:  # of .to() and others
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            after = self._buffers[name]
            if buffer is not None and after is not None and after.dtype in (torch.float16, torch.bfloat16):
                self._buffers[name] = buffer.to(after.device, torch.float32)
        return self


class Wavelengths(Float32Buffers):
    """Base class of encodings by sines and cosines, of the frequencies base^(-2i / dim) for i = 0 … dim / 2 - 1."""

    frequencies: Tensor

    def __init__(self, name: str, dim: int, base: float) -> None:
        super().__init__()
        if dim % 2:
            raise ValueError(f"{type(self).__name__} pairs the features, so {name} must be even, got {dim}")
        self.base = base
        self.register_buffer("frequencies", torch.empty(dim // 2, dtype=torch.float32), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        i = torch.arange(len(self.frequencies), device=self.frequencies.device, dtype=torch.float32)
        self.frequencies.copy_(self.base ** (-i / len(i)))

    def extra_repr(self) -> str:
        return f"{2 * len(self.frequencies)}, base={self.base:g}"


class RotaryEmbedding(Wavelengths):
    """RoPE: rotate each pair of a head's features by an angle that grows with the position (Su et al., 2021).

    Features i and i + head_dim / 2 are a pair (the layout of Llama), rotated by position · base^(-2i / head_dim).

    Args:
        head_dim: number of features per head, even.
        base: the largest wavelength is 2π · base positions.

    Raises:
        ValueError: if head_dim is odd.
    """

    def __init__(self, head_dim: int, base: float = 10_000.0) -> None:
        super().__init__("head_dim", head_dim, base)

    def forward(
        self,
        x: Float[Tensor, "batch heads length head_dim"],
        offset: int = 0,
        positions: Int[Tensor, "*batch length"] | None = None,
    ) -> Float[Tensor, "batch heads length head_dim"]:
        """Rotate queries or keys at positions offset, offset + 1, …, or at ``positions``, (length,) or (B, length)."""
        if positions is None:
            positions = torch.arange(offset, offset + x.shape[2], device=x.device)
        angles = (positions.float()[..., None] * self.frequencies).unsqueeze(-3)  # (B?, 1, length, head_dim / 2)
        return rotate_pairs(x, angles.cos(), angles.sin(), interleaved=False)


def alibi_slopes(num_heads: int) -> Tensor:  # (num_heads,)
    """Return the slopes of ALiBi (Press et al., 2022): 2^(-8/h), 2^(-16/h), …, 2^-8.

    If h is not a power of two, the slopes of the next smaller power of two come first, then every other slope of the
    next larger one.

    Raises:
        ValueError: if num_heads is less than 1.

    >>> alibi_slopes(4).tolist()
    [0.25, 0.0625, 0.015625, 0.00390625]
    """
    if num_heads < 1:
        raise ValueError(f"alibi_slopes: num_heads must be at least 1, got {num_heads}")
    below = 1 << (num_heads.bit_length() - 1)
    first = [2.0 ** (-8 * (i + 1) / below) for i in range(below)]
    between = [2.0 ** (-4 * (i + 1) / below) for i in range(0, 2 * (num_heads - below), 2)]
    return torch.tensor(first + between, dtype=torch.float32)


class Alibi(Float32Buffers):
    """ALiBi's slopes of a layer: the penalty of a logit for each position between query and key.

    Args:
        num_heads: number of query heads.
        sides: "causal" or "symmetric" (one slope for both sides), or "split" for encoders: the slope is ``steepness``
            times as large for later keys in half of the heads, and for earlier keys in the other half.
        steepness: see ``sides``.

    Raises:
        ValueError: for other sides, or "split" with a single head.
    """

    slopes: Tensor

    def __init__(self, num_heads: int, sides: str = "causal", steepness: float = 4.0) -> None:
        super().__init__()
        if sides not in ("causal", "symmetric", "split"):
            raise ValueError(f'Alibi: sides must be "causal", "symmetric" or "split", got {sides!r}')
        if sides == "split" and num_heads < 2:
            raise ValueError('Alibi: sides="split" needs at least two heads, one for each side')
        self.num_heads: int = num_heads
        self.sides: str = sides
        self.steepness: float = steepness
        shape = (1, num_heads, 2) if sides == "split" else (num_heads,)
        self.register_buffer("slopes", torch.empty(shape, dtype=torch.float32), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        heads = self.num_heads
        if self.sides != "split":
            self.slopes.copy_(alibi_slopes(heads))
            return
        # two neighbouring heads share a slope in opposite directions, so that each range is covered on both sides
        half = alibi_slopes((heads + 1) // 2).repeat_interleave(2)[:heads]
        back = torch.arange(heads) % 2 == 0
        before = torch.where(back, half, self.steepness * half)
        after = torch.where(back, self.steepness * half, half)
        self.slopes.copy_(torch.stack([before, after], -1).unsqueeze(0))

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, sides={self.sides!r}, steepness={self.steepness:g}"

    def shard_heads(self, first: int, count: int) -> None:
        """Keep the slopes of heads first … first + count - 1, for tensor parallelism."""
        whole = self.slopes
        self.slopes = whole[first : first + count] if whole.dim() == 1 else whole[:, first : first + count]

    def forward(self) -> Tensor:
        """Return ``alibi_slopes`` for ``sigmoid_attention``: (num_heads,), or (1, num_heads, 2) for split sides."""
        return self.slopes


class SinusoidalEmbedding(Wavelengths):
    """Fixed sines and cosines of Vaswani et al. (2017), added to the input.

    Args:
        embed_dim: number of features, even. base: the largest wavelength is 2π · base positions.
    """

    def __init__(self, embed_dim: int, base: float = 10_000.0) -> None:
        super().__init__("embed_dim", embed_dim, base)

    def forward(
        self,
        x: Float[Tensor, "batch length embed_dim"],
        offset: int = 0,
        positions: Int[Tensor, "*batch length"] | None = None,
    ) -> Float[Tensor, "batch length embed_dim"]:
        """Add the encoding of positions offset, offset + 1, …, or of ``positions``."""
        if positions is None:
            positions = torch.arange(offset, offset + x.shape[1], device=x.device)
        angles = positions.float().unsqueeze(-1) * self.frequencies  # (B?, length, embed_dim / 2)
        return x + torch.stack([angles.sin(), angles.cos()], -1).flatten(-2).to(x.dtype)


class ImageSinusoids(nn.Module):
    """Fixed sines and cosines of MoCo v3 and MAE, added to an image's patches in row-major order."""

    encoding: Tensor

    def __init__(self, embed_dim: int, rows: int, columns: int) -> None:
        super().__init__()
        if embed_dim % 4:
            raise ValueError(f"ImageSinusoids: embed_dim must be a multiple of 4, got embed_dim={embed_dim}")
        self.rows, self.columns = rows, columns
        self.register_buffer("encoding", torch.empty(rows * columns, embed_dim), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        quarter = self.encoding.shape[1] // 4
        frequencies = 10_000.0 ** -(torch.arange(quarter) / quarter)
        y, x = torch.meshgrid(torch.arange(self.rows), torch.arange(self.columns), indexing="ij")
        parts = [c.flatten()[:, None] * frequencies for c in (x, y)]
        self.encoding.copy_(torch.cat([part for angles in parts for part in (angles.sin(), angles.cos())], -1))

    def extra_repr(self) -> str:
        return f"{self.encoding.shape[1]}, rows={self.rows}, columns={self.columns}"

    def forward(self, x: Float[Tensor, "batch patches embed_dim"]) -> Float[Tensor, "batch patches embed_dim"]:
        return x + self.encoding.to(x.dtype)


class LearnableEmbedding(nn.Module):
    """Learned vector for each position, added to the input; ``std`` is the standard deviation of its initial values."""

    def __init__(self, num_positions: int, embed_dim: int, std: float = 0.02) -> None:
        super().__init__()
        self.std = std
        self.weight: nn.Parameter = nn.Parameter(torch.empty(num_positions, embed_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.weight, std=self.std)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, {self.weight.shape[1]}, std={self.std:g}"

    def forward(
        self, x: Float[Tensor, "batch length embed_dim"], offset: int = 0
    ) -> Float[Tensor, "batch length embed_dim"]:
        """Add the vectors of positions offset, offset + 1, …; raise ValueError if there are fewer vectors."""
        stop = offset + x.shape[1]
        if stop > len(self.weight):
            raise ValueError(f"LearnableEmbedding has {len(self.weight)} positions, and the input ends at {stop}")
        return x + self.weight[offset:stop]
