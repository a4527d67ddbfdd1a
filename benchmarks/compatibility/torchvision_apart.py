"""Lets torchvision be imported from the folder in which the Makefile keeps a wheel that does not fit its PyTorch.

That is a wheel for CUDA next to a PyTorch for CPUs, where it fails to declare two operators. The tests and
comparisons need its transforms and models, and timm, which imports it; none of them calls the operators.
"""

import sys
from pathlib import Path

import torch

if (_folder := Path(__file__).parents[2] / ".venv" / "torchvision").is_dir():
    sys.path.append(str(_folder))
    _library = torch.library.Library("torchvision", "FRAGMENT")
    for _name in ("nms", "qnms"):
        _library.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
