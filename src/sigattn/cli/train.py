"""Command ``sigattn train``."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from sigattn.cli.parsing import parse
from sigattn.cli.progress import TrainingProgress
from sigattn.cli.runs import write_run
from sigattn.distributed.process_mesh import init_process_mesh, shutdown
from sigattn.recipes import datasets
from sigattn.recipes.recipe import Recipe
from sigattn.recipes.registry import RECIPES, find_recipe
from sigattn.train import loop, metrics
from sigattn.train.checkpoint import check_no_checkpoints, list_checkpoints
from sigattn.validation import SettingsError, check_at_least, check_output_folder


def train_recipe(arguments: list[str]) -> None:
    """Run ``sigattn train NAME [--tiny] [--softmax] [--field value …]``."""
    if not arguments or arguments[0].startswith("-"):
        print("usage: sigattn train NAME [--tiny] [--softmax] [--data PATH] [--folder PATH] [--resume] [settings]\n")
        print("names: " + ", ".join(RECIPES))
        print("sigattn train NAME --help lists every setting; sigattn recipes describes the names")
        sys.exit(0 if arguments[:1] in (["--help"], ["-h"]) else 2)
    name, *rest = arguments
    for form in ("tiny", "softmax"):
        if f"--{form}" in rest:
            rest.remove(f"--{form}")
            name = f"{name}-{form}"
    options = _options(find_recipe(name), rest)
    recipe = dataclasses.replace(find_recipe(name), model=options.model, task=options.task, training=options.training)
    try:
        _train(recipe, name, options)
    finally:
        shutdown()


def _options(recipe: Recipe, arguments: list[str]) -> Any:
    """Parse the settings of a recipe, each with its flag, and the paths of data and results."""
    fields: list[Any] = [
        (
            "data",
            Annotated[Path | None, tyro.conf.arg(help="folder, file or hf:NAME:CONFIGURATION; see sigattn recipes")],
            None,
        ),
        ("tokenizer", Annotated[Path | None, tyro.conf.arg(help="of a language model; none for bytes")], None),
        ("folder", Annotated[Path, tyro.conf.arg(help="for metrics, checkpoints, model")], Path("runs") / recipe.name),
        ("resume", Annotated[bool, tyro.conf.arg(help="continue from the last checkpoint, if any")], False),
        ("workers", Annotated[int, tyro.conf.arg(help="number of processes that read images")], 0),
    ]
    fields += [
        (n, type(v), v) for n, v in (("model", recipe.model), ("task", recipe.task), ("training", recipe.training))
    ]
    made = dataclasses.make_dataclass(
        "Train", [(n, kind, dataclasses.field(default=value)) for n, kind, value in fields], frozen=True, kw_only=True
    )
    base = next(n for n in sorted(RECIPES, key=len, reverse=True) if recipe.name.startswith(n))
    text = inspect.cleandoc(RECIPES[base].__doc__ or "")
    text += "\n\nWith --tiny it is the small form for a CPU; with --softmax the attention is softmax."
    options: Any = parse(lambda: tyro.cli(made, args=arguments, prog=f"sigattn train {recipe.name}", description=text))
    check_at_least(0, options, "workers")
    return options


def _train(recipe: Recipe, name: str, options: Any) -> None:
    folder = options.folder
    is_main_process = init_process_mesh().is_main_process
    _check(recipe)
    check_output_folder(folder)
    if not options.resume:
        check_no_checkpoints(folder)  # before the data is read, which can take long
    elif is_main_process and not list_checkpoints(folder / "checkpoints"):
        print(f"nothing to resume in {folder}: starting")
    steps, warmup_steps = recipe.training.max_steps, recipe.training.warmup_steps
    if is_main_process and steps < warmup_steps:
        print(f"{steps} steps end within the warm-up of {warmup_steps}: --training.warmup-steps sets its length")
    data = datasets.load_dataset(recipe, options.data, tokenizer=options.tokenizer, workers=options.workers)
    with TrainingProgress(recipe.training.max_steps, quiet=not is_main_process) as progress:
        loop.train(
            recipe.task,
            recipe.model,
            recipe.training,
            data,
            folder,
            resume=options.resume,
            on_row=functools.partial(progress.show, recipe.name),
            on_start=lambda _: write_run(folder, recipe, name, options),
        )
    if is_main_process:
        rows = metrics.read_metrics(folder / "metrics.jsonl")
        final = metrics.last_validation(rows)
        spikes = {n: metrics.count_spikes([r[n] for r in rows], f) for n, f in (("gradient_norm", 3.0), ("loss", 1.2))}
        if final:
            print(", ".join(f"{k} {v:.4g}" for k, v in final.items()))
        if summary := data.unreadable_summary():
            print(summary)
        print(f"spikes: {spikes['gradient_norm']} of the gradient norm, {spikes['loss']} of the loss")
        print(f"model: {folder / 'model'}")


def _check(recipe: Recipe) -> None:
    """Build the recipe's module on the meta device, because layers check that their settings fit together.

    Raises:
        SettingsError: if they do not.
    """
    try:
        with torch.device("meta"):
            recipe.task.build(recipe.model)
    except ValueError as error:
        raise SettingsError(str(error)) from error
