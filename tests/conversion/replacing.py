"""Conversion without batches, for tests of what becomes of each softmax."""

from sigattn import convert
from sigattn.conversion import SoftmaxLayer


def replace(model, example=None, **options):
    """Convert a model, and return every softmax and its outcome."""
    return list(convert(model, example=example, **options).softmax)


def converted(name, kind, call):
    return SoftmaxLayer(name, kind, call, "converted")
