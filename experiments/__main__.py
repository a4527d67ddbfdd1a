"""The experiments on the command line: ``python -m experiments NAME``, from the root of the repository.

``--help`` lists the arguments. Two comparisons have arguments of their own: ``python -m experiments compare`` and
``python -m experiments norms``. Exit codes are those of ``sigattn.cli.errors``.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Annotated

import tyro

from benchmarks import provenance
from experiments import attention_norms, compare, pages
from experiments.experiment import OPTIONS, SCALES, Experiment, ExperimentError, Scale, Setting, Stored
from experiments.registry import EXPERIMENTS, find_experiment
from sigattn.cli.errors import exit_on_errors
from sigattn.cli.parsing import run_command
from sigattn.data.dataset import DataError
from sigattn.data.documents import is_streamed
from sigattn.tables import print_table
from sigattn.validation import SettingsError, check_at_least


def run_experiment(
    name: Annotated[str | None, tyro.conf.Positional] = None,
    /,
    scale: Scale = "small",
    seeds: int = 3,
    folder: Path = Path("runs/experiments"),
    workers: int = 2,
    data: Path | None = None,
    tokenizer: Path | None = None,
    speech: Path | None = None,
    all: bool = False,  # noqa: A002  (the flag's name)
    list: bool = False,  # noqa: A002
    judge: Path | None = None,
    longer: int = 1,
    more_seeds: tuple[tuple[str, int], ...] = (),
    extend: Path | None = None,
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
        more_seeds: variants and their numbers of seeds, above --seeds, for claims that need more to be decided.
        extend: folder of pages, such as docs/results, whose results of this experiment are kept, so that only seeds
            that they lack are trained.
    """
    given = [n for n, v in locals().items() if v != inspect.signature(run_experiment).parameters[n].default]
    for action, text in (("judge", "judges stored data and runs nothing"), ("list", "lists the experiments")):
        others = ", ".join("NAME" if n == "name" else f"--{n}" for n in given if n != action)
        if action in given and others:
            raise SettingsError(f"--{action} {text}: leave out {others}")
    if judge is not None:
        print(pages.count_verdicts(pages.judge_again(judge)))
        return
    if list:
        _print_experiments()
        return
    if name is None and not all:
        raise SettingsError("name an experiment, list them, or run all of them", "list", "all")
    if name is not None and all:
        raise SettingsError(f"--all runs every experiment: leave out --all, or the name {name}")
    for path in (data, tokenizer, speech):
        if path is not None and not is_streamed(path) and not path.exists():
            raise DataError(f"no such file or folder: {path}")
    check_at_least(1, {"seeds": seeds, "workers": workers, "longer": longer})
    if scale == "paper" and longer != 1:
        raise SettingsError(f'longer={longer} is for the scales "smoke" and "small", and does not change "paper"')
    _check_more_seeds(more_seeds, seeds, name)
    if extend is not None and name is None:
        raise SettingsError("--extend is for one experiment: name it in place of --all")
    results = folder / (scale if longer == 1 else f"{scale}-{longer}x")
    if name is not None:
        _check_options(find_experiment(name), given)
    for experiment in EXPERIMENTS.values() if all else (find_experiment(name or ""),):
        print(f"{experiment.name}: {experiment.title} ({experiment.source})", flush=True)
        start = time.perf_counter()
        own = results / experiment.name
        stored = Stored() if extend is None else pages.read_stored(extend, experiment, scale, longer)
        setting = Setting(
            scale,
            seeds,
            own,
            lambda line: print(f"  {line}", flush=True),
            workers,
            data,
            tokenizer,
            speech,
            longer,
            dict(more_seeds),
            stored,
        )
        try:
            result = experiment.run(setting)
        except ExperimentError as error:
            if not all:
                raise
            print(f"  left out: {error}", flush=True)
            continue
        about = provenance.describe("experiments", {"scale": scale, "seeds": seeds})
        page = pages.write_page(own, experiment, setting, result, about)
        for finding in page.findings:
            print(f"  {finding['verdict']}: {finding['claim']} ({finding['evidence']})")
        print(f"  {own / 'page.md'}, after {time.perf_counter() - start:.0f} s", flush=True)
    all_pages = pages.read_pages(results)
    print(f"{pages.write_findings(results, all_pages)}: {pages.count_verdicts(all_pages)}")


def _check_options(experiment: Experiment, given: Collection[str]) -> None:
    """Raise ``SettingsError`` for options that the experiment does not use."""
    if unused := [name for name in OPTIONS if name in given and name not in experiment.takes]:
        taken = ", ".join(f"--{name}" for name in OPTIONS if name in experiment.takes) or "none of its kind"
        flags = ", ".join(f"--{name}" for name in unused)
        raise SettingsError(f"{experiment.name} takes no {flags}: leave it out; it takes {taken}")


def _check_more_seeds(more_seeds: tuple[tuple[str, int], ...], seeds: int, name: str | None) -> None:
    """Raise ``SettingsError`` for numbers that add no seeds, and for experiments whose variants have equal numbers."""
    if not more_seeds:
        return
    if name is None:
        raise SettingsError("--more-seeds is for the variants of one experiment: name it in place of --all")
    if not find_experiment(name).unequal_seeds:
        takers = ", ".join(e.name for e in EXPERIMENTS.values() if e.unequal_seeds)
        raise SettingsError(f"--more-seeds is not for {name}, whose variants have equal seeds; it is for {takers}")
    for variant, number in more_seeds:
        if number <= seeds:
            raise SettingsError(f"--more-seeds {variant!r} {number} adds none to --seeds {seeds}: name a larger number")
    if repeated := [v for v, count in Counter(v for v, _ in more_seeds).items() if count > 1]:
        raise SettingsError(f"--more-seeds names {repeated[0]!r} more than once: give each variant one number")


def _print_experiments() -> None:
    for e in EXPERIMENTS.values():
        small, paper = (None if m is None else f"{m:g} min" if m else "seconds" for m in map(e.minutes.get, SCALES[1:]))
        hardware = f"{paper} on {e.hardware}" if paper else e.hardware
        print(f"{e.name}: {e.title}\n    {e.source}\n    small: {small} on 2 CPU cores; paper: {hardware}")


def measure_norms(options: attention_norms.AttentionNormsConfig) -> None:
    """Measure the norm of attention outputs at initialisation for each position and bias (a minute on 2 cores)."""
    found = attention_norms.measure_attention_norms(options, lambda *_: None)
    kinds = tuple(attention_norms.KINDS)
    rows = [[p, *(f"{found[p, kind]:,.0f}" for kind in kinds)] for p in attention_norms.POSITIONS]
    title = "Attention output norm at initialisation, mean over layers"
    print_table(("position", *kinds), rows, title=title, right=kinds)


def compare_all(options: compare.ComparisonConfig) -> None:
    """Compare sigmoid with softmax on every task, five seeds each (about an hour on 2 cores), in one table."""
    print(compare.compare_activations(options, lambda line: print(line, flush=True)))


COMMANDS: dict[str, Callable[..., object]] = {"compare": compare_all, "norms": measure_norms}
DESCRIPTION = "The comparison of all tasks (compare), and attention norms at initialisation (norms)."


def main(arguments: Sequence[str] | None = None) -> None:
    """Run an experiment, the comparison of all tasks, or the norms; the module's docstring names the exit codes."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    with exit_on_errors("experiments"):
        if arguments[:1] and arguments[0] in COMMANDS:
            run_command(COMMANDS, arguments, "python -m experiments", DESCRIPTION)
        else:
            run_command(run_experiment, arguments, "python -m experiments")


if __name__ == "__main__":
    main()
