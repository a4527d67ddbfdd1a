"""Add a model of one's own, a text classifier, and train it: which package of Python's library is a piece of code from?

    python examples/text_classifier.py                    # minutes on two cores

The model is a configuration, a module and a line in ``MODELS``: with these the training loop, ``save`` and ``load``
know it. Padding does not affect the result, and every text has the bias -log of its own length.

Needs ``pip install 'sigattn[train]'``.
"""

import argparse
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from sigattn.data import Data, TextData, load_text
from sigattn.models import MODELS, Transformer, TransformerConfig, load
from sigattn.nn.position import RotaryEmbedding
from sigattn.tasks import Classification
from sigattn.train import TrainConfig, train

PACKAGES = ("asyncio", "ctypes", "email", "encodings", "importlib", "multiprocessing", "unittest", "xml")


@dataclass(frozen=True, kw_only=True)
class TextClassifierConfig(TransformerConfig):
    """Configuration of a classifier of texts, which are bytes."""

    max_seq_len: int = 256
    num_classes: int = 2

    DEFAULT_BIAS = "log_sample"
    KNOWS_LENGTHS = True

    def build(self):
        return TextClassifier(self)

    def example_inputs(self, batch_size=2):
        """Return tokens and lengths."""
        lengths = torch.linspace(self.max_seq_len, 1 + self.max_seq_len // 2, batch_size).long()
        return torch.randint(256, (batch_size, self.max_seq_len)), lengths


MODELS["text-classifier"] = TextClassifierConfig


class TextClassifier(Transformer):
    """Token embedding, blocks without a causal mask, a norm, the mean of each text, and an output."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(256, config.embed_dim)
        self.blocks = nn.ModuleList(
            config.make_transformer_block(
                i, RotaryEmbedding(config.head_dim), causal=False, max_seq_len=config.max_seq_len
            )
            for i in range(config.num_layers)
        )
        self.norm = nn.LayerNorm(config.embed_dim)
        self.output = nn.Linear(config.embed_dim, config.num_classes)
        self.reset_parameters()

    def forward(self, tokens, lengths):
        """Return the logits of the classes, of tokens (B, N) padded to the longest text, and lengths (B,)."""
        x = self.embedding(tokens)  # (B, N, embed_dim)
        for block in self.blocks:
            x = self.run_block(block, x, key_lengths=lengths)
        exists = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]  # (B, N)
        return self.output((self.norm(x) * exists[:, :, None]).sum(1) / lengths[:, None])


class Sources(Data):
    """Pieces of the packages' source code, of random lengths; the last tenth of each package is held out."""

    def __init__(self, max_length):
        library = Path(sysconfig.get_paths()["stdlib"])
        self.packages = [TextData.from_bytes(load_text(library / name), max_length) for name in PACKAGES]

    def batch(self, step, size, seed, shard=(0, 1)):
        windows = [package.batch(step, size, seed)[0] for package in self.packages]
        labels = torch.randint(len(windows), (size,), generator=torch.Generator().manual_seed(seed + 1000 * step))
        batch = self._cut(torch.stack(windows)[labels, torch.arange(size)], labels)
        return tuple(t[shard[0] :: shard[1]] for t in batch)

    def validation(self, size):
        windows = torch.cat([tokens for package in self.packages for tokens, _ in package.validation(64)])
        batch = self._cut(windows, torch.arange(len(PACKAGES)).repeat_interleave(64))
        return zip(*(t.split(size) for t in batch), strict=True)

    @property
    def fingerprint(self):
        return " ".join(package.fingerprint for package in self.packages)

    @staticmethod
    def _cut(windows, labels):
        """Return windows, lengths that repeat from half to the whole window, and labels."""
        longest = windows.shape[1]
        return windows, longest - torch.arange(len(labels)) % (longest // 2), labels


def main():
    """Train, and load the saved model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--activation", choices=("sigmoid", "softmax"), default="sigmoid")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--folder", type=Path, default=Path("text-classifier"))
    options = parser.parse_args()
    model = TextClassifierConfig(
        num_layers=2, embed_dim=64, max_seq_len=128, num_classes=len(PACKAGES), activation=options.activation
    )
    training = TrainConfig(max_steps=options.steps, batch_size=64, validate_every=min(options.steps, 100))

    def report(row):
        if "validation_top1" in row:
            print(f"step {row['step']}: held-out accuracy {100 * row['validation_top1']:.1f} %", flush=True)

    train(Classification(), model, training, Sources(model.max_seq_len), options.folder, on_row=report)
    print(load(options.folder / "model"))


if __name__ == "__main__":
    main()
