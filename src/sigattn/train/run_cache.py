"""Cache of finished training runs, one folder each: a finished run with unchanged settings is not repeated."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sigattn.files import write_text
from sigattn.train.folder_lock import LOCK_FILE, lock_folder

IDENTITY_FILE = "settings.txt"


def load_result(file: Path, identity: str) -> dict[str, Any] | None:
    """Return the result in a file, or None if there is none or it belongs to a run of another identity."""
    try:
        result: dict[str, Any] = json.loads(file.read_text())
        return result if result["identity"] == identity else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def store_result(file: Path, identity: str, result: dict[str, Any]) -> None:
    """Write the result of a finished run and its identity."""
    write_text(file, json.dumps({**result, "identity": identity}) + "\n")


@contextmanager
def prepared_folder(folder: Path, identity: str) -> Iterator[None]:
    """Lock a run's folder; if it contains a run of another identity, empty it first.

    Raises:
        FolderInUseError: if another process is training in it.
    """
    with lock_folder(folder):
        mark = folder / IDENTITY_FILE
        if not mark.exists() or mark.read_text() != identity:
            for path in folder.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                elif path.name != LOCK_FILE:
                    path.unlink()
        write_text(mark, identity)
        yield
