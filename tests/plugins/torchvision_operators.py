"""A pytest plugin that declares the two operators which torchvision's CUDA wheel fails to register next to a CPU torch.

Only ``make test`` loads it, in a second run for the tests marked ``torchvision``, on machines where no wheel of
torchvision fits the installed torch. The tests need torchvision's transforms, and timm, which imports them; neither
calls the operators.
"""

import torch

_library = torch.library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms"):
    _library.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
