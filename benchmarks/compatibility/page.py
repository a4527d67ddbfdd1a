"""The generated tables of docs/compatibility.md: a section for each library, from data in docs/compatibility."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "compatibility.md"
SHOWN = ("exact", "refused")


def results(section: str) -> dict[str, dict[str, Any]]:
    """Return the stored results of a section by architecture."""
    return {row["architecture"]: row for row in _stored(section)["results"]}


def update(section: str, library: str, rows: Iterable[dict[str, Any]], *, complete: bool = False) -> None:
    """Store results, and write the table of their section into the page.

    Args:
        section: name of the data file and of the markers in the page.
        library: name and version.
        rows: each with "architecture", "status" and "why", and more; they replace those of the same architecture.
        complete: delete the results of other architectures.
    """
    earlier = results(section)
    # a missing package, such as torchvision, is no result
    new = [row for row in rows if "ImportError" not in row["why"] or row["architecture"] not in earlier]
    kept = {row["architecture"] for row in rows} if complete else earlier.keys()
    merged = {name: row for name, row in earlier.items() if name in kept}
    merged |= {row["architecture"]: {**row, "why": _reason(row["why"])} for row in new}
    lines = ",\n".join(json.dumps(merged[name], ensure_ascii=False) for name in sorted(merged))
    _data(section).write_text(f'{{"library": {json.dumps(library)}, "results": [\n{lines}\n]}}\n')
    PAGE.write_text(_between_markers(section).sub(lambda _: table(section), PAGE.read_text()))


def section_of_page(section: str) -> str:
    """Return the lines of a section that the page has."""
    found = _between_markers(section).search(PAGE.read_text())
    assert found is not None
    return found[0]


def table(section: str) -> str:
    """Return the lines of a section that the page must have."""
    data = _stored(section)
    rows = data["results"]
    counts = Counter(row["status"] for row in rows)
    lines = [f"{data['library']}: " + ", ".join(f"{n} {status}" for status, n in counts.most_common()) + ".", ""]
    lines += ["| architecture | result | why |", "|---|---|---|"]
    lines += [f"| {r['architecture']} | {r['status']} | {_why(r)} |" for r in rows if r["status"] in SHOWN]
    for status in sorted(counts.keys() - SHOWN):
        names = ", ".join(row["architecture"] for row in rows if row["status"] == status)
        lines += ["", f"{status[0].upper()}{status[1:]}: {names}."]
    return "\n".join(lines)


def _data(section: str) -> Path:
    return DOCS / "compatibility" / f"{section}.json"


def _stored(section: str) -> dict[str, Any]:
    stored: dict[str, Any] = json.loads(_data(section).read_text())
    return stored


def _why(row: dict[str, Any]) -> str:
    ran, layers = row.get("ran"), row.get("layers")
    partly = f"{ran} of {layers} attention layers ran" if row["status"] == "exact" and ran != layers else ""
    return "; ".join(filter(None, (partly, row["why"])))


def _reason(message: str) -> str:
    """Return the reason of a refusal in a few words."""
    if layers := re.search(r"silently use softmax: (.*?)\. Build", message):
        return f"softmax in {', '.join(dict.fromkeys(re.findall(r'[(](.*?)[)]', layers[1])))}"
    return message.rpartition('attn_implementation="sigmoid": ')[2]


def _between_markers(section: str) -> re.Pattern[str]:
    return re.compile(rf"(?<=<!-- {section}: generated -->\n).*?(?=\n<!-- {section}: end -->)", re.DOTALL)
