"""Training of any task and model, on one process or many: metrics, checkpoints, exact resumption."""

from sigattn.train.checkpoint import CheckpointError
from sigattn.train.config import TrainConfig, epochs_to_steps, scale_learning_rate
from sigattn.train.folder_lock import FolderInUseError
from sigattn.train.loop import evaluate, train
from sigattn.train.metrics import count_spikes, read_metrics
from sigattn.train.trainer import Interrupted, NonFiniteLossError

__all__ = [
    "CheckpointError",
    "FolderInUseError",
    "Interrupted",
    "NonFiniteLossError",
    "TrainConfig",
    "count_spikes",
    "epochs_to_steps",
    "evaluate",
    "read_metrics",
    "scale_learning_rate",
    "train",
]
