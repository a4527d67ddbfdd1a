"""Speech: features against formulas, batches by seconds, corpora in their layouts, broken recordings."""

import math
import tarfile

import pytest
import torch

from sigattn.data import speech
from sigattn.data.corpora import group_by_duration, librispeech, spoken_digits, tedlium
from sigattn.data.dataset import DataError, PlaceholderBatch
from sigattn.data.speech import CharTokenizer, Speech, Utterance, log_mel, mel_filters, spec_augment

soundfile = pytest.importorskip("soundfile")
ALPHABET = "|'abcdefghijklmnopqrstuvwxyz"


def tone(seconds, rate=8000, pitch=440.0):
    return 0.3 * torch.sin(2 * math.pi * pitch * torch.arange(round(seconds * rate)) / rate)


@pytest.fixture
def digits(tmp_path):
    folder = tmp_path / "fsdd" / "recordings"
    folder.mkdir(parents=True)
    for digit in range(10):
        for speaker in ("ann", "bob"):
            for index in (0, 1, 7, 8):
                wave = tone(0.2 + 0.02 * digit, pitch=200 + 50 * digit)
                soundfile.write(folder / f"{digit}_{speaker}_{index}.wav", wave.numpy(), 8000)
    return tmp_path / "fsdd"


class TestFeatures:
    def test_tone_peaks_in_its_mel_bin(self):
        for rate, pitch in ((16_000, 1000.0), (8000, 300.0)):
            assert (mel_filters(512, rate, 80).sum(1) > 0).all()
            wave = tone(1.0, rate, pitch) + 1e-3 * torch.randn(rate)
            spectrum = torch.stft(wave, 512, 160, 400, torch.hann_window(400), return_complex=True).abs().square()
            energy = mel_filters(512, rate, 80) @ spectrum
            low, high = (2595 * math.log10(1 + f / 700) for f in (20.0, rate / 2))
            centre = (2595 * math.log10(1 + pitch / 700) - low) / (high - low) * 81 - 1
            assert abs(energy.mean(1).argmax() - centre) <= 1

    def test_frames_are_10_ms_apart_and_standardised(self):
        frames = log_mel(torch.randn(16_000), 16_000)
        assert frames.shape == (101, 80)
        torch.testing.assert_close(frames.mean(0), torch.zeros(80), atol=1e-4, rtol=0)
        torch.testing.assert_close(frames.std(0), torch.ones(80), atol=0.01, rtol=0)
        assert log_mel(torch.zeros(8000), 8000).isfinite().all()  # silence

    def test_spec_augment_keeps_its_limits(self):
        for length in (300, 1000, 5):
            masked = []
            for i in range(20):
                out = spec_augment(torch.ones(length, 80), torch.Generator().manual_seed(i))
                columns, rows = ((out == 0).all(dim) for dim in (0, 1))
                assert columns.sum() <= 60
                assert ((out == 0) == (columns[None] | rows[:, None])).all()
                masked.append(int(rows.sum()))
            widest = min(50, length // 10)  # of ten masks, half as wide on average, which may overlap
            assert 3 * widest <= sum(masked) / 20 <= 5.5 * widest


def data_of(digits, spec_augment_from=None, training=60):
    strings, held_out = spoken_digits(digits, training=training, held_out=12)
    return Speech(strings, held_out, CharTokenizer(ALPHABET), spec_augment_from=spec_augment_from)


class TestBatches:
    def test_an_epoch_has_each_utterance_once_in_batches_of_so_many_seconds(self, digits):
        data = data_of(digits)
        epoch = data._epoch(0, 6, seed=0)
        assert sorted(i for group in epoch for i in group) == list(range(60))
        for group in epoch:
            assert max(data.training[i].seconds for i in group) * len(group) <= 6 or len(group) == 1
        step = len(epoch) + 1  # the second batch of the second epoch
        chosen, number = data._chosen(step, 6, seed=0)
        assert (chosen, number) == (data._epoch(1, 6, seed=0)[1], 1)
        assert data._epoch(1, 6, seed=0) != epoch != data._epoch(0, 6, seed=1)

    def test_padding_lengths_targets_and_shards(self, digits):
        """A process without an utterance has a placeholder."""
        data = data_of(digits)
        frames, lengths, targets, counts = data.batch(0, 6, seed=0)
        chosen, _ = data._chosen(0, 6, seed=0)
        for row, i in enumerate(chosen):
            utterance = data.training[i]
            assert lengths[row] == pytest.approx(100 * utterance.seconds, abs=2)
            assert not frames[row, lengths[row] :].any()
            words = "".join(ALPHABET[t - 1] for t in targets[row, : counts[row]].tolist()).replace("|", " ")
            assert words == utterance.text
        count = len(frames)
        parts = [data.batch(0, 6, seed=0, shard=(rank, count + 1)) for rank in range(count + 1)]
        assert [isinstance(part, PlaceholderBatch) for part in parts] == [False] * count + [True]
        for part, whole in zip(parts, frames, strict=False):
            assert torch.equal(part[0][0], whole[: part[1][0]])
        assert sum(len(b[0]) for b in data.validation(4)) == 12

    def test_masks_begin_at_a_step_differ_from_epoch_to_epoch_and_leave_cached_frames_alone(self, digits):
        late, never = data_of(digits, 1, training=12), data_of(digits, training=12)
        masked = []
        for step in range(4):  # the whole set is one batch: an epoch is one step
            chosen, number = late._chosen(step, 1000, seed=0)
            assert number == step
            frames, lengths, *_ = late.batch(step, 1000, seed=0)
            assert torch.equal(frames, never.batch(step, 1000, seed=0)[0]) == (step == 0)
            masked.append(frames[chosen.index(0), : lengths[chosen.index(0)]] != 0)
            if step == 1:
                first = frames
        assert not torch.equal(masked[1], masked[2])
        assert not torch.equal(masked[2], masked[3])
        assert torch.equal(late.batch(1, 1000, seed=0)[0], first)

    def test_cached_frames_stay_within_a_limit_of_memory(self, digits, monkeypatch):
        monkeypatch.setattr(speech, "MAX_CACHED_BYTES", 100_000)
        data = data_of(digits)
        for _ in range(2):
            data.batch(0, 1000, seed=0)
        assert 0 < sum(frames.nbytes for frames in data._cached_frames.values()) == data._cached_bytes <= 100_000

    def test_broken_recordings_are_counted_and_left_out(self, digits, capsys):
        data = data_of(digits)
        first, *_ = data._chosen(0, 6, seed=0)[0]
        broken, missing = data.training[first].pieces[0][0], data.held_out[0].pieces[0][0]
        broken.write_bytes(b"no sound")
        missing.unlink()
        for _ in range(2):
            frames, *_ = data.batch(0, 6, seed=0)
            assert len(frames) < len(data._chosen(0, 6, seed=0)[0])
        assert 0 < sum(len(b[0]) for b in data.validation(4)) < 12
        assert set(data.unreadable.errors) == {str(broken), str(missing)}
        assert capsys.readouterr().out.count(f"unreadable recording {broken}: ") == 1
        assert data.unreadable_summary().startswith("2 of ")

    def test_mostly_broken_recordings_are_an_error(self, digits, capsys):
        """One in a batch of its own is replaced."""
        data, other = data_of(digits), data_of(digits)
        (chosen,) = data._chosen(0, 0, seed=0)[0]  # no seconds at all: each batch is one utterance
        data.training[chosen].pieces[0][0].write_bytes(b"no sound")
        frames, lengths, *_ = data.batch(0, 0, seed=0)
        assert len(frames) == len(lengths) == 1
        assert frames.isfinite().all()
        for file in (digits / "recordings").glob("*.wav"):
            file.write_bytes(b"no sound")
        with pytest.raises(DataError, match=r"recordings cannot be read, the last .*wav: LibsndfileError"):
            list(zip(range(99), other.batches(0, 6, seed=0), strict=False))
        missing = [Utterance(((digits / f"{i}.wav", 0.0, math.inf),), "one", 1.0) for i in range(4)]
        with pytest.raises(DataError, match="no held-out recording can be read"):
            list(Speech(missing[:3], missing[3:], CharTokenizer(ALPHABET)).validation(4))

    def test_fingerprint_depends_on_texts_and_contents(self, tmp_path):
        path = tmp_path / "a.wav"
        path.write_bytes(b"RIFF and so on")
        utterance, other = (Utterance(((path, 0.0, 1.0),), text, 1.0) for text in ("one", "two"))
        before = Speech([utterance], [], CharTokenizer("abc")).fingerprint
        assert Speech([utterance], [], CharTokenizer("abc")).fingerprint == before
        assert Speech([other], [], CharTokenizer("abc")).fingerprint != before
        path.write_bytes(b"RIFF and so off")
        assert Speech([utterance], [], CharTokenizer("abc")).fingerprint != before


class TestCorpora:
    def test_spoken_digits(self, digits, tmp_path):
        """In a folder or an archive."""
        (digits / "recordings" / "readme_of_this.wav").write_bytes(b"not a recording of a digit")
        training, held_out = spoken_digits(digits, training=50, held_out=20)
        assert (len(training), len(held_out)) == (50, 20)
        names = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
        for part, test in ((training, False), (held_out, True)):
            for u in part:
                stems = [p.stem.split("_") for p, _, _ in u.pieces]
                assert u.text.split() == [names[int(d)] for d, _, _ in stems]
                assert len({speaker for _, speaker, _ in stems}) == 1
                assert all((int(index) < 5) == test for *_, index in stems)
        packed = tmp_path / "fsdd.tar.gz"
        with tarfile.open(packed, "w:gz") as tar:
            tar.add(digits, "fsdd")
        again, _ = spoken_digits(packed, training=50, held_out=20)
        assert [(u.text, u.seconds) for u in again] == [(u.text, u.seconds) for u in training]
        a, b = (Speech(strings, [], CharTokenizer(ALPHABET)) for strings in (training, again))
        assert torch.equal(a.batch(0, 6, seed=0)[0], b.batch(0, 6, seed=0)[0])
        before = b.fingerprint
        packed.write_bytes(packed.read_bytes() + b"changed")
        assert Speech(again, [], CharTokenizer(ALPHABET)).fingerprint != before
        with pytest.raises(DataError, match="FSDD's layout"):
            spoken_digits(tmp_path)
        (tmp_path / "broken.tar.gz").write_bytes(b"no archive")
        with pytest.raises(DataError, match="cannot read the archive"):
            spoken_digits(tmp_path / "broken.tar.gz")

    def test_librispeech(self, tmp_path, capsys):
        chapter = tmp_path / "dev-clean" / "12" / "34"
        chapter.mkdir(parents=True)
        names, words = [f"12-34-000{i}" for i in range(4)], ("HELLO WORLD", "IT'S", "A", "B")
        text = chapter / "12-34.trans.txt"
        text.write_text("\n\n".join(f"{name} {said}" for name, said in zip(names, words, strict=True)))
        for name, seconds in zip(names, (1.5, 0.5), strict=False):
            soundfile.write(chapter / f"{name}.flac", tone(seconds, 16_000).numpy(), 16_000)
        (chapter / f"{names[2]}.flac").write_bytes(b"no sound")
        found = librispeech(tmp_path, ["dev-clean"])
        assert [(u.text, u.seconds) for u in found] == list(zip(words, (1.5, 0.5, 0.0, 0.0), strict=True))
        data = Speech(found, [], CharTokenizer(ALPHABET), spec_augment_from=None)
        assert sorted(data.batch(0, 10, 0)[1].tolist()) == [51, 151]
        assert set(data.unreadable.errors) == {str(chapter / f"{name}.flac") for name in names[2:]}
        assert "2 of 4 recordings could not be read" in data.unreadable_summary()
        (chapter / f"{names[1]}.flac").unlink()
        with pytest.raises(DataError, match="3 of 4 recordings cannot be read"):
            Speech(librispeech(tmp_path, ["dev-clean"]), [], CharTokenizer(ALPHABET)).batch(0, 10, 0)
        text.write_bytes(b"\xff\xfe")
        with pytest.raises(DataError, match=r"cannot read .*12-34\.trans\.txt"):
            librispeech(tmp_path, ["dev-clean"])
        with pytest.raises(DataError, match="test-clean/SPEAKER/CHAPTER"):
            librispeech(tmp_path, ["test-clean"])

    def test_tedlium(self, tmp_path):
        talk = tmp_path / "legacy" / "test"
        for name in ("stm", "sph"):
            (talk / name).mkdir(parents=True)
        (talk / "stm" / "ann.stm").write_text(
            "ann 1 ann 0.50 2.00 <o,f0,male> we <unk> it 's fine\n"
            "ann 1 ann 2.00 2.20 <o,f0,male> <unk>\n"
            "ann 1 inter_segment_gap 2.00 2.50 <o,,unknown> ignore_time_segment_in_scoring\n"
        )
        soundfile.write(talk / "sph" / "ann.sph", tone(3.0, 16_000).numpy(), 16_000, format="NIST", subtype="PCM_16")
        (found,) = tedlium(tmp_path, "test")
        assert found.text == "we it's fine"
        assert found.seconds == 1.5
        _, lengths, *_ = Speech([found], [], CharTokenizer(ALPHABET), spec_augment_from=None).batch(0, 10, 0)
        assert lengths.tolist() == [151]
        with pytest.raises(DataError, match=r"legacy/dev/stm/\*\.stm"):
            tedlium(tmp_path, "dev")
        for line, message in (
            ("ann 1 ann", "expected a line in the .stm format"),
            ("a 1 a 2.0 1.0 <o> we", "a time after 2.0"),
        ):
            (talk / "stm" / "ann.stm").write_text(line + "\n")
            with pytest.raises(DataError, match=message):
                tedlium(tmp_path, "test")

    def test_group_by_duration(self):
        made = [Utterance((), "", s) for s in (0.5, 9.99, 10.0, 25.0, 30.0, 61.0)]
        assert [len(v) for v in group_by_duration(made).values()] == [2, 1, 1, 2]
