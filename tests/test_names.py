"""Dotted names of this library in documentation, docstrings and error messages exist."""

import functools
import re
import symtable
from pathlib import Path

ROOT = Path(__file__).parent.parent
NAME = re.compile(r"(?<![\w./-])sigattn(?:\.[A-Za-z]\w*)+")
IMPORT = re.compile(r"from (sigattn[\w.]*) import (\w+(?:, \w+)*)")
CODE = [f for folder in ("src", "experiments", "benchmarks") for f in (ROOT / folder).rglob("*.py")]
PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *CODE]
HISTORY = {"log.md", "CHANGELOG.md"}  # they may name what is gone
FILES = {"toml", "json", "md", "py"}  # sigattn.toml is a file


@functools.cache
def defined(module: Path) -> dict[str, set[str] | None]:
    """Return the names that a module defines or imports, each class of its own with the names in its body."""

    def names(table):
        return {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported() or s.is_annotated()}

    table = symtable.symtable(module.read_text(), module.name, "exec")
    classes = {child.get_name(): names(child) for child in table.get_children() if child.get_type() == "class"}
    return dict.fromkeys(names(table)) | classes


def exists(name: str) -> bool:
    """Return True if a dotted name is a module, an object of one, or an attribute of a class, not inherited."""
    path, parts = ROOT / "src", name.split(".")
    while parts and (path / parts[0]).is_dir():
        path /= parts.pop(0)
    module = path / f"{parts[0]}.py" if parts else path
    if module.is_file():
        parts.pop(0)
    else:
        module = path / "__init__.py"
    if not parts or parts[0] not in defined(module):
        return not parts
    attributes = defined(module)[parts[0]]
    return attributes is None or set(parts[1:2]) <= attributes


def test_names_exist():
    unknown = []
    for page in [p for p in PAGES if p.name not in HISTORY]:
        text = page.read_text()
        names = {n for n in NAME.findall(text) if n.rsplit(".")[-1] not in FILES}
        names |= {f"{module}.{name}" for module, imported in IMPORT.findall(text) for name in imported.split(", ")}
        unknown += [f"{page.relative_to(ROOT)}: {n}" for n in sorted(names) if not exists(n)]
    assert not unknown
