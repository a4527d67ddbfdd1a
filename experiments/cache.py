"""Cache of measurements in files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def memoize(path: Path, settings: dict[str, Any], measure: Callable[[], Any]) -> Any:
    """Return the value of ``measure()``, converted by JSON; read from ``path`` if stored there with these settings."""
    try:
        found = json.loads(path.read_text())
        if found["settings"] == json.loads(json.dumps(settings)):
            return found["value"]
    except (OSError, json.JSONDecodeError, KeyError):
        pass
    value = measure()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"settings": settings, "value": value}) + "\n")
    return json.loads(path.read_text())["value"]
