"""Images: digits and folders, in an order that depends on seed and step; missing and broken files."""

import multiprocessing
import os
import signal

import pytest
import torch

from sigattn.data import images
from sigattn.data.dataset import DataError, draw_samples, sample_generator
from sigattn.data.digits import Digits
from sigattn.data.images import ImageFolder


class TestOrder:
    def test_passes_over_all_samples(self):
        drawn = [i for step in range(5) for i in draw_samples(10, step, 4, seed=3)]
        assert sorted(i for i, epoch in drawn if epoch == 0) == list(range(10))
        assert sorted(i for i, epoch in drawn if epoch == 1) == list(range(10))
        assert [i for i, e in drawn if e == 0] != [i for i, e in drawn if e == 1]
        assert draw_samples(10, 2, 4, seed=3) == draw_samples(10, 2, 4, seed=3)
        assert draw_samples(10, 2, 4, seed=3) != draw_samples(10, 2, 4, seed=4)
        assert len(draw_samples(3, 0, 8, seed=0)) == 8  # a batch may be longer than an epoch

    def test_generators_differ_by_sample_and_epoch(self):
        seeds = {sample_generator(s, e, i).initial_seed() for s in range(3) for e in range(3) for i in range(100)}
        assert len(seeds) == 900


class TestDigits:
    def test_held_out_part_is_disjoint(self):
        (images, labels), (held, held_labels) = Digits().train_and_held_out()
        assert (len(images), len(held)) == (1437, 360)
        assert len(labels) == 1437
        assert {tuple(i.flatten().tolist()) for i in held}.isdisjoint(tuple(i.flatten().tolist()) for i in images)
        assert sorted(held_labels.unique().tolist()) == list(range(10))

    @pytest.mark.parametrize(("views", "labels", "tensors"), [(1, True, 2), (1, False, 1), (2, False, 2), (3, True, 3)])
    def test_batches(self, views, labels, tensors):
        data = Digits(num_views=views, labels=labels)
        whole = data.batch(3, 12, seed=1)
        assert len(whole) == tensors
        parts = [data.batch(3, 12, seed=1, shard=(rank, 4)) for rank in range(4)]
        for i, t in enumerate(whole):  # the samples do not depend on the number of processes
            assert torch.equal(torch.stack([p[i] for p in parts], 1).flatten(0, 1), t)
        assert not torch.equal(data.batch(4, 12, seed=1)[0], whole[0])
        held = list(data.validation(100))
        assert sum(len(b[0]) for b in held) == 360
        assert all(torch.equal(a[0], b[0]) for a, b in zip(held, data.validation(100), strict=True))

    def test_augmentation_is_small_and_random(self):
        plain, varied = Digits(strength=0.0), Digits(strength=1.0)
        a, b = plain.batch(0, 64, 0)[0], varied.batch(0, 64, 0)[0]
        assert 0.05 < (a - b).abs().mean() < 0.6
        assert torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1] > 0.6
        assert plain.fingerprint != varied.fingerprint
        assert not torch.equal(plain.batch(1, 64, 0)[0], a)  # other images, not another augmentation of the same


@pytest.fixture
def folder(tmp_path):
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("torchvision.transforms.v2")
    for part, count in (("train", 5), ("val", 2)):
        for label, colour in enumerate([(250, 0, 0), (0, 0, 250)]):
            where = tmp_path / part / f"class{label}"
            where.mkdir(parents=True)
            for i in range(count):
                image.new("RGB", (40, 30), colour).save(where / f"{i}.png")
    return tmp_path


def first_pixel(image):
    return torch.tensor(image.getpixel((0, 0)))


def test_stop_signals_do_not_end_the_workers(tmp_path, monkeypatch):
    """Schedulers send SIGTERM, and terminals SIGINT, to all processes; the step must still be completed."""
    image = pytest.importorskip("PIL.Image")
    monkeypatch.setattr(images, "transforms", lambda *_: first_pixel)
    for i, part in enumerate(("train/a", "train/b", "val/a", "val/b")):
        (tmp_path / part).mkdir(parents=True)
        image.new("RGB", (4, 4), (i, 0, 0)).save(tmp_path / part / "0.png")
    others, data = multiprocessing.active_children(), ImageFolder(tmp_path, 4, "none", workers=2)
    for step, batch in zip(range(8), data.batches(0, 2, seed=0), strict=False):
        if step == 1:  # both workers have returned a batch
            workers = [p.pid for p in multiprocessing.active_children() if p not in others]
            for worker in workers:
                os.kill(worker, signal.SIGTERM)
                os.kill(worker, signal.SIGINT)
        assert torch.equal(batch[0], data.batch(step, 2, seed=0)[0])
    assert len(workers) == 2


@pytest.mark.torchvision
class TestImageFolder:
    @pytest.mark.parametrize(("augmentation", "views"), [("none", 1), ("crop", 1), ("randaugment", 1), ("simclr", 2),
                                                         ("multicrop", 10)])  # fmt: skip
    def test_batches(self, folder, augmentation, views):
        data = ImageFolder(folder, 32, augmentation)
        batch = data.batch(0, 6, seed=0)
        assert len(batch) == (2 if views == 1 else views)
        assert batch[0].shape == (6, 3, 32, 32)
        if views == 10:
            assert batch[-1].shape == (6, 3, 16, 16)
        for a, b in zip(batch, data.batch(0, 6, seed=0), strict=True):
            assert torch.equal(a, b)
        halves = [data.batch(0, 6, seed=0, shard=(rank, 2)) for rank in range(2)]
        assert torch.equal(torch.stack([h[0] for h in halves], 1).flatten(0, 1), batch[0])
        assert sum(len(b[0]) for b in data.validation(3)) == 4

    def test_labels_follow_the_colours(self, folder):
        images, labels = ImageFolder(folder, 32, "crop").batch(0, 8, seed=0)
        red = images[:, 0].mean((1, 2)) > images[:, 2].mean((1, 2))
        assert torch.equal(red, labels == 0)
        (alone,) = ImageFolder(folder, 32, "crop", labels=False).batch(0, 8, seed=0)
        assert torch.equal(alone, images)

    def test_workers_keep_the_order(self, folder):
        plain, ahead = ImageFolder(folder, 16, "crop"), ImageFolder(folder, 16, "crop", workers=2)
        for step, batch in zip(range(2, 7), ahead.batches(2, 4, seed=1), strict=False):
            assert torch.equal(batch[0], plain.batch(step, 4, seed=1)[0])

    @staticmethod
    def files(folder, part):
        return sorted((folder / part).rglob("*.png"))

    @pytest.mark.parametrize("workers", [0, 1])
    def test_broken_images_are_counted_and_skipped(self, folder, capfd, workers):
        broken = [*self.files(folder, "train")[:3], self.files(folder, "val")[0]]
        whole = broken[0].read_bytes()
        for file, content in zip(broken, (b"", b"no image", whole[:-40], whole[:60]), strict=True):
            file.write_bytes(content)
        broken.append(self.files(folder, "train")[-1])
        broken[-1].unlink()
        broken[-1].symlink_to(folder / "nowhere")
        data = ImageFolder(folder, 16, "crop", workers=workers)
        for _, batch in zip(range(4), data.batches(0, 10, seed=0), strict=False):
            assert batch[0].shape[0] == 10
        held_out = list(data.validation(2))
        assert sum(len(images) for images, _ in held_out) == len(self.files(folder, "val")) - 1
        assert set(data.unreadable.errors) == set(map(str, broken))
        said = capfd.readouterr().out
        assert all(said.count(f"unreadable image {file}: ") == 1 for file in broken)
        assert data.unreadable_summary().startswith(f"5 of {len(list(folder.rglob('*.png')))} images could not be read")
        assert all(str(file) in data.unreadable_summary() for file in broken)

    def test_decompression_bomb_counts_as_broken(self, folder, monkeypatch, capsys):
        image = pytest.importorskip("PIL.Image")
        bombs = {self.files(folder, "train")[0]: (60, 60), self.files(folder, "val")[0]: (90, 90)}
        for file, size in bombs.items():
            image.new("RGB", size).save(file)
        monkeypatch.setattr(image, "MAX_IMAGE_PIXELS", 3000)  # a warning above it, an error above twice as many
        data = ImageFolder(folder, 16, "none")
        assert data.batch(0, 10, seed=0)[0].shape[0] == 10
        list(data.validation(4))
        assert set(data.unreadable.errors) == set(map(str, bombs))
        assert "DecompressionBomb" in capsys.readouterr().out

    @pytest.mark.parametrize("workers", [0, 1])
    def test_mostly_broken_images_are_an_error(self, folder, workers, capfd):
        for file in folder.rglob("*.png"):
            file.write_bytes(b"no image")
        data = ImageFolder(folder, 16, "crop", workers=workers)
        with pytest.raises(DataError, match=r"images cannot be read, the last .*png: UnidentifiedImageError") as error:
            next(iter(data.batches(0, 10, seed=0)))
        assert "\n" not in str(error.value)
        with pytest.raises(DataError, match=r"no held-out image of .* can be read"):
            list(ImageFolder(folder, 16, "crop").validation(4))

    def test_wrong_layout_raises(self, tmp_path, folder):
        with pytest.raises(DataError, match=r"looked for .*train/CLASS/\*\.jpeg and found no folder"):
            ImageFolder(tmp_path / "nowhere", 16, "crop")
        for file in (folder / "val").rglob("*.png"):
            file.unlink()
        with pytest.raises(DataError, match=r"val/CLASS/.* and found none"):
            ImageFolder(folder, 16, "crop")
