"""What a run measures, step by step: JSON lines for programs, tensorboard events for people."""

from __future__ import annotations

import json
import secrets
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from sigattn.files import naming
from sigattn.optional import require


class MetricsLog:
    """Appends to ``metrics.jsonl`` and to tensorboard's event file in a folder.

    Args:
        folder: where; it must exist.
        first_step: steps from here on will be written; what an interrupted run wrote beyond is dropped.
        wandb: a project of Weights & Biases, to which the same is sent; None for none. A resumed run goes on there
            as the same run.
        settings: of the run, for that project.

    Raises:
        MissingPackageError: with ``wandb``, where it is not installed.
    """

    def __init__(
        self,
        folder: Path,
        first_step: int = 0,
        *,
        wandb: str | None = None,
        settings: dict[str, Any] | None = None,
    ) -> None:
        self._run = None if wandb is None else _wandb_run(wandb, folder, settings or {})
        self.path = folder / "metrics.jsonl"
        kept = [row for row in read(self.path) if row["step"] < first_step]
        with naming(self.path):
            self.path.write_text("".join(json.dumps(row) + "\n" for row in kept))
        self._file = self.path.open("a")
        self._board = SummaryWriter(str(folder), purge_step=first_step)

    def write(self, row: dict[str, Any]) -> None:
        """Add the measurements of one step; ``row`` must name its ``step``."""
        with naming(self.path):
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
        for name, value in row.items():
            if name != "step":
                self._board.add_scalar(name, value, row["step"])
        if self._run is not None:
            self._run.log({n: v for n, v in row.items() if n != "step"}, step=row["step"])

    def close(self) -> None:
        """Write out what is buffered."""
        self._file.close()
        self._board.close()
        if self._run is not None:
            self._run.finish()


def _wandb_run(project: str, folder: Path, settings: dict[str, Any]) -> Any:
    """The folder's run in a project, made if it is new; its name there is kept in the folder."""
    wandb = require("wandb", "metrics for Weights & Biases", "wandb")
    kept = folder / "wandb.txt"
    if not kept.exists():
        kept.write_text(secrets.token_hex(8))
    return wandb.init(
        project=project, id=kept.read_text(), name=folder.name, dir=folder, config=settings, resume="allow"
    )


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a ``metrics.jsonl``; none if there is no such file. A last line cut short is left out."""
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
    """How often a value is more than ``factor`` times the median of the ``window`` before it.

    The paper's "2-5 marginal spikes" as a number: of gradient norms with factor 3, of losses with factor 1.2. The first
    ten values are not judged; values in a row that are too large are one spike.
    """
    spikes, within = 0, False
    for i in range(10, len(values)):
        usual = statistics.median(values[max(0, i - window) : i])
        high = values[i] > factor * usual
        spikes += high and not within
        within = high
    return spikes
