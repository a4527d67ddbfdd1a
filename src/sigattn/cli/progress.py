"""Progress of training and of reading a corpus: bars on a terminal, else lines."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column


class TrainingProgress(Progress):
    """A bar for each model with its latest measurements; if the output is not a terminal, a line every 20 steps.

    Args:
        steps: number of steps of each model.
        quiet: show no bars.
    """

    STEPS_PER_LINE = 20

    def __init__(self, steps: int, *, quiet: bool = False) -> None:
        console = Console()
        columns = (TextColumn("{task.fields[title]}"), BarColumn(12), MofNCompleteColumn(), TimeRemainingColumn())
        text = TextColumn("{task.description}", table_column=Column())  # wraps in a narrow terminal, unlike the others
        super().__init__(*columns, text, console=console, disable=quiet or not console.is_terminal)
        self.steps = steps
        self.validation: dict[str, str] = {}  # by title

    def show(self, title: str, row: dict[str, Any]) -> None:
        """Show the measurements of a step of the model ``title``."""
        if title not in self.validation:
            self.add_task("", total=self.steps, title=title)
        validation = [f"{k.removeprefix('validation_')} {v:.4g}" for k, v in row.items() if k.startswith("validation_")]
        self.validation[title] = " ".join(validation) or self.validation.get(title, "")
        attention = f" attention {row['attention_norm']:,.1f}" if "attention_norm" in row else ""
        text = f"loss {row['loss']:.4g} gradient {row['gradient_norm']:.3g}{attention}"
        text += f" samples/s {row['samples_per_second']:,.1f} | {self.validation[title]}"
        done = row["step"] + 1
        self.update(self.task_ids[-1], completed=done, description=text)
        if not self.console.is_terminal and (done % self.STEPS_PER_LINE == 0 or done in (1, self.steps)):
            self.console.print(f"{title}: step {done} {text}", soft_wrap=True, highlight=False)


class CorpusProgress(Progress):
    """Documents and tokens read so far: a bar on a terminal, else a line every 10 seconds.

    Args:
        console: where to print. title: of the bar. limit: number of tokens at which the bar is full; None if unknown.
    """

    SECONDS = 10.0  # between lines
    REFRESH = 0.1  # seconds between updates of the bar

    def __init__(self, console: Console, title: str, limit: int | None = None) -> None:
        columns = (TextColumn(title), BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        super().__init__(*columns, console=console, disable=not console.is_terminal)
        self.interval: float = self.REFRESH if console.is_terminal else self.SECONDS
        self.shown: float = time.monotonic()
        self.add_task("", total=limit)

    def show(self, documents: int, tokens: int) -> None:
        """Show new numbers, unless the last ones were shown less than ``interval`` seconds ago."""
        now = time.monotonic()
        if now - self.shown < self.interval:
            return
        self.shown = now
        text = f"{documents:,} documents" + (f", {tokens:,} tokens" if tokens else "")
        self.update(self.task_ids[0], completed=tokens, description=text)
        if not self.console.is_terminal:
            self.console.print(text, soft_wrap=True, highlight=False)
