"""Every model name of the installed timm: the conversion is exact, or refuses by name.

    python -m tests.integrations.sweep_timm [MODEL ...] [--write]

Each name is built without memory for its weights, and searched for softmax in the code of its layers. Names with the
same model class and the same kinds of attention make a group; the smallest model of each group is built, converted with
and without an example, and compared with the formula in timm's own layers (``timm_outcomes.py``).
"""

import argparse
import sys
import warnings
from collections import defaultdict
from typing import Any

import timm
import torch

from sigattn.conversion.modules import find_softmax
from tests.integrations import compatibility_page
from tests.integrations.timm_outcomes import outcome

SMALLER: dict[str, dict[str, Any]] = {  # options and input sizes for groups whose smallest model is large
    "beit_base_patch16_224": {"depth": 2},
    "davit_base_fl": {"size": (3, 224, 224)},
    "deepseek_vit_412m": {"depth": 2, "size": (3, 112, 112)},
    "deepseek_vit_412m_enc": {"depth": 2, "size": (3, 112, 112)},
    "gemma4_vit_167m": {"depth": 2, "size": (3, 192, 192)},
    "gemma4_vit_167m_enc": {"depth": 2, "size": (3, 192, 192)},
    "mobilenetv5_300m_enc": {"size": (3, 128, 128)},
    "mobilenetv5_base": {"size": (3, 128, 128)},
    "naflexvit_base_patch16_parfac_gap": {"depth": 2, "size": (3, 64, 64)},
    "naflexvit_base_patch16_siglip": {"depth": 2, "size": (3, 64, 64)},
    "qwen3_vit_88m": {"depth": 2, "size": (3, 128, 128)},
    "qwen3_vit_88m_enc": {"depth": 2, "size": (3, 128, 128)},
    "sam2_hiera_tiny": {"size": (3, 224, 224)},
    "samvit_base_patch16_224": {"depth": 2},
    "vit_pe_core_tiny_patch16_384": {"depth": 2},
    "vit_pe_spatial_tiny_patch16_512": {"depth": 2},
}

Group = tuple[str, tuple[tuple[str, str], ...]]


def group(name: str) -> tuple[Group, int]:
    """Return a model's class with its attention layers' classes and calls, and its number of parameters."""
    with torch.device("meta"):
        model = timm.create_model(name)
    kinds = {(type(f.module).__name__, f.call) for f in find_softmax(model)}
    return (type(model).__name__, tuple(sorted(kinds))), sum(p.numel() for p in model.parameters())


def groups(names: list[str]) -> dict[Group, list[str]]:
    """Return the names of each group that has a softmax, the smallest model first."""
    found: dict[Group, list[tuple[int, str]]] = defaultdict(list)
    for name in names:
        key, parameters = group(name)
        if key[1]:
            found[key].append((parameters, name))
    return {key: [name for _, name in sorted(members)] for key, members in found.items()}


def row(members: list[str]) -> dict[str, Any]:
    """Return the result of a group: its smallest model's."""
    name = members[0]
    try:
        verdict, layers, remaining = outcome(name, **SMALLER.get(name, {}))
    except AssertionError as error:
        verdict, layers, remaining = "wrong", str(error), 0
    more = f", {remaining} softmax of no attention" if remaining else ""
    why = f"softmax in {layers}" if verdict == "refused" else f"{layers}{more}".lstrip(", ")
    why += f"; {len(members)} names" if len(members) > 1 else ""
    return {"architecture": name, "status": verdict, "why": why, "models": len(members)}


def main() -> None:
    """Sweep, print each result, and fail if one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for members in groups(arguments.models or timm.list_models()).values():
        rows.append(row(members))
        print(rows[-1], flush=True)
    if arguments.write:
        compatibility_page.write("timm", f"timm {timm.__version__}", rows)
    sys.exit(any(r["status"] == "wrong" for r in rows))


if __name__ == "__main__":
    main()
