"""Types of an experiment, which reproduces a figure or table of the paper at one of three scales, and its result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from experiments.intervals import Verdict
from sigattn.validation import SettingsError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Scale = Literal["smoke", "small", "paper"]
SCALES: tuple[Scale, ...] = ("smoke", "small", "paper")
Kind = Literal["paper", "beyond", "timing"]
Option = Literal["seeds", "workers", "longer", "data", "tokenizer", "speech"]
OPTIONS: tuple[Option, ...] = ("seeds", "workers", "longer", "data", "tokenizer", "speech")
TRAINING: tuple[Option, ...] = ("seeds", "workers", "longer")
LANGUAGE: tuple[Option, ...] = (*TRAINING, "data", "tokenizer")
SPEECH: tuple[Option, ...] = (*TRAINING, "speech")
Row = dict[str, Any]


class ExperimentError(SettingsError):
    """Error of an experiment that cannot run with the given arguments; the message is one line."""


@dataclass(frozen=True)
class Stored:
    """Results of an earlier page, to which runs with further seeds are added.

    Attributes:
        rows: the page's data.
        seeds: number of seeds by run, 0 to this number less 1.
        identities: hash of settings and data by run (``Setting.identities``).
        origins: date, commit and device of the page and of those that it extends, the earliest first.
        figure: figure.svg of the page, which an extended page keeps if its experiment cannot draw it from data.
        figure_seeds: the seeds that it shows, as a sentence.
    """

    rows: Sequence[Row] = ()
    seeds: dict[str, int] = field(default_factory=dict)
    identities: dict[str, str] = field(default_factory=dict)
    origins: Sequence[dict[str, Any]] = ()
    figure: Path | None = None
    figure_seeds: str = ""


@dataclass(frozen=True)
class Setting:
    """Arguments of an experiment.

    Attributes:
        scale: "smoke" (seconds), "small" (minutes on 2 cores) or "paper".
        seeds: number of seeds of each training run.
        folder: folder of runs and data, from which an interrupted command continues.
        log: called with a line of progress. workers: number of runs at a time, each with one thread.
        data: tokens or text for the language models (as ``sigattn train --data``); None for CPython's documentation as
            bytes, which the paper's scale does not accept. tokenizer: tokenizer, if the data is text.
        speech: recordings, the spoken digits as a folder or .tar.gz; None is possible at scale "smoke" only.
        longer: factor of the training steps below the paper's scale.
        more_seeds: number of seeds, above ``seeds``, of variants whose comparison needs more of them, by name.
        stored: results that are kept: seeds that it has are not trained.
        fingerprints: fingerprints of the data that runs were trained on, by name; filled in by the experiment.
        identities: hash of settings and data by run, with seed 0; filled in by the experiment.
    """

    scale: Scale
    seeds: int
    folder: Path
    log: Callable[[str], None] = lambda _: None
    workers: int = 2
    data: Path | None = None
    tokenizer: Path | None = None
    speech: Path | None = None
    longer: int = 1
    more_seeds: dict[str, int] = field(default_factory=dict)
    stored: Stored = field(default_factory=Stored)
    fingerprints: dict[str, str] = field(default_factory=dict)
    identities: dict[str, str] = field(default_factory=dict)

    def scaled(self, smoke: Any, small: Any, paper: Any) -> Any:
        """Return the value for the scale."""
        return {"smoke": smoke, "small": small, "paper": paper}[self.scale]

    def steps(self, smoke: int, small: int, paper: int | None = None) -> Any:
        """Return the training steps for the scale; ``longer`` times as many below the paper's."""
        return self.scaled(smoke * self.longer, small * self.longer, paper)

    def num_seeds(self, variant: str) -> int:
        """Return the number of seeds of a variant."""
        return self.more_seeds.get(variant, self.seeds)

    def check_variants(self, names: Iterable[str]) -> None:
        """Raise ``ExperimentError`` if ``more_seeds`` names a variant that is not among these."""
        names = list(names)
        if unknown := [name for name in self.more_seeds if name not in names]:
            raise ExperimentError(
                f"--more-seeds names {', '.join(map(repr, unknown))}, which this experiment does not train; its "
                f"variants are {', '.join(map(repr, names))}"
            )


@dataclass(frozen=True)
class Finding:
    """Statement, and the evidence for or against it.

    Attributes:
        claim: the statement in our words.
        verdict: "agrees", "differs", "equivalent" (a difference within the tolerance of a claim of equality),
            "depends" (on a choice that the paper does not state), or "not shown" if scale and seeds do not decide.
        evidence: measured values behind the verdict.
    """

    claim: str
    verdict: Verdict
    evidence: str


@dataclass(frozen=True)
class Result:
    """Result of an experiment.

    Attributes:
        columns, rows: the table. data: rows written to data.jsonl, by which the statements are judged.
        figure: the figure; None for none, or for that of the stored page (``Stored.figure``).
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    data: Sequence[Row]
    figure: Figure | None = None


def count_seeds_by(key: str) -> Callable[[Sequence[Row]], dict[str, int]]:
    """Return a function for ``Experiment.count_seeds``, given the key of a run's name in rows with a "seed"."""

    def count(rows: Sequence[Row]) -> dict[str, int]:
        return {name: len(set(select(rows, "seed", **{key: name}))) for name in dict.fromkeys(r[key] for r in rows)}

    return count


def select(rows: Sequence[Row], key: str, **where: Any) -> list[Any]:
    """Return the values of ``key`` in the rows that have the given values of other keys."""
    return [row[key] for row in rows if all(row[k] == v for k, v in where.items())]


@dataclass(frozen=True)
class Experiment:
    """Experiment that reproduces a figure or table of the paper.

    Attributes:
        name: name on the command line. title: short description. source: figure, table or section of the paper.
        run: runs the experiment.
        judge: returns the findings from the rows of data and the scale, so that stored data can be judged again.
        minutes: approximate minutes on 2 cores, by scale; None if unknown.
        hardware: hardware for the paper's scale. differs: difference of "small" from the paper's set-up.
        takes: fields of ``Setting`` that ``run`` uses at some scale, of ``OPTIONS``.
        kind: "paper" for the paper's claims, "beyond" for ours beyond it, "timing" for times of the local machine.
        unequal_seeds: True if it takes ``Setting.more_seeds``.
        count_seeds: returns the number of seeds by run of the rows of data, if ``run`` takes ``Setting.stored``: its
            table follows from the data.
    """

    name: str
    title: str
    source: str
    run: Callable[[Setting], Result]
    judge: Callable[[Sequence[Row], Scale], list[Finding]]
    minutes: dict[Scale, float | None] = field(default_factory=dict)
    hardware: str = "2 CPU cores"
    differs: str = ""
    takes: tuple[Option, ...] = TRAINING
    kind: Kind = "paper"
    unequal_seeds: bool = False
    count_seeds: Callable[[Sequence[Row]], dict[str, int]] | None = None
