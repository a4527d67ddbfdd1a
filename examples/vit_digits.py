"""Train a vision transformer with sigmoid attention on scikit-learn's handwritten digits: half a minute on two cores.

    python examples/vit_digits.py
    python examples/vit_digits.py --activation softmax    # the same model with softmax

Needs ``pip install 'sigattn[train,vision]'``.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F

from sigattn.models import ViT, ViTConfig


def main():
    """Train on four fifths of the digits, and print the accuracy on the rest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--activation", choices=("sigmoid", "softmax"), default="sigmoid")
    parser.add_argument("--epochs", type=int, default=15)
    options = parser.parse_args()
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
    labels = torch.tensor(labels)
    held_out = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)) < len(labels) // 5
    model = ViT(
        ViTConfig(
            image_size=8, patch_size=2, channels=1, num_classes=10, num_layers=3, embed_dim=64, num_heads=4,
            activation=options.activation, init_values=0.01,
        )
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    train_images, train_labels = images[~held_out], labels[~held_out]
    for epoch in range(options.epochs):
        model.train()
        for rows in torch.randperm(len(train_labels)).split(128):
            loss = F.cross_entropy(model(train_images[rows]), train_labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            right = (model(images[held_out]).argmax(-1) == labels[held_out]).float().mean()
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}, held-out accuracy {100 * right:.1f} %", flush=True)


if __name__ == "__main__":
    main()
