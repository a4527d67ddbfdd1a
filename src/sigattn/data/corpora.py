"""Readers of speech corpora in their original layouts: LibriSpeech, TED-LIUM v3, and the Free Spoken Digit Dataset."""

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch

from sigattn.data.dataset import DataError
from sigattn.data.speech import Utterance, open_recording, read_archive
from sigattn.optional import require

_FSDD_NAME = re.compile(r"\d_[^_]+_\d+")  # digit, speaker, index
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def group_by_duration(utterances: Sequence[Utterance]) -> dict[str, list[Utterance]]:
    """Group utterances by the paper's duration buckets of TED-LIUM: 0-10 s, 10-20 s, 20-30 s, and longer."""
    groups: dict[str, list[Utterance]] = {"0-10s": [], "10-20s": [], "20-30s": [], "30s+": []}
    for u in utterances:
        list(groups.values())[min(int(u.seconds // 10), 3)].append(u)
    return groups


def librispeech(root: Path, parts: Sequence[str]) -> list[Utterance]:
    """Return the utterances of LibriSpeech, ``PART/SPEAKER/CHAPTER/`` with ``….trans.txt`` and ``….flac`` files.

    Raises DataError if a part is missing, MissingPackageError if soundfile is.
    """
    utterances = []
    for part in parts:
        transcripts = sorted((root / part).glob("*/*/*.trans.txt"))
        lines = [(transcript, line.partition(" ")) for transcript in transcripts for line in _lines(transcript)]
        if not lines:
            raise DataError(f"looked for {root / part}/SPEAKER/CHAPTER/*.trans.txt (LibriSpeech's layout), found none")
        utterances += [_recording(transcript.parent / f"{name}.flac", text) for transcript, (name, _, text) in lines]
    return utterances


def tedlium(root: Path, part: str) -> list[Utterance]:
    """Return the utterances of a part of TED-LIUM v3, ``legacy/PART/stm/*.stm`` and ``legacy/PART/sph/*.sph``.

    Raises DataError if the part is missing, or a line is not in the .stm format.
    """
    folder = root / "legacy" / part
    utterances = []
    for file in sorted((folder / "stm").glob("*.stm")):
        for line in _lines(file):
            try:
                name, _, _, first, last, *words = line.split(maxsplit=6)
                start, stop = float(first), float(last)
            except ValueError as error:
                raise DataError(f"{file}: expected a line in the .stm format, got {line[:60]!r}") from error
            text = words[1].replace("<unk>", "").replace(" '", "'") if len(words) == 2 else ""
            text = " ".join(text.split())  # words that are left out leave two spaces, or nothing else
            if text and text != "ignore_time_segment_in_scoring":
                if not 0 <= start < stop < math.inf:
                    raise DataError(f"{file}: expected a time after {first}, got {last}")
                path = folder / "sph" / f"{name}.sph"
                utterances.append(Utterance(((path, start, stop),), text, stop - start))
    if not utterances:
        raise DataError(f"looked for {folder}/stm/*.stm (TED-LIUM's layout) and found none")
    return utterances


def spoken_digits(
    source: Path, *, training: int = 3000, held_out: int = 200, longest: int = 7
) -> tuple[list[Utterance], list[Utterance]]:
    """Return training and held-out strings of 1 to ``longest`` spoken digits: FSDD recordings of one speaker.

    ``source`` is the Free Spoken Digit Dataset: the folder ``recordings``, its parent, or a .tar.gz of either. The
    ``held_out`` strings are made of the official test recordings (0 to 4). Raises DataError if there are no recordings,
    MissingPackageError if soundfile is missing.
    """
    folder = source / "recordings" if (source / "recordings").is_dir() else source
    files = read_archive(source) if source.is_file() else folder.glob("*.wav")
    strings = []
    digits: dict[bool, dict[str, list[Utterance]]] = {False: defaultdict(list), True: defaultdict(list)}
    for path in sorted(path for path in files if _FSDD_NAME.fullmatch(path.stem)):
        digit, speaker, index = path.stem.split("_")
        digits[int(index) < 5][speaker].append(_recording(path, DIGITS[int(digit)]))
    for is_test, count in ((False, training), (True, held_out)):
        if not digits[is_test]:
            raise DataError(f"looked for recordings/DIGIT_SPEAKER_INDEX.wav (FSDD's layout) in {source} and found none")
        speakers = [digits[is_test][speaker] for speaker in sorted(digits[is_test])]
        generator = torch.Generator().manual_seed(int(is_test))
        strings.append([_draw_string(speakers, longest, generator) for _ in range(count)])
    return strings[0], strings[1]


def _draw_string(speakers: list[list[Utterance]], longest: int, generator: torch.Generator) -> Utterance:
    """Draw a speaker and 1 to ``longest`` of the speaker's digits."""
    (speaker,), (length,) = (_draw(limit, 1, generator) for limit in (len(speakers), longest))
    digits = speakers[speaker]
    drawn = [digits[i] for i in _draw(len(digits), 1 + length, generator)]
    return Utterance(
        tuple(piece for digit in drawn for piece in digit.pieces),
        " ".join(digit.text for digit in drawn),
        sum(digit.seconds for digit in drawn),
    )


def _draw(limit: int, count: int, generator: torch.Generator) -> list[int]:
    return torch.randint(limit, (count,), generator=generator).tolist()


def _lines(file: Path) -> list[str]:
    """Return the lines of a transcript without empty lines and comments."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"cannot read {file}: {error}") from error
    return [line for line in lines if line.strip() and not line.startswith(";;")]


def _recording(path: Path, text: str) -> Utterance:
    """Return a whole recording; one that cannot be read has no duration, and is reported when a batch needs it."""
    soundfile = require("soundfile", "recordings", "'sigattn[speech]'")
    try:
        seconds = soundfile.info(open_recording(path)).duration
    except Exception:  # decoders raise many types of errors for broken files
        seconds = 0.0
    return Utterance(((path, 0.0, math.inf),), text, seconds)
