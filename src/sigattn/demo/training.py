"""Demonstration of the bias: language models with softmax, sigmoid with b = -log n, and sigmoid with b = 0.

    sigattn demo                    (or: make demo)

Hardware: 2 CPU cores. Time: 4 to 5 minutes. Expected: softmax and sigmoid with b = -log n end near each other, both
below 2.2 bits per byte on held-out text; sigmoid with b = 0 starts with attention outputs about a hundred times as
large and ends clearly worse (Sect. 5, "Mitigating Large Attention Norms", and App. E).
"""

from __future__ import annotations

import functools
import json
import platform
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import sigattn
from sigattn.data.dataset import DataError
from sigattn.data.text import TextData, load_text
from sigattn.demo import report
from sigattn.files import write_text
from sigattn.models import saving
from sigattn.models.language import LanguageModel, LanguageModelConfig
from sigattn.tasks.language import LanguageModelling
from sigattn.train import metrics
from sigattn.train.config import TrainConfig
from sigattn.train.folder_lock import lock_folder
from sigattn.train.loop import train
from sigattn.train.trainer import Row
from sigattn.validation import SettingsError, check_at_least

INTRODUCTION = (
    "Three byte-level language models of the same size, trained on the same text in the same order. They differ in the "
    "attention only: softmax; sigmoid with the paper's bias b = -log n, where n is the context length; and sigmoid "
    "without a bias. Without the bias every weight starts near 1/2, so the attention's output is initially orders of "
    "magnitude too large, and the final loss is higher."
)
CHECKPOINTS = "*/checkpoints/step-*"  # below a run folder
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
    num_layers: int = 4
    embed_dim: int = 128
    num_heads: int = 4
    training: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        check_at_least(1, self, *SIZES)
        if self.training.log_attention_every != 1:
            raise SettingsError("the demo shows the attention norm of every step: log_attention_every must be 1")


TITLES = {"softmax": "softmax", "sigmoid-log-n": "sigmoid, b = −log n", "sigmoid-no-bias": "sigmoid, b = 0"}


def model_configs(config: DemoConfig) -> dict[str, LanguageModelConfig]:
    """Return the configurations of the three models by folder name; they differ in activation and bias only."""
    sizes: dict[str, Any] = {name: getattr(config, name) for name in SIZES}
    return {
        "softmax": LanguageModelConfig(activation="softmax", **sizes),
        "sigmoid-log-n": LanguageModelConfig(attention_bias="log_context", **sizes),
        "sigmoid-no-bias": LanguageModelConfig(attention_bias=0.0, **sizes),
    }


def train_models(config: DemoConfig, on_row: Callable[[str, Row], None]) -> list[report.Run]:
    """Train the three models, write config.json and report.html, and return the runs of the report.

    Args:
        config: the settings.
        on_row: called with a model's title and the metrics of each step.

    Raises:
        SettingsError: if the settings do not fit together.
        SettingsError: if the run folder already contains a run, and it is not to be resumed.
        DataError: if the text is unusable, or the run folder cannot be written.
        CheckpointError, FolderInUseError, Interrupted: as in ``train``.
    """
    folder = config.run_folder
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*sigmoid attention without a bias")  # intended in one of the models
        models = model_configs(config)
        try:
            for model in models.values():
                saving.build(model, "meta")
        except ValueError as error:
            raise SettingsError(str(error)) from error
        text = TextData.from_bytes(load_text(config.text), config.max_seq_len)
        facts = describe(config, text)
        _prepare_folder(folder, config.resume)
        with lock_folder(folder):
            runs = [
                _train(config, name, model, text, facts, functools.partial(on_row, TITLES[name]))
                for name, model in models.items()
            ]
            flat = {f"{group}: {name}": value for group, values in facts.items() for name, value in values.items()}
            page = report.comparison_page("Softmax and sigmoid attention, side by side", INTRODUCTION, runs, flat)
            write_text(folder / "report.html", page)
    return runs


def _train(
    config: DemoConfig,
    name: str,
    model: LanguageModelConfig,
    text: TextData,
    facts: dict[str, Any],
    on_row: Callable[[Row], None],
) -> report.Run:
    folder = config.run_folder

    def write_facts(_: int) -> None:
        write_text(folder / "config.json", json.dumps(facts, indent=2) + "\n")

    trained = train(
        LanguageModelling(),
        model,
        config.training,
        text,
        folder / name,
        resume=config.resume,
        on_row=on_row,
        on_start=write_facts,
    )
    return report.Run(TITLES[name], metrics.read_metrics(folder / name / "metrics.jsonl"), generate_sample(trained))


def _prepare_folder(folder: Path, resume: bool) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise DataError(f"cannot write to the run folder {folder}: {error.strerror}") from error
    if not resume and any(folder.glob(CHECKPOINTS)):
        raise SettingsError(
            f"the run folder {folder} holds a run already: resume it, or name another folder", "resume", "run_folder"
        )


def generate_sample(model: nn.Module, length: int = 400) -> str:
    """Return a text that a model generates from a fixed prompt."""
    prompt = torch.tensor([list(b"The function ")])
    generator = torch.Generator().manual_seed(0)
    assert isinstance(model, LanguageModel)
    tokens = model.generate(prompt, length, temperature=0.7, generator=generator)
    return bytes(tokens[0].tolist()).decode(errors="replace")


def describe(config: DemoConfig, text: TextData) -> dict[str, Any]:
    """Return settings, versions, machine and text of the demo."""
    return {
        "model": {name: getattr(config, name) for name in SIZES},
        "training": asdict(config.training),
        "text": {
            "source": str(config.text) if config.text else "pydoc_data.topics",
            "sha256": text.fingerprint,
            "training_bytes": len(text.training_tokens),
            "held_out_bytes": len(text.held_out_tokens),
        },
        "versions": {"sigattn": sigattn.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "machine": {"processor": platform.machine(), "system": platform.system(), "threads": torch.get_num_threads()},
    }
