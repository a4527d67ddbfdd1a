"""Masked autoencoder for images (He et al., 2022)."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from sigattn.models.config import ModelConfig
from sigattn.models.transformer import Transformer, residual_stream
from sigattn.models.vision import ViT, ViTConfig
from sigattn.nn.initialization import initialize
from sigattn.nn.norm import make_norm
from sigattn.nn.position import ImageSinusoids
from sigattn.shapes import Float
from sigattn.validation import check_at_least, check_fraction


@dataclass(frozen=True, kw_only=True)
class MaskedAutoencoderConfig(ModelConfig):
    """Configuration of a masked autoencoder: an encoder of the visible patches and a decoder that predicts all.

    Attributes:
        encoder: configuration of the encoder, whose classes are not used. Its bias should be "log_batch", -log of the
            actual number of tokens, which differs between pretraining (3 of 4 patches hidden) and later use.
        decoder_num_layers: number of blocks of the decoder; options not listed here are those of the encoder.
        decoder_embed_dim: number of features of a position in the decoder.
        decoder_num_heads: number of attention heads of the decoder.
        mask_ratio: fraction of the patches that is hidden; at least one is hidden, and one visible.
    """

    encoder: ViTConfig = field(default_factory=lambda: ViTConfig(attention_bias="log_batch"))
    decoder_num_layers: int = 8
    decoder_embed_dim: int = 512
    decoder_num_heads: int = 16
    mask_ratio: float = 0.75

    def __post_init__(self) -> None:
        check_at_least(1, self, "decoder_num_layers", "decoder_embed_dim", "decoder_num_heads")
        check_fraction(self, "mask_ratio")

    def build(self) -> "MaskedAutoencoder":
        return MaskedAutoencoder(self)

    @property
    def transformer(self) -> ViTConfig:
        return self.encoder

    def with_transformer(self, **changes: Any) -> "MaskedAutoencoderConfig":
        return replace(self, encoder=replace(self.encoder, **changes))

    def tiny(self) -> "MaskedAutoencoderConfig":
        small = self.encoder.tiny()
        return replace(self, encoder=small, decoder_num_layers=1, decoder_embed_dim=64, decoder_num_heads=4)

    def example_inputs(self, batch_size: int = 2) -> tuple[Tensor, ...]:
        return self.encoder.example_inputs(batch_size)


class MaskedAutoencoder(Transformer):
    """Masked autoencoder: hide most patches of an image, encode the others, and predict the pixels of all."""

    def __init__(self, config: MaskedAutoencoderConfig) -> None:
        super().__init__()
        self.config = config
        e = config.encoder
        sizes = {name: getattr(config, f"decoder_{name}") for name in ("num_layers", "embed_dim", "num_heads")}
        d = replace(e, mlp_dim=None, **sizes)
        self.encoder: ViT = ViT(replace(e, num_classes=0))
        self.bridge: nn.Linear = nn.Linear(e.embed_dim, d.embed_dim)
        self.mask_token: nn.Parameter = nn.Parameter(torch.empty(1, 1, d.embed_dim))
        self.position: ImageSinusoids = ImageSinusoids(d.embed_dim, d.grid_size, d.grid_size)
        self.blocks: nn.ModuleList = nn.ModuleList(d.make_block(layer) for layer in range(d.num_layers))
        self.norm: nn.Module = make_norm(d.norm, d.embed_dim)
        self.output: nn.Linear = nn.Linear(d.embed_dim, e.channels * e.patch_size**2)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        initialize(self, self.config.encoder.initialization)
        self.encoder.reset_parameters()
        nn.init.trunc_normal_(self.mask_token, std=0.02)

    def forward(
        self, images: Float[Tensor, "batch channels rows columns"]
    ) -> tuple[Float[Tensor, "batch patches pixels"], Float[Tensor, "batch patches"]]:
        """Return the predicted pixels of each patch, and 1 for hidden and 0 for visible patches.

        Each call draws the hidden patches at random. Raises ValueError for images of a single patch.
        """
        x = self.encoder.embed(images)
        batch, patches, _ = x.shape
        if patches < 2:
            raise ValueError(
                f"MaskedAutoencoder hides some patches and sees others: pass images of at least two, got {patches}"
            )
        num_visible = min(max(1, round(patches * (1 - self.config.mask_ratio))), patches - 1)
        order = torch.rand(batch, patches, device=x.device).argsort(1)
        hidden = torch.ones(batch, patches, device=x.device).scatter(1, order[:, :num_visible], 0.0)
        x = x.gather(1, order[:, :num_visible, None].expand(-1, -1, x.shape[2]))
        return self._decode(self.encoder.encode(x), order, num_visible), hidden

    def _decode(self, x: Tensor, order: Tensor, num_visible: int) -> Tensor:
        """Insert mask tokens for the hidden patches, restore the order of the patches, and predict their pixels."""
        x = residual_stream(self.bridge(x))
        cls, x = (x[:, :1], x[:, 1:]) if self.encoder.cls is not None else (x[:, :0], x)
        mask = self.mask_token.to(x.dtype).expand(x.shape[0], order.shape[1] - num_visible, -1)
        index = order.argsort(1)[:, :, None].expand(-1, -1, x.shape[2])
        x = torch.cat([cls, self.position(torch.cat([x, mask], 1).gather(1, index))], 1)
        for block in self.blocks:
            x = self.run_block(block, x)
        return self.output(self.norm(x[:, cls.shape[1] :]))
