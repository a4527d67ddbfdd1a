"""Training objectives: each builds its module, computes its loss and evaluates its metrics."""

from sigattn.data.task import Task
from sigattn.tasks.classification import Classification
from sigattn.tasks.ctc import CTC
from sigattn.tasks.distillation import Distillation
from sigattn.tasks.joint_embedding import BYOL, SimCLR
from sigattn.tasks.language import LanguageModelling
from sigattn.tasks.mae import MaskedAutoencoding

__all__ = ["BYOL", "CTC", "Classification", "Distillation", "LanguageModelling", "MaskedAutoencoding", "SimCLR", "Task"]
