"""Conversion without batches, for tests of what becomes of each softmax."""

from sigattn import convert
from sigattn.conversion import SoftmaxLayer


def replace(model, example=None, **options):
    """Convert a model to the paper's sigmoid attention, and return every softmax and its outcome."""
    return list(convert(model, example=example, **{"normalize": False, **options}).softmax)


def converted(name, kind, call):
    return SoftmaxLayer(name, kind, call, "converted")
