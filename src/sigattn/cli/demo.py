"""Command ``sigattn demo``."""

from __future__ import annotations

from sigattn.cli.progress import TrainingProgress
from sigattn.demo import report
from sigattn.demo import training as demo
from sigattn.tables import print_table


def train_demo(options: demo.DemoConfig) -> None:
    """Train one softmax and two sigmoid language models on text (4 to 5 minutes on 2 cores), and write a report."""
    if options.resume and not any(options.run_folder.glob(demo.CHECKPOINTS)):
        print(f"nothing to resume in {options.run_folder}: starting")
    with TrainingProgress(options.training.max_steps) as progress:
        runs = demo.train_models(options, progress.show)
    columns = [name for name, _ in report.TABLE]
    cells = [[cell(run) for _, cell in report.TABLE] for run in runs]
    print_table(columns, cells, title="Softmax and sigmoid attention, side by side", right=columns[1:])
    print(f"report: {options.run_folder / 'report.html'}")
