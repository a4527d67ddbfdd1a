"""Every model name of the installed timm and torchvision: the conversion is exact, or refuses by name.

Each name is built without memory for its weights, and searched for softmax in the code of its layers. Names with the
same model class and the same kinds of attention make a group; the smallest model of each group is built, converted with
and without an example, and compared with the formula in its own layers.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import timm
import torch
import torchvision
from torch import Tensor, nn

from benchmarks.compatibility.reference import SigmoidReference, SoftmaxOperators
from sigattn import convert
from sigattn.conversion.modules import find_softmax

# options and input sizes for groups whose smallest model, also with "_enc" at the end of its name, is large
SMALLER: dict[str, dict[str, Any]] = {
    "beit_base_patch16_224": {"depth": 2},
    "davit_base_fl": {"size": (3, 224, 224)},
    "deepseek_vit_412m": {"depth": 2, "size": (3, 112, 112)},
    "gemma4_vit_167m": {"depth": 2, "size": (3, 192, 192)},
    "mobilenetv5_300m": {"size": (3, 128, 128)},
    "mobilenetv5_base": {"size": (3, 128, 128)},
    "naflexvit_base_patch16_parfac_gap": {"depth": 2, "size": (3, 64, 64)},
    "naflexvit_base_patch16_siglip": {"depth": 2, "size": (3, 64, 64)},
    "qwen3_vit_88m": {"depth": 2, "size": (3, 128, 128)},
    "torchvision/mvit_v2_s": {"size": (3, 16, 224, 224)},
    "torchvision/swin3d_t": {"size": (3, 8, 64, 64)},
    "sam2_hiera_tiny": {"size": (3, 224, 224)},
    "samvit_base_patch16_224": {"depth": 2},
    "vit_pe_core_tiny_patch16_384": {"depth": 2},
    "vit_pe_spatial_tiny_patch16_512": {"depth": 2},
}
LIBRARY = f"timm {timm.__version__} and torchvision {torchvision.__version__.partition('+')[0]}"


def create(name: str, **options: Any) -> nn.Module:
    """Return a model of timm, or of torchvision, whose names have "torchvision/" before them here."""
    if name.startswith("torchvision/"):
        return torchvision.models.get_model(name.removeprefix("torchvision/"), weights=None, **options)
    return timm.create_model(name, **options)


def names() -> list[str]:
    """Return the names of timm, and those of torchvision that classify images and videos."""
    # RegNets, which are convolutional, cannot be built without memory
    modules = (torchvision.models, torchvision.models.video)
    theirs = [name for module in modules for name in torchvision.models.list_models(module, exclude="regnet*")]
    return timm.list_models() + [f"torchvision/{name}" for name in theirs]


class Outcome(NamedTuple):
    """Result for one model.

    Attributes:
        status: "exact", "refused" or "no attention".
        layers: classes of the layers.
        remaining: number of softmaxes.
    """

    status: str
    layers: str
    remaining: int


class PaperReference(SigmoidReference):
    """σ(scale · Q Kᵀ + b) V with b = -log n of n visible keys; a key is hidden if its logit is below -1000."""

    def weights(self, logits: Tensor, *, written: bool) -> Tensor | None:
        """Return weights with n keys that the query sees; in a function of PyTorch, that a query of the sample sees."""
        if self.calling_layer() is None:
            return None
        visible = logits > -1000
        counted = visible if written else visible.any(-2, keepdim=True).any(-3, keepdim=True)
        n = counted.sum(-1, keepdim=True).clamp(min=1).to(logits.dtype)
        return torch.sigmoid(logits - n.log()).where(visible, 0)


@torch.no_grad()
def outcome(name: str, size: tuple[int, ...] | None = None, **options: Any) -> Outcome:
    """Convert a model, compare it with the formula in its own layers, and count the softmaxes that ran.

    Raises:
        AssertionError: if the model differs from the formula, or computes a softmax that the report does not list.
    """
    torch.manual_seed(0)
    plain = create(name, **options).eval()
    for parameter in plain.parameters():
        if parameter.abs().max() < 1e-4:  # scales and heads that start near 0 would hide the attention
            parameter.normal_(0.0, 0.2)
    x = torch.randn(1, *(size or getattr(plain, "default_cfg", {"input_size": (3, 224, 224)})["input_size"]))
    for example in (None, (x,)):
        model = copy.deepcopy(plain)
        try:
            report = convert(model, example=example, normalize=False).softmax
        except ValueError as refusal:
            result = _refusal(str(refusal), plain, x)
            continue
        converted = [r for r in report if r.is_sigmoid]
        remaining = len(report) - len(converted)
        with SoftmaxOperators() as seen:
            ours = model(x)
        assert remaining or not seen.names, f"{name}: {len(seen.names)} softmaxes are not listed"
        _compare(name, plain, [r.name for r in converted], x, ours)
        result = Outcome("exact", ", ".join(sorted({r.kind for r in converted})), remaining)
    return result


def _refusal(message: str, plain: nn.Module, x: Tensor) -> Outcome:
    if "no softmax attention" in message:
        with SoftmaxOperators() as seen:
            plain(x)
        return Outcome("no attention", "", len(seen.names))
    assert "cannot be replaced" in message
    kinds = {part.partition(":")[0] for part in message.split(" (")[1:] if ": " in part[:60]}
    return Outcome("refused", ", ".join(sorted(kinds)), 0)


def _compare(name: str, plain: Any, layers: list[str], x: Tensor, ours: Tensor) -> None:
    """Allow twice the error of the formula in the same dtype, both judged by the formula in float64."""
    plain = copy.deepcopy(plain)
    for layer in plain.modules():
        if hasattr(layer, "fused_attn"):
            layer.fused_attn = True
    with PaperReference(map(plain.get_submodule, layers)):
        single = plain(x)
    plain, x = plain.double(), x.double()
    with PaperReference(map(plain.get_submodule, layers)):
        truth = plain(x)
    error, effect = (ours - truth).abs().max(), (plain(x) - truth).abs().max()
    allowed = 2 * (single - truth).abs().max() + 1e-5 * truth.abs().max()
    assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}"
    assert effect > 10 * allowed, f"{name}: attention changes the output by {effect:.2e} only"


# -- all models -------------------------------------------------------------------------------------------------------

Group = tuple[str, tuple[tuple[str, str], ...]]


def group(name: str) -> tuple[Group, int]:
    """Return a model's class with its attention layers' classes and calls, and its number of parameters."""
    with torch.device("meta"):
        model = create(name)
    kinds = {(type(f.module).__name__, f.call) for f in find_softmax(model)}
    return (type(model).__name__, tuple(sorted(kinds))), sum(p.numel() for p in model.parameters())


def groups(names: Iterable[str]) -> dict[Group, list[str]]:
    """Return the names of each group that has softmax, the smallest model first."""
    found: dict[Group, list[tuple[int, str]]] = defaultdict(list)
    for name in names:
        key, parameters = group(name)
        if key[1]:
            found[key].append((parameters, name))
    return {key: [name for _, name in sorted(members)] for key, members in found.items()}


def rows(names: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield a row of the table for each group of these names."""
    for name, *others in groups(names).values():
        try:
            status, layers, remaining = outcome(name, **SMALLER.get(name.removesuffix("_enc"), {}))
        except AssertionError as error:
            status, layers, remaining = "wrong", str(error), 0
        more = f", {remaining} softmax of no attention" if remaining else ""
        why = f"softmax in {layers}" if status == "refused" else f"{layers}{more}".lstrip(", ")
        why += f"; {len(others) + 1} names" if others else ""
        yield {"architecture": name, "status": status, "why": why, "models": len(others) + 1}
