"""The generated tables of docs/compatibility.md: one section for each library, from data in docs/compatibility.

compatibility_page.write("transformers", "transformers 5.23.0", results)    # a sweep over the library
compatibility_page.table("transformers")                                    # its lines, as the page must have them
"""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "compatibility.md"
SHOWN = ("exact", "refused")


def data_of(section: str) -> Path:
    return DOCS / "compatibility" / f"{section}.json"


def results(section: str) -> dict[str, dict[str, Any]]:
    return {row["architecture"]: row for row in json.loads(data_of(section).read_text())["results"]}


def write(section: str, library: str, rows: list[dict[str, Any]]) -> None:
    """Write the results of a section, and its table into the page.

    Args:
        section: name of the data file and of the markers in the page.
        library: name and version. rows: each with "architecture", "status" and "why", and what else is known.
    """
    data_of(section).parent.mkdir(exist_ok=True)
    rows = [{**row, "why": _reason(row["why"])} for row in rows]
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in sorted(rows, key=lambda r: r["architecture"]))
    data_of(section).write_text(f'{{"library": {json.dumps(library)}, "results": [\n{lines}\n]}}\n')
    PAGE.write_text(_between_markers(section).sub(lambda _: table(section), PAGE.read_text()))


def section_of_page(section: str) -> str:
    found = _between_markers(section).search(PAGE.read_text())
    assert found is not None
    return found[0]


def table(section: str) -> str:
    data = json.loads(data_of(section).read_text())
    rows = data["results"]
    counts = Counter(row["status"] for row in rows)
    lines = [f"{data['library']}: " + ", ".join(f"{n} {status}" for status, n in counts.most_common()) + ".", ""]
    lines += ["| architecture | result | why |", "|---|---|---|"]
    lines += [f"| {r['architecture']} | {r['status']} | {_why(r)} |" for r in rows if r["status"] in SHOWN]
    for status in (s for s in sorted(counts) if s not in SHOWN):
        names = ", ".join(row["architecture"] for row in rows if row["status"] == status)
        lines += ["", f"{status[0].upper()}{status[1:]}: {names}."]
    return "\n".join(lines)


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
