"""The examples in docstrings, README and docs run as they stand; the pages' links and commands lead somewhere."""

import datetime
import doctest
import json
import re
from pathlib import Path
from statistics import mean, median, stdev

import pytest
import torch
import yaml

import sigattn
import sigattn.nn
from sigattn.ops import problem, statistics

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


FUNCTIONS = [sigattn.sigmoid_attention, sigattn.log_length_bias, sigattn.attention_statistics, sigattn.convert]


@pytest.mark.parametrize("function", [*FUNCTIONS, sigattn.nn.recommend])
def test_docstring_examples(function):
    names = {"torch": torch, **vars(sigattn), **vars(sigattn.nn), **vars(problem), **vars(statistics)}
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner()
    (test,) = finder.find(function, function.__name__, globs=names | {"nn": torch.nn, "convert": sigattn.convert})
    assert test.examples, f"{function} has no example"
    assert runner.run(test).failed == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_python_blocks_run(page):
    """One after another, as a reader pastes them."""
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.S):
        exec(compile(block, page.name, "exec"), names)


GUIDES = (
    "start operator layers convert training serving long-sequences integrations why coming-from support index "
    "architecture"
)
READ = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs" / f"{name}.md" for name in GUIDES.split())]
NUMBER = re.compile(r"(?<![\w.,])\d[\d.,]*")


def sentences(page: Path) -> list[str]:
    """Return the sentences of a page and the items of its lists, without code, tables, headings and addresses."""
    text = re.sub(r"^```.*?^```$|^(?:\||#|    ).*?$|<[^>]*>|\]\([^)]*\)", "", page.read_text(), flags=re.S | re.M)
    text = re.sub(r"`[^`]*`", "code", text)
    return [" ".join(s.split()) for s in re.split(r"(?<=[.!?])\s|\n\s*\n|\n\s*(?:-|\d+\.) ", text) if s.strip()]


def test_sentences_of_the_guides_are_short():
    """At most ten have more than 35 words, or more than three numbers."""
    read = [f"{page.name}: {s}" for page in READ for s in sentences(page)]
    long = [s for s in read if len(s.split()) > 35 or len(NUMBER.findall(s)) > 3]
    assert len(read) > 300
    assert len(long) <= 10, "\n".join(long)


def test_guides_can_be_read_in_a_terminal():
    wide = [f"{p.name}: {x}" for p in READ for x in p.read_text().splitlines() if len(x) > 120 and x[:1] != "|"]
    assert wide == []
    readme = ROOT / "README.md"
    assert max(map(len, readme.read_text().splitlines())) <= 120
    assert len(readme.read_text().splitlines()) <= 90
    assert sum(len(NUMBER.findall(sentence)) for sentence in sentences(readme)) <= 40


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)|src=\"([^\"]+)\"", page.read_text()):
        path = next(t for t in target if t)
        assert path.startswith("https://") or (page.parent / path).exists(), f"{page.name}: {path}"


@pytest.mark.parametrize("page", [p for p in PAGES if p.name != "log.md"], ids=lambda p: p.name)
def test_named_files_and_tests_exist(page):
    """The log is history, and may name what is gone."""
    text = page.read_text()
    for path in re.findall(
        r"`((?:src|tests|docs|benchmarks|experiments|ops|recipes)/[\w./-]+\.(?:py|md|json|svg))`", text
    ):
        assert (ROOT / path).exists() or (ROOT / "src/sigattn" / path).exists(), f"{page.name}: {path}"
    tests = "\n".join(f.read_text() for f in (ROOT / "tests").rglob("test_*.py"))
    for name in re.findall(r"`(test_\w+)`", text):
        assert f"def {name}(" in tests, f"{page.name}: {name}"


def test_make_targets_named_in_the_pages_exist():
    makefile = (ROOT / "Makefile").read_text()
    for page in [*PAGES, *(ROOT / ".github").rglob("*.*")]:
        for target in re.findall(r"(?:`|run: )make ((?:[\w-]+ ?)+)(?:`|\n)", page.read_text()):
            for name in target.split():
                assert re.search(rf"^{name}:", makefile, re.M), f"{page.name}: make {name}"


def test_newest_release_of_the_changelog_is_this_version():
    releases = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert releases[0] == "Unreleased"
    version, date = re.fullmatch(r"(\S+) \((\d{4}-\d{2}-\d{2})\)", releases[1]).groups()
    assert version == sigattn.__version__
    assert datetime.date.fromisoformat(date)


def test_citation_has_the_version_and_the_paper():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == sigattn.__version__
    assert citation.keys() >= {"cff-version", "message", "title", "authors"}  # those that its schema requires
    (paper,) = citation["references"]
    assert paper["title"] == "Theory, Analysis, and Best Practices for Sigmoid Self-Attention"
    assert len(paper["authors"]) == 11


def test_quality_in_the_readme_is_that_of_the_committed_runs():
    entry = "language, CPython's documentation: bits per byte"
    runs = json.loads((ROOT / "benchmarks" / "results" / "compare" / "results.json").read_text())
    cells = []
    for activation in ("softmax", "sigmoid"):
        values = [r["value"] for r in runs if (r["entry"], r["activation"]) == (entry, activation)]
        cells.append(f"{mean(values):.2f} ± {stdev(values):.2f}")
    row = _line_of_the_readme("language model, CPython's documentation")
    assert row.endswith(f"| {cells[0]} | {cells[1]} | – |")
    assert len(values) == 5


@pytest.mark.parametrize(
    ("row", "architecture"),
    [("language model with ALiBi", "ALiBi"), ("Llama of transformers", "Llama"), ("nanoGPT's GPT-2", "GPT-2")],
)
def test_architectures_in_the_readme_are_those_of_causal_bias(row, architecture):
    lines = (ROOT / "docs" / "results" / "causal-bias" / "data.jsonl").read_text().splitlines()
    data = [json.loads(line) for line in lines]
    softmax, sigmoid, normalized = (
        f"{mean(values):.3f} ± {stdev(values):.3f}" if len(values) > 1 else None
        for rule in ("softmax", "-log n", "normalized, -log n - 6")  # the default of ``normalize``
        for values in [[r["bits"] for r in data if (r["architecture"], r["rule"]) == (architecture, f"{rule} at 128")]]
    )
    assert _line_of_the_readme(row).endswith(f"| {softmax} | {sigmoid} | {normalized} |")


def test_speed_of_training_in_the_readme_is_that_of_the_committed_runs():
    """Medians of three runs of SDPA's time over ours."""

    def ratio(processor, n, dtype, causal):
        runs = [
            json.loads(p.read_text())
            for p in sorted((ROOT / "benchmarks" / "results").glob(f"cpu-{processor}-[123].json"))
        ]
        ours = {"n": n, "dtype": dtype, "causal": causal, "pass": "training", "implementation": "sigattn"}
        rows = [row for run in runs for row in run["rows"] if all(row[k] == v for k, v in ours.items())]
        assert len(rows) == 3
        return f"{median(row['softmax_time_over_this'] for row in rows):.2f}"

    cells = [" / ".join(ratio("zen5", n, dtype, False) for dtype in ("float32", "bfloat16")) for n in (1024, 4096)]
    assert _line_of_the_readme("training step, Zen 5").endswith(f"| {cells[0]} | {cells[1]} |")
    cells = [" / ".join(ratio("zen3", n, "float32", causal) for causal in (False, True)) for n in (1024, 4096)]
    assert _line_of_the_readme("training step, Zen 3").endswith(f"| {cells[0]} | {cells[1]} |")


def _line_of_the_readme(start: str) -> str:
    return next(line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith(f"| {start}"))
