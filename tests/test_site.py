"""The documentation site: its strict build passes, its reference is complete, and it needs no network."""

import os
import re
import subprocess
import sys
from inspect import ismodule
from pathlib import Path

import pytest

import sigattn

ROOT = Path(__file__).parent.parent
BUILD = """
import sys
from sphinx.application import Sphinx

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
