"""Dotted names of this library in documentation, docstrings and error messages exist."""

import pkgutil
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NAME = re.compile(r"(?<![\w./-])sigattn(?:\.[A-Za-z]\w*)+")
IMPORT = re.compile(r"from (sigattn[\w.]*) import (\w+(?:, \w+)*)")
CODE = [f for folder in ("src", "experiments", "benchmarks") for f in (ROOT / folder).rglob("*.py")]
PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *CODE]
HISTORY = {"log.md", "CHANGELOG.md"}  # they may name what is gone
FILES = {"toml", "json", "md", "py"}  # sigattn.toml is a file


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
    for page in [p for p in PAGES if p.name not in HISTORY]:
        text = page.read_text()
        names = {n for n in NAME.findall(text) if n.rsplit(".")[-1] not in FILES}
        names |= {f"{module}.{name}" for module, imported in IMPORT.findall(text) for name in imported.split(", ")}
        unknown += [f"{page.relative_to(ROOT)}: {n}" for n in sorted(names) if not exists(n)]
    assert not unknown
