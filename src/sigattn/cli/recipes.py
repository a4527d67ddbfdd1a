"""Commands ``sigattn recipes``, ``sigattn norms`` and ``sigattn compare``."""

from __future__ import annotations

import inspect
import warnings
from dataclasses import asdict
from typing import Annotated, Any

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from sigattn.experiments import attention_norms, compare
from sigattn.recipes.registry import RECIPES, find_recipe


def list_recipes(name: Annotated[str | None, tyro.conf.Positional] = None, /) -> None:
    """List all recipes with the columns of the paper's practitioner's guide, or print every setting of one.

    Args:
        name: a recipe; NAME-tiny, NAME-softmax and NAME-tiny-softmax are its variants.
    """
    console = Console()
    console = console if console.width >= 118 else Console(width=118)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*Ramapuram")
        if name is None:
            _print_recipe_table(console)
        else:
            _print_recipe(console, name)


def _print_recipe_table(console: Console) -> None:
    rows = {name: find_recipe(name).guide_row() for name in RECIPES}
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("recipe", "domain", "objective", "size", "position", "QK", "LS", "bias", "norm"):
        table.add_column(column, no_wrap=True)
    for name, row in rows.items():
        table.add_row(name, *row.values())
    console.print(table)
    console.print("QK: QK-norm. LS: LayerScale. bias: of the sigmoid. norm: placement of norms.", highlight=False)
    console.print(
        "sigattn recipes NAME prints every setting; sigattn train NAME --tiny trains a small form.", highlight=False
    )


def _print_recipe(console: Console, name: str) -> None:
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
        console.print(f"\n{title}".rstrip() if title else "", highlight=False)
        for key, value in settings.items():
            console.print(f"    {key:<44} {value}", highlight=False, soft_wrap=True, markup=False)


def _settings(config: object) -> dict[str, Any]:
    values: dict[str, Any] = asdict(config)  # type: ignore[call-overload]
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= {f"{key}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {key: value}
    return flat


def measure_norms(options: attention_norms.AttentionNormsConfig) -> None:
    """Measure the norm of attention outputs at initialisation for each position and bias (a minute on 2 cores)."""
    console, found = Console(), {}

    def show(position: str, kind: str, norm: float) -> None:
        found[position, kind] = norm

    attention_norms.measure_attention_norms(options, show)
    table = Table(box=box.SIMPLE_HEAD, title="Attention output norm at initialisation, mean over layers")
    for column in ("position", *attention_norms.KINDS):
        table.add_column(column, justify="left" if column == "position" else "right")
    for position in attention_norms.POSITIONS:
        table.add_row(position, *(f"{found[position, kind]:,.0f}" for kind in attention_norms.KINDS))
    console.print(table)


def compare_all(options: compare.ComparisonConfig) -> None:
    """Compare sigmoid with softmax on every task, three seeds each (under an hour on 2 cores), in one table."""
    console = Console()
    console.print(
        compare.compare_activations(options, lambda line: print(line, flush=True)), soft_wrap=True, highlight=False
    )
