"""The command line: ``sigattn demo``, ``sigattn info``, ``sigattn theory``, ``sigattn bench``."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence

try:
    import tyro
    from rich import box
    from rich.console import Console
    from rich.live import Live
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Table

    from sigattn import info
    from sigattn.bench import accuracy, cpu, hybridnorm, kernels, static, tune
    from sigattn.bench.provenance import BenchmarkError
    from sigattn.data.dataset import DataError
    from sigattn.recipes import demo, report, theory
    from sigattn.theory.statements import Statement
    from sigattn.train.checkpoint import CheckpointError
    from sigattn.train.loop import Interrupted, Row
except ModuleNotFoundError as missing:
    sys.exit(f"sigattn: the command line needs {missing.name}: pip install 'sigattn[train]'")


def run_demo(options: demo.Demo) -> None:
    """Train a softmax and two sigmoid language models on real text (4 to 5 minutes on 2 cores), and write a report."""
    console = Console()
    try:
        with _Display(console, options) as display:
            runs = demo.run(options, display.update)
    except Interrupted as stop:
        console.print(f"\n{stop}\nTo go on: sigattn demo --resume --run-folder {options.run_folder}", highlight=False)
        sys.exit(130)
    table = Table(title="Softmax and sigmoid attention, side by side", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name, _ in report.TABLE:
        table.add_column(name, justify="left" if name == "model" else "right", no_wrap=name == "model")
    for run in runs:
        table.add_row(*(cell(run) for _, cell in report.TABLE))
    console.print(table)
    console.print(f"report: {options.run_folder / 'report.html'}", soft_wrap=True, highlight=False)


class _Display:
    """A progress bar and the latest measurements of each model; plain lines where the output is no terminal."""

    EVERY = 50  # steps between plain lines

    def __init__(self, console: Console, options: demo.Demo) -> None:
        self.console, self.steps = console, options.training.steps
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
        """Show a new row."""
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


def show_info() -> None:
    """Print versions, devices, and which backend serves what and why not the others."""
    print(info.describe())


def run_theory(options: theory.Theory) -> None:
    """Check every statement of the paper's theory that can be run (1 to 2 minutes on 2 cores)."""
    console = Console()

    def show(s: Statement) -> None:
        colour = {"holds": "green", "fails": "red"}.get(s.verdict, "yellow")
        console.print(
            f"[{colour}]{s.verdict}[/{colour}]  [bold]{escape(s.claim)}[/bold]  ({s.where}; {s.cases:,} cases)"
        )
        if s.note:
            console.print(escape(s.note), style="dim", highlight=False)

    found = theory.run(options, show)
    counts = Counter(s.verdict for s in found)
    summary = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    console.print(f"{len(found)} statements: {summary}", highlight=False)
    if options.report is not None:
        console.print(f"report: {options.report}", soft_wrap=True, highlight=False)


def bench_cpu(options: cpu.CpuBenchmark) -> None:
    """Ours, softmax SDPA, naive and compiled naive sigmoid on the CPU, side by side: time, error, memory."""
    cpu.run(options)


def bench_static(options: static.StaticBenchmark) -> None:
    """What the compiler makes of the GPU kernels, without a GPU: registers, spills, instructions per score."""
    static.run(options)


def bench_kernels(options: kernels.KernelBenchmark) -> None:
    """The GPU kernels beside every peer present, over lengths from 64 to 78k: TFLOP/s, ratios, errors, plots."""
    kernels.run(options)


def bench_accuracy(options: accuracy.AccuracyBenchmark) -> None:
    """How exact weights and outputs stay as n grows, with b = -log n: ours and each sigmoid peer, in each dtype."""
    accuracy.run(options)


def bench_hybridnorm(options: hybridnorm.HybridNormBenchmark) -> None:
    """From which length sigmoid attention with a LayerNorm after it beats softmax on this GPU."""
    hybridnorm.run(options)


def bench_tune(options: tune.TuneBenchmark) -> None:
    """Time the tile shapes of the GPU kernels on this GPU, beside those in force."""
    tune.run(options)


def bench() -> None:
    """Benchmarks, each with the peers in the same run and checked against float64; bench --help lists them."""


COMMANDS: dict[str, Callable[..., None]] = {
    "demo": run_demo,
    "info": show_info,
    "theory": run_theory,
    "bench": bench,
}
BENCHMARKS: dict[str, Callable[..., None]] = {
    "cpu": bench_cpu,
    "static": bench_static,
    "kernels": bench_kernels,
    "accuracy": bench_accuracy,
    "hybridnorm": bench_hybridnorm,
    "tune": bench_tune,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; what a user got wrong ends in one line and exit code 2."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    commands, program = COMMANDS, "sigattn"
    if arguments[:1] == ["bench"]:
        commands, program, arguments = BENCHMARKS, "sigattn bench", arguments[1:]
    try:
        tyro.extras.subcommand_cli_from_dict(
            commands, prog=program, description=__doc__, args=arguments, config=(tyro.conf.OmitArgPrefixes,)
        )
    except (DataError, CheckpointError, demo.SettingsError, BenchmarkError) as error:
        print(f"sigattn: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
