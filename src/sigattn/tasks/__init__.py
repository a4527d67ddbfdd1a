"""Training objectives, one per module: each builds its module, computes its loss and evaluates its metrics."""

from sigattn.data.task import Task
from sigattn.tasks.byol import BYOL
from sigattn.tasks.classification import Classification
from sigattn.tasks.ctc import CTC
from sigattn.tasks.distillation import Distillation
from sigattn.tasks.language import LanguageModelling
from sigattn.tasks.mae import MaskedAutoencoding
from sigattn.tasks.simclr import SimCLR

__all__ = [
    "BYOL",
    "CTC",
    "Classification",
    "Distillation",
    "LanguageModelling",
    "MaskedAutoencoding",
    "SimCLR",
    "Task",
]
