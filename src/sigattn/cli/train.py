"""Commands ``sigattn train``, ``sigattn recipes`` and ``sigattn demo``."""

import dataclasses
import functools
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import tyro

from sigattn.cli.parsing import parse, wrap
from sigattn.cli.runs import TrainingProgress, check_run_folder, run_training, write_run
from sigattn.demo import report
from sigattn.demo import training as demo
from sigattn.distributed.process_mesh import init_process_mesh, shutdown
from sigattn.recipes import RECIPES, Recipe, find_recipe, load_dataset
from sigattn.tables import print_table
from sigattn.train import metrics
from sigattn.train.checkpoint import list_checkpoints
from sigattn.validation import check_at_least


def train_recipe(arguments: list[str]) -> None:
    """Run ``sigattn train NAME [--tiny] [--softmax] [--field value …]``."""
    if not arguments or arguments[0].startswith("-"):
        print("usage: sigattn train NAME [--tiny] [--softmax] [--data PATH] [settings]\n")
        print(wrap("names: " + ", ".join(RECIPES)))
        print("\nsigattn train NAME --help lists every setting, sigattn recipes the names.")
        sys.exit(0 if arguments[:1] in (["--help"], ["-h"]) else 2)
    name, *rest = arguments
    for form in ("tiny", "softmax"):
        if f"--{form}" in rest:
            rest.remove(f"--{form}")
            name = f"{name}-{form}"
    recipe = find_recipe(name)
    options = _options(recipe, rest)
    recipe = dataclasses.replace(recipe, model=options.model, task=options.task, training=options.training)
    try:
        _train(recipe, name, options)
    finally:
        shutdown()


def _options(recipe: Recipe, arguments: list[str]) -> Any:
    """Parse the settings of a recipe, each with its flag, and the paths of data and results."""
    paths: tuple[tuple[str, Any, Any, str], ...] = (
        ("data", Path | None, None, "folder, file or hf:NAME:CONFIGURATION; see sigattn recipes"),
        ("tokenizer", Path | None, None, "of a language model; none for bytes"),
        ("folder", Path, Path("runs") / recipe.name, "for metrics, checkpoints, model"),
        ("resume", bool, False, "continue from the last checkpoint, if any"),
        ("workers", int, 0, "number of processes that read images"),
    )
    fields: list[tuple[str, Any, Any]] = [
        (name, Annotated[kind, tyro.conf.arg(help=text)], dataclasses.field(default=default))
        for name, kind, default, text in paths
    ]
    for name in ("model", "task", "training"):
        settings = getattr(recipe, name)
        fields.append((name, type(settings), dataclasses.field(default=settings)))
    kind = dataclasses.make_dataclass("Train", fields, frozen=True, kw_only=True)
    text = f"{recipe.documentation()}\n\nWith --tiny it is the small form for a CPU; with --softmax the attention "
    text = wrap(f"{text}is softmax.")
    options: Any = parse(lambda: tyro.cli(kind, args=arguments, prog=f"sigattn train {recipe.name}", description=text))
    check_at_least(0, options, "workers")
    return options


def _train(recipe: Recipe, name: str, options: Any) -> None:
    folder, training = options.folder, recipe.training
    recipe.task.check(recipe.model)
    check_run_folder(folder, options.resume)
    is_main_process = init_process_mesh().is_main_process
    if is_main_process and training.max_steps < training.warmup_steps:
        print(
            f"{training.max_steps} steps end within the warm-up of {training.warmup_steps}: --training.warmup-steps "
            "sets its length"
        )
    data = load_dataset(recipe, options.data, tokenizer=options.tokenizer, workers=options.workers)
    on_start = functools.partial(write_run, folder, recipe, name, options.data, options.tokenizer)
    rows = run_training(recipe, data, folder, resume=options.resume, on_start=on_start)
    if is_main_process:
        if final := metrics.last_validation(rows):
            print(", ".join(f"{k} {v:.4g}" for k, v in final.items()))
        if summary := data.unreadable_summary():
            print(summary)
        spikes = [metrics.count_spikes([r[n] for r in rows], f) for n, f in (("gradient_norm", 3.0), ("loss", 1.2))]
        print(f"spikes: {spikes[0]} of the gradient norm, {spikes[1]} of the loss")
        print(f"model: {folder / 'model'}")


def list_recipes(name: Annotated[str | None, tyro.conf.Positional] = None, /) -> None:
    """List all recipes with the columns of the paper's guide, or describe one.

    Args:
        name: a recipe; NAME-tiny, NAME-softmax and NAME-tiny-softmax are its variants.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*Ramapuram")
        if name is not None:
            recipe = find_recipe(name)
            print(f"{recipe.documentation()}\n")
            print(f"parameters: {recipe.parameters():,}")
            print(f"sigattn train {name} --help lists every setting.")
            return
        guide = {name: list(find_recipe(name).guide_row().values()) for name in RECIPES}
    # in 80 columns: the name has the domain
    rows = [[name, row[1].partition(" (")[0], *row[2:-1], row[-1].removesuffix("-Norm")] for name, row in guide.items()]
    print_table(("recipe", "objective", "size", "position", "QK", "LS", "bias", "norm"), rows)
    print("QK: QK-norm. LS: LayerScale. bias: of the sigmoid. norm: placement of norms.")
    print("sigattn recipes NAME describes one; sigattn train NAME --tiny trains a small form.")


def train_demo(options: demo.DemoConfig) -> None:
    """Compare softmax and sigmoid models in a report (about 3 minutes on 2 cores)."""
    folder = options.run_folder
    if options.resume and not any(list_checkpoints(folder / name / "checkpoints") for name in demo.MODELS):
        print(f"nothing to resume in {folder}: starting")
    with TrainingProgress(options.training.max_steps) as progress:
        runs = demo.train_models(options, progress.show)
    columns = [name for name, _ in report.TABLE]
    cells = [[cell(run) for _, cell in report.TABLE] for run in runs]
    print_table(columns, cells, title="Softmax and sigmoid attention, side by side", right=columns[1:])
    print(f"report: {folder / 'report.html'}")
