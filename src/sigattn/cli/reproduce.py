"""Command ``sigattn reproduce``: the paper's experiments."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from sigattn.bench import provenance
from sigattn.experiments import pages
from sigattn.experiments.experiment import SCALES, ExperimentError, Scale, Setting
from sigattn.experiments.registry import EXPERIMENTS, find_experiment
from sigattn.validation import check_at_least


def reproduce(
    name: Annotated[str | None, tyro.conf.Positional] = None,
    /,
    scale: Scale = "small",
    seeds: int = 3,
    folder: Path = Path("runs/reproduce"),
    workers: int = 2,
    data: Path | None = None,
    tokenizer: Path | None = None,
    speech: Path | None = None,
    all: bool = False,  # noqa: A002  (the flag's name)
    list: bool = False,  # noqa: A002
    judge: Path | None = None,
    longer: int = 1,
) -> None:
    """Run an experiment of the paper, and write its data, figure and page. Finished runs are not repeated.

    Args:
        name: an experiment; --list lists them.
        scale: "smoke" (seconds), "small" (minutes on 2 cores) or "paper".
        seeds: number of seeds of each training run.
        folder: folder for runs, data and pages.
        workers: number of runs at a time, each with one thread.
        data: data of language models, as for sigattn train; default: CPython's documentation (not at "paper" scale).
        tokenizer: tokenizer, if the data is text.
        speech: the Free Spoken Digit Dataset, a folder or its .tar.gz.
        all: run every experiment, one after another, and report those that cannot run with these arguments.
        list: list the experiments.
        judge: judge the data of the pages in this folder again and rewrite them; nothing is run.
        longer: factor of the training steps of scales "smoke" and "small", for findings that may change with training.
    """
    console = Console()
    if judge is not None:
        console.print(pages.count_verdicts(pages.judge_again(judge)), soft_wrap=True, highlight=False)
        return
    if list or (name is None and not all):
        _print_experiments(console)
        return
    check_at_least(1, {"seeds": seeds, "workers": workers, "longer": longer})
    results = folder / (scale if longer == 1 else f"{scale}-{longer}x")
    for experiment in EXPERIMENTS.values() if all else (find_experiment(name or ""),):
        console.print(f"{experiment.name}: {experiment.title} ({experiment.source})", highlight=False)
        start = time.perf_counter()
        own = results / experiment.name
        own.mkdir(parents=True, exist_ok=True)
        setting = Setting(
            scale, seeds, own, lambda line: print(f"  {line}", flush=True), workers, data, tokenizer, speech, longer
        )
        try:
            result = experiment.run(setting)
        except ExperimentError as error:
            if not all:
                raise
            console.print(f"  left out: {error}", soft_wrap=True, highlight=False)
            continue
        about = provenance.describe("reproduce", {"scale": scale, "seeds": seeds})
        page = pages.write_page(own, experiment, setting, result, about)
        for finding in page.findings:
            line = f"  {finding['verdict']}: {finding['claim']} ({finding['evidence']})"
            console.print(line, soft_wrap=True, highlight=False)
        console.print(
            f"  {own / 'page.md'}, after {time.perf_counter() - start:.0f} s", soft_wrap=True, highlight=False
        )
    written = pages.read_pages(results)
    console.print(
        f"{pages.write_index(results, written)}: {pages.count_verdicts(written)}", soft_wrap=True, highlight=False
    )


def _print_experiments(console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("experiment", "title", "in the paper", *SCALES, "hardware for paper"):
        table.add_column(column)
    for e in EXPERIMENTS.values():
        minutes = (e.minutes.get(s) for s in SCALES)
        table.add_row(
            e.name, e.title, e.source, *("not known" if m is None else f"{m:g} min" for m in minutes), e.hardware
        )
    console.print(table)
