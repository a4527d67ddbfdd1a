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
READ = [page for page in PAGES if page.name != "log.md"]  # the log is history: it may name what is gone, at any length
FUNCTIONS = [sigattn.sigmoid_attention, sigattn.log_length_bias, sigattn.attention_statistics, sigattn.convert]


@pytest.mark.parametrize("function", [*FUNCTIONS, sigattn.nn.recommend])
def test_docstring_examples(function):
    names = {"torch": torch, **vars(sigattn), **vars(sigattn.nn), **vars(problem), **vars(statistics)}
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner()
    (test,) = finder.find(function, function.__name__, globs=names | {"nn": torch.nn, "convert": sigattn.convert})
    assert test.examples, f"{function} has no example"
    assert runner.run(test).failed == 0


@pytest.mark.parametrize("page", [p for p in READ if "```python" in p.read_text()], ids=lambda p: p.name)
def test_python_blocks_run(page):
    """One after another, as a reader pastes them."""
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.S):
        exec(compile(block, page.name, "exec"), names)


NUMBER = re.compile(r"(?<![\w.,])\d[\d.,]*")
NO_PROSE = re.compile(
    r"^<!-- \w+: generated.*?: end -->$|^```.*?^```$|^(?:\||#|    ).*?$|<[^>]*>|\]\([^)]*\)", re.S | re.M
)


def sentences(page: Path) -> list[str]:
    """Return the sentences of a page and the items of its lists, without code, tables, headings and addresses."""
    text = re.sub(r"`[^`]*`", "code", NO_PROSE.sub("", page.read_text()))
    return [" ".join(s.split()) for s in re.split(r"(?<=[.!?])\s|\n\s*\n|\n\s*(?:-|\d+\.) ", text) if s.strip()]


def test_sentences_are_short():
    """At most ten have more than 35 words, or more than three numbers."""
    read = [f"{page.name}: {s}" for page in READ for s in sentences(page)]
    long = [s for s in read if len(s.split()) > 35 or len(NUMBER.findall(s)) > 3]
    assert len(read) > 600
    assert len(long) <= 10, "\n".join(long)


def test_pages_can_be_read_in_a_terminal():
    lines = [
        f"{p.name}: {x}" for p in READ for x in re.sub("<!--.*?end -->", "", p.read_text(), flags=re.S).split("\n")
    ]
    assert [line for line in lines if len(line.partition(": ")[2]) > 120 and ": |" not in line] == []
    readme = PAGES[0].read_text().splitlines()
    assert max(map(len, readme)) <= 120
    assert len(readme) <= 90
    assert sum(len(NUMBER.findall(sentence)) for sentence in sentences(PAGES[0])) <= 40


def test_links_files_tests_and_commands_exist():
    makefile = (ROOT / "Makefile").read_text()
    tests = "\n".join(f.read_text() for f in (ROOT / "tests").rglob("test_*.py"))
    missing = []
    for page in [*PAGES, *(ROOT / ".github").rglob("*.*")]:
        text, found = page.read_text(), set()
        for path in map("".join, re.findall(r"\]\(([^)#]+)\)|src=\"([^\"]+)\"", text)):
            found |= {path} if not path.startswith("https://") and not (page.parent / path).exists() else set()
        for command in re.findall(r"(?:`|run: )make ((?:[\w-]+ ?)+)(?:`|\n)", text):
            found |= {f"make {name}" for name in command.split() if not re.search(rf"^{name}:", makefile, re.M)}
        if page in READ:
            folders = r"`((?:src|tests|docs|benchmarks|experiments|ops|recipes)/[\w./-]+\.(?:py|md|json|svg))`"
            found |= {
                f for f in re.findall(folders, text) if not any((ROOT / s / f).exists() for s in ("", "src/sigattn"))
            }
            found |= {name for name in re.findall(r"`(test_\w+)`", text) if f"def {name}(" not in tests}
        missing += [f"{page.name}: {name}" for name in found]
    assert missing == []


def test_version_date_and_paper_of_changelog_and_citation():
    releases = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert releases[0] == "Unreleased"
    version, date = re.fullmatch(r"(\S+) \((\d{4}-\d{2}-\d{2})\)", releases[1]).groups()
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == version == sigattn.__version__
    assert citation["date-released"] == datetime.date.fromisoformat(date)
    assert citation.keys() >= {"cff-version", "message", "title", "authors"}  # those that its schema requires
    (paper,) = citation["references"]
    assert paper["title"] == "Theory, Analysis, and Best Practices for Sigmoid Self-Attention"
    assert len(paper["authors"]) == 11


def cells_of_quality(rows, digits):
    """Return mean ± standard deviation of the values of each row."""
    assert all(len(values) == 5 for values in rows)
    return [f"{mean(values):.{digits}f} ± {stdev(values):.{digits}f}" for values in rows]


def cell_of_speed(processor, n, options):
    """Return medians of three runs of SDPA's time over ours."""
    runs = [json.loads(p.read_text()) for p in (ROOT / "benchmarks/results").glob(f"cpu-{processor}-[123].json")]
    ratios = []
    for dtype, causal in options:
        ours = {"n": n, "dtype": dtype, "causal": causal, "pass": "training", "implementation": "sigattn"}
        rows = [row for run in runs for row in run["rows"] if all(row[k] == v for k, v in ours.items())]
        assert len(rows) == 3
        ratios.append(f"{median(row['softmax_time_over_this'] for row in rows):.2f}")
    return " / ".join(ratios)


def test_numbers_in_the_readme_are_those_of_the_committed_runs():
    entry = "language, CPython's documentation: bits per byte"
    runs = json.loads((ROOT / "benchmarks/results/compare/results.json").read_text())
    pair = [
        [r["value"] for r in runs if (r["entry"], r["activation"]) == (entry, activation)]
        for activation in ("softmax", "sigmoid")
    ]
    expected = {"language model, CPython's documentation": [*cells_of_quality(pair, 2), "–"]}
    data = [json.loads(line) for line in (ROOT / "docs/results/causal-bias/data.jsonl").read_text().splitlines()]
    for row, architecture in (("language model with ALiBi", "ALiBi"), ("Llama of", "Llama"), ("nanoGPT's", "GPT-2")):
        bits = [
            [r["bits"] for r in data if (r["architecture"], r["rule"]) == (architecture, f"{rule} at 128")]
            for rule in ("softmax", "-log n", "normalized, -log n - 6")  # the default of ``normalize``
        ]
        expected[row] = cells_of_quality(bits, 3)
    for processor, options in {
        "zen5": [("float32", False), ("bfloat16", False)],
        "zen3": [("float32", False), ("float32", True)],
    }.items():
        row = f"training step, Zen {processor[-1]}"
        expected[row] = [cell_of_speed(processor, n, options) for n in (1024, 4096)]
    lines = PAGES[0].read_text().splitlines()
    for start, cells in expected.items():
        (line,) = [line for line in lines if line.startswith(f"| {start}")]
        assert line.endswith(f"| {' | '.join(cells)} |")
