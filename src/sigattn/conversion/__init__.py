"""Conversion of models with softmax attention to sigmoid attention, by a fit of the bias on a few batches.

Example::

    from sigattn.conversion import convert
    report = convert(model, batches)
    print(report)
"""

from sigattn.conversion.api import convert
from sigattn.conversion.attention_call import AttentionCall, ConversionError
from sigattn.conversion.replacement import RemainingSoftmax, Replaced, sigmoidify
from sigattn.conversion.report import ConversionReport, HeadReport, LayerReport
from sigattn.conversion.restore import restore

__all__ = [
    "AttentionCall",
    "ConversionError",
    "ConversionReport",
    "HeadReport",
    "LayerReport",
    "RemainingSoftmax",
    "Replaced",
    "convert",
    "restore",
    "sigmoidify",
]
