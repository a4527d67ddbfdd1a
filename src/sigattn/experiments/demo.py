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
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import sigattn
from sigattn.data.dataset import DataError
from sigattn.data.text import TextData, TokenText, load_text
from sigattn.experiments import report
from sigattn.models import saving
from sigattn.models.language import LanguageModel, LanguageModelConfig
from sigattn.tasks.language import LanguageModelling
from sigattn.train import metrics
from sigattn.train.checkpoint import RunExistsError
from sigattn.train.config import TrainConfig
from sigattn.train.folder_lock import lock_folder
from sigattn.train.loop import Row, train
from sigattn.validation import SettingsError, check_at_least

INTRODUCTION = (
    "Three byte-level language models of the same size, trained on the same text in the same order. They differ in the "
    "attention only: softmax; sigmoid with the paper's bias b = -log n, where n is the context length; and sigmoid "
    "without a bias. Without the bias every weight starts near 1/2, so the attention's output is initially orders of "
    "magnitude too large, and the final loss is higher."
)


@dataclass(frozen=True, kw_only=True)
class Demo:
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
        check_at_least(1, self, "max_seq_len", "num_layers", "embed_dim", "num_heads")


def models(options: Demo) -> dict[str, LanguageModelConfig]:
    """Return the configurations of the three models by folder name; they differ in activation and bias only."""
    base = LanguageModelConfig(
        max_seq_len=options.max_seq_len,
        num_layers=options.num_layers,
        embed_dim=options.embed_dim,
        num_heads=options.num_heads,
    )
    return {
        "softmax": replace(base, activation="softmax"),
        "sigmoid-log-n": replace(base, activation="sigmoid", attention_bias="log_context"),
        "sigmoid-no-bias": replace(base, activation="sigmoid", attention_bias=0.0),
    }


TITLES = {"softmax": "softmax", "sigmoid-log-n": "sigmoid, b = −log n", "sigmoid-no-bias": "sigmoid, b = 0"}


def run(options: Demo, on_row: Callable[[str, Row], None]) -> list[report.Run]:
    """Train the three models, write config.json, report.html and curves.svg, and return the runs of the report.

    Args:
        options: the settings.
        on_row: called with a model's title and the metrics of each step.

    Raises:
        SettingsError: if the settings do not fit together, or the run folder already contains a run.
        DataError: if the text is unusable, or the run folder cannot be written.
        CheckpointError, FolderInUseError, Interrupted: as in ``train``.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*sigmoid attention without a bias")  # intended in one of the models
        return _run(options, on_row)


def _run(options: Demo, on_row: Callable[[str, Row], None]) -> list[report.Run]:
    _check(options)
    text = TokenText.split(load_text(options.text), options.max_seq_len)
    folder = options.run_folder
    _prepare_folder(folder, options.resume)
    with lock_folder(folder):
        return _train(options, text, on_row)


def _train(options: Demo, text: TokenText, on_row: Callable[[str, Row], None]) -> list[report.Run]:
    folder, facts, runs = options.run_folder, about(options, text), []

    def write_facts(_: int) -> None:
        (folder / "config.json").write_text(json.dumps(facts, indent=2) + "\n")

    for name, config in models(options).items():
        title = TITLES[name]
        model = train(
            LanguageModelling(),
            config,
            options.training,
            TextData(text, options.max_seq_len),
            folder / name,
            resume=options.resume,
            on_row=functools.partial(on_row, title),
            on_start=write_facts,
        )
        runs.append(report.Run(title, metrics.read_metrics(folder / name / "metrics.jsonl"), sample(model)))
    page = report.build("Softmax and sigmoid attention, side by side", INTRODUCTION, runs, _flat(facts))
    (folder / "report.html").write_text(page)
    (folder / "curves.svg").write_text(report.curves(runs))
    return runs


def _check(options: Demo) -> None:
    try:
        for config in models(options).values():
            saving.build(config, "meta")
    except ValueError as error:
        raise SettingsError(str(error)) from error


def _prepare_folder(folder: Path, resume: bool) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise DataError(f"cannot write to the run folder {folder}: {error.strerror}") from error
    if not resume and any(folder.glob("*/checkpoints/step-*")):
        raise RunExistsError(f"the run folder {folder} holds a run already: resume it, or name another folder")


def sample(model: nn.Module, length: int = 400) -> str:
    """Return a text that a model generates from a fixed prompt."""
    prompt = torch.tensor([list(b"The function ")])
    generator = torch.Generator().manual_seed(0)
    assert isinstance(model, LanguageModel)
    tokens = model.generate(prompt, length, temperature=0.7, generator=generator)
    return bytes(tokens[0].tolist()).decode(errors="replace")


def about(options: Demo, text: TokenText) -> dict[str, Any]:
    """Return settings, versions, machine and text of the demo."""
    return {
        "model": {name: getattr(options, name) for name in ("max_seq_len", "num_layers", "embed_dim", "num_heads")},
        "training": asdict(options.training),
        "text": {
            "source": str(options.text) if options.text else "pydoc_data.topics",
            "sha256": text.sha256,
            "training_bytes": len(text.training),
            "held_out_bytes": len(text.validation),
        },
        "versions": {"sigattn": sigattn.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "machine": {"processor": platform.machine(), "system": platform.system(), "threads": torch.get_num_threads()},
    }


def _flat(facts: dict[str, Any]) -> dict[str, Any]:
    return {f"{group}: {name}": value for group, values in facts.items() for name, value in values.items()}
