"""Every model name of the installed timm and torchvision: the conversion is exact, or refuses by name.

    python -m tests.integrations.sweep_timm [MODEL ...] [--write]

Each name is built without memory for its weights, and searched for softmax in the code of its layers. Names with the
same model class and the same kinds of attention make a group; the smallest model of each group is built, converted with
and without an example, and compared with the formula in its own layers.
"""

import argparse
import copy
import sys
import warnings
from collections import defaultdict
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tests import torchvision_apart  # noqa: F401

import timm  # isort: skip
import torchvision  # isort: skip

from sigattn.conversion.modules import find_softmax
from tests.conversion.layers import SoftmaxOperators, replace
from tests.integrations import compatibility_page

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


def create(name: str, **options) -> torch.nn.Module:
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


LIBRARY = f"timm {timm.__version__} and torchvision {torchvision.__version__.partition('+')[0]}"


class Outcome(NamedTuple):
    """verdict: "exact", "refused" or "no attention". detail: classes of the layers. remaining: number of softmaxes."""

    verdict: str
    detail: str
    remaining: int


def formula(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None):
    """σ(scale · Q Kᵀ + b) V with b = -log of the keys, or of those that a mask shows."""
    assert not is_causal
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill(~attn_mask, -torch.inf)
    n = torch.tensor(float(k.shape[-2]), dtype=q.dtype)
    if attn_mask is not None:
        n = (attn_mask.expand(*attn_mask.shape[:-1], k.shape[-2]) > -1000).any(-2, keepdim=True)
        n = n.any(-3, keepdim=True).sum(-1, keepdim=True).to(q.dtype)
    logits = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale) - n.log()
    return torch.sigmoid(logits if attn_mask is None else logits + attn_mask) @ v


class FormulaInstead(TorchFunctionMode):
    """Computes the formula for PyTorch's function, and σ(logits - log M) where these layers compute a softmax."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            return formula(*args, **(kwargs or {}))
        frame = sys._getframe(1)
        while getattr(func, "__name__", "") == "softmax" and frame is not None:
            layer = frame.f_locals.get("self")
            if isinstance(layer, torch.nn.Module) and layer in self.layers:
                visible = args[0] > -1000
                n = visible.sum(-1, keepdim=True).clamp(min=1)
                return torch.sigmoid(args[0] - n.log()).where(visible, 0)
            frame = frame.f_back
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def outcome(name: str, size: tuple[int, int, int] | None = None, **options) -> Outcome:
    """Convert a model, compare it with the formula in its own layers, and count the softmaxes that ran.

    Raises:
        AssertionError: if the model differs from the formula, or computes a softmax that the report does not list.
    """
    torch.manual_seed(0)
    plain = create(name, **options).eval()
    x = torch.randn(1, *(size or getattr(plain, "default_cfg", {"input_size": (3, 224, 224)})["input_size"]))
    for by_example in (False, True):
        model = copy.deepcopy(plain)
        try:
            report = replace(model, (x,) if by_example else None)
        except ValueError as error:
            result = refusal(str(error), plain, x)
            continue
        replaced = sorted({r.kind for r in report if r.is_sigmoid})
        written = {plain.get_submodule(r.name) for r in report if r.outcome == "materialised"}
        remaining = [r for r in report if not r.is_sigmoid]
        with SoftmaxOperators() as seen:
            ours = model(x)
        assert remaining or not seen.names, f"{name}: {len(seen.names)} softmaxes are not listed"
        compare(name, plain, x, ours, written)
        result = Outcome("exact", ", ".join(replaced), len(remaining))
    return result


def refusal(message: str, plain: torch.nn.Module, x: torch.Tensor) -> Outcome:
    if "no softmax attention" in message:
        with SoftmaxOperators() as seen:
            plain(x)
        return Outcome("no attention", "", len(seen.names))
    assert "cannot be replaced" in message
    kinds = {part.partition(":")[0] for part in message.split(" (")[1:] if ": " in part[:60]}
    return Outcome("refused", ", ".join(sorted(kinds)), 0)


def expected(plain: torch.nn.Module, names: list[str], x: torch.Tensor) -> torch.Tensor:
    with FormulaInstead({plain.get_submodule(n) for n in names}):
        return plain(x)


def compare(name: str, plain: torch.nn.Module, x: torch.Tensor, ours: torch.Tensor, written: set) -> None:
    """The error may be twice that of the formula in the same dtype, both judged by the formula in float64."""
    names = [n for n, m in plain.named_modules() if m in written]
    plain = copy.deepcopy(plain)
    for layer in plain.modules():
        if hasattr(layer, "fused_attn"):
            layer.fused_attn = True
    single, truth = (
        expected(model, names, images) for model, images in ((plain, x), (copy.deepcopy(plain).double(), x.double()))
    )
    error, allowed = (ours - truth).abs().max(), 2 * (single - truth).abs().max() + 1e-5 * truth.abs().max()
    assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}"


# -- all models -------------------------------------------------------------------------------------------------------

Group = tuple[str, tuple[tuple[str, str], ...]]


def group(name: str) -> tuple[Group, int]:
    """Return a model's class with its attention layers' classes and calls, and its number of parameters."""
    with torch.device("meta"):
        model = create(name)
    kinds = {(type(f.module).__name__, f.call) for f in find_softmax(model)}
    return (type(model).__name__, tuple(sorted(kinds))), sum(p.numel() for p in model.parameters())


def groups(names: list[str]) -> dict[Group, list[str]]:
    found: dict[Group, list[tuple[int, str]]] = defaultdict(list)
    for name in names:
        key, parameters = group(name)
        if key[1]:
            found[key].append((parameters, name))
    return {key: [name for _, name in sorted(members)] for key, members in found.items()}


def row(members: list[str]) -> dict[str, Any]:
    name = members[0]
    try:
        verdict, layers, remaining = outcome(name, **SMALLER.get(name.removesuffix("_enc"), {}))
    except AssertionError as error:
        verdict, layers, remaining = "wrong", str(error), 0
    more = f", {remaining} softmax of no attention" if remaining else ""
    why = f"softmax in {layers}" if verdict == "refused" else f"{layers}{more}".lstrip(", ")
    why += f"; {len(members)} names" if len(members) > 1 else ""
    return {"architecture": name, "status": verdict, "why": why, "models": len(members)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for members in groups(arguments.models or names()).values():
        rows.append(row(members))
        print(rows[-1], flush=True)
    if arguments.write:
        compatibility_page.write("timm", LIBRARY, rows)
    sys.exit(any(r["status"] == "wrong" for r in rows))


if __name__ == "__main__":
    main()
