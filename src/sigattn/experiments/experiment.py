"""What an experiment is: one figure or table of the paper, at three scales, and what is said of it afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import matplotlib.figure

from sigattn.recipes.intervals import Verdict

Scale = Literal["smoke", "small", "paper"]
SCALES: tuple[Scale, ...] = ("smoke", "small", "paper")


class ExperimentError(Exception):
    """An experiment that cannot be run as asked for; the message is one line."""


@dataclass(frozen=True)
class Setting:
    """How an experiment is run.

    Attributes:
        scale: "smoke" (seconds), "small" (at most 8 minutes on 2 cores) or "paper".
        seeds: of each training run. folder: for runs and data, kept so that an interrupted command goes on.
        show: called with a line for each thing done. workers: runs at a time, a thread each.
        data: tokens or text for the language models (as ``sigattn train --data``); None for CPython's documentation as
            bytes, which the paper's scale does not take. tokenizer: for text.
        speech: recordings, the spoken digits as a folder or .tar.gz; None to do without, which only "smoke" can.
        used: the data that runs were trained on, name and fingerprint; filled in as they are.
    """

    scale: Scale
    seeds: int
    folder: Path
    show: Callable[[str], None] = lambda _: None
    workers: int = 2
    data: Path | None = None
    tokenizer: Path | None = None
    speech: Path | None = None
    used: dict[str, str] = field(default_factory=dict)

    def of(self, smoke: Any, small: Any, paper: Any) -> Any:
        """The value for the scale."""
        return {"smoke": smoke, "small": small, "paper": paper}[self.scale]


@dataclass(frozen=True)
class Finding:
    """One thing that the paper says, and what was seen of it.

    Attributes:
        claim: the paper's, in our words. verdict, seen: "not shown" where the scale cannot show it.
    """

    claim: str
    verdict: Verdict
    seen: str


@dataclass(frozen=True)
class Result:
    """What came of it.

    Attributes:
        columns, rows: the table. findings: what is said. data: rows for programs.
        figure: None where there is nothing to draw.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    findings: Sequence[Finding]
    data: Sequence[dict[str, Any]]
    figure: matplotlib.figure.Figure | None = None


@dataclass(frozen=True)
class Experiment:
    """A figure or table of the paper.

    Attributes:
        name: on the command line. title: in a few words. place: where in the paper.
        run: does it. minutes: about how long on 2 cores, by scale; None where it is not a matter of minutes.
        hardware: for the paper's scale. differs: how "small" differs from the paper's set-up.
    """

    name: str
    title: str
    place: str
    run: Callable[[Setting], Result]
    minutes: dict[Scale, float | None] = field(default_factory=dict)
    hardware: str = "2 CPU cores"
    differs: str = ""
