"""Documentation: examples run, links, names and commands exist, numbers are those measured, and the site builds."""

import datetime
import doctest
import json
import os
import pkgutil
import re
import subprocess
import sys
from inspect import ismodule
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
    """At most five have more than 35 words, or more than three numbers."""
    read = [f"{page.name}: {s}" for page in READ for s in sentences(page)]
    long = [s for s in read if len(s.split()) > 35 or len(NUMBER.findall(s)) > 3]
    assert len(read) > 600
    assert len(long) <= 5, "\n".join(long)


def test_pages_can_be_read_in_a_terminal():
    for page in READ:
        lines = re.sub("<!--.*?end -->", "", page.read_text(), flags=re.S).splitlines()
        assert [line for line in lines if len(line) > 120 and line[:1] != "|"] == [], page.name
    readme = PAGES[0].read_text().splitlines()
    assert max(map(len, readme)) <= 120
    assert len(readme) <= 90
    assert sum(len(NUMBER.findall(sentence)) for sentence in sentences(PAGES[0])) <= 40


def test_links_files_tests_and_commands_exist():
    makefile = (ROOT / "Makefile").read_text()
    tests = "\n".join(f.read_text() for f in (ROOT / "tests").rglob("test_*.py"))
    files = r"`((?:src|tests|docs|benchmarks|experiments|ops|recipes)/[\w./-]+\.(?:py|md|json|svg))`"
    for page in [*READ, *(ROOT / ".github").rglob("*.*")]:
        text = page.read_text()
        assert not re.search(r"!\[[^\]]*\]\(http", text), f"{page.name}: a picture from elsewhere"
        for target in map("".join, re.findall(r"\]\(([^)#]+)\)|src=\"([^\"]+)\"", text)):
            assert target.startswith("https://") or (page.parent / target).exists(), f"{page.name}: {target}"
        for command in re.findall(r"(?:`|run: )make ((?:[\w-]+ ?)+)(?:`|\n)", text):
            for name in command.split():
                assert re.search(rf"^{name}:", makefile, re.M), f"{page.name}: make {name}"
        for file in re.findall(files, text):
            assert (ROOT / file).exists() or (ROOT / "src/sigattn" / file).exists(), f"{page.name}: {file}"
        for name in re.findall(r"`(test_\w+)`", text):
            assert f"def {name}(" in tests, f"{page.name}: {name}"


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


def rows_of_the_readme():
    """Return the cells of rows of the README by their beginnings, from the committed runs."""
    cells = []
    for name, activation in (("results", "softmax"), ("results", "sigmoid"), ("normalize", "normalized")):
        runs = json.loads((ROOT / f"benchmarks/results/compare/{name}.json").read_text())
        about = "language, CPython's documentation: bits per byte", activation
        bits = [r["value"] for r in runs if (r["entry"], r["activation"]) == about]
        cells.append(f"{mean(bits):.2f} ± {stdev(bits):.2f}")
    yield "language model, CPython", cells
    data = [json.loads(line) for line in (ROOT / "docs/results/causal-bias/data.jsonl").read_text().splitlines()]
    for row, architecture in (("language model with ALiBi", "ALiBi"), ("Llama of", "Llama"), ("nanoGPT's", "GPT-2")):
        cells = []
        for rule in ("softmax", "-log n", "normalized, -log n - 6"):  # the last is the default of ``normalize``
            bits = [r["bits"] for r in data if (r["architecture"], r["rule"]) == (architecture, f"{rule} at 128")]
            assert len(bits) == 5
            cells.append(f"{mean(bits):.3f} ± {stdev(bits):.3f}")
        yield row, cells
    both = {"zen5": [("float32", False), ("bfloat16", False)], "zen1": [("float32", False), ("float32", True)]}
    for processor, options in both.items():
        files = (ROOT / "benchmarks/results").glob(f"cpu-{processor}-[123].json")
        speeds = [row for file in files for row in json.loads(file.read_text())["rows"]]
        cells = [" / ".join(_speed(speeds, n, *option) for option in options) for n in (1024, 4096)]
        yield f"training step, Zen {processor[-1]}", cells


def _speed(rows, n, dtype, causal):
    """Return the median of three runs of SDPA's time over ours."""
    ours = {"n": n, "dtype": dtype, "causal": causal, "pass": "training", "implementation": "sigattn"}
    ratios = [row["softmax_time_over_this"] for row in rows if all(row[k] == v for k, v in ours.items())]
    assert len(ratios) == 3
    return f"{median(ratios):.2f}"


def test_numbers_in_the_readme_are_those_of_the_committed_runs():
    lines = PAGES[0].read_text().splitlines()
    for start, cells in rows_of_the_readme():
        (line,) = [line for line in lines if line.startswith(f"| {start}")]
        assert line.endswith(f"| {' | '.join(cells)} |")
    data = (ROOT / "docs/results/embeddings/data.jsonl").read_text().splitlines()
    assert {json.loads(row)["same_neighbour"] for row in data} == {1.0}
    assert any("all-MiniLM-L6-v2 keeps each text's nearest neighbour" in line for line in lines)


BUILD = """
import sys
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer, PycodeError

ModuleAnalyzer.cache["module", "lm_eval.models.huggingface"] = PycodeError("mocked")  # which Sphinx would import
site = sys.argv[1]
app = Sphinx("docs", "docs", site, site + "/.doctrees", "html", {"smartquotes": False}, status=None)
app.builder.search = False
app.build(filenames=["docs/operator.md", "docs/results/regularity/page.md", "docs/reference/sigattn.rst"])
for page in app.env.found_docs:
    app.env.get_and_resolve_doctree(page, app.builder)
"""


def test_the_site(tmp_path):
    """All pages are read, and their links resolved, without a warning; three are written."""
    pytest.importorskip("furo")
    inventory = pytest.importorskip("sphinx.util.inventory")
    env = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}"}
    done = subprocess.run([sys.executable, "-c", BUILD, tmp_path], cwd=ROOT, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    objects = inventory.InventoryFile.loads((tmp_path / "objects.inv").read_bytes(), uri="").data
    described = {name for kind, names in objects.items() if kind.startswith("py:") for name in names}
    packages = [sigattn, *(getattr(sigattn, name) for name in sigattn.__all__ if ismodule(getattr(sigattn, name)))]
    public = {f"{p.__name__}.{n}" for p in packages for n in getattr(p, "__all__", ()) if not ismodule(getattr(p, n))}
    assert len(public) > 150
    assert public | {"sigattn.integrations.transformers.check"} <= described
    pages_load_nothing_from_elsewhere(tmp_path)
    operator = (tmp_path / "operator.html").read_text()
    assert 'href="reference/sigattn.html#sigattn.sigmoid_varlen_attention"' in operator  # names in prose are links


def pages_load_nothing_from_elsewhere(site):
    for page in site.rglob("*.html"):
        loaded = re.findall(r"<(?:script|img|iframe)[^>]* src=\"([^\"]*)|<link[^>]* href=\"([^\"]*)", page.read_text())
        assert loaded, page
        for target in map("".join, loaded):
            assert not re.match(r"(?:\w+:)?//", target), f"{page.name}: {target}"
            file = page.parent / target.partition("#")[0].partition("?")[0]
            assert target.startswith("#") or file.suffix == ".html" or file.exists(), f"{page.name}: {target}"
    styles = "\n".join(f.read_text() for f in (site / "_static").rglob("*.css"))
    assert not re.search(r"@import|url\(\"?(?:https?:)?//", styles)


def test_figures_and_tables_are_those_of_the_measurements(tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    from benchmarks import figures

    figures.write(tmp_path)
    written = {f.name: f.read_text() for f in tmp_path.iterdir()}
    committed = {f.name: f.read_text() for f in (ROOT / "docs/figures").iterdir()}
    assert written.keys() == committed.keys()
    for name, text in committed.items():
        if name.endswith(".svg") and f"Matplotlib v{matplotlib.__version__}" not in text:
            continue  # another version draws the same data in other words
        (words, numbers), (new_words, new_numbers) = _words_and_numbers(text), _words_and_numbers(written[name])
        assert new_words == words, f"docs/figures/{name} is not what make figures draws"
        assert new_numbers == pytest.approx(numbers, rel=0, abs=1e-5), name  # processors differ in the last digit


def _words_and_numbers(figure):
    """Split a figure into its words, without identifiers, which are hashes of its content, and its numbers."""
    parts = re.split(r"(-?\d+(?:\.\d+)?)", re.sub(r"\b[a-z][0-9a-f]{10}\b", "id", figure))
    return parts[::2], list(map(float, parts[1::2]))


NAME = re.compile(r"(?<![\w./-])sigattn(?:\.[A-Za-z]\w*)+")
IMPORT = re.compile(r"from (sigattn[\w.]*) import (\w+(?:, \w+)*)")
FILES = {"toml", "json", "md", "py"}  # sigattn.toml is a file
CODE = [f for folder in ("src", "experiments", "benchmarks") for f in (ROOT / folder).rglob("*.py")]


def exists(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def test_names_exist():
    for package in ("triton", "transformers", "lm_eval"):  # which modules import
        pytest.importorskip(package)
    unknown = []
    for page in [*READ, *(ROOT / "docs").glob("*/**/*.md"), *CODE]:
        text = page.read_text()
        names = {n for n in NAME.findall(text) if n.rsplit(".")[-1] not in FILES}
        names |= {f"{module}.{name}" for module, imported in IMPORT.findall(text) for name in imported.split(", ")}
        unknown += [f"{page.relative_to(ROOT)}: {n}" for n in sorted(names) if not exists(n)]
    assert not unknown
