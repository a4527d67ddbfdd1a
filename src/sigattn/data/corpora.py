"""Speech corpora in the layouts they come in: LibriSpeech, TED-LIUM v3, and strings of spoken digits."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from sigattn.data.dataset import DataError
from sigattn.data.speech import Utterance, unpacked

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def by_duration(utterances: Sequence[Utterance]) -> dict[str, list[Utterance]]:
    """The paper's buckets of TED-LIUM: 0-10 s, 10-20 s, 20-30 s, and longer."""
    names = ("0-10s", "10-20s", "20-30s", "30s+")
    found: dict[str, list[Utterance]] = {name: [] for name in names}
    for u in utterances:
        found[names[min(int(u.seconds // 10), 3)]].append(u)
    return found


def librispeech(root: Path, parts: Sequence[str]) -> list[Utterance]:
    """LibriSpeech: ``PART/SPEAKER/CHAPTER/….trans.txt`` beside ``….flac``.

    Raises:
        DataError: if a part is not there, or soundfile is missing.
    """
    soundfile = _soundfile()
    found = []
    for part in parts:
        folder = root / part
        for transcript in sorted(folder.glob("*/*/*.trans.txt")):
            for line in transcript.read_text().splitlines():
                name, _, text = line.partition(" ")
                path = transcript.parent / f"{name}.flac"
                found.append(Utterance(((path, 0.0, math.inf),), text, soundfile.info(path).duration))
        if not found:
            raise DataError(f"looked for {folder}/SPEAKER/CHAPTER/*.trans.txt (LibriSpeech's layout) and found none")
    return found


def tedlium(root: Path, part: str) -> list[Utterance]:
    """TED-LIUM v3: ``legacy/PART/stm/*.stm`` beside ``legacy/PART/sph/*.sph``.

    Raises:
        DataError: if the part is not there.
    """
    folder = root / "legacy" / part
    found = []
    for file in sorted((folder / "stm").glob("*.stm")):
        for line in file.read_text().splitlines():
            name, _, _, first, last, *words = line.split(maxsplit=6)
            text = words[1] if len(words) == 2 else ""
            if text and text != "ignore_time_segment_in_scoring":
                path = folder / "sph" / f"{name}.sph"
                start, stop = float(first), float(last)
                found.append(
                    Utterance(((path, start, stop),), text.replace("<unk>", "").replace(" '", "'"), stop - start)
                )
    if not found:
        raise DataError(f"looked for {folder}/stm/*.stm (TED-LIUM's layout) and found none")
    return found


def spoken_digits(
    source: Path, *, training: int = 3000, held_out: int = 200, longest: int = 7
) -> tuple[list[Utterance], list[Utterance], Path | None]:
    """Strings of spoken digits: the Free Spoken Digit Dataset's recordings, 1 to ``longest`` of one speaker in a row.

    Args:
        source: the folder ``recordings`` (or what holds it), or the whole as .tar.gz.
        training, held_out: number of strings. Held-out ones are of the official test recordings (0 to 4).

    Returns:
        Strings to train on, held-out ones, and the archive, where source is one.

    Raises:
        DataError: if no recordings are there.
    """
    soundfile = _soundfile()
    if source.is_file():
        archive, files = source, unpacked(source)
        durations = {Path(n): soundfile.info(io.BytesIO(b)).duration for n, b in files.items()}
    else:
        archive, folder = None, source / "recordings" if (source / "recordings").is_dir() else source
        durations = {p: soundfile.info(p).duration for p in sorted(folder.glob("*_*_*.wav"))}
    if not durations:
        raise DataError(f"looked for recordings/DIGIT_SPEAKER_INDEX.wav (FSDD's layout) in {source} and found none")
    made = []
    for test, count in ((False, training), (True, held_out)):
        by_speaker: dict[str, list[Path]] = {}
        for path in sorted(durations):
            _, speaker, index = path.stem.split("_")
            if (int(index) < 5) == test:
                by_speaker.setdefault(speaker, []).append(path)
        made.append(_strings(by_speaker, durations, count, longest, seed=int(test)))
    return made[0], made[1], archive


def _strings(
    by_speaker: dict[str, list[Path]], durations: dict[Path, float], count: int, longest: int, seed: int
) -> list[Utterance]:
    generator = torch.Generator().manual_seed(seed)

    def draw(limit: int) -> int:
        return int(torch.randint(limit, (), generator=generator))

    speakers, strings = sorted(by_speaker), []
    for _ in range(count):
        recordings = by_speaker[speakers[draw(len(speakers))]]
        paths = [recordings[draw(len(recordings))] for _ in range(1 + draw(longest))]
        text = " ".join(DIGITS[int(p.stem.split("_")[0])] for p in paths)
        pieces = tuple((p, 0.0, math.inf) for p in paths)
        strings.append(Utterance(pieces, text, sum(durations[p] for p in paths)))
    return strings


def _soundfile() -> Any:
    try:
        import soundfile
    except ModuleNotFoundError as error:
        raise DataError("recordings are read by soundfile: pip install 'sigattn[speech]'") from error
    return soundfile
