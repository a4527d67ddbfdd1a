"""Command ``sigattn demo``."""

from __future__ import annotations

import math
import sys

from rich import box
from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from sigattn.experiments import demo, report
from sigattn.train.trainer import Interrupted, Row


def train_demo(options: demo.DemoConfig) -> None:
    """Train one softmax and two sigmoid language models on text (4 to 5 minutes on 2 cores), and write a report."""
    console = Console()
    try:
        with _Display(console, options) as display:
            runs = demo.train_models(options, display.update)
    except Interrupted as stop:
        console.print(f"\n{stop}\nTo resume: sigattn demo --resume --run-folder {options.run_folder}", highlight=False)
        sys.exit(128 + stop.signal)
    table = Table(title="Softmax and sigmoid attention, side by side", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name, _ in report.TABLE:
        table.add_column(name, justify="left" if name == "model" else "right", no_wrap=name == "model")
    for run in runs:
        table.add_row(*(cell(run) for _, cell in report.TABLE))
    console.print(table)
    console.print(f"report: {options.run_folder / 'report.html'}", soft_wrap=True, highlight=False)


class _Display:
    """Progress bar and latest measurements of each model; plain lines if the output is not a terminal."""

    EVERY = 50  # steps between plain lines

    def __init__(self, console: Console, options: demo.DemoConfig) -> None:
        self.console, self.steps = console, options.training.max_steps
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
        )
        self.task = self.progress.add_task("training", total=self.steps * len(demo.TITLES))
        self.latest: dict[str, Row] = {}
        self.live = Live(get_renderable=self._render, console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> _Display:
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.console.is_terminal:
            self.live.stop()

    def update(self, title: str, row: Row) -> None:
        """Show the measurements of a step of the model ``title``."""
        held = self.latest.get(title, {}).get("validation_bits")
        self.latest[title] = {"validation_bits": held, **row} if held is not None else row
        before = list(demo.TITLES.values()).index(title) * self.steps
        self.progress.update(self.task, completed=before + row["step"] + 1, description=title)
        done = row["step"] + 1
        if not self.console.is_terminal and (done % self.EVERY == 0 or done in (1, self.steps)):
            cells = " ".join(f"{name} {value}" for name, value in zip(self._NAMES, self._cells(title), strict=True))
            self.console.print(cells, soft_wrap=True, highlight=False)

    _NAMES = ("model", "step", "loss", "bits/byte", "held-out", "attention norm", "gradient norm", "sequences/s")

    def _cells(self, title: str) -> list[str]:
        row = self.latest[title]
        held = row.get("validation_bits")
        return [
            title,
            f"{row['step'] + 1}",
            f"{row['loss']:.3f}",
            f"{row['loss'] / math.log(2):.3f}",
            "–" if held is None else f"{held:.3f}",
            f"{row['attention_norm']:,.1f}",
            f"{row['gradient_norm']:.2f}",
            f"{row['samples_per_second']:,.1f}",
        ]

    def _render(self) -> Table:
        table = Table.grid()
        rows = Table()
        for name in self._NAMES:
            rows.add_column(name, justify="left" if name == "model" else "right")
        for title in self.latest:
            rows.add_row(*self._cells(title))
        table.add_row(rows)
        table.add_row(self.progress)
        return table
