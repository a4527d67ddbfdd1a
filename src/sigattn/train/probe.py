"""Evaluation of a backbone's features by a linear probe."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

from sigattn.data.dataset import Batch
from sigattn.models.vision import ViT


@torch.no_grad()
def extract_features(backbone: ViT, batches: Iterable[Batch]) -> tuple[Tensor, Tensor]:
    """Return a backbone's features (samples, embed_dim) and the labels (samples,) of batches of images and labels."""
    backbone.eval()
    device = next(backbone.parameters()).device
    pairs = [(backbone.features(images.to(device)).float().cpu(), labels) for images, labels in batches]
    features, labels = zip(*pairs, strict=True)
    return torch.cat(features), torch.cat(labels)


def linear_probe(training: tuple[Tensor, Tensor], held_out: tuple[Tensor, Tensor]) -> float:
    """Return the top-1 accuracy in 0 … 1 of multinomial logistic regression on standardised features.

    Training and held-out data are features (samples, embed_dim) and labels (samples,). The loss includes 1e-3 / 2 times
    the squared weights; L-BFGS minimises it in at most 200 iterations.
    """
    x, y = training
    mean, spread = x.mean(0), x.std(0) + 1e-6
    x, test = (x - mean) / spread, (held_out[0] - mean) / spread
    classes = int(max(y.max(), held_out[1].max())) + 1
    weight = torch.zeros(classes, x.shape[1], requires_grad=True)
    offset = torch.zeros(classes, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, offset], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(F.linear(x, weight, offset), y) + 1e-3 * weight.square().sum() / 2
        value.backward()
        return value

    optimizer.step(loss)
    with torch.no_grad():
        return (F.linear(test, weight, offset).argmax(-1) == held_out[1]).double().mean().item()
