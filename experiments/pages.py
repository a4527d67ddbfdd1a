"""Pages of results in Markdown: one with its figure for each experiment, and one with the findings of all."""

from __future__ import annotations

import json
import shlex
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from experiments.experiment import Experiment, ExperimentError, Kind, Result, Scale, Setting, Stored
from experiments.intervals import VERDICTS
from experiments.registry import EXPERIMENTS, find_experiment
from experiments.summaries import SUMMARIES
from sigattn.data.dataset import DataError

INTRODUCTION = (
    "A claim of equality **agrees** if the whole 95 % interval of the difference lies within a tolerance and contains "
    "0. It is **equivalent** if the interval lies within the tolerance without 0, and **differs** if it lies outside. "
    "A claim **depends** if a choice decides that the paper does not state. It is **not shown** if this scale and "
    "these seeds do not decide. Intervals are Welch's; in conversion, causal-bias and causal-bias-larger (against "
    "softmax), small-models (of normalized sigmoid), embeddings and sigma-accuracy they are paired by seed."
)


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown, without a final line break."""
    head, *body = ("| " + " | ".join(cells) + " |" for cells in ([c or " " for c in columns], *rows))
    return "\n".join([head, "|" + "---|" * len(columns), *body])


@dataclass(frozen=True)
class Page:
    """Content of a page, stored in page.json.

    Attributes:
        name, title, source: see ``Experiment``. scale, seeds: see ``Setting``. findings: claim, verdict and evidence.
        columns, rows: the table. differs: difference of this scale from the paper's. has_figure: if it has a figure.
        data: names and hashes of the training data. command: the command that writes the page.
        kind: see ``Experiment``. longer, more_seeds, identities: see ``Setting``.
        extends: origins of the pages whose results are among the data, the earliest first (``read_stored``).
        figure_seeds: seeds of the runs that the figure shows, as a sentence, if they are not all.
        conclusion: the result in a sentence, with which the page begins. Somebody who has read the findings writes it
            into page.json; new findings have none, and other verdicts remove it.
    """

    name: str
    title: str
    source: str
    scale: str
    seeds: int
    differs: str
    columns: list[str]
    rows: list[list[str]]
    findings: list[dict[str, str]]
    has_figure: bool
    provenance: dict[str, Any]
    data: list[str] = field(default_factory=list)
    command: str = ""
    kind: Kind = "paper"
    longer: int = 1
    more_seeds: dict[str, int] = field(default_factory=dict)
    identities: dict[str, str] = field(default_factory=dict)
    extends: list[dict[str, Any]] = field(default_factory=list)
    figure_seeds: str = ""
    conclusion: str = ""

    @property
    def summary(self) -> str:
        """What was done, without a final point."""
        return SUMMARIES.get(self.name, self.title)

    @property
    def verdicts(self) -> list[str]:
        """The verdict on each claim."""
        return [f["verdict"] for f in self.findings]

    @property
    def extent(self) -> str:
        """Scale and seeds as a sentence."""
        longer = "" if self.longer == 1 else f", {self.longer} times its training"
        return f"Scale: {self.scale}{longer}, seeds: {self.numbers_of_seeds}."

    @property
    def numbers_of_seeds(self) -> str:
        """Number of seeds, and those of variants with more, as text."""
        by_number: dict[int, list[str]] = {}
        for name, number in self.more_seeds.items():
            by_number.setdefault(number, []).append(name)
        more = "".join(f"; {number} of {' and of '.join(names)}" for number, names in sorted(by_number.items()))
        return f"{self.seeds}{more}"


def write_page(
    folder: Path, experiment: Experiment, setting: Setting, result: Result, provenance: dict[str, Any]
) -> Page:
    """Write data.jsonl, page.json, figure.svg and page.md into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row) for row in result.data]
    stored_figure = setting.stored.figure if result.figure is None else None
    (folder / "data.jsonl").write_text("".join(line + "\n" for line in lines))
    page = Page(
        experiment.name,
        experiment.title,
        experiment.source,
        setting.scale,
        setting.seeds,
        experiment.differs if setting.scale != "paper" else "",
        list(result.columns),
        [list(row) for row in result.rows],
        _judge(experiment, lines, setting.scale),
        result.figure is not None or stored_figure is not None,
        provenance,
        [f"{name} ({fingerprint})" for name, fingerprint in sorted(setting.fingerprints.items())],
        _command(experiment, setting),
        experiment.kind,
        setting.longer,
        setting.more_seeds,
        setting.identities,
        list(setting.stored.origins),
        setting.stored.figure_seeds if stored_figure else "",
    )
    if stored_figure is not None and stored_figure.resolve() != (folder / "figure.svg").resolve():
        shutil.copyfile(stored_figure, folder / "figure.svg")
    if result.figure is not None:
        result.figure.savefig(folder / "figure.svg", metadata={"Date": None})
    _store(folder, page)
    return page


def _store(folder: Path, page: Page) -> None:
    (folder / "page.json").write_text(json.dumps(asdict(page), indent=1) + "\n")
    (folder / "page.md").write_text(page_markdown(page))


def read_stored(folder: Path, experiment: Experiment, scale: Scale, longer: int) -> Stored:
    """Return the results of an experiment's page in a folder, to add seeds to them.

    Raises:
        DataError: if the folder has no such page, or its page does not name the settings and data of its runs.
        ExperimentError: if tables of the experiment do not follow from data alone, or the page is of another scale or
            length of training.
    """
    if experiment.count_seeds is None:
        takers = ", ".join(e.name for e in EXPERIMENTS.values() if e.count_seeds)
        raise ExperimentError(
            f"--extend is not for {experiment.name}, whose table needs all its runs: leave it out; it is for {takers}"
        )
    page_folder = folder / experiment.name
    if not (page_folder / "page.json").exists():
        raise DataError(f"{folder} has no page of {experiment.name} to extend: leave out --extend, or name its folder")
    page = Page(**json.loads((page_folder / "page.json").read_text()))
    if (page.scale, page.longer) != (scale, longer):
        raise ExperimentError(
            f"the page in {page_folder} is of scale {page.scale!r} and longer={page.longer}, not {scale!r} and {longer}"
            ": name the same, or leave out --extend"
        )
    if not page.identities:
        raise DataError(f"the page in {page_folder} does not name the settings of its runs: leave out --extend")
    rows = [json.loads(line) for line in (page_folder / "data.jsonl").read_text().splitlines()]
    origins = [*page.extends, page.provenance]
    figure = path if (path := page_folder / "figure.svg").exists() else None
    shown = page.figure_seeds or f"The figure shows fewer seeds: {page.numbers_of_seeds}."
    return Stored(rows, experiment.count_seeds(rows), page.identities, origins, figure, shown)


def _judge(experiment: Experiment, lines: Iterable[str], scale: str) -> list[dict[str, str]]:
    """Return the findings for rows of data.jsonl."""
    return [asdict(f) for f in experiment.judge([json.loads(line) for line in lines], cast(Scale, scale))]


def judge_again(folder: Path) -> list[Page]:
    """Judge the data of every page in a folder by the rules of this version, and rewrite the pages.

    Titles and sources are also those of this version. Figures and tables stay as measured.

    Raises:
        DataError: if the folder holds no pages.
    """
    for page in read_pages(folder):
        experiment, page_folder = find_experiment(page.name), folder / page.name
        findings = _judge(experiment, (page_folder / "data.jsonl").read_text().splitlines(), page.scale)
        about = {"title": experiment.title, "source": experiment.source, "kind": experiment.kind}
        judged = Page(**{**asdict(page), **about, "findings": findings})
        _store(page_folder, judged if judged.verdicts == page.verdicts else replace(judged, conclusion=""))
    pages = read_pages(folder)
    if not pages:
        missing = f"{folder} holds no page (NAME/page.json)" if folder.is_dir() else f"no such folder: {folder}"
        raise DataError(f"{missing}; name a folder of pages, for example runs/experiments/small")
    write_findings(folder, pages)
    return pages


def read_pages(folder: Path) -> list[Page]:
    """Return the pages of all experiments in a folder, sorted by name."""
    return [Page(**json.loads(path.read_text())) for path in sorted(folder.glob("*/page.json"))]


def page_markdown(w: Page) -> str:
    """Return a page as Markdown: a sentence, the figure, the table, the verdicts, and how they were made."""
    lines = [f"# {w.title}", "", w.conclusion or f"{w.summary}: {_of_claims(w.verdicts)}."]
    if w.has_figure:
        lines += ["", f"![{w.title}](figure.svg)"]
        lines += ["", w.figure_seeds] if w.figure_seeds else []
    lines += ["", markdown_table(w.columns, w.rows), "", "## Verdicts", ""]
    lines += [f"- **{f['verdict']}**: {f['claim']} ({f['evidence']})" for f in w.findings]
    lines += ["", "## Set-up", ""]
    lines += [f"{w.summary}.", ""] if w.conclusion else []
    lines += [f"{w.source}. {w.extent}"]
    if w.differs:
        lines += ["", f"Differs from the paper's set-up: {w.differs}."]
    if w.data:
        lines += ["", "Data: " + "; ".join(w.data) + "."]
    about = w.provenance
    command = w.command or f"python -m experiments {w.name} --scale {w.scale} --seeds {w.seeds}"
    lines += ["", f"`{command}`, {_origin(about)}."]
    if w.extends:
        lines += ["", f"The first seeds are those of {'; of '.join(map(_origin, w.extends))}."]
    return "\n".join(lines) + "\n"


IN_WORDS: dict[str, tuple[str, str]] = {
    "agrees": ("agrees", "agree"),
    "differs": ("differs", "differ"),
    "equivalent": ("is equivalent", "are equivalent"),
    "depends": ("depends", "depend"),
    "not shown": ("is not shown", "are not shown"),
}


def _counted(verdicts: Iterable[str]) -> str:
    """Return the number of each verdict: ``4 agree, 1 differs and 1 is not shown``."""
    counts = Counter(verdicts)
    *first, last = [f"{counts[v]} {IN_WORDS[v][counts[v] > 1]}" for v in VERDICTS if counts[v]] or ["none is judged"]
    return f"{', '.join(first)} and {last}" if first else last


def _of_claims(verdicts: Sequence[str]) -> str:
    """Return the number of claims of each verdict: ``of 6 claims 4 agree, 1 differs and 1 is not shown``."""
    if len(set(verdicts)) == 1:
        number = len(verdicts)
        together = {1: "the claim", 2: "both claims"}.get(number, f"all {number} claims")
        return f"{together} {IN_WORDS[verdicts[0]][number > 1]}"
    return f"of {len(verdicts)} claims {_counted(verdicts)}"


def _origin(about: dict[str, Any]) -> str:
    """Return date, commit and device of a page's provenance as text."""
    return f"{about['date']}, commit {about['commit'][:12]}, {about['device']}, torch {about['versions']['torch']}"


def _command(experiment: Experiment, setting: Setting) -> str:
    """Return the command that writes a page."""
    parts = ["python", "-m", "experiments", experiment.name, "--scale", setting.scale, "--seeds", str(setting.seeds)]
    if setting.longer != 1:
        parts += ["--longer", str(setting.longer)]
    if setting.more_seeds:
        parts += ["--more-seeds", *(str(part) for pair in setting.more_seeds.items() for part in pair)]
    for name in ("data", "tokenizer", "speech"):
        if (path := getattr(setting, name)) is not None:
            parts += [f"--{name}", str(path)]
    return shlex.join(parts)


KINDS: dict[Kind, str] = {
    "paper": "The paper's claims",
    "beyond": "Claims beyond the paper",
    "timing": "Timings of one machine",
}


def count_verdicts(pages: Sequence[Page]) -> str:
    """Return the number of findings of each kind and verdict, as text."""
    verdicts = {kind: [v for page in pages if page.kind == kind for v in page.verdicts] for kind in KINDS}
    return " ".join(f"{title}: {_counted(verdicts[kind])}." for kind, title in KINDS.items() if verdicts[kind])


def _finding(page: Page) -> str:
    """Return a page's result in a sentence and its numbers of verdicts, or all its verdicts if it has no sentence."""
    if not page.conclusion:
        return "<br>".join(f"**{f['verdict']}**: {f['claim']}" for f in page.findings)
    claims = _of_claims(page.verdicts)
    return f"{page.conclusion}<br>{claims[0].upper()}{claims[1:]}."


def findings_table(pages: Sequence[Page]) -> str:
    """Return the findings of all pages as Markdown, in the order of the experiments, by kind."""
    by_name = {page.name: page for page in pages}
    ordered = [by_name[name] for name in EXPERIMENTS if name in by_name]
    parts = ["# Results", "", count_verdicts(pages), "", INTRODUCTION]
    for kind, title in KINDS.items():
        rows = [
            (f"[{page.title}]({page.name}/page.md)", _finding(page), page.source)
            for page in ordered
            if page.kind == kind
        ]
        if rows:
            parts += ["", f"## {title}", "", markdown_table(("experiment", "finding", "in the paper"), rows)]
    return "\n".join(parts) + "\n"


def write_findings(folder: Path, pages: Sequence[Page]) -> Path:
    """Write README.md with the findings of all pages of a folder."""
    path = folder / "README.md"
    path.write_text(findings_table(pages))
    return path
