"""Commands ``sigattn export`` and ``sigattn lm-eval``: trained language models in other libraries."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from sigattn.cli.runs import load_language_model
from sigattn.data.tokens import END, load_tokenizer
from sigattn.validation import SettingsError, check_at_least


def export(
    folder: Annotated[Path, tyro.conf.Positional],
    save: Annotated[Path, tyro.conf.Positional],
    /,
) -> None:
    """Write a run's language model into a folder that transformers can load (AutoModelForCausalLM).

    Args:
        folder: folder of the run.
        save: the folder to write.
    """
    model_integration: Any = importlib.import_module("sigattn.integrations.transformers.model")
    model, tokenizer = load_language_model(folder)
    end = None
    if tokenizer is not None and load_tokenizer(tokenizer).token_to_id(END) is not None:
        end = END
    model_integration.export(model, save, tokenizer, end)
    print(f"{save}: import sigattn.integrations.transformers.model, then AutoModelForCausalLM.from_pretrained")


def lm_eval(
    folder: Annotated[Path, tyro.conf.Positional],
    /,
    tasks: tuple[str, ...] = (),
    include: Path | None = None,
    limit: int | None = None,
    batch_size: int = 8,
) -> None:
    """Evaluate a run's language model with lm-evaluation-harness, by default on the paper's nine tasks.

    Args:
        folder: folder of the run.
        tasks: names of the harness's tasks. Default: ARC easy and challenge, HellaSwag, PIQA, SciQ, WinoGrande and
            LAMBADA, and with one example TriviaQA and WebQuestions.
        include: folder of further tasks (YAML). The harness runs the Python code that a task names with !function:
            include only folders that you trust.
        limit: number of samples of each task.
        batch_size: number of sequences evaluated at a time.
    """
    check_at_least(1, {"limit": limit, "batch_size": batch_size})
    harness: Any = importlib.import_module("sigattn.integrations.lm_eval")
    model, path = load_language_model(folder)
    tokenizer = None if path is None else load_tokenizer(path)
    end = None if tokenizer is None else tokenizer.token_to_id(END)
    try:
        found = harness.evaluate(
            harness.SigattnLM(model, tokenizer, batch_size, end or 0), tasks, include=include, limit=limit
        )
    except (ValueError, ConnectionError) as error:
        raise SettingsError(" ".join(str(error).split())) from error
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("task", "metric", "value", "± standard error"):
        table.add_column(column)
    for task, metrics in found.items():
        for name, value in metrics.items():
            if not name.endswith("_stderr"):
                spread = metrics.get(f"{name}_stderr")
                table.add_row(task, name, f"{value:.4g}", "" if spread is None else f"{spread:.2g}")
    Console().print(table)
    (folder / "lm_eval.json").write_text(json.dumps(found, indent=2) + "\n")
