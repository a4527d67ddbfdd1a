"""Images: digits and folders, in an order that depends on seed and step; missing and broken files."""

import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch

import sigattn.files
from sigattn.data import images
from sigattn.data.dataset import MAX_NAMED, DataError, UnreadableFiles, draw_samples, sample_generator
from sigattn.data.images import Digits, ImageFolder
from tests.test_mistakes import raising


def test_order_passes_over_all_samples():
    drawn = [i for step in range(5) for i in draw_samples(10, step, 4, seed=3)]
    assert sorted(i for i, epoch in drawn if epoch == 0) == list(range(10))
    assert sorted(i for i, epoch in drawn if epoch == 1) == list(range(10))
    assert [i for i, e in drawn if e == 0] != [i for i, e in drawn if e == 1]
    assert draw_samples(10, 2, 4, seed=3) == draw_samples(10, 2, 4, seed=3)
    assert draw_samples(10, 2, 4, seed=3) != draw_samples(10, 2, 4, seed=4)
    assert len(draw_samples(3, 0, 8, seed=0)) == 8  # a batch may be longer than an epoch
    seeds = {sample_generator(s, e, i).initial_seed() for s in range(3) for e in range(3) for i in range(100)}
    assert len(seeds) == 900


def test_many_unreadable_files_take_few_lines(capsys):
    files = UnreadableFiles("recording", 2000)
    for number in range(1000):
        files.add(f"{number}.flac", "broken")
        files.add(f"{number}.flac", "broken")  # again, in the next epoch
    said = capsys.readouterr().out.splitlines()
    assert said[:MAX_NAMED] == [f"unreadable recording {number}.flac: broken" for number in range(MAX_NAMED)]
    assert said[MAX_NAMED:] == ["further unreadable recordings are counted, and not named"]
    assert files.summary().startswith("1000 of 2,000 recordings could not be read and were left out: 0.flac, ")
    with pytest.raises(DataError, match="1001 of 2000 recordings cannot be read, the last b: broken"):
        files.add("b", "broken")


def changed(path):
    """Change a file's last byte, at equal size."""
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def test_hash_of_files(tmp_path, monkeypatch):
    """Of names and contents; of large files, names and sizes; of unreadable files, names."""
    files = [(name, tmp_path / name) for name in ("a", "b", "missing", "folder")]
    for _, path in files[:2]:
        path.write_bytes(b"content")
    (tmp_path / "folder").mkdir()
    hashes = [sigattn.files.files_sha256(files)]
    assert sigattn.files.files_sha256(files) == hashes[0]
    changed(files[0][1])
    hashes.append(sigattn.files.files_sha256(files))
    monkeypatch.setattr(sigattn.files, "MAX_HASHED_BYTES", 10)
    hashes.append(sigattn.files.files_sha256(files))
    changed(files[0][1])
    assert sigattn.files.files_sha256(files) == hashes[-1]
    files[0][1].write_bytes(b"contents")
    hashes.append(sigattn.files.files_sha256(files))
    assert len(set(hashes)) == 4
    monkeypatch.setattr(Path, "open", raising(PermissionError(13, "Permission denied")))
    monkeypatch.setattr(sigattn.files, "MAX_HASHED_BYTES", 1000)
    assert sigattn.files.files_sha256(files) not in hashes


class TestDigits:
    def test_held_out_part_is_disjoint(self):
        (images, labels), (held, held_labels) = Digits().train_and_held_out()
        assert (len(images), len(labels), len(held)) == (1437, 1437, 360)
        assert {tuple(i.flatten().tolist()) for i in held}.isdisjoint(tuple(i.flatten().tolist()) for i in images)
        assert sorted(held_labels.unique().tolist()) == list(range(10))

    @pytest.mark.parametrize("views", [1, 3])
    def test_batches(self, views):
        data = Digits(num_views=views)
        whole = data.batch(3, 12, seed=1)
        assert len(whole) == max(2, views)  # one view has labels
        parts = [data.batch(3, 12, seed=1, shard=(rank, 4)) for rank in range(4)]
        for i, t in enumerate(whole):  # the samples do not depend on the number of processes
            assert torch.equal(torch.stack([p[i] for p in parts], 1).flatten(0, 1), t)
        assert not torch.equal(data.batch(4, 12, seed=1)[0], whole[0])
        held = list(data.validation(100))
        assert sum(len(b[0]) for b in held) == 360
        assert all(torch.equal(a[0], b[0]) for a, b in zip(held, data.validation(100), strict=True))

    def test_augmentation_is_small_and_random(self):
        first, second = Digits(num_views=2).batch(0, 64, 0)
        assert 0.05 < (first - second).abs().mean() < 0.6
        assert torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1] > 0.4
        assert Digits().fingerprint != Digits(num_views=2).fingerprint


@pytest.fixture
def folder(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for part, count in (("train", 5), ("val", 2)):
        for label, colour in enumerate([(250, 0, 0), (0, 0, 250)]):
            where = tmp_path / part / f"class{label}"
            where.mkdir(parents=True)
            for i in range(count):
                image.new("RGB", (40, 30), (colour[0], i, colour[2])).save(where / f"{i}.png")
    return tmp_path


@pytest.fixture
def plain(monkeypatch):
    """An image is its first pixel, without torchvision."""
    monkeypatch.setattr(images, "transforms", lambda *_: lambda image: torch.tensor(image.getpixel((0, 0))))


@pytest.mark.usefixtures("plain")
def test_stop_signals_do_not_end_the_workers(folder):
    """Schedulers send SIGTERM, and terminals SIGINT, to all processes; the step must still be completed."""
    others, data = multiprocessing.active_children(), ImageFolder(folder, 4, "none", workers=2)
    for step, batch in zip(range(2, 10), data.batches(2, 4, seed=1), strict=False):
        if step == 3:  # both workers have returned a batch
            workers = [p.pid for p in multiprocessing.active_children() if p not in others]
            for worker in workers:
                os.kill(worker, signal.SIGTERM)
                os.kill(worker, signal.SIGINT)
        assert torch.equal(batch[0], data.batch(step, 4, seed=1)[0])
    assert len(workers) == 2


@pytest.mark.parametrize(("augmentation", "views"), [("none", 1), ("crop", 1), ("randaugment", 1), ("simclr", 2),
                                                     ("multicrop", 10)])  # fmt: skip
def test_batches_of_a_folder(folder, augmentation, views):
    pytest.importorskip("torchvision.transforms.v2")
    data = ImageFolder(folder, 32, augmentation)
    batch = data.batch(0, 6, seed=0)
    assert len(batch) == (2 if views == 1 else views)
    assert batch[0].shape == (6, 3, 32, 32)
    if views == 10:
        assert batch[-1].shape == (6, 3, 16, 16)
    if augmentation in ("none", "crop"):  # red or blue
        assert torch.equal(batch[0][:, 0].mean((1, 2)) > batch[0][:, 2].mean((1, 2)), batch[1] == 0)
    for a, b in zip(batch, data.batch(0, 6, seed=0), strict=True):
        assert torch.equal(a, b)
    halves = [data.batch(0, 6, seed=0, shard=(rank, 2)) for rank in range(2)]
    assert torch.equal(torch.stack([h[0] for h in halves], 1).flatten(0, 1), batch[0])
    assert sum(len(b[0]) for b in data.validation(3)) == 4


@pytest.mark.usefixtures("plain")
def test_fingerprint_depends_on_contents(folder):
    before = ImageFolder(folder, 4, "none").fingerprint
    assert ImageFolder(folder, 4, "none").fingerprint == before != ImageFolder(folder, 4, "crop").fingerprint
    changed(folder / "val" / "class0" / "0.png")
    assert ImageFolder(folder, 4, "none").fingerprint != before


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("workers", [0, 1])
def test_broken_images_are_counted_and_skipped(folder, capfd, workers, monkeypatch):
    image = pytest.importorskip("PIL.Image")
    training, held_out = (sorted((folder / part).rglob("*.png")) for part in ("train", "val"))
    broken = [*training[:3], training[-1], held_out[0]]
    whole = broken[0].read_bytes()
    for file, content in zip(broken, (b"", b"no image", whole[:-40]), strict=False):
        file.write_bytes(content)
    broken[3].unlink()
    broken[3].symlink_to(folder / "nowhere")
    image.new("RGB", (90, 90)).save(broken[4])
    monkeypatch.setattr(image, "MAX_IMAGE_PIXELS", 5000)  # a decompression bomb
    data = ImageFolder(folder, 16, "crop", workers=workers)
    for _, batch in zip(range(4), data.batches(0, 10, seed=0), strict=False):
        assert batch[0].shape[0] == 10
    assert sum(len(images) for images, _ in data.validation(2)) == len(held_out) - 1
    assert set(data.unreadable.errors) == set(map(str, broken))
    said = capfd.readouterr().out
    assert all(said.count(f"unreadable image {file}: ") == 1 for file in broken)
    assert "DecompressionBomb" in said
    assert data.unreadable_summary().startswith("5 of 14 images could not be read")
    assert all(str(file) in data.unreadable_summary() for file in broken)


@pytest.mark.usefixtures("plain")
def test_mostly_broken_images_are_an_error(folder, capfd):
    for file in folder.rglob("*.png"):
        file.write_bytes(b"no image")
    data = ImageFolder(folder, 16, "crop", workers=1)
    with pytest.raises(DataError, match=r"images cannot be read, the last .*png: UnidentifiedImageError") as error:
        next(iter(data.batches(0, 10, seed=0)))
    assert "\n" not in str(error.value)
    with pytest.raises(DataError, match=r"no held-out image of .* can be read"):
        list(ImageFolder(folder, 16, "crop").validation(4))


@pytest.mark.usefixtures("plain")
def test_wrong_layout_raises(tmp_path, folder):
    with pytest.raises(DataError, match=r"looked for .*train/CLASS/\*\.jpeg and found no folder"):
        ImageFolder(tmp_path / "nowhere", 16, "crop")
    for file in (folder / "val").rglob("*.png"):
        file.unlink()
    with pytest.raises(DataError, match=r"val/CLASS/.* and found none"):
        ImageFolder(folder, 16, "crop")
