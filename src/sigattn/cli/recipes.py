"""Command ``sigattn recipes``."""

from __future__ import annotations

import inspect
import warnings
from dataclasses import asdict
from typing import Annotated, Any

import tyro

from sigattn.recipes.registry import RECIPES, find_recipe
from sigattn.tables import print_table


def list_recipes(name: Annotated[str | None, tyro.conf.Positional] = None, /) -> None:
    """List all recipes with the columns of the paper's practitioner's guide, or print every setting of one.

    Args:
        name: a recipe; NAME-tiny, NAME-softmax and NAME-tiny-softmax are its variants.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*Ramapuram")
        if name is not None:
            _print_recipe(name)
            return
        rows = [[name, *find_recipe(name).guide_row().values()] for name in RECIPES]
    columns = ("recipe", "domain", "objective", "size", "position", "QK", "LS", "bias", "norm")
    print_table(columns, rows, min_width=118)
    print("QK: QK-norm. LS: LayerScale. bias: of the sigmoid. norm: placement of norms.")
    print("sigattn recipes NAME prints every setting; sigattn train NAME --tiny trains a small form.")


def _print_recipe(name: str) -> None:
    recipe = find_recipe(name)
    base = next(n for n in sorted(RECIPES, key=len, reverse=True) if name.startswith(n))
    print(inspect.cleandoc(RECIPES[base].__doc__ or ""))
    facts = {
        "parameters": f"{recipe.parameters():,}",
        "tokens trained on": f"{recipe.tokens():.3g}",
        "H100 hours at 40 % of its peak (estimated)": f"{recipe.gpu_hours():.3g}",
    }
    groups = {"": facts, "task": {"kind": type(recipe.task).__name__, **_settings(recipe.task)}}
    groups |= {"data": _settings(recipe.data), "model": _settings(recipe.model), "training": _settings(recipe.training)}
    for title, settings in groups.items():
        print(f"\n{title}" if title else "", *(f"    {key:<44} {value}" for key, value in settings.items()), sep="\n")


def _settings(config: object) -> dict[str, Any]:
    values: dict[str, Any] = asdict(config)  # type: ignore[call-overload]
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= {f"{key}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {key: value}
    return flat
