"""Command ``sigattn convert``."""

import dataclasses
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.console import Console

from sigattn.cli.runs import check_run_folder, read_run, run_training, write_run
from sigattn.conversion import ConversionReport, convert
from sigattn.data.dataset import Batch, Data, DataError
from sigattn.distributed.process_mesh import init_process_mesh
from sigattn.models import saving
from sigattn.nn.evaluation import evaluation_mode
from sigattn.recipes import RECIPES, Recipe, load_dataset
from sigattn.tasks import Distillation
from sigattn.train import metrics
from sigattn.train.checkpoint import list_checkpoints
from sigattn.validation import SettingsError, check_at_least, check_not_negative, check_positive


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
    """Convert a softmax model to sigmoid attention, and fine-tune it if wanted."""
    if init_process_mesh().world_size > 1:
        raise SettingsError("sigattn convert runs on one process: start it without torchrun")
    source = options.source
    model_folder = source / "model" if (source / "model").is_dir() else source
    recipe, data_path, tokenizer = _read(source, model_folder)
    recipe = _with_fine_tuning(recipe, options)
    data_path, tokenizer = options.data or data_path, options.tokenizer or tokenizer
    folder = options.folder or source.with_name(f"{source.resolve().name}-sigmoid")
    if (folder / "model").exists() and not list_checkpoints(folder / "checkpoints"):
        raise SettingsError(f"{folder} holds a model already: name another folder", "folder")
    check_run_folder(folder, options.resume)
    data = load_dataset(recipe, data_path, tokenizer=tokenizer)
    model, report, stages = _convert(recipe, model_folder, data, options.batches)
    recipe = dataclasses.replace(recipe, model=model.config)

    def write() -> None:
        write_run(folder, recipe, recipe.name, data_path, tokenizer)
        report.save(folder / "conversion.json")

    if options.steps:
        trained = recipe
        if options.distil:
            teacher = str(model_folder.resolve())
            task = Distillation(task=recipe.task, teacher=teacher, weight=options.distil)
            trained = dataclasses.replace(recipe, task=task)
        weights = model.state_dict()
        rows = run_training(trained, data, folder, resume=options.resume, on_start=write, weights=weights)
        stages[f"fine-tuned, {options.steps} steps"] = metrics.last_validation(rows)
    else:
        write()
        saving.save(model, folder / "model")
    for name, values in stages.items():
        print(f"{name}: " + ", ".join(f"{k} {v:.4g}" for k, v in values.items()))
    if summary := data.unreadable_summary():
        print(summary)
    print(f"model: {folder / 'model'}")


def _read(source: Path, model_folder: Path) -> tuple[Recipe, Path | None, Path | None]:
    """Return the recipe of a run or a model, and the paths of a run's data and tokenizer; raise if it is neither."""
    data, tokenizer = None, None
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
    return recipe, data, tokenizer


def _recipe_of_model(source: Path, config: Any) -> Recipe:
    """Return a tiny recipe, whose task and data are those of a model without a run, with the model's configuration."""
    recipes = [recipe.tiny() for recipe in RECIPES.values() if type(recipe.model) is type(config)]
    recipes = [recipe for recipe in recipes if _saves_all_layers(recipe.softmax())]  # softmax: does not warn
    if len({type(recipe.task) for recipe in recipes}) != 1:
        raise SettingsError(f"{source} holds a model of {type(config).__name__} without a run: name the run's folder")
    return dataclasses.replace(recipes[0], model=config)


def _saves_all_layers(recipe: Recipe) -> bool:
    """Return True if the task adds no layers to the model; added layers are not saved."""
    module = recipe.task.check(recipe.model)
    return recipe.task.backbone(module) is module


def _with_fine_tuning(recipe: Recipe, options: ConvertConfig) -> Recipe:
    steps = options.steps
    return recipe.with_training(
        max_steps=max(steps, 1),
        learning_rate=options.learning_rate,
        batch_size=options.batch_size or recipe.training.batch_size,
        schedule="cosine",
        warmup_steps=min(10, steps // 10),
        validate_every=max(1, steps // 10),
        checkpoint_every=max(1, steps // 4),
        log_attention_every=1,
        ema=None,
        tensor_parallel=1,
    )


def _convert(
    recipe: Recipe, model_folder: Path, data: Data, num_batches: int
) -> tuple[Any, ConversionReport, dict[str, dict[str, float]]]:
    """Return the converted model, the report, and the held-out metrics before and after the conversion."""
    console, device, training = Console(), init_process_mesh().device, recipe.training
    model: Any = saving.load(model_folder, device)

    def on_device(batch: Batch) -> Batch:
        return tuple(t.to(device) for t in batch)

    def evaluate() -> dict[str, float]:
        with evaluation_mode(model), torch.no_grad():
            return recipe.task.evaluate(model, map(on_device, data.validation(training.eval_batch_size)))

    with console.status("evaluating, and fitting the bias"):
        before = evaluate()
        batches = [on_device(data.batch(i, training.batch_size, training.seed)) for i in range(num_batches)]
        report = convert(model, batches, loss=recipe.task.loss)
        after = evaluate()
    console.print(str(report), highlight=False, markup=False, soft_wrap=True)
    return model, report, {"softmax": before, "converted": after}
