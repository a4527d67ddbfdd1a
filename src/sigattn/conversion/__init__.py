"""Conversion of softmax models to sigmoid attention: ``sigattn.convert`` and ``sigattn.restore``.

``api.py`` has ``convert``. An adapter knows a family of models: ``modules.py`` those of PyTorch, timm and this library,
``transformers.py`` those of transformers. The fit is in ``fit.py`` (bias), ``output_scale.py`` and ``refinement.py``.
"""

from sigattn.conversion.api import convert
from sigattn.conversion.report import ConversionError, ConversionReport, HeadReport, LayerReport, SoftmaxLayer
from sigattn.conversion.restore import restore

__all__ = [
    "ConversionError",
    "ConversionReport",
    "HeadReport",
    "LayerReport",
    "SoftmaxLayer",
    "convert",
    "restore",
]
