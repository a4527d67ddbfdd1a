"""Data sets of the recipes, loaded from a path."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sigattn.data import synthetic
from sigattn.data.corpora import group_by_duration, librispeech, spoken_digits, tedlium
from sigattn.data.dataset import Data, DataError
from sigattn.data.digits import Digits
from sigattn.data.documents import hub_documents, is_streamed
from sigattn.data.hashing import file_sha256, files_sha256
from sigattn.data.images import ImageFolder
from sigattn.data.speech import CharTokenizer, Speech, Utterance
from sigattn.data.stream import StreamedText
from sigattn.data.text import TextData, TokenText, load_text
from sigattn.data.tokens import (
    check_vocabulary,
    document_encoder,
    find_packed_tokenizer,
    load_packed,
    load_tokenizer,
    tokenize_corpus,
)
from sigattn.data.unreadable import UnreadableFiles
from sigattn.models.autoencoder import MaskedAutoencoderConfig
from sigattn.models.language import LanguageModelConfig
from sigattn.models.sequence import SequenceModelConfig
from sigattn.models.speech import SpeechModelConfig
from sigattn.recipes.recipe import Recipe
from sigattn.tasks.byol import BYOL
from sigattn.tasks.ctc import CTC
from sigattn.tasks.mae import MaskedAutoencoding
from sigattn.tasks.simclr import SimCLR
from sigattn.tasks.synthetic import KSummation, PairRepeat
from sigattn.validation import SettingsError

LIBRISPEECH_SPLITS = ("dev-clean", "dev-other", "test-clean", "test-other")


def load_dataset(recipe: Recipe, path: Path | None, *, tokenizer: Path | None = None, workers: int = 0) -> Data:
    """Load the training data of a recipe.

    Args:
        recipe: the recipe.
        path: for language models a text file or folder, a streamed data set (``hf:NAME``, ``hf:NAME:CONFIGURATION``)
            or a .bin file of ``sigattn pack``; for vision a folder with train and val; for speech LibriSpeech's root,
            or the spoken digits as a folder or .tar.gz. None for CPython's documentation as bytes, the handwritten
            digits, or a synthetic problem.
        tokenizer: tokenizer file of a language model whose vocabulary is not bytes.
        workers: number of processes that read images.

    Raises:
        DataError: if the data is missing, or not of the kind that the recipe needs.
        SettingsError: if an option that the recipe needs is missing, or an option does not apply to it.
    """
    others = (LanguageModelConfig, SequenceModelConfig, SpeechModelConfig)
    if workers and (path is None or isinstance(recipe.model, others)):
        raise SettingsError(f"workers={workers} is for folders of images, and {recipe.name} reads none: leave it out")
    if isinstance(recipe.model, LanguageModelConfig):
        return _text(recipe.model, path, tokenizer)
    if tokenizer is not None:
        raise SettingsError(f"{recipe.name} is not a language model and takes no tokenizer")
    if isinstance(recipe.model, SequenceModelConfig):
        return _drawn(recipe, recipe.model, path)
    if isinstance(recipe.model, SpeechModelConfig):
        return _speech(recipe, recipe.model, path)
    return _images(recipe, path, workers)


def load_held_out(recipe: Recipe, path: Path | None, *, tokenizer: Path | None = None) -> dict[str, Data]:
    """Load the evaluation data of a trained model as named parts.

    As in the paper's tables, the parts are LibriSpeech's dev-clean, dev-other, test-clean and test-other (those that
    ``path`` contains), or TED-LIUM's joint validation and test sets by duration. For other data there is one part with
    an empty name, as loaded by ``load_dataset``.

    Raises:
        DataError: if the data is missing, or not of the kind that the recipe needs.
        SettingsError: if an option that the recipe needs is missing, or an option does not apply to it.
    """
    if path is None or not isinstance(recipe.model, SpeechModelConfig):
        return {"": load_dataset(recipe, path, tokenizer=tokenizer)}
    assert isinstance(recipe.task, CTC)
    tokens, mels = CharTokenizer(recipe.task.alphabet), recipe.model.num_mel_bins
    parts: dict[str, tuple[Sequence[Utterance], UnreadableFiles | None]]
    if splits := [name for name in LIBRISPEECH_SPLITS if (path / name).is_dir()]:
        files = {name: UnreadableFiles("recording") for name in splits}
        parts = {name: (librispeech(path, [name], unreadable), unreadable) for name, unreadable in files.items()}
    elif (path / "legacy").is_dir():
        by_duration = group_by_duration([*tedlium(path, "dev"), *tedlium(path, "test")])
        parts = {name: (part, None) for name, part in by_duration.items() if part}
    else:
        return {"": load_dataset(recipe, path, tokenizer=tokenizer)}
    return {n: Speech((), part, tokens, num_mel_bins=mels, unreadable=u) for n, (part, u) in parts.items()}


def _text(model: LanguageModelConfig, path: Path | None, tokenizer: Path | None) -> Data:
    if path is not None and path.suffix == ".bin":
        own = find_packed_tokenizer(path, tokenizer)
        text = load_packed(path, model.vocab_size, model.max_seq_len)
        return TextData(text, model.max_seq_len, tokenizer=None if own is None else file_sha256(own))
    if tokenizer is None:
        if model.vocab_size != 256:
            raise SettingsError(
                f"a vocabulary of {model.vocab_size} tokens needs a tokenizer (sigattn tokenizer makes one) or a .bin "
                "file of sigattn pack; bytes need a vocabulary of 256",
                "tokenizer",
                "data",
                "model.vocab_size",
            )
        if path is not None and is_streamed(path):
            return StreamedText(lambda: hub_documents(path), f"{_streamed(path)} as bytes", _bytes, model.max_seq_len)
        return TextData(TokenText.split(load_text(path), model.max_seq_len), model.max_seq_len)
    if path is None:
        raise SettingsError(
            "a tokenizer needs a text: a file, or a folder of .txt, .jsonl, .parquet and others", "data"
        )
    vocabulary = load_tokenizer(tokenizer)
    if is_streamed(path):
        check_vocabulary(vocabulary.get_vocab_size(), model.vocab_size)
        name = f"{_streamed(path)} as {tokenizer.name}, {file_sha256(tokenizer)}"
        return StreamedText(
            lambda: hub_documents(path),
            name,
            document_encoder(vocabulary),
            model.max_seq_len,
            vocab_size=model.vocab_size,
        )
    text = tokenize_corpus(path, vocabulary, model.vocab_size, model.max_seq_len)
    return TextData(text, model.max_seq_len, tokenizer=file_sha256(tokenizer))


def _streamed(path: Path) -> str:
    """Return the name of a streamed data set, with a hash of its files if it is a folder."""
    folder = Path(str(path).removeprefix("hf:"))
    if not folder.is_dir():
        return str(path)
    files = sorted(f for f in folder.rglob("*") if f.is_file())
    return f"{path} {files_sha256((str(f.relative_to(folder)), f) for f in files)}"


def _bytes(document: str) -> list[int]:
    return list((document + "\n\n").encode())


def _drawn(recipe: Recipe, model: SequenceModelConfig, path: Path | None) -> Data:
    if path is not None:
        raise SettingsError(f"{recipe.name} generates its data: name none", "data")
    if isinstance(recipe.task, KSummation):
        return synthetic.KSummation(model.seq_len, recipe.task.k)
    assert isinstance(recipe.task, PairRepeat)
    return synthetic.PairRepeat(model.num_symbols, model.seq_len, recipe.task.lengths)


def _speech(recipe: Recipe, model: SpeechModelConfig, path: Path | None) -> Data:
    if path is None:
        raise SettingsError(f"{recipe.name} trains on {recipe.data.name}: name its folder", "data")
    if not path.exists():
        raise DataError(f"no such file or folder: {path}")
    assert isinstance(recipe.task, CTC)
    tokens, unreadable = CharTokenizer(recipe.task.alphabet), UnreadableFiles("recording")
    archive = None
    if recipe.data.librispeech:
        training = librispeech(path, recipe.data.librispeech, unreadable)
        held_out = librispeech(path, ("dev-clean", "dev-other"), unreadable)
    else:
        training, held_out, archive = spoken_digits(path, unreadable=unreadable)
    return Speech(
        training,
        held_out,
        tokens,
        num_mel_bins=model.num_mel_bins,
        spec_augment_from=recipe.data.spec_augment_from,
        archive=archive,
        unreadable=unreadable,
    )


def _images(recipe: Recipe, path: Path | None, workers: int) -> Data:
    vision = recipe.transformer
    size, channels = getattr(vision, "image_size", 0), getattr(vision, "channels", 0)
    paired = isinstance(recipe.task, (SimCLR, BYOL))
    labels = not paired and not isinstance(recipe.task, MaskedAutoencoding)
    assert labels or paired or isinstance(recipe.model, MaskedAutoencoderConfig)
    if path is None:
        if (size, channels) != (8, 1):
            raise SettingsError(
                f"{recipe.name} trains on {recipe.data.name}: name a folder with train/CLASS and val/CLASS, or "
                "train its tiny form on handwritten digits",
                "data",
                "tiny",
            )
        _check_classes(labels, "the set of handwritten digits", 10, vision)
        return Digits(num_views=2 if paired else 1, labels=labels)
    augmentation, jitter = recipe.data.augmentation, recipe.data.jitter
    data = ImageFolder(path, size, augmentation, labels=labels, jitter=jitter, workers=workers)
    _check_classes(labels, str(path), len(data.classes), vision)
    return data


def _check_classes(labels: bool, name: str, found: int, vision: object) -> None:
    classes = getattr(vision, "num_classes", 0)
    if labels and found != classes:
        raise SettingsError(f"{name} has {found} classes and the model {classes}", "model.num_classes")
