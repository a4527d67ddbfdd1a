"""Training of any task and model, on one process or many: metrics, checkpoints, exact resumption."""

from sigattn.train.checkpoint import CheckpointError
from sigattn.train.config import TrainConfig
from sigattn.train.folder_lock import FolderInUseError
from sigattn.train.loop import Interrupted, NonFiniteLossError, evaluate, train
from sigattn.train.metrics import count_spikes, read_metrics

__all__ = [
    "CheckpointError", "FolderInUseError", "Interrupted", "NonFiniteLossError", "TrainConfig", "count_spikes",
    "evaluate", "read_metrics", "train",
]  # fmt: skip
