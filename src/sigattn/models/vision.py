"""Vision transformers (Dosovitskiy et al., 2021)."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sigattn.models.config import TransformerConfig
from sigattn.models.transformer import Transformer, residual_stream
from sigattn.nn.block import Block
from sigattn.nn.cape import ImageCape
from sigattn.nn.initialization import initialize
from sigattn.nn.norm import make_norm
from sigattn.nn.position import ImageSinusoids, LearnableEmbedding
from sigattn.shapes import Float
from sigattn.validation import check_among, check_at_least, check_bool

Position = Literal["learnable", "sincos", "cape", "none"]


@dataclass(frozen=True, kw_only=True)
class ViTConfig(TransformerConfig):
    """Configuration of a vision transformer: by default ViT-B/16, with the paper's QK-norm and LayerScale.

    Attributes:
        image_size: height and width of an image, in pixels.
        patch_size: height and width of a patch, in pixels.
        channels: number of channels of an image.
        num_classes: number of classes; 0 for a model that returns its features.
        position: encoding added to the patches: "learnable", "sincos" (fixed), "cape" or "none".
        pool: input of the linear output, the "cls" token or the "average" of the patches.
        dynamic_img_size: True to accept other image sizes too (such as DINO's small crops); learned positions are
            interpolated.
        freeze_patch_embed: True to keep the initial patch projection (MoCo v3; the paper's SimCLR).
    """

    num_layers: int = 12
    embed_dim: int = 768
    num_heads: int = 12
    init_values: float | None = 1e-4
    image_size: int = 224
    patch_size: int = 16
    channels: int = 3
    num_classes: int = 1000
    position: Position = "learnable"
    pool: Literal["cls", "average"] = "cls"
    dynamic_img_size: bool = False
    freeze_patch_embed: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(1, self, "image_size", "patch_size", "channels")
        check_at_least(0, self, "num_classes")
        check_among(("cls", "average"), self, "pool")
        check_bool(self, "dynamic_img_size", "freeze_patch_embed")

    def build(self) -> "ViT":
        return ViT(self)

    def tiny(self) -> "ViTConfig":
        return replace(super().tiny(), image_size=8, patch_size=2, channels=1, num_classes=10)

    def example_inputs(self, batch_size: int = 2) -> tuple[Tensor, ...]:
        return (torch.randn(batch_size, self.channels, self.image_size, self.image_size),)

    @property
    def grid_size(self) -> int:
        """Number of patches along a side; raises ValueError if patch_size does not divide image_size."""
        if self.image_size % self.patch_size:
            sizes = f"{self.image_size} and {self.patch_size}"
            raise ValueError(f"image_size must be a multiple of patch_size, got {sizes}")
        return self.image_size // self.patch_size

    @property
    def num_tokens(self) -> int:
        """Length of the sequence: the patches, and the CLS token if there is one."""
        return self.grid_size**2 + (self.pool == "cls")

    def make_block(self, layer: int) -> Block:
        return self.make_transformer_block(layer, None, causal=False, max_seq_len=self.num_tokens)


SIZES: dict[str, dict[str, Any]] = {
    "Ti": {"num_layers": 12, "embed_dim": 192, "num_heads": 3},
    "S": {"num_layers": 12, "embed_dim": 384, "num_heads": 6},
    "B": {"num_layers": 12, "embed_dim": 768, "num_heads": 12},
    "L": {"num_layers": 24, "embed_dim": 1024, "num_heads": 16},
}


class ViT(Transformer):
    """Vision transformer: patches with positions, blocks, a norm, and a linear output of CLS token or average."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        embed_dim, grid = config.embed_dim, config.grid_size
        self.patch_embed: nn.Conv2d = nn.Conv2d(config.channels, embed_dim, config.patch_size, config.patch_size)
        self.patch_embed.requires_grad_(not config.freeze_patch_embed)
        self.cls: nn.Parameter | None = nn.Parameter(torch.empty(1, 1, embed_dim)) if config.pool == "cls" else None
        self.position: nn.Module = make_position(config.position, embed_dim, grid, grid)
        self.blocks: nn.ModuleList = nn.ModuleList(config.make_block(layer) for layer in range(config.num_layers))
        self.norm: nn.Module = make_norm(config.norm, embed_dim)
        self.output: nn.Module = nn.Linear(embed_dim, config.num_classes) if config.num_classes else nn.Identity()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise all parameters; "moco_v3" sets the range of the patch projection as timm does, for 3 channels."""
        initialize(self, self.config.initialization)
        if self.config.initialization == "moco_v3":
            limit = (6 / (3 * self.config.patch_size**2 + self.config.embed_dim)) ** 0.5
            nn.init.uniform_(self.patch_embed.weight, -limit, limit)
        if self.cls is not None:
            nn.init.normal_(self.cls, std=1e-6)

    def forward(self, images: Float[Tensor, "batch channels rows columns"]) -> Float[Tensor, "batch outputs"]:
        """Return the logits of the classes, or the features if there are no classes."""
        return self.output(self.features(images))

    def features(self, images: Float[Tensor, "batch channels rows columns"]) -> Float[Tensor, "batch embed_dim"]:
        """Return the pooled features, the input of the linear output."""
        x = self.encode(self.embed(images))
        return x[:, 0] if self.cls is not None else x.mean(1)

    def embed(self, images: Float[Tensor, "batch channels rows columns"]) -> Float[Tensor, "batch patches embed_dim"]:
        """Return the patches as tokens, with their position encoding; raise ValueError for images of another size."""
        c = self.config
        sides = images.shape[2:]
        fits = not any(s % c.patch_size for s in sides) if c.dynamic_img_size else sides == (c.image_size,) * 2
        if images.shape[1] != c.channels or not fits:
            raise ValueError(
                f"images must be (batch, {c.channels}, {c.image_size}, {c.image_size}), got {tuple(images.shape)}; "
                f"with dynamic_img_size=True height and width may be other multiples of patch_size={c.patch_size}"
            )
        x = residual_stream(self.patch_embed(images))  # (B, embed_dim, rows, columns)
        x, rows, columns = x.flatten(2).mT, x.shape[2], x.shape[3]
        # an exported program takes all sizes alike: a comparison would restrict it to other sizes, or to this one
        if not c.dynamic_img_size or (not torch.compiler.is_exporting() and rows == columns == c.grid_size):
            return self.position(x)
        return _resized(self.position, c, x, rows, columns)

    def encode(self, x: Float[Tensor, "batch patches embed_dim"]) -> Float[Tensor, "batch tokens embed_dim"]:
        """Apply all blocks and the norm; the CLS token, if there is one, is the first of the output."""
        if self.cls is not None:
            x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1)
        for block in self.blocks:
            x = self.run_block(block, x)
        return self.norm(x)


def make_position(kind: str, embed_dim: int, rows: int, columns: int) -> nn.Module:
    """Create the position encoding of an image's patches; raise ValueError for an unknown kind."""
    if kind == "learnable":
        return LearnableEmbedding(rows * columns, embed_dim)
    if kind == "sincos":
        return ImageSinusoids(embed_dim, rows, columns)
    if kind == "cape":
        return ImageCape(embed_dim, rows, columns)
    if kind == "none":
        return nn.Identity()
    raise ValueError(f'position must be "learnable", "sincos", "cape" or "none", got {kind!r}')


def _resized(position: nn.Module, config: ViTConfig, x: Tensor, rows: int, columns: int) -> Tensor:
    """Return x with the position encoding of another grid of patches; a learned encoding is interpolated."""
    if isinstance(position, LearnableEmbedding):
        encoding = position.weight.unflatten(0, (config.grid_size, config.grid_size)).permute(2, 0, 1)[None]
        encoding = F.interpolate(encoding, (rows, columns), mode="bicubic", antialias=True).flatten(2).mT
        return x + encoding.to(x.dtype)
    resized = make_position(config.position, config.embed_dim, rows, columns)
    return resized.to(x.device).train(position.training)(x)
