"""Conversion of models with softmax attention to sigmoid attention, by a fit of the bias on a few batches.

Example::

    from sigattn.convert import convert
    report = convert(model, batches)
    print(report)
"""

from sigattn.convert.attention_call import AttentionCall, ConversionError
from sigattn.convert.conversion import convert
from sigattn.convert.report import ConversionReport, HeadReport, LayerReport
from sigattn.convert.restore import restore

__all__ = ["AttentionCall", "ConversionError", "ConversionReport", "HeadReport", "LayerReport", "convert", "restore"]
