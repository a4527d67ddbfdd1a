"""Demonstration of the bias: language models with softmax, sigmoid with b = -log n, and sigmoid with b = 0.

    sigattn demo                    (or: make demo)

Hardware: 2 CPU cores. Time: about 3 minutes. Expected: softmax and sigmoid with b = -log n end near each other, both
below 2.2 bits per byte on held-out text; sigmoid with b = 0 starts with attention outputs about a hundred times as
large and ends clearly worse (Sect. 5, "Mitigating Large Attention Norms", and App. E).
"""

import functools
import platform
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import sigattn
from sigattn.data.text import TextData, load_text
from sigattn.demo import report
from sigattn.files import write_text
from sigattn.models.language import LanguageModel, LanguageModelConfig
from sigattn.tasks.language import LanguageModelling
from sigattn.train.checkpoint import check_no_checkpoints
from sigattn.train.config import TrainConfig
from sigattn.train.folder_lock import lock_folder
from sigattn.train.loop import Row, train
from sigattn.train.metrics import read_metrics
from sigattn.validation import SettingsError, check_at_least, check_output_folder

INTRODUCTION = (
    "Three byte-level language models of the same size, trained on the same text in the same order. They differ in the "
    "attention only: softmax; sigmoid with the paper's bias b = -log n, where n is the context length; and sigmoid "
    "without a bias. Without the bias every weight starts near 1/2, so the attention's output is initially orders of "
    "magnitude too large, and the final loss is higher."
)
SIZES = ("max_seq_len", "num_layers", "embed_dim", "num_heads")


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """Settings of the demo.

    Attributes:
        run_folder: folder for metrics, checkpoints and the report.
        text: a text file, or a folder of text files; by default CPython's documentation.
        resume: continue the run in the run folder.
        max_seq_len: length of the sequences in bytes; n in b = -log n.
        num_layers: number of blocks of each model.
        embed_dim: number of features of a position.
        num_heads: number of attention heads.
        training: settings of the training loop.
    """

    run_folder: Path = Path("runs/demo")
    text: Path | None = None
    resume: bool = False
    max_seq_len: int = 256
    num_layers: int = 3
    embed_dim: int = 96
    num_heads: int = 3
    training: TrainConfig = field(
        default_factory=lambda: TrainConfig(max_steps=360, batch_size=8, learning_rate=4e-3, validate_every=90)
    )

    def __post_init__(self) -> None:
        check_at_least(1, self, *SIZES)
        if self.training.log_attention_every != 1:
            raise SettingsError("the demo shows the attention norm of every step: log_attention_every must be 1")


MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # title and options of the attention, by folder
    "softmax": ("softmax", {"activation": "softmax"}),
    "sigmoid-log-n": ("sigmoid, b = −log n", {"attention_bias": "log_context"}),
    "sigmoid-no-bias": ("sigmoid, b = 0", {"attention_bias": 0.0}),
}


def train_models(config: DemoConfig, on_row: Callable[[str, Row], None]) -> list[report.Run]:
    """Train the three models, write report.html, and return the runs of the report.

    ``on_row`` is called with a model's title and the metrics of each step. Raises SettingsError if the settings do not
    fit together or the run folder holds a run that is not to be resumed, DataError if the text is unusable, and the
    errors of ``train``.
    """
    folder, task = config.run_folder, LanguageModelling()
    check_output_folder(folder)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*sigmoid attention without a bias")  # intended in one of the models
        sizes: dict[str, Any] = {name: getattr(config, name) for name in SIZES}
        models = {name: LanguageModelConfig(**sizes, **attention) for name, (_, attention) in MODELS.items()}
        for name, model in models.items():
            task.check(model)
            if not config.resume:
                check_no_checkpoints(folder / name, "run_folder")
        text = TextData.from_bytes(load_text(config.text), config.max_seq_len)
        runs = []
        with lock_folder(folder):
            for name, (title, _) in MODELS.items():
                show = functools.partial(on_row, title)
                run = (task, models[name], config.training, text, folder / name)
                trained = train(*run, resume=config.resume, on_row=show)
                rows = read_metrics(folder / name / "metrics.jsonl")
                runs.append(report.Run(title, rows, generate_sample(trained)))
            title, facts = "Softmax and sigmoid attention, side by side", describe(config, text)
            write_text(folder / "report.html", report.comparison_page(title, INTRODUCTION, runs, facts))
    return runs


def generate_sample(model: nn.Module, length: int = 400) -> str:
    """Return a text that a model generates from a fixed prompt."""
    assert isinstance(model, LanguageModel)
    prompt, generator = torch.tensor([list(b"The function ")]), torch.Generator().manual_seed(0)
    tokens = model.generate(prompt, length, temperature=0.7, generator=generator)
    return bytes(tokens[0].tolist()).decode(errors="replace")


def describe(config: DemoConfig, text: TextData) -> dict[str, Any]:
    """Return settings, versions, machine and text of the demo, for the report."""
    return {
        **{f"model: {name}": getattr(config, name) for name in SIZES},
        **{f"training: {name}": value for name, value in asdict(config.training).items()},
        "text": f"{config.text or 'pydoc_data.topics'} (SHA-256 {text.fingerprint})",
        "bytes for training, held out": f"{len(text.training_tokens):,}, {len(text.held_out_tokens):,}",
        "versions": f"sigattn {sigattn.__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        "machine": f"{platform.machine()}, {platform.system()}, {torch.get_num_threads()} threads",
    }
