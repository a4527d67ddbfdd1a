"""Speech data set: transcribed utterances as batches of log-mel frames, with SpecAugment."""

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
from sigattn.files import files_sha256

Sample = tuple[int, Tensor, list[int]]  # index, frames and tokens of an utterance
MAX_CACHED_BYTES = 1 << 28  # of frames in memory: computing them takes up to a third of a small model's training


@functools.cache
def read_archive(archive: Path) -> dict[Path, bytes]:
    """Return the contents of the .wav files in a .tar archive; the path of a file starts with that of the archive."""
    try:
        with tarfile.open(archive) as tar:
            members = [member for member in tar if member.isreg() and member.name.endswith(".wav")]
            return {archive / m.name: file.read() for m in members if (file := tar.extractfile(m)) is not None}
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        raise DataError(f"cannot read the archive {archive}: {error}") from error


def _file_of(path: Path) -> Path:
    """Return the archive that contains a recording, or its own path if it is in none."""
    return path if path.is_file() else next((parent for parent in path.parents if parent.is_file()), path)


def open_recording(path: Path) -> Path | io.BytesIO:
    """Return what soundfile opens: the path of a recording, or its content if it is in an archive."""
    file = _file_of(path)
    return path if file == path else io.BytesIO(read_archive(file)[path])


@dataclass(frozen=True)
class Utterance:
    """Transcribed speech: its transcript, its duration in seconds, and its pieces, concatenated in this order.

    A piece is (file, start, end) in seconds; an end of infinity is the file's end. A file may be in a .tar archive:
    ``digits.tar.gz/recordings/0_ann_1.wav``.
    """

    pieces: tuple[tuple[Path, float, float], ...]
    text: str
    seconds: float


class Speech(Data):
    """Utterances in batches of similar length whose size is given in seconds.

    A recording that cannot be read is counted, reported and left out. If they are more than half of all, ``DataError``
    is raised. SpecAugment is applied from the step ``spec_augment_from`` on; None turns it off.
    """

    batch_unit = "seconds"

    def __init__(
        self, training: Sequence[Utterance], held_out: Sequence[Utterance], tokenizer: "CharTokenizer", *,
        num_mel_bins: int = 80, spec_augment_from: int | None = 0,
    ) -> None:  # fmt: skip
        self.training, self.held_out, self.tokenizer = training, held_out, tokenizer
        self.num_mel_bins, self.spec_augment_from = num_mel_bins, spec_augment_from
        files = {path for u in (*training, *held_out) for path, _, _ in u.pieces}
        self.unreadable: UnreadableFiles = UnreadableFiles("recording", len(files))
        self._epochs: dict[tuple[int, int, int], list[list[int]]] = {}
        self._cached_frames: dict[Utterance, Tensor] = {}
        self._cached_bytes = 0

    def batch(self, step: int, size: int, seed: int, shard: tuple[int, int] = (0, 1)) -> Batch:
        """Return frames (B, T, num_mel_bins), lengths (B,), targets (B, C) and target lengths (B,).

        ``size`` is the largest duration of the batch over all processes, in seconds including padding.
        """
        chosen, epoch = self._chosen(step, size, seed)
        local, count = chosen[shard[0] :: shard[1]], len(self.training)
        batch_type, local = tuple if local else PlaceholderBatch, local or chosen[:1]
        samples = list(self._readable(self.training, local))
        if not samples:  # replaced by the next readable utterance
            others = ((local[-1] + offset) % count for offset in range(1, count))
            samples = list(itertools.islice(self._readable(self.training, others), 1))
        if not samples:
            raise DataError("no recording to train on can be read")
        if self.spec_augment_from is not None and step >= self.spec_augment_from:
            samples = [(i, spec_augment(frames, sample_generator(seed, epoch, i)), text) for i, frames, text in samples]
        return batch_type(collate(samples))

    def _readable(self, utterances: Sequence[Utterance], indices: Iterable[int]) -> Iterator[Sample]:
        """Iterate over index, frames and tokens of the utterances that can be read."""
        for i in indices:
            if (frames := self._frames(utterances[i])) is not None:
                yield i, frames, self.tokenizer(utterances[i].text)

    def validation(self, size: int) -> Iterable[Batch]:
        """Iterate over the held-out utterances, shortest first, in batches of at most ``size`` seconds.

        Raises DataError if there are held-out utterances and none can be read.
        """
        is_readable = False
        order = sorted(range(len(self.held_out)), key=lambda i: self.held_out[i].seconds)
        for group in _groups(order, self.held_out, float(size)):
            if samples := list(self._readable(self.held_out, group)):
                is_readable = True
                yield collate(samples)
        if self.held_out and not is_readable:
            raise DataError("no held-out recording can be read")

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of settings, transcripts, names and times, and of the files (``sigattn.files.files_sha256``)."""
        digest = hashlib.sha256(f"{self.num_mel_bins} {self.spec_augment_from}".encode())
        paths = set()
        for u in (*self.training, *self.held_out):
            digest.update(f"{[(p.name, a, b) for p, a, b in u.pieces]} {u.text}\n".encode())
            paths |= {p for p, _, _ in u.pieces}
        files = sorted({_file_of(path) for path in paths})
        digest.update(files_sha256((file.name, file) for file in files).encode())
        return digest.hexdigest()

    def _chosen(self, step: int, size: int, seed: int) -> tuple[list[int], int]:
        """Return the utterances of a step and its epoch; every epoch has its own grouping and order of batches."""
        for epoch in range(step + 1):
            groups = self._epoch(epoch, size, seed)
            if step < len(groups):
                return groups[step], epoch
            step -= len(groups)
        raise AssertionError("every epoch has a batch")

    def _epoch(self, epoch: int, size: int, seed: int) -> list[list[int]]:
        """Return the batches of an epoch, which are kept, because later steps count them."""
        key = epoch, size, seed
        if key not in self._epochs:
            generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
            noise = torch.rand(len(self.training), generator=generator).tolist()
            order = sorted(range(len(self.training)), key=lambda i: self.training[i].seconds * (0.9 + 0.2 * noise[i]))
            groups = _groups(order, self.training, float(size))
            self._epochs[key] = [groups[i] for i in torch.randperm(len(groups), generator=generator).tolist()]
        return self._epochs[key]

    def _frames(self, utterance: Utterance) -> Tensor | None:
        """Return the log-mel frames of an utterance, cached if memory allows; None if a recording cannot be read."""
        if utterance in self._cached_frames:
            return self._cached_frames[utterance]
        parts, rate = [], 0
        for piece in utterance.pieces:
            try:
                wave, rate = _read(*piece)
            except Exception as error:  # decoders raise many types of errors for broken files
                self.unreadable.add(str(piece[0]), f"{type(error).__name__}: {error}")
                return None
            parts.append(wave)
        frames = log_mel(torch.cat(parts), rate, self.num_mel_bins)
        if self._cached_bytes + frames.nbytes <= MAX_CACHED_BYTES:
            self._cached_frames[utterance] = frames
            self._cached_bytes += frames.nbytes
        return frames


def _read(path: Path, first: float, last: float) -> tuple[Tensor, int]:
    """Return a part of a recording, averaged over channels, (samples,), and its sampling rate in Hz."""
    import soundfile

    with soundfile.SoundFile(open_recording(path)) as sound:
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


def collate(samples: Sequence[Sample]) -> Batch:
    """Return frames, lengths, targets and target lengths of samples, padded with zeros."""
    frames = [sample[1] for sample in samples]
    targets = [torch.tensor(sample[2], dtype=torch.int64) for sample in samples]
    lengths, target_lengths = (torch.tensor([len(row) for row in rows]) for rows in (frames, targets))
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(frames, True), lengths, pad(targets, True), target_lengths


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


def log_mel(waveform: Tensor, sample_rate: int, num_mel_bins: int = 80) -> Tensor:
    """Return log-mel frames (T, num_mel_bins) of a waveform (samples,) with its sampling rate in Hz.

    A frame is 25 ms every 10 ms. Each bin is normalised to mean 0 and variance 1.
    """
    window, hop = round(0.025 * sample_rate), round(0.01 * sample_rate)
    size = max(512, 1 << (window - 1).bit_length())
    spectrum = torch.stft(
        waveform, size, hop, window, torch.hann_window(window), center=True, pad_mode="constant", return_complex=True
    )
    energy = mel_filters(size, sample_rate, num_mel_bins) @ spectrum.abs().square()  # (mels, frames)
    frames = energy.clamp(min=1e-10).log().mT
    return (frames - frames.mean(0)) / (frames.var(0, unbiased=False) + 1e-5).sqrt()


@functools.cache
def mel_filters(fft_size: int, sample_rate: int, num_mel_bins: int) -> Tensor:
    """Return triangular filters (num_mel_bins, fft_size / 2 + 1) from 20 Hz to half the sample rate.

    They are evenly spaced on the mel scale 2595 log₁₀(1 + f / 700).
    """
    low, high = (2595 * math.log10(1 + f / 700) for f in (20.0, sample_rate / 2))
    corners = 700 * (10 ** (torch.linspace(low, high, num_mel_bins + 2, device="cpu") / 2595) - 1)
    bins = torch.linspace(0, sample_rate / 2, fft_size // 2 + 1, device="cpu")
    rising = (bins - corners[:-2, None]) / (corners[1:-1] - corners[:-2])[:, None]
    falling = (corners[2:, None] - bins) / (corners[2:] - corners[1:-1])[:, None]
    return torch.minimum(rising, falling).clamp(min=0)


def spec_augment(frames: Tensor, generator: torch.Generator) -> Tensor:
    """Apply SpecAugment (Park et al., 2019) to frames (T, num_mel_bins), with the paper's numbers.

    Two masks of at most 30 frequencies, and ten of at most 50 frames and a tenth of the sample, become 0, the mean.
    """
    frames = frames.clone()

    def mask(rows: Tensor, limit: int) -> None:
        width = int(torch.randint(min(limit, len(rows)) + 1, (), generator=generator))
        start = int(torch.randint(len(rows) - width + 1, (), generator=generator))
        rows[start : start + width] = 0

    for _ in range(2):
        mask(frames.T, 30)
    for _ in range(10):
        mask(frames, min(50, len(frames) // 10))
    return frames
