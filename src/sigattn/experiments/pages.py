"""Pages of results: one Markdown page and figure for each experiment, and one HTML index of them all."""

from __future__ import annotations

import html
import json
import shlex
import urllib.parse
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sigattn.experiments import report
from sigattn.experiments.experiment import Experiment, Result, Setting


@dataclass(frozen=True)
class Page:
    """Content of a page, stored in page.json.

    Attributes:
        name, title, source: see ``Experiment``. scale, seeds: see ``Setting``. findings: claim, verdict and evidence.
        columns, rows: the table. differs: difference of this scale from the paper's. has_figure: if it has a figure.
        data: names and hashes of the training data. command: the command that writes the page.
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


def write_page(
    folder: Path, experiment: Experiment, setting: Setting, result: Result, provenance: dict[str, Any]
) -> Page:
    """Write data.jsonl, page.json, figure.svg, figure.png and page.md into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in result.data))
    written = Page(
        experiment.name,
        experiment.title,
        experiment.source,
        setting.scale,
        setting.seeds,
        experiment.differs if setting.scale != "paper" else "",
        list(result.columns),
        [list(row) for row in result.rows],
        [asdict(f) for f in result.findings],
        result.figure is not None,
        provenance,
        [f"{name} ({fingerprint})" for name, fingerprint in sorted(setting.fingerprints.items())],
        _command(experiment, setting),
    )
    if result.figure is not None:
        result.figure.savefig(folder / "figure.svg", metadata={"Date": None})
        result.figure.savefig(folder / "figure.png", dpi=110)
    (folder / "page.json").write_text(json.dumps(asdict(written), indent=1) + "\n")
    (folder / "page.md").write_text(page_markdown(written))
    return written


def read_pages(folder: Path) -> list[Page]:
    """Return the pages of all experiments in a folder, sorted by name."""
    return [Page(**json.loads(path.read_text())) for path in sorted(folder.glob("*/page.json"))]


def page_markdown(w: Page) -> str:
    """Return a page as Markdown."""
    lines = [f"# {w.title}", "", f"{w.source}. Scale: {w.scale}, seeds: {w.seeds}.", ""]
    if w.differs:
        lines += [f"Differs from the paper's set-up: {w.differs}.", ""]
    lines += [f"- **{f['verdict']}**: {f['claim']} ({f['evidence']})" for f in w.findings]
    if w.has_figure:
        lines += ["", f"![{w.title}](figure.svg)"]
    lines += ["", report.markdown_table(w.columns, w.rows)]
    if w.data:
        lines += ["", "Data: " + "; ".join(w.data) + "."]
    about = w.provenance
    command = w.command or f"sigattn reproduce {w.name} --scale {w.scale} --seeds {w.seeds}"
    lines += ["", f"`{command}`, {about['date']}, commit "
              f"{about['commit'][:12]}, {about['device']}, torch {about['versions']['torch']}."]  # fmt: skip
    return "\n".join(lines) + "\n"


def _command(experiment: Experiment, setting: Setting) -> str:
    """Return the command that writes a page."""
    parts = ["sigattn", "reproduce", experiment.name, "--scale", setting.scale, "--seeds", str(setting.seeds)]
    for name in ("data", "tokenizer", "speech"):
        if (path := getattr(setting, name)) is not None:
            parts += [f"--{name}", str(path)]
    return shlex.join(parts)


def count_verdicts(written: Sequence[Page]) -> str:
    """Return the number of findings of each verdict, as text."""
    found = Counter(f["verdict"] for w in written for f in w.findings)
    return ", ".join(f"{found[v]} {v}" for v in ("agrees", "differs", "not shown"))


def write_index(folder: Path, written: Sequence[Page]) -> Path:
    """Write one HTML page of all results with their figures; ``written`` is text from files and is escaped."""
    parts = []
    for w in written:
        findings = "".join(
            f"<li><b>{_text(f['verdict'])}</b>: {_text(f['claim'])} <i>{_text(f['evidence'])}</i></li>"
            for f in w.findings
        )
        source = _text(f"{urllib.parse.quote(str(w.name), safe='')}/figure.svg")
        figure = f'<img src="{source}" alt="{_text(w.title)}" width="100%">' if w.has_figure else ""
        data = f"<p>Data: {_text('; '.join(w.data))}.</p>" if w.data else ""
        differs = f"<p>Differs from the paper's set-up: {_text(w.differs)}.</p>" if w.differs else ""
        parts.append(
            f"<h2>{_text(w.title)}</h2><p>{_text(w.source)}. Scale: {_text(w.scale)}, seeds: {_text(w.seeds)}.</p>"
            f"{data}{differs}<ul>{findings}</ul>{figure}{report.html_table(w.columns, w.rows)}"
        )
    path = folder / "index.html"
    introduction = f"Experiments of Ramapuram et al. (ICLR 2025), reproduced. Findings: {count_verdicts(written)}."
    path.write_text(report.page("Sigmoid attention: the paper's experiments", introduction, "".join(parts)))
    return path


def _text(value: object) -> str:
    """Return a value as escaped HTML text that is also safe in quoted attributes."""
    return html.escape(str(value), quote=True)
