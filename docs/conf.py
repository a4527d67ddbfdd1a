"""Configuration of the documentation site (``make docs``): Sphinx, pages in Markdown, reference from the docstrings."""

import pkgutil
import re
from collections import Counter
from importlib import import_module
from inspect import isclass, ismodule, isroutine
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.ext.autodoc.mock import mock
from sphinx.util.nodes import make_refnode

import sigattn
import sigattn.integrations

project = "sigattn"
author = "The sigattn authors"
version = release = sigattn.__version__
html_title = f"sigattn {release}"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["figures/*.md"]  # tables that other pages include
myst_heading_anchors = 3

autodoc_mock_imports = ["lm_eval", "timm", "transformers"]  # takes seconds off, and works without torchvision
autodoc_preserve_defaults = True
napoleon_custom_sections = [("Attributes", "params_style")]  # autodoc describes the fields of dataclasses too
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"

# Names of this library must resolve, except of the operators' implementation, which the reference does not contain. For
# names of other libraries, Sphinx would need their inventories from the network.
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(?!sigattn\.(?!ops\.)).*"),
    ("py:class", r"sigattn\.models\.config\.Config"),
]  # a TypeVar

html_theme = "furo"
html_favicon = "_static/favicon.svg"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
highlight_language = "text"  # of blocks without a language: commands and lists

NOT_LINKED = {"alibi_slopes"}  # in a text, the argument


def public_modules() -> list[str]:
    """Return the modules of the reference: ``sigattn``, the packages that it exports, and others with public names."""
    exported = [f"sigattn.{name}" for name in sigattn.__all__ if hasattr(getattr(sigattn, name), "__all__")]
    adapters = [f"sigattn.integrations.{m.name}" for m in pkgutil.iter_modules(sigattn.integrations.__path__)]
    return ["sigattn", *exported, *adapters]


def write_reference(app: Sphinx) -> None:
    """Write a page for each public module, which autodoc fills from its ``__all__``."""
    folder = Path(app.srcdir, "reference")
    folder.mkdir(exist_ok=True)
    pages = {folder / f"{module}.rst": reference_page(app, module) for module in public_modules()}
    for page in set(folder.iterdir()) - set(pages):
        page.unlink()
    for page, text in pages.items():
        if not page.exists() or page.read_text() != text:
            page.write_text(text)


def reference_page(app: Sphinx, name: str) -> str:
    """Return the page of a module; constants have directives of their own, because autodoc leaves them out."""
    with mock(app.config.autodoc_mock_imports):
        module = import_module(name)
    values = {member: getattr(module, member) for member in getattr(module, "__all__", ())}
    constants = [m for m, v in values.items() if not (isclass(v) or isroutine(v) or ismodule(v))]
    page = f"{name}\n{'=' * len(name)}\n\n.. automodule:: {name}\n   :members:\n"
    return page + "".join(f"\n.. py:data:: {constant}\n" for constant in constants)


def link_names(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Link names of the reference in a text: ``sigattn.nn.Attention``, ``Attention(…)``, ``log_length_bias``."""
    objects = {name: entry for name, entry in app.env.domaindata["py"]["objects"].items() if not entry.aliased}
    modules = {name for name, entry in objects.items() if entry.objtype == "module"}
    public = [name for name in objects if name.rpartition(".")[0] in modules]
    count = Counter(name.rpartition(".")[2] for name in public)
    unique = {short: name for name in public if count[short := name.rpartition(".")[2]] == 1}
    for literal in list(doctree.findall(nodes.literal)):
        match = re.fullmatch(r"([\w.]+)(\(.*\))?", literal.astext())
        if match is None or isinstance(literal.parent, nodes.title | nodes.reference):
            continue
        name = match[1]
        if name in NOT_LINKED or (name.islower() and name.isalpha() and not match[2]):
            continue  # a word such as train, rather than the function
        name = name if name in objects else unique.get(name, "")
        if name:
            at = objects[name]
            literal.replace_self(make_refnode(app.builder, page, at.docname, at.node_id, literal.deepcopy(), name))


def readable_signature(*event: Any) -> tuple[str | None, str | None]:
    """Return a signature that can be parsed, with ``...`` for defaults that a dataclass's factory makes."""
    *_, signature, returned = event
    return signature and signature.replace("<factory>", "..."), returned


def skip_inherited_texts(*event: Any) -> bool | None:
    """Leave out what has only Python's or PyTorch's text: extra_repr, and fields of a named tuple (described above)."""
    _, _, name, member, *_ = event
    return True if name == "extra_repr" or (member.__doc__ or "").startswith("Alias for field number") else None


def setup(app: Sphinx) -> None:
    """Register the functions above."""
    app.connect("autodoc-skip-member", skip_inherited_texts)
    app.connect("autodoc-process-signature", readable_signature)
    app.connect("builder-inited", write_reference)
    app.connect("doctree-resolved", link_names)
