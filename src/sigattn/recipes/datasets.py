"""Data sets of the recipes, loaded from a path."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from sigattn.data.corpora import group_by_duration, librispeech, spoken_digits, tedlium
from sigattn.data.dataset import Data, DataError
from sigattn.data.documents import hub_documents, is_streamed
from sigattn.data.images import Augmentation, Digits, ImageFolder
from sigattn.data.speech import CharTokenizer, Speech, Utterance
from sigattn.data.text import StreamedText, TextData, load_text
from sigattn.data.tokens import document_encoder, load_packed, tokenize_corpus
from sigattn.files import file_sha256, files_sha256
from sigattn.recipes.recipe import DataSource, Recipe
from sigattn.validation import SettingsError

LIBRISPEECH_SPLITS = ("dev-clean", "dev-other", "test-clean", "test-other")


def load_dataset(recipe: Recipe, path: Path | None, *, tokenizer: Path | None = None, workers: int = 0) -> Data:
    """Load the training data of a recipe.

    Args:
        recipe: the recipe.
        path: for language models a text file or folder, a streamed data set (``hf:NAME``, ``hf:NAME:CONFIGURATION``)
            or a .bin file of ``sigattn pack``; for vision a folder with train and val; for speech LibriSpeech's root,
            or the spoken digits as a folder or .tar.gz. None for CPython's documentation as bytes, or the handwritten
            digits.
        tokenizer: tokenizer file of a language model whose vocabulary is not bytes.
        workers: number of processes that read images.

    Raises DataError if the data is missing, or not of the kind that the recipe needs; SettingsError if an option that
    the recipe needs is missing, or an option does not apply to it.
    """
    if workers and (path is None or not recipe.data.takes_workers):
        raise SettingsError(f"workers={workers} is for folders of images, and {recipe.name} reads none: leave it out")
    _check_tokenizer(recipe, tokenizer)
    return recipe.data.load(recipe, path, tokenizer, workers)


def load_held_out(recipe: Recipe, path: Path | None, *, tokenizer: Path | None = None) -> dict[str, Data]:
    """Load the evaluation data of a trained model as named parts.

    As in the paper's tables, the parts are LibriSpeech's dev-clean, dev-other, test-clean and test-other (those that
    ``path`` contains), or TED-LIUM's joint validation and test sets by duration. For other data there is one part with
    an empty name, as loaded by ``load_dataset``, whose errors are raised.
    """
    _check_tokenizer(recipe, tokenizer)
    return recipe.data.load_held_out(recipe, path, tokenizer)


def _check_tokenizer(recipe: Recipe, tokenizer: Path | None) -> None:
    if tokenizer is not None and not recipe.data.takes_tokenizer:
        raise SettingsError(f"{recipe.name} is not a language model and takes no tokenizer")


@dataclass(frozen=True, kw_only=True)
class TextSource(DataSource):
    """Text of a language model, as bytes or as the tokens of a tokenizer."""

    takes_tokenizer: ClassVar[bool] = True

    def tiny(self) -> "TextSource":
        return replace(self, name="CPython's documentation, as bytes")

    def load(self, recipe: Recipe, path: Path | None, tokenizer: Path | None, workers: int) -> Data:
        model: Any = recipe.model
        length, vocab_size = model.max_seq_len, model.vocab_size
        if path is not None and path.suffix == ".bin":
            return load_packed(path, vocab_size, length, tokenizer)
        if tokenizer is None:
            if vocab_size != 256:
                raise SettingsError(
                    f"a vocabulary of {vocab_size} tokens needs a tokenizer (sigattn tokenizer makes one) or a .bin "
                    "file of sigattn pack; bytes need a vocabulary of 256",
                    "tokenizer",
                    "data",
                    "model.vocab_size",
                )
            if path is None or not is_streamed(path):
                return TextData.from_bytes(load_text(path), length)
            encode: Callable[[str], list[int]] = _bytes
            unit = "bytes"
        elif path is None:
            raise SettingsError(
                "a tokenizer needs a text: a file, or a folder of .txt, .jsonl, .parquet and others", "data"
            )
        elif not is_streamed(path):
            return tokenize_corpus(path, tokenizer, vocab_size, length)
        else:
            encode = document_encoder(tokenizer, vocab_size)
            unit = f"{tokenizer.name}, {file_sha256(tokenizer)}"
        documents = functools.partial(hub_documents, path)
        return StreamedText(documents, f"{_streamed(path)} as {unit}", encode, length, vocab_size=vocab_size)


def _streamed(path: Path) -> str:
    """Return the name of a streamed data set, with a hash of its files if it is a folder."""
    folder = Path(str(path).removeprefix("hf:"))
    if not folder.is_dir():
        return str(path)
    files = sorted(f for f in folder.rglob("*") if f.is_file())
    return f"{path} {files_sha256((str(f.relative_to(folder)), f) for f in files)}"


def _bytes(document: str) -> list[int]:
    return list((document + "\n\n").encode())


@dataclass(frozen=True, kw_only=True)
class SpeechSource(DataSource):
    """Recordings with transcripts: LibriSpeech, or the spoken digits.

    Attributes:
        librispeech: training folders of LibriSpeech; empty for the spoken digits.
        spec_augment_from: step from which recordings are masked by SpecAugment; None turns it off.
    """

    librispeech: tuple[str, ...] = ()
    spec_augment_from: int | None = None

    def tiny(self) -> "SpeechSource":
        # SpecAugment's masks are made for recordings of fifteen seconds; these have about two
        return replace(self, name="spoken digits (FSDD)", librispeech=(), spec_augment_from=None)

    def load(self, recipe: Recipe, path: Path | None, tokenizer: Path | None, workers: int) -> Data:
        if path is None:
            raise SettingsError(f"{recipe.name} trains on {self.name}: name its folder", "data")
        if not path.exists():
            raise DataError(f"no such file or folder: {path}")
        if self.librispeech:
            training, held_out = librispeech(path, self.librispeech), librispeech(path, ("dev-clean", "dev-other"))
        else:
            training, held_out = spoken_digits(path)
        return self._speech(recipe, training, held_out)

    def load_held_out(self, recipe: Recipe, path: Path | None, tokenizer: Path | None) -> dict[str, Data]:
        parts: dict[str, list[Utterance]] = {}
        if path is not None:
            parts = {name: librispeech(path, [name]) for name in LIBRISPEECH_SPLITS if (path / name).is_dir()}
            if not parts and (path / "legacy").is_dir():
                parts = group_by_duration([*tedlium(path, "dev"), *tedlium(path, "test")])
        if not parts:
            return super().load_held_out(recipe, path, tokenizer)
        return {name: self._speech(recipe, (), utterances) for name, utterances in parts.items() if utterances}

    def _speech(self, recipe: Recipe, training: Sequence[Utterance], held_out: Sequence[Utterance]) -> Speech:
        model: Any = recipe.model
        task: Any = recipe.task
        options = {"num_mel_bins": model.num_mel_bins, "spec_augment_from": self.spec_augment_from}
        return Speech(training, held_out, CharTokenizer(task.alphabet), **options)


@dataclass(frozen=True, kw_only=True)
class ImageSource(DataSource):
    """Folder of images with train/CLASS and val/CLASS, or scikit-learn's handwritten digits.

    Attributes:
        augmentation: augmentation of image folders (``ImageFolder``).
        jitter: strength of the colour jitter of image folders.
    """

    augmentation: Augmentation = "none"
    jitter: float = 0.5
    takes_workers: ClassVar[bool] = True

    def tiny(self) -> "ImageSource":
        return replace(self, name="scikit-learn's handwritten digits")

    def load(self, recipe: Recipe, path: Path | None, tokenizer: Path | None, workers: int) -> Data:
        model: Any = recipe.transformer
        data: Digits | ImageFolder
        if path is not None:
            data = ImageFolder(path, model.image_size, self.augmentation, jitter=self.jitter, workers=workers)
        elif (model.image_size, model.channels) == (8, 1):
            data = Digits(num_views=recipe.task.num_views)
        else:
            raise SettingsError(
                f"{recipe.name} trains on {self.name}: name a folder with train/CLASS and val/CLASS, or "
                "train its tiny form on handwritten digits",
                "data",
                "tiny",
            )
        if recipe.task.has_labels and len(data.classes) != model.num_classes:
            name = path or "the set of handwritten digits"
            classes = f"{name} has {len(data.classes)} classes and the model {model.num_classes}"
            raise SettingsError(classes, "model.num_classes")
        return data
