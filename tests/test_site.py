"""The documentation site: its strict build passes, its reference is complete, and it needs no network."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_the_site(tmp_path):
    """In one test, because processes of pytest share no fixture, and a build takes 20 seconds."""
    pytest.importorskip("furo")
    pytest.importorskip("myst_parser")
    command = [sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", "docs", tmp_path]  # as make docs
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-5000:]
    every_public_name_is_in_the_reference(tmp_path)
    pages_load_nothing_from_elsewhere(tmp_path)
    prose_links_to_the_reference(tmp_path)


def exported(module):
    """Return the names of ``__all__`` of a module's file, without submodules."""
    for node in ast.parse(module.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            names = ast.literal_eval(node.value)
            return [n for n in names if not any((module.parent / f).exists() for f in (n, f"{n}.py"))]
    return []


def every_public_name_is_in_the_reference(site):
    from sphinx.util.inventory import InventoryFile

    inventory = InventoryFile.loads((site / "objects.inv").read_bytes(), uri="").data
    described = {name for kind, names in inventory.items() if kind.startswith("py:") for name in names}
    source = ROOT / "src/sigattn"
    files = [source / "__init__.py", *source.glob("*/__init__.py"), *source.glob("integrations/*/__init__.py")]
    files = [f for f in files if f.parent.name != "cli"]
    public = set()
    for file in files:
        module = ".".join(file.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
        public |= {f"{module}.{name}" for name in exported(file)}
    assert len(public) > 150
    assert public - described == set()


def pages_load_nothing_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 50
    for page in pages:
        loaded = re.findall(r"<(?:script|img|iframe)[^>]* src=\"([^\"]*)|<link[^>]* href=\"([^\"]*)", page.read_text())
        assert loaded, page
        for target in map("".join, loaded):
            assert not re.match(r"(?:\w+:)?//", target), f"{page.name}: {target}"
            file = page.parent / target.partition("#")[0].partition("?")[0]
            assert target.startswith("#") or file.exists(), f"{page.name}: {target}"
    styles = "\n".join(f.read_text() for f in (site / "_static").rglob("*.css"))
    assert not re.search(r"@import|url\(\"?(?:https?:)?//", styles)


def prose_links_to_the_reference(site):
    page = (site / "operator.html").read_text()
    assert 'href="reference/sigattn.html#sigattn.sigmoid_varlen_attention"' in page


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
        message = f"docs/figures/{name} is not what make figures draws"
        assert new_words == words, message
        assert new_numbers == pytest.approx(numbers, rel=0, abs=1e-5), message  # processors differ in the last digit


def _words_and_numbers(text):
    """Split a figure into its words, without identifiers, which are hashes of its content, and its numbers."""
    text = re.sub(r"\b[a-z][0-9a-f]{10}\b", "id", text)
    pattern = r"-?\d+(?:\.\d+)?"
    return re.split(pattern, text), [float(number) for number in re.findall(pattern, text)]
