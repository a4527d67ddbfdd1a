"""Progress of training: bars on a terminal, else lines."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
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
