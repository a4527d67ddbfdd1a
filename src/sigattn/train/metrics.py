"""Log of a run's measurements: JSON lines, tensorboard events and, optionally, Weights & Biases."""

from __future__ import annotations

import json
import secrets
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sigattn.files import add_path_to_errors
from sigattn.optional import require


class MetricsLog:
    """Writer of ``metrics.jsonl`` and of tensorboard's event file in a folder.

    Args:
        folder: folder of both files; it must exist.
        first_step: the first step to be written; rows of this and later steps, written by an interrupted run, are
            deleted.
        wandb: project of Weights & Biases that receives the same rows; None for none. A resumed run continues as the
            same run there.
        settings: settings of the run, stored in that project.

    Raises:
        MissingPackageError: if ``wandb`` is set and the package is not installed.
    """

    def __init__(
        self,
        folder: Path,
        first_step: int = 0,
        *,
        wandb: str | None = None,
        settings: dict[str, Any] | None = None,
    ) -> None:
        from torch.utils.tensorboard import SummaryWriter  # needs tensorboard

        self._run = None if wandb is None else _wandb_run(wandb, folder, settings or {})
        self.path: Path = folder / "metrics.jsonl"
        kept = [row for row in read_metrics(self.path) if row["step"] < first_step]
        unfinished = self.path.with_name(self.path.name + ".unfinished")
        with add_path_to_errors(unfinished):
            unfinished.write_text("".join(json.dumps(row) + "\n" for row in kept))
        unfinished.replace(self.path)
        self._file = self.path.open("a")
        self._board = SummaryWriter(str(folder), purge_step=first_step)

    def write(self, row: dict[str, Any]) -> None:
        """Add the measurements of one step; ``row`` must name its ``step``."""
        with add_path_to_errors(self.path):
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
        for name, value in row.items():
            if name != "step":
                self._board.add_scalar(name, value, row["step"])
        if self._run is not None:
            self._run.log({n: v for n, v in row.items() if n != "step"}, step=row["step"])

    def close(self) -> None:
        """Write buffered rows and close all files."""
        self._file.close()
        self._board.close()
        if self._run is not None:
            self._run.finish()


def _wandb_run(project: str, folder: Path, settings: dict[str, Any]) -> Any:
    """Return the run of a folder in a project, created if new; its identifier is stored in the folder."""
    wandb = require("wandb", "metrics for Weights & Biases", "wandb")
    kept = folder / "wandb.txt"
    if not kept.exists():
        kept.write_text(secrets.token_hex(8))
    return wandb.init(
        project=project, id=kept.read_text(), name=folder.name, dir=folder, config=settings, resume="allow"
    )


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a ``metrics.jsonl``, without an incomplete last line; no rows if the file does not exist."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


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
