"""Vision transformers (Dosovitskiy et al., 2021), and the masked autoencoder (He et al., 2022)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sigattn.models.transformer import TransformerConfig, Watched
from sigattn.nn.block import Block
from sigattn.nn.cape import ImageCape
from sigattn.nn.initialization import initialize
from sigattn.nn.norm import make_norm
from sigattn.nn.position import LearnableEmbedding, image_sinusoids
from sigattn.shapes import Float

Position = Literal["learnable", "sincos", "cape", "none"]


@dataclass(frozen=True, kw_only=True)
class VisionTransformerConfig(TransformerConfig):
    """Size and kind of a vision transformer: by default ViT-B/16, with the paper's QK-norm and LayerScale.

    Attributes:
        image_size: pixels of a side. patch: pixels of a patch's side. channels: of an image.
        classes: outputs; 0 for none, so that the model gives its features.
        position: added to the patches: "learnable", "sincos" (fixed), "cape" or "none".
        pool: what the output is made of, the "cls" token or the "average" of the patches.
        freeze_patches: keep the patches' projection as it was drawn (MoCo v3; the paper's SimCLR).
    """

    layers: int = 12
    width: int = 768
    heads: int = 12
    layer_scale: float | None = 1e-4
    image_size: int = 224
    patch: int = 16
    channels: int = 3
    classes: int = 1000
    position: Position = "learnable"
    pool: Literal["cls", "average"] = "cls"
    freeze_patches: bool = False

    @property
    def grid(self) -> int:
        """Patches along a side.

        Raises:
            ValueError: if patches do not divide the image.
        """
        if self.image_size % self.patch:
            raise ValueError(f"image_size must be a multiple of patch, got {self.image_size} and {self.patch}")
        return self.image_size // self.patch

    @property
    def tokens(self) -> int:
        """Length of the sequence: patches, and the CLS token if there is one."""
        return self.grid**2 + (self.pool == "cls")

    def make_block(self, layer: int) -> Block:
        """The block of a layer."""
        return self.block(layer, None, causal=False, context=self.tokens)


SIZES = {
    "Ti": {"layers": 12, "width": 192, "heads": 3},
    "S": {"layers": 12, "width": 384, "heads": 6},
    "B": {"layers": 12, "width": 768, "heads": 12},
    "L": {"layers": 24, "width": 1024, "heads": 16},
}


class VisionTransformer(Watched):
    """Patches, their places, blocks, a norm, and a linear output of the CLS token or the average."""

    def __init__(self, config: VisionTransformerConfig) -> None:
        super().__init__()
        self.config = config
        width, grid = config.width, config.grid
        self.patches = nn.Conv2d(config.channels, width, config.patch, config.patch)
        self.patches.requires_grad_(not config.freeze_patches)
        self.cls = nn.Parameter(torch.empty(1, 1, width)) if config.pool == "cls" else None
        self.position = _position(config.position, width, grid)
        self.blocks = nn.ModuleList(config.make_block(layer) for layer in range(config.layers))
        self.norm = make_norm(config.norm, width)
        self.output = nn.Linear(width, config.classes) if config.classes else nn.Identity()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew; MoCo v3 draws patches as if each colour were one matrix, as timm does."""
        initialize(self, self.config.initialization)
        if self.config.initialization == "moco_v3":
            limit = (6 / (3 * self.config.patch**2 + self.config.width)) ** 0.5
            nn.init.uniform_(self.patches.weight, -limit, limit)
        if self.cls is not None:
            nn.init.normal_(self.cls, std=1e-6)

    def forward(self, images: Float[Tensor, "batch channels rows columns"]) -> Float[Tensor, "batch outputs"]:
        """Logits of the classes, or features if there are none."""
        result: Tensor = self.output(self.features(images))
        return result

    def features(self, images: Float[Tensor, "batch channels rows columns"]) -> Float[Tensor, "batch width"]:
        """The pooled features before the output."""
        x = self.encode(self.embed(images))
        return x[:, 0] if self.cls is not None else x.mean(1)

    def embed(self, images: Float[Tensor, "batch channels rows columns"]) -> Float[Tensor, "batch patches width"]:
        """Patches as tokens, with their places.

        Raises:
            ValueError: for images of another size.
        """
        c = self.config
        expected = (c.channels, c.image_size, c.image_size)
        if images.shape[1:] != expected:
            raise ValueError(f"images must be (batch, {', '.join(map(str, expected))}), got {tuple(images.shape)}")
        x = self.patches(images).flatten(2).mT  # (B, patches, width)
        result: Tensor = self.position(x)
        return result

    def encode(self, x: Float[Tensor, "batch patches width"]) -> Float[Tensor, "batch tokens width"]:
        """All blocks and the norm; the CLS token, if there is one, comes first."""
        if self.cls is not None:
            x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1)
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.norm(x)
        return result


class _Fixed(nn.Module):
    """Fixed sines and cosines, added to the patches."""

    encoding: Tensor

    def __init__(self, width: int, grid: int) -> None:
        super().__init__()
        self.grid = grid
        self.register_buffer("encoding", torch.empty(grid**2, width), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.encoding.copy_(image_sinusoids(self.encoding.shape[1], self.grid, self.grid))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.encoding.to(x.dtype)


def _position(kind: str, width: int, grid: int) -> nn.Module:
    if kind == "learnable":
        return LearnableEmbedding(grid**2, width)
    if kind == "sincos":
        return _Fixed(width, grid)
    if kind == "cape":
        return ImageCape(width, grid, grid)
    if kind == "none":
        return nn.Identity()
    raise ValueError(f'position must be "learnable", "sincos", "cape" or "none", got {kind!r}')


@dataclass(frozen=True, kw_only=True)
class MaskedAutoencoderConfig:
    """An encoder of the patches that are seen, and a small decoder that fills in the others.

    Attributes:
        encoder: a vision transformer, whose classes are not used. With 3 of 4 patches hidden, and none later, its
            bias is best "log_batch": -log of the tokens that there are.
        decoder_layers, decoder_width, decoder_heads: of the decoder, which is otherwise as the encoder.
        mask_ratio: part of the patches that is hidden.
    """

    encoder: VisionTransformerConfig = field(default_factory=lambda: VisionTransformerConfig(bias="log_batch"))
    decoder_layers: int = 8
    decoder_width: int = 512
    decoder_heads: int = 16
    mask_ratio: float = 0.75


class MaskedAutoencoder(Watched):
    """Hides most patches of an image, encodes the others, and predicts the pixels of all."""

    def __init__(self, config: MaskedAutoencoderConfig) -> None:
        super().__init__()
        if not 0 < config.mask_ratio < 1:
            raise ValueError(f"mask_ratio must lie between 0 and 1, got {config.mask_ratio}")
        self.config = config
        e = config.encoder
        d = replace(
            e, layers=config.decoder_layers, width=config.decoder_width, heads=config.decoder_heads, hidden=None
        )
        self.encoder = VisionTransformer(replace(e, classes=0))
        self.bridge = nn.Linear(e.width, d.width)
        self.mask_token = nn.Parameter(torch.empty(1, 1, d.width))
        self.position = _Fixed(d.width, d.grid)
        self.blocks = nn.ModuleList(d.make_block(layer) for layer in range(d.layers))
        self.norm = make_norm(d.norm, d.width)
        self.output = nn.Linear(d.width, e.channels * e.patch**2)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew."""
        initialize(self, self.config.encoder.initialization)
        self.encoder.reset_parameters()
        nn.init.trunc_normal_(self.mask_token, std=0.02)

    def forward(
        self, images: Float[Tensor, "batch channels rows columns"]
    ) -> tuple[Float[Tensor, "batch patches pixels"], Float[Tensor, "batch patches"]]:
        """Predicted pixels of each patch, and which patches were hidden (1) and which seen (0).

        Which are hidden is drawn anew at each call.
        """
        x = self.encoder.embed(images)
        batch, patches, _ = x.shape
        seen = max(1, round(patches * (1 - self.config.mask_ratio)))
        order = torch.rand(batch, patches, device=x.device).argsort(1)
        hidden = torch.ones(batch, patches, device=x.device).scatter(1, order[:, :seen], 0.0)
        x = x.gather(1, order[:, :seen, None].expand(-1, -1, x.shape[2]))
        return self._decode(self.encoder.encode(x), order, seen), hidden

    def _decode(self, x: Tensor, order: Tensor, seen: int) -> Tensor:
        """Put mask tokens where patches were hidden, all back in order, and predict."""
        x = self.bridge(x)
        first, x = (x[:, :1], x[:, 1:]) if self.encoder.cls is not None else (x[:, :0], x)
        mask = self.mask_token.to(x.dtype).expand(len(x), order.shape[1] - seen, -1)
        place = order.argsort(1)[:, :, None].expand(-1, -1, x.shape[2])
        x = torch.cat([first, self.position(torch.cat([x, mask], 1).gather(1, place))], 1)
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.output(self.norm(x[:, first.shape[1] :]))
        return result

    def loss(self, images: Float[Tensor, "batch channels rows columns"]) -> Float[Tensor, ""]:
        """Mean squared error of the hidden patches' pixels, each patch brought to mean 0 and variance 1."""
        predicted, hidden = self(images)
        target = F.unfold(images.float(), self.config.encoder.patch, stride=self.config.encoder.patch).mT
        target = (target - target.mean(-1, keepdim=True)) / (target.var(-1, keepdim=True) + 1e-6).sqrt()
        error = (predicted.float() - target).square().mean(-1)  # (B, patches)
        return (error * hidden).sum() / hidden.sum()
