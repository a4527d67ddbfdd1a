"""Log of a run's measurements: JSON lines, tensorboard events and, optionally, Weights & Biases.

Each line of ``metrics.jsonl`` ends with the CRC-32 of its other values, so that damaged lines are noticed.
"""

import json
import secrets
import statistics
import warnings
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sigattn.files import add_path_to_errors, replacing, write_text
from sigattn.optional import require


class MetricsLog:
    """Writer of ``metrics.jsonl`` and of tensorboard's event file in a folder.

    The folder must exist. Rows of ``first_step`` and later steps, written by an interrupted run, are deleted. ``wandb``
    is a project of Weights & Biases that receives the same rows, and the ``settings`` of the run; a resumed run
    continues as the same run there. Raises MissingPackageError if ``wandb`` is set and the package is not installed.
    """

    def __init__(
        self, folder: Path, first_step: int = 0, *, wandb: str | None = None, settings: dict[str, Any] | None = None
    ) -> None:
        from torch.utils.tensorboard import SummaryWriter  # needs tensorboard

        self._run = None if wandb is None else _wandb_run(wandb, folder, settings or {})
        self.path: Path = folder / "metrics.jsonl"
        earlier = [row for row in read_metrics(self.path) if row["step"] < first_step]
        with replacing(self.path) as unfinished:
            write_text(unfinished, "".join(map(_line, earlier)))
        self._file = self.path.open("a")
        self._events: Path = folder / "events.out.tfevents"  # the start of the name of tensorboard's file
        with add_path_to_errors(self._events):
            self._board = SummaryWriter(str(folder), purge_step=first_step)

    def write(self, row: dict[str, Any]) -> None:
        """Add the measurements of one step; ``row`` must name its ``step``."""
        with add_path_to_errors(self.path):
            self._file.write(_line(row))
            self._file.flush()
        with add_path_to_errors(self._events):
            for name, value in row.items():
                if name != "step":
                    self._board.add_scalar(name, value, row["step"])
        if self._run is not None:
            self._run.log({n: v for n, v in row.items() if n != "step"}, step=row["step"])

    def close(self) -> None:
        with add_path_to_errors(self.path):
            self._file.close()
        with add_path_to_errors(self._events):
            self._board.close()
        if self._run is not None:
            self._run.finish()


def _wandb_run(project: str, folder: Path, settings: dict[str, Any]) -> Any:
    """Return the run of a folder in a project, created if new; its identifier is stored in the folder."""
    wandb = require("wandb", "metrics for Weights & Biases", "wandb")
    id_file = folder / "wandb.txt"
    if not id_file.exists():
        write_text(id_file, secrets.token_hex(8))
    return wandb.init(
        project=project, id=id_file.read_text(), name=folder.name, dir=folder, config=settings, resume="allow"
    )


def _line(row: dict[str, Any]) -> str:
    return json.dumps({**row, "crc32": _crc32(row)}) + "\n"


def _crc32(row: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(row).encode())


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return the row of a line; None if the line is damaged."""
    try:
        row: dict[str, Any] = json.loads(line)
        return row if row.pop("crc32") == _crc32(row) else None
    except (ValueError, RecursionError, AttributeError, TypeError, KeyError):
        return None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a ``metrics.jsonl``; no rows if the file does not exist.

    An incomplete last line, which a killed run leaves, is left out. Damaged lines are left out with a warning.
    """
    if not path.exists():
        return []
    *lines, last = path.read_bytes().split(b"\n")
    if b"}" in last:  # complete
        lines.append(last)
    rows = [_parse(line) for line in lines]
    if damaged := [number for number, row in enumerate(rows, 1) if row is None]:
        warnings.warn(
            f"{path}: {len(damaged)} damaged lines are left out, the first is line {damaged[0]}", stacklevel=2
        )
    return [row for row in rows if row is not None]


def last_validation(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the held-out metrics of the last row, without "validation_" in their names."""
    last = rows[-1] if rows else {}
    return {k.removeprefix("validation_"): v for k, v in last.items() if k.startswith("validation_")}


def count_spikes(values: Sequence[float], factor: float, window: int = 50) -> int:
    """Count the values that exceed ``factor`` times the median of the ``window`` values before them.

    Quantifies the paper's "2-5 marginal spikes": factor 3 for gradient norms, 1.2 for losses. The first ten values are
    not counted; consecutive values that are too large are one spike.
    """
    spikes, within = 0, False
    for i in range(10, len(values)):
        usual = statistics.median(values[max(0, i - window) : i])
        high = values[i] > factor * usual
        spikes += high and not within
        within = high
    return spikes
