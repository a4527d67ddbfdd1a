"""Evaluation of a backbone's features by a linear probe."""

from collections.abc import Iterable

import torch
from torch import Tensor

from sigattn.data.dataset import Batch
from sigattn.models.vision import ViT
from sigattn.optional import require


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
    the squared weights; scikit-learn minimises it by L-BFGS in at most 200 iterations.
    """
    linear = require("sklearn.linear_model", "linear probes", "'sigattn[vision]'")
    mean, spread = training[0].mean(0), training[0].std(0) + 1e-6
    (x, y), (test, labels) = (((features - mean) / spread, labels) for features, labels in (training, held_out))
    return float(linear.LogisticRegression(C=1e3 / len(x), max_iter=200).fit(x, y).score(test, labels))
