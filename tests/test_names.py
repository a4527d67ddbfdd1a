"""Dotted names of this library in documentation, docstrings and error messages exist."""

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"
NAME = re.compile(r"(?<![\w./-])sigattn(?:\.[A-Za-z]\w*)+")
IMPORT = re.compile(r"from (sigattn[\w.]*) import (\w+(?:, \w+)*)")
CODE = [f for folder in ("src", "experiments", "benchmarks") for f in (ROOT / folder).rglob("*.py")]
PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *CODE]
HISTORY = {"log.md", "CHANGELOG.md"}  # they may name what is gone
FILES = {"toml", "json", "md", "py"}  # sigattn.toml is a file


def defined(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """Return what statements define, by name."""
    found: dict[str, ast.stmt] = {}
    for node in body:
        match node:
            case ast.FunctionDef() | ast.ClassDef() | ast.AsyncFunctionDef():
                found[node.name] = node
            case ast.Import() | ast.ImportFrom():
                found.update({(a.asname or a.name): node for a in node.names})
            case ast.Assign():
                found.update(
                    {t.id: node for target in node.targets for t in ast.walk(target) if isinstance(t, ast.Name)}
                )
                if found.keys() & {"__all__"} and isinstance(node.value, ast.List | ast.Tuple):
                    names = [e.value for e in node.value.elts if isinstance(e, ast.Constant)]
                    found.update(dict.fromkeys(filter(str.isidentifier, names), node) | found)
            case ast.AnnAssign(target=ast.Name(id=name)):
                found[name] = node
            case ast.If() | ast.Try():
                found.update(defined(node.body) | defined(node.orelse))
    return found


@functools.cache
def names_of(module: Path) -> dict[str, ast.stmt]:
    """Return what a module defines, by name."""
    return defined(ast.parse(module.read_text()).body)


def exists(name: str) -> bool:
    """Return True if a dotted name is a module, or an object of one; inherited attributes are not followed."""
    folder = SOURCE
    parts = name.split(".")
    for i, part in enumerate(parts):
        if (folder / part).is_dir():
            folder = folder / part
            continue
        module = folder / f"{part}.py"
        rest = parts[i + 1 :] if module.is_file() else parts[i:]
        if not module.is_file():
            module = folder / "__init__.py"
        if not rest:
            return True
        node = names_of(module).get(rest[0])
        if not isinstance(node, ast.ClassDef) or len(rest) == 1:
            return node is not None
        return rest[1] in defined(node.body) or bool(node.bases)
    return True


def test_names_exist():
    unknown = []
    for page in [p for p in PAGES if p.name not in HISTORY]:
        text = page.read_text()
        names = {n for n in NAME.findall(text) if n.rsplit(".")[-1] not in FILES}
        names |= {f"{module}.{name}" for module, imported in IMPORT.findall(text) for name in imported.split(", ")}
        unknown += [f"{page.relative_to(ROOT)}: {n}" for n in sorted(names) if not exists(n)]
    assert not unknown
