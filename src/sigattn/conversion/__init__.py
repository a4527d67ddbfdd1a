"""Conversion of softmax models to sigmoid attention: ``sigattn.convert`` and ``sigattn.restore``.

``api.py`` has ``convert``. An adapter knows a family of models: ``modules.py`` those of PyTorch, timm and this library,
``transformers.py`` those of transformers. ``fit.py`` fits the bias, and ``measure.py`` measures what becomes of it.
"""

from sigattn.conversion.api import convert
from sigattn.conversion.report import ConversionError, ConversionReport, HeadReport, LayerReport, SoftmaxLayer
from sigattn.conversion.restore import restore

__all__ = ["ConversionError", "ConversionReport", "HeadReport", "LayerReport", "SoftmaxLayer", "convert", "restore"]
