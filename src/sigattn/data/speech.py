"""Speech data set: transcribed utterances as batches of log-mel frames."""

from __future__ import annotations

import functools
import hashlib
import io
import itertools
import math
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sigattn.data.dataset import Batch, Data, DataError, PlaceholderBatch, UnreadableFiles, sample_generator
from sigattn.data.speech_features import log_mel, spec_augment
from sigattn.files import files_sha256

MAX_CACHED_BYTES = 1 << 28  # of frames in memory: computing them takes up to a third of a small model's training


@functools.cache
def read_archive(archive: Path) -> dict[str, bytes]:
    """Return the contents of the .wav files in a .tar archive, by name; raise DataError if it cannot be read."""
    try:
        with tarfile.open(archive) as tar:
            members = [member for member in tar if member.isreg() and member.name.endswith(".wav")]
            return {m.name: file.read() for m in members if (file := tar.extractfile(m)) is not None}
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        raise DataError(f"cannot read the archive {archive}: {error}") from error


@dataclass(frozen=True)
class Utterance:
    """Transcribed speech.

    Attributes:
        pieces: (file, start, end) in seconds, concatenated in this order; an end of infinity is the file's end.
        text: the transcript.
        seconds: duration.
    """

    pieces: tuple[tuple[Path, float, float], ...]
    text: str
    seconds: float


class Speech(Data):
    """Utterances in batches of similar length whose size is given in seconds.

    A recording that cannot be read is counted, reported and left out. If they are more than half of all, ``DataError``
    is raised.

    Args:
        training: training utterances.
        held_out: held-out utterances.
        tokenizer: the tokenizer.
        num_mel_bins: number of mel bins.
        spec_augment_from: step from which SpecAugment is applied; None turns it off.
        archive: a tar file that contains the recordings; None if they are files on the disk.
        unreadable: recordings of these utterances already found to be unreadable.
    """

    batch_unit = "seconds"

    def __init__(
        self,
        training: Sequence[Utterance],
        held_out: Sequence[Utterance],
        tokenizer: CharTokenizer,
        *,
        num_mel_bins: int = 80,
        spec_augment_from: int | None = 0,
        archive: Path | None = None,
        unreadable: UnreadableFiles | None = None,
    ) -> None:
        self.training = training
        self.held_out = held_out
        self.tokenizer = tokenizer
        self.num_mel_bins = num_mel_bins
        self.spec_augment_from = spec_augment_from
        files = {path for u in (*training, *held_out) for path, _, _ in u.pieces}
        self.unreadable: UnreadableFiles = (
            UnreadableFiles("recording", len(files)) if unreadable is None else unreadable
        )
        self._archive, self._source = {} if archive is None else read_archive(archive), archive
        self._epochs: list[list[list[int]]] = []
        self._epochs_key: tuple[int, int] | None = None  # (size, seed) of _epochs
        self._cached_frames: dict[Utterance, Tensor] = {}
        self._cached_bytes = 0

    def batch(self, step: int, size: int, seed: int, shard: tuple[int, int] = (0, 1)) -> Batch:
        """Return frames (B, T, num_mel_bins), lengths (B,), targets (B, C) and target lengths (B,).

        ``size`` is the largest duration of the batch over all processes, in seconds including padding.
        """
        chosen, epoch = self._chosen(step, size, seed)
        mask = self.spec_augment_from is not None and step >= self.spec_augment_from
        local = chosen[shard[0] :: shard[1]]
        batch_type = tuple if local else PlaceholderBatch
        local = local or chosen[:1]
        samples = list(self._readable(self.training, local))
        if not samples:  # replaced by the next readable utterance
            count = len(self.training)
            others = ((local[-1] + offset) % count for offset in range(1, count))
            samples = list(itertools.islice(self._readable(self.training, others), 1))
        if not samples:
            raise DataError("no recording to train on can be read")
        if mask:
            samples = [(i, spec_augment(frames, sample_generator(seed, epoch, i)), text) for i, frames, text in samples]
        return batch_type(collate([(frames, text) for _, frames, text in samples]))

    def _readable(
        self, utterances: Sequence[Utterance], indices: Iterable[int]
    ) -> Iterator[tuple[int, Tensor, list[int]]]:
        """Iterate over index, frames and tokens of the utterances that can be read."""
        for i in indices:
            if (frames := self._frames(utterances[i])) is not None:
                yield i, frames, self.tokenizer(utterances[i].text)

    def validation(self, size: int) -> Iterable[Batch]:
        """Iterate over the held-out utterances, shortest first, in batches of at most ``size`` seconds.

        Raises:
            DataError: if there are held-out utterances and none can be read.
        """
        read = 0
        order = sorted(range(len(self.held_out)), key=lambda i: self.held_out[i].seconds)
        for group in _groups(order, self.held_out, float(size)):
            readable = [(frames, text) for _, frames, text in self._readable(self.held_out, group)]
            if readable:
                read += len(readable)
                yield collate(readable)
        if self.held_out and not read:
            raise DataError("no held-out recording can be read")

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of settings, transcripts, names and times, and of the files (``sigattn.files.files_sha256``)."""
        digest = hashlib.sha256(f"{self.num_mel_bins} {self.spec_augment_from}".encode())
        paths = {self._source} if self._source is not None else set()
        for u in (*self.training, *self.held_out):
            digest.update(f"{[(p.name, a, b) for p, a, b in u.pieces]} {u.text}\n".encode())
            if self._source is None:
                paths |= {p for p, _, _ in u.pieces}
        ordered = sorted(paths)
        digest.update(files_sha256((path.name, path) for path in ordered).encode())
        return digest.hexdigest()

    def _chosen(self, step: int, size: int, seed: int) -> tuple[list[int], int]:
        """Return the utterances of a step and its epoch; every epoch has its own grouping and order of batches."""
        if self._epochs_key != (size, seed):
            self._epochs, self._epochs_key = [], (size, seed)
        before = 0
        for epoch in range(step + 1):
            if epoch == len(self._epochs):
                self._epochs.append(self._epoch(epoch, size, seed))
            if step < before + len(self._epochs[epoch]):
                return self._epochs[epoch][step - before], epoch
            before += len(self._epochs[epoch])
        raise AssertionError("every epoch has a batch")

    def _epoch(self, epoch: int, size: int, seed: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        noise = torch.rand(len(self.training), generator=generator).tolist()
        order = sorted(range(len(self.training)), key=lambda i: self.training[i].seconds * (0.9 + 0.2 * noise[i]))
        groups = _groups(order, self.training, float(size))
        return [groups[i] for i in torch.randperm(len(groups), generator=generator).tolist()]

    def _frames(self, utterance: Utterance) -> Tensor | None:
        """Return the log-mel frames of an utterance, or None if one of its recordings cannot be read.

        The frames of the first utterances are cached, up to ``MAX_CACHED_BYTES``.
        """
        if utterance in self._cached_frames:
            return self._cached_frames[utterance]
        parts, rate = [], 0
        for piece in utterance.pieces:
            try:
                wave, rate = self._wave(*piece)
            except Exception as error:  # decoders raise many types of errors for broken files
                self.unreadable.add(str(piece[0]), f"{type(error).__name__}: {error}")
                return None
            parts.append(wave)
        frames = log_mel(torch.cat(parts), rate, self.num_mel_bins)
        if self._cached_bytes + frames.nbytes <= MAX_CACHED_BYTES:
            self._cached_frames[utterance] = frames
            self._cached_bytes += frames.nbytes
        return frames

    def _wave(self, path: Path, first: float, last: float) -> tuple[Tensor, int]:
        """Read a recording, averaged over channels: (samples,) and the sampling rate in Hz."""
        import soundfile

        file: Path | io.BytesIO = io.BytesIO(self._archive[str(path)]) if self._archive else path
        with soundfile.SoundFile(file) as sound:
            sound.seek(round(first * sound.samplerate))
            count = -1 if last == math.inf else round((last - first) * sound.samplerate)
            wave = torch.from_numpy(sound.read(count, dtype="float32", always_2d=True).mean(1))
            if not len(wave):
                raise EOFError(f"the recording has no samples at {first:g} s")
            return wave, sound.samplerate


class CharTokenizer:
    """Tokenizer of characters: 1, 2, … for the characters of an alphabet, with "|" for white space."""

    def __init__(self, alphabet: str) -> None:
        self.alphabet = alphabet

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a text in lower case; characters that are not in the alphabet are left out."""
        tokens = [self.alphabet.find("|" if c.isspace() else c) + 1 for c in text.lower().strip()]
        return [t for t in tokens if t]


def collate(samples: Sequence[tuple[Tensor, list[int]]]) -> Batch:
    """Return frames (B, T, num_mel_bins), lengths (B,), targets (B, C) and target lengths (B,), padded with zeros."""
    frames, texts = zip(*samples, strict=True)
    targets = [torch.tensor(t, dtype=torch.int64) for t in texts]
    pad = torch.nn.utils.rnn.pad_sequence
    lengths = torch.tensor([len(f) for f in frames])
    return pad(list(frames), True), lengths, pad(targets, True), torch.tensor([len(t) for t in targets])


def _groups(order: Sequence[int], utterances: Sequence[Utterance], seconds: float) -> list[list[int]]:
    """Group consecutive utterances into batches of at most ``seconds`` including padding, or of one utterance."""
    groups: list[list[int]] = []
    longest = 0.0
    for i in order:
        longest = max(longest, utterances[i].seconds)
        if not groups or longest * (len(groups[-1]) + 1) > seconds:
            groups.append([])
            longest = utterances[i].seconds
        groups[-1].append(i)
    return groups
