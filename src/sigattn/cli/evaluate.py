"""Commands ``sigattn evaluate``, ``generate``, ``probe``, ``export`` and ``lm-eval``: use of a trained run."""

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from sigattn.cli.runs import load_language_model, read_run
from sigattn.data.dataset import DataError
from sigattn.data.images import Digits, ImageFolder
from sigattn.data.tokens import END, make_byte_tokenizer
from sigattn.files import write_text
from sigattn.models import saving
from sigattn.models.vision import ViT
from sigattn.recipes import load_held_out
from sigattn.tables import print_table
from sigattn.train import loop
from sigattn.train.probe import extract_features, linear_probe
from sigattn.validation import SettingsError, check_at_least, check_seed


def evaluate(folder: Annotated[Path, tyro.conf.Positional], /, data: Path | None = None) -> None:
    """Evaluate a run's model, or else its last checkpoint, on the held-out data.

    Args:
        folder: folder of the run.
        data: data to use instead of the run's own; LibriSpeech's root gives a speech model's errors on each of
            dev-clean, dev-other, test-clean and test-other, TED-LIUM's root those by duration.
    """
    recipe, path, tokenizer = read_run(folder)
    for part, source in load_held_out(recipe, data or path, tokenizer=tokenizer).items():
        metrics = loop.evaluate(recipe.task, recipe.model, recipe.training, source, folder)
        for key, value in metrics.items():
            print(f"{part} {key} {value:.6g}".strip())
        if summary := source.unreadable_summary():
            print(f"{part} {summary}".strip())


def generate(
    folder: Annotated[Path, tyro.conf.Positional],
    /,
    prompt: str = "The ",
    max_new_tokens: int = 200,
    temperature: float = 0.7,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: str = "",
    seed: int = 0,
) -> None:
    """Continue a text with a run's language model, up to the end of the document.

    Args:
        folder: folder of the run.
        prompt: text to continue.
        max_new_tokens: largest number of new tokens.
        temperature: sampling temperature; 0 for the likeliest token each time.
        top_k: sample from this number of likeliest tokens only.
        top_p: sample from the likeliest tokens that together have this probability.
        stop: end after this character, or any text that is one token.
        seed: seed of sampling.
    """
    model, tokenizer, end = load_language_model(folder)

    def encode(text: str) -> list[int]:
        if tokenizer is None:
            return list(text.encode())
        return list(tokenizer.encode(text, add_special_tokens=False).ids)  # some tokenizers add an end to the prompt

    check_at_least(0, {"max_new_tokens": max_new_tokens})
    check_seed({"seed": seed})
    if not encode(prompt):
        raise SettingsError("--prompt is empty: give the text to continue")
    ends = encode(stop)
    if len(ends) > 1:
        raise SettingsError(f"--stop must be one token, and {stop!r} has {len(ends)}")
    ends += [] if end is None else [end]
    generator = torch.Generator().manual_seed(seed)
    options: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "generator": generator}
    inputs = torch.tensor(encode(prompt), dtype=torch.int64)
    tokens = model.generate([inputs], max_new_tokens, stop_tokens=ends, **options)[0].tolist()
    print(bytes(tokens).decode(errors="replace") if tokenizer is None else tokenizer.decode(tokens))


def probe(folder: Annotated[Path, tyro.conf.Positional], /, data: Path | None = None) -> None:
    """Report the top-1 accuracy of a linear probe on a run's vision model.

    Args:
        folder: folder of the run.
        data: a folder with train/CLASS and val/CLASS. Default: the run's own data, or handwritten digits.
    """
    recipe, path, _ = read_run(folder)
    model = saving.load(folder / "model")
    if not isinstance(model, ViT):
        raise DataError(f"{folder} holds a {type(model).__name__} ({recipe.name}), no vision transformer")
    path = data or path
    if path is None:
        parts = [extract_features(model, [part]) for part in Digits().train_and_held_out()]
    else:
        images = ImageFolder(path, model.config.image_size, "none")
        train = (images.batch(i, 256, 0) for i in range(-(-len(images) // 256)))
        features, labels = extract_features(model, train)
        # the last batch is filled up with images of the next pass
        parts = [(features[: len(images)], labels[: len(images)]), extract_features(model, images.validation(256))]
        if summary := images.unreadable_summary():
            print(summary)
    print(f"linear probe: top1 {linear_probe(*parts):.4f}")


def export(folder: Annotated[Path, tyro.conf.Positional], save: Annotated[Path, tyro.conf.Positional], /) -> None:
    """Write a run's language model into a folder that transformers can load.

    Args:
        folder: folder of the run.
        save: the folder to write.
    """
    if save.is_file() or any((save / name).exists() for name in ("run.json", "config.json")):
        raise DataError(f"{save} is a file, or holds a run or a model already: name another folder")
    from sigattn.integrations.transformers.model import export as export_model

    model, tokenizer, end = load_language_model(folder)
    if tokenizer is None:
        tokenizer = make_byte_tokenizer()
    with saving.tensor_file_errors(save):
        export_model(model, save, tokenizer, None if end is None else END)
    print(f"{save}: import sigattn.integrations.transformers, then AutoModelForCausalLM.from_pretrained")


def lm_eval(
    folder: Annotated[Path, tyro.conf.Positional],
    /,
    tasks: tuple[str, ...] = (),
    include: Path | None = None,
    limit: int | None = None,
    batch_size: int = 8,
) -> None:
    """Evaluate a run's language model with lm-evaluation-harness.

    Args:
        folder: folder of the run.
        tasks: names of the harness's tasks. Default: ARC easy and challenge, HellaSwag, PIQA, SciQ, WinoGrande and
            LAMBADA, and with one example TriviaQA and WebQuestions.
        include: folder of further tasks (YAML). The harness runs the Python code that a task names with !function:
            include only folders that you trust.
        limit: number of samples of each task.
        batch_size: number of sequences evaluated at a time.
    """
    check_at_least(1, {"limit": limit, "batch_size": batch_size})
    from sigattn.integrations import lm_eval as harness

    model, tokenizer, end = load_language_model(folder)
    adapter = harness.SigattnLM(model, tokenizer, batch_size, end)
    try:
        results = harness.evaluate(adapter, tasks, include=include, limit=limit)
    except (ConnectionError, ValueError) as error:
        kind = DataError if isinstance(error, ConnectionError) else SettingsError
        raise kind(str(error)) from error
    rows = [
        (task, name, f"{value:.4g}", f"{spread:.2g}" if (spread := metrics.get(f"{name}_stderr")) is not None else "")
        for task, metrics in results.items()
        for name, value in metrics.items()
        if not name.endswith("_stderr")
    ]
    print_table(("task", "metric", "value", "± standard error"), rows)
    write_text(folder / "lm_eval.json", json.dumps(results, indent=2) + "\n")
