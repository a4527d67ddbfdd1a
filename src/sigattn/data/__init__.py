"""Data sets of text, images and speech, as batches that depend on seed and step only."""

from sigattn.data.corpora import group_by_duration, librispeech, spoken_digits, tedlium
from sigattn.data.dataset import Batch, Data, DataError, PlaceholderBatch, UnreadableFiles
from sigattn.data.documents import iter_documents
from sigattn.data.images import Digits, ImageFolder
from sigattn.data.speech import CharTokenizer, Speech, Utterance
from sigattn.data.text import StreamedText, TextData, load_text
from sigattn.data.tokens import load_packed, load_tokenizer, pack_corpus, tokenize_corpus, train_tokenizer

__all__ = [
    "Batch", "CharTokenizer", "Data", "DataError", "Digits", "ImageFolder", "PlaceholderBatch", "Speech",
    "StreamedText", "TextData", "UnreadableFiles", "Utterance", "group_by_duration", "iter_documents", "librispeech",
    "load_packed", "load_text", "load_tokenizer", "pack_corpus", "spoken_digits", "tedlium", "tokenize_corpus",
    "train_tokenizer",
]  # fmt: skip
