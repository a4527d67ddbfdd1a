"""The comparisons on the command line, from the root of the repository.

    python -m benchmarks.compatibility transformers [ARCHITECTURE ...] [--write | --convert]
    python -m benchmarks.compatibility timm [MODEL ...] [--write]

The exit code is 1 if a result is "wrong" or "failed"; others are those of ``sigattn.cli.errors``.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import tyro

from benchmarks.compatibility import page, torchvision_apart  # noqa: F401
from sigattn.cli.errors import exit_on_errors
from sigattn.cli.parsing import run_command
from sigattn.validation import SettingsError

DESCRIPTION = "Architectures of other libraries, compared with a reference. ``LIBRARY --help`` lists the arguments."
Names = Annotated[tuple[str, ...], tyro.conf.Positional]


def compare_transformers(names: Names = (), /, write: bool = False, convert: bool = False) -> None:
    """Choose "sigmoid" in every architecture of transformers, and compare with its eager attention.

    Args:
        names: architectures; default: all of the registry.
        write: write the results into docs/compatibility.md.
        convert: convert softmax models instead; these results are only printed.
    """
    if write and convert:
        raise SettingsError("docs/compatibility.md has no table of conversions: leave out write or convert")
    from benchmarks.compatibility import sweep_transformers as sweep
    from benchmarks.compatibility.tiny_transformers import architectures

    judge = sweep.judge_conversion if convert else sweep.judge
    rows = (vars(judge(name)) for name in names or architectures())
    _report("transformers", sweep.LIBRARY, rows, write=write, complete=not names)


def compare_timm(names: Names = (), /, write: bool = False) -> None:
    """Convert every model of timm and torchvision, and compare with the formula in its own layers.

    Args:
        names: models, those of torchvision with "torchvision/" before them; default: all.
        write: write the results into docs/compatibility.md.
    """
    from benchmarks.compatibility import sweep_timm as sweep

    _report("timm", sweep.LIBRARY, sweep.rows(names or sweep.names()), write=write, complete=not names)


def _report(section: str, library: str, rows: Iterator[dict[str, Any]], *, write: bool, complete: bool) -> None:
    """Print results as they come and, with ``write``, put them into the page; exit with 1 if one is an error."""
    warnings.simplefilter("ignore")
    done: list[dict[str, Any]] = []
    for row in rows:
        done.append(row)
        ran = f"{row['ran']}/{row['layers']}" if "ran" in row else ""
        print(f"{row['architecture']:32} {row['status']:12} {ran:6} {row['why'][:200]}", flush=True)
        if write:
            page.update(section, library, [row])
    if write and complete:
        page.update(section, library, done, complete=True)
    counts = Counter(row["status"] for row in done)
    print(counts)
    sys.exit(counts["wrong"] + counts["failed"] > 0)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a comparison."""
    arguments = sys.argv[1:] if arguments is None else arguments
    with exit_on_errors("benchmarks.compatibility"):
        commands = {"transformers": compare_transformers, "timm": compare_timm}
        run_command(commands, arguments, "python -m benchmarks.compatibility", DESCRIPTION)


if __name__ == "__main__":
    main()
