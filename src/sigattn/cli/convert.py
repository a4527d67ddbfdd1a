"""Command ``sigattn convert``."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.console import Console

from sigattn.cli.progress import TrainingProgress
from sigattn.cli.runs import read_run, write_run
from sigattn.conversion import ConversionReport, convert
from sigattn.data.dataset import Batch, Data, DataError
from sigattn.distributed.process_mesh import init_process_mesh
from sigattn.models import saving
from sigattn.nn.evaluation import evaluation_mode
from sigattn.recipes import datasets
from sigattn.recipes.recipe import Recipe
from sigattn.recipes.registry import RECIPES
from sigattn.tasks import Distillation, Task
from sigattn.train import loop, metrics
from sigattn.train.checkpoint import check_no_checkpoints, list_checkpoints
from sigattn.validation import (
    SettingsError,
    check_at_least,
    check_not_negative,
    check_output_folder,
    check_positive,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvertConfig:
    """Settings of ``sigattn convert``.

    Attributes:
        source: folder of a run of ``sigattn train`` or ``sigattn demo``, or of a saved model.
        data: data for the fit, the fine-tuning and the evaluation; None for the run's own.
        tokenizer: tokenizer file of a language model whose vocabulary is not bytes; None for the run's own.
        folder: folder for model, conversion.json, metrics and checkpoints; None for the source and "-sigmoid".
        batches: number of training batches for the fit; a quarter of them is held out.
        steps: number of steps of fine-tuning; 0 for none.
        learning_rate: peak learning rate of the fine-tuning.
        distil: weight of the divergence of the outputs from the softmax model's in the loss of the fine-tuning; 0 for
            none.
        batch_size: samples of a batch (seconds, for speech); None for the run's own.
        resume: continue the fine-tuning from its last checkpoint.
    """

    source: tyro.conf.Positional[Path] = Path("runs/demo/softmax")
    data: Path | None = None
    tokenizer: Path | None = None
    folder: Path | None = None
    batches: int = 8
    steps: int = 0
    learning_rate: float = 1e-3
    distil: float = 0.0
    batch_size: int | None = None
    resume: bool = False

    def __post_init__(self) -> None:
        check_at_least(1, self, "batches", "batch_size")
        check_at_least(0, self, "steps")
        check_positive(self, "learning_rate")
        check_not_negative(self, "distil")
        for name in ("learning_rate", "distil", "resume"):
            if not self.steps and getattr(self, name) != getattr(ConvertConfig, name):
                raise SettingsError(f"{name} applies to the fine-tuning only: pass steps too", "steps")


def convert_run(options: ConvertConfig) -> None:
    """Convert a softmax model to sigmoid attention with a fitted bias, and fine-tune it if wanted."""
    if init_process_mesh().world_size > 1:
        raise SettingsError("sigattn convert runs on one process: start it without torchrun")
    recipe, model_folder, options = _read(options)
    recipe = recipe.with_training(**_training(recipe, options))
    assert options.folder is not None
    check_output_folder(options.folder)
    task = recipe.task
    if options.distil:
        task = Distillation(task=task, teacher=str(model_folder.resolve()), weight=options.distil)
    if (options.folder / "model").exists() and not list_checkpoints(options.folder / "checkpoints"):
        raise SettingsError(f"{options.folder} holds a model already: name another folder", "folder")
    if not options.resume:
        check_no_checkpoints(options.folder)
    elif not list_checkpoints(options.folder / "checkpoints"):
        print(f"nothing to resume in {options.folder}: starting")
    data = datasets.load_dataset(recipe, options.data, tokenizer=options.tokenizer)
    console = Console()
    model, report, stages = _convert(recipe, model_folder, data, options, console)
    recipe = dataclasses.replace(recipe, model=model.config)
    if options.steps:
        rows = _fine_tune(recipe, task, model, report, data, options)
        stages[f"fine-tuned, {options.steps} steps"] = metrics.last_validation(rows)
    else:
        _write_run(recipe, report, options)
        saving.save(model, options.folder / "model")
    for name, values in stages.items():
        print(f"{name}: " + ", ".join(f"{k} {v:.4g}" for k, v in values.items()))
    if summary := data.unreadable_summary():
        print(summary)
    print(f"model: {options.folder / 'model'}")


def _read(options: ConvertConfig) -> tuple[Recipe, Path, ConvertConfig]:
    """Return the recipe, the folder of the model, and the options with the run's data, tokenizer and folder.

    Raises:
        DataError: if the source holds neither a run nor a model. ModelError: if the model cannot be loaded.
        SettingsError: if it is none that this command converts.
    """
    source, data, tokenizer = options.source, None, None
    model_folder = source / "model" if (source / "model").is_dir() else source
    if (source / "run.json").exists():
        recipe, data, tokenizer = read_run(source)
        recipe = dataclasses.replace(recipe, name=recipe.name.replace("-softmax", ""))
    elif not (model_folder / "config.json").exists():
        raise DataError(f"{source} holds neither a run (run.json) nor a model (config.json and model.safetensors)")
    else:
        recipe = _recipe_of_model(source, saving.load(model_folder).config)
    if recipe.transformer.activation != "softmax":
        raise SettingsError(
            f"{source} holds a model with activation={recipe.transformer.activation!r}: only softmax is converted"
        )
    if not _saves_all_layers(recipe):
        raise SettingsError(
            f"{source} was trained with {type(recipe.task).__name__}, whose additional layers are not saved: convert "
            "its model in Python with sigattn.convert"
        )
    options = dataclasses.replace(
        options,
        data=options.data or data,
        tokenizer=options.tokenizer or tokenizer,
        folder=options.folder or source.with_name(f"{source.resolve().name}-sigmoid"),
    )
    return recipe, model_folder, options


def _recipe_of_model(source: Path, config: Any) -> Recipe:
    """Return a tiny recipe, whose task and data are those of a model without a run, with the model's configuration.

    Raises:
        SettingsError: if models of this class are trained for several tasks, or for one that adds layers.
    """
    recipes = [recipe for make in RECIPES.values() if type((recipe := make().tiny()).model) is type(config)]
    recipes = [recipe for recipe in recipes if _saves_all_layers(recipe.softmax())]  # softmax: does not warn
    if len({type(recipe.task) for recipe in recipes}) != 1:
        raise SettingsError(f"{source} holds a model of {type(config).__name__} without a run: name the run's folder")
    return dataclasses.replace(recipes[0], model=config)


def _saves_all_layers(recipe: Recipe) -> bool:
    """Return True if the task adds no layers to the model; added layers are not saved."""
    with torch.device("meta"):
        module = recipe.task.build(recipe.model)
    return recipe.task.backbone(module) is module


def _training(recipe: Recipe, options: ConvertConfig) -> dict[str, Any]:
    """Return the settings of the fine-tuning that differ from the run's training."""
    steps, size = options.steps, options.batch_size
    return {
        "max_steps": max(steps, 1),
        "learning_rate": options.learning_rate,
        "batch_size": recipe.training.batch_size if size is None else size,
        "schedule": "cosine",
        "warmup_steps": min(10, steps // 10),
        "validate_every": max(1, steps // 10),
        "checkpoint_every": max(1, steps // 4),
        "log_attention_every": 1,
        "ema": None,
        "tensor_parallel": 1,
    }


def _convert(
    recipe: Recipe, model_folder: Path, data: Data, options: ConvertConfig, console: Console
) -> tuple[Any, ConversionReport, dict[str, dict[str, float]]]:
    """Return the converted model, the report, and the held-out metrics before and after the conversion."""
    device, training = init_process_mesh().device, recipe.training

    def on_device(batch: Batch) -> Batch:
        return tuple(t.to(device) for t in batch)

    def evaluate() -> dict[str, float]:
        with evaluation_mode(model), torch.no_grad():
            return recipe.task.evaluate(model, map(on_device, data.validation(training.eval_batch_size)))

    model: Any = saving.load(model_folder, device)
    with console.status("evaluating the softmax model"):
        before = evaluate()
    with console.status("fitting the bias"):
        batches = [on_device(data.batch(i, training.batch_size, training.seed)) for i in range(options.batches)]
        report = convert(model, batches, loss=recipe.task.loss)
    console.print(str(report), highlight=False, markup=False, soft_wrap=True)
    with console.status("evaluating the converted model"):
        return model, report, {"softmax": before, "converted": evaluate()}


def _write_run(recipe: Recipe, report: ConversionReport, options: ConvertConfig) -> None:
    """Write run.json and conversion.json into the folder."""
    assert options.folder is not None
    write_run(options.folder, recipe, recipe.name, options)
    report.save(options.folder / "conversion.json")


def _fine_tune(
    recipe: Recipe, task: Task, model: Any, report: ConversionReport, data: Data, options: ConvertConfig
) -> list[dict[str, Any]]:
    """Train the converted model in the folder, and return the measurements of each step."""
    assert options.folder is not None
    folder = options.folder
    with TrainingProgress(recipe.training.max_steps) as progress:
        loop.train(
            task,
            recipe.model,
            recipe.training,
            data,
            folder,
            weights=model.state_dict(),
            resume=options.resume,
            on_row=functools.partial(progress.show, recipe.name),
            on_start=lambda _: _write_run(recipe, report, options),
        )
    return metrics.read_metrics(folder / "metrics.jsonl")
