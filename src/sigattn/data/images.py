"""Images: scikit-learn's handwritten digits, and folders in ImageNet's layout, augmented by torchvision."""

import functools
import hashlib
import itertools
import math
import signal
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from sigattn.data.dataset import Batch, Data, DataError, UnreadableFiles, draw_samples, sample_generator
from sigattn.files import files_sha256
from sigattn.optional import explain_import_errors, require
from sigattn.validation import check_among

SUFFIXES = {".jpeg", ".jpg", ".png", ".webp", ".bmp"}
Augmentation = Literal["none", "crop", "randaugment", "simclr", "multicrop"]
SMALL_VIEWS = 8  # of "multicrop", with DINO's two large ones
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of the channels


def transforms(augmentation: Augmentation, size: int, jitter: float = 0.5) -> Callable[[Any], Any]:
    """Return torchvision's transform from a PIL image to a tensor, or to a list of tensors if there are views."""
    check_among(get_args(Augmentation), {"augmentation": augmentation})
    with explain_import_errors("vision"):
        from torchvision.transforms import v2
    finish = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(IMAGENET_MEAN, IMAGENET_STD)]

    if augmentation == "none":
        return v2.Compose([v2.Resize(round(size * 256 / 224)), v2.CenterCrop(size), *finish])

    def view(pixels: int, low: float, high: float = 1.0, *augmentations: Any) -> Any:
        crop = v2.RandomResizedCrop(pixels, (low, high))
        return v2.Compose([crop, v2.RandomHorizontalFlip(), *augmentations, *finish])

    def coloured_view(pixels: int, low: float, high: float, blur: float = 0.5, solarize: float = 0.0) -> Any:
        colours = v2.ColorJitter(0.8 * jitter, 0.8 * jitter, 0.8 * jitter, 0.2 * jitter)
        blurred = v2.GaussianBlur(23, (0.1, 2.0))
        random = (v2.RandomApply([colours], 0.8), v2.RandomGrayscale(0.2), v2.RandomApply([blurred], blur))
        return view(pixels, low, high, *random, v2.RandomSolarize(128, solarize))

    if augmentation == "crop":
        return view(size, 0.2)
    if augmentation == "randaugment":
        return view(size, 0.08, 1.0, v2.RandAugment())
    if augmentation == "simclr":
        return functools.partial(_views, [coloured_view(size, 0.08, 1.0)] * 2)
    large = [coloured_view(size, 0.4, 1.0, 1.0), coloured_view(size, 0.4, 1.0, 0.1, 0.2)]
    small = coloured_view(16 * round(size * 96 / 224 / 16) or 16, 0.05, 0.4)
    return functools.partial(_views, large + [small] * SMALL_VIEWS)


def _views(transforms: list[Callable[[Any], Tensor]], image: Any) -> list[Tensor]:
    return [transform(image) for transform in transforms]


class ImageFolder(Data):
    """Images in one folder per class, ``train/CLASS/….jpeg`` and ``val/CLASS/….jpeg``.

    An image that cannot be read, or that Pillow reports as a decompression bomb, is counted and reported. In training
    it is replaced by the next image, in validation left out. Raises DataError if they are more than half of all, or if
    the folder has another layout.

    Args:
        root: folder of train and val.
        size: height and width in pixels.
        augmentation: "none", "crop" (random resized crop and flip), "randaugment" (crop and RandAugment), "simclr" (two
            views with colour jitter and blur), or "multicrop" (DINO's two large and eight small views).
        jitter: strength of the colour jitter.
        workers: number of processes that read images; 0 reads in this process.
    """

    def __init__(
        self, root: Path, size: int, augmentation: Augmentation, *, jitter: float = 0.5, workers: int = 0
    ) -> None:
        self.classes: list[str] = _classes(root / "train")
        self._train, self._held = (_images(root / split, self.classes) for split in ("train", "val"))
        self.root, self.size, self.augmentation, self.jitter, self.workers = root, size, augmentation, jitter, workers
        self.unreadable: UnreadableFiles = UnreadableFiles("image", len(self._train) + len(self._held))
        self._vary, self._plain = transforms(augmentation, size, jitter), transforms("none", size)

    def batches(self, first_step: int, size: int, seed: int, shard: tuple[int, int] = (0, 1)) -> Iterator[Batch]:
        """Iterate over the batches of ``first_step`` and all later steps, prefetched by ``workers`` processes."""
        if not self.workers:
            yield from super().batches(first_step, size, seed, shard)
            return
        options: dict[str, Any] = {"num_workers": self.workers, "worker_init_fn": _ignore_stop_signals}
        options["sampler"] = itertools.count(first_step)
        loader = torch.utils.data.DataLoader(_Steps(self, size, seed, shard), batch_size=None, **options)
        for batch, errors in loader:
            self.unreadable.merge(errors)
            if isinstance(batch, DataError):
                raise batch
            yield batch

    def batch(self, step: int, size: int, seed: int, shard: tuple[int, int] = (0, 1)) -> Batch:
        """Return images (B, 3, size, size), one tensor per view, and labels (B,) if there is one view."""
        chosen = draw_samples(len(self._train), step, size, seed)[shard[0] :: shard[1]]
        return _collate([self._sample(i, epoch, seed) for i, epoch in chosen])

    def validation(self, size: int) -> Iterable[Batch]:
        """Iterate over the held-out images in order; they are augmented only if the augmentation makes views.

        Raises DataError if no image can be read.
        """
        is_readable = False
        vary = self._vary if self.augmentation in ("simclr", "multicrop") else self._plain
        for start in range(0, len(self._held), size):
            held_out = enumerate(self._held[start : start + size], start)
            samples = [(self._load(path, vary, i), label) for i, (path, label) in held_out]
            if readable := [(image, label) for image, label in samples if image is not None]:
                is_readable = True
                yield _collate(readable)
        if not is_readable:
            raise DataError(f"no held-out image of {self.root} can be read")

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of the images' names and labels, their files (``sigattn.files.files_sha256``) and the augmentation."""
        images = [(str(path.relative_to(self.root)), path, label) for path, label in (*self._train, *self._held)]
        listing = "\n".join(f"{name} {label}" for name, _, label in images)
        files = files_sha256((name, path) for name, path, _ in sorted(images, key=lambda image: image[1]))
        return hashlib.sha256(f"{self.augmentation} {self.size} {self.jitter}\n{listing}\n{files}".encode()).hexdigest()

    def __len__(self) -> int:
        return len(self._train)

    def _sample(self, index: int, epoch: int, seed: int) -> tuple[Any, int]:
        """Return the image of an index, or the first readable one after it, augmented, and its label."""
        drawn = int(torch.randint(1 << 62, (), generator=sample_generator(seed, epoch, index)))
        for offset in range(len(self._train)):
            path, label = self._train[(index + offset) % len(self._train)]
            if (image := self._load(path, self._vary, drawn)) is not None:
                return image, label
        raise DataError(f"no image of {self.root} can be read")

    def _load(self, path: Path, vary: Callable[[Any], Any], seed: int) -> Any:
        """Return an augmented image, or None if it cannot be read."""
        from PIL import Image

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", Image.DecompressionBombWarning)
                with Image.open(path) as file:
                    image = file.convert("RGB")
        except Exception as error:
            self.unreadable.add(str(path), f"{type(error).__name__}: {error}")
            return None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return vary(image)


def _collate(samples: list[tuple[Any, int]]) -> Batch:
    images, labels = zip(*samples, strict=True)
    if isinstance(images[0], list):
        return tuple(torch.stack(view) for view in zip(*images, strict=True))
    return torch.stack(images), torch.tensor(labels)


class _Steps(torch.utils.data.Dataset[tuple[Batch | DataError, dict[str, str]]]):
    """Batches by step, with the unreadable files that a worker process has found in it."""

    def __init__(self, data: ImageFolder, size: int, seed: int, shard: tuple[int, int]) -> None:
        self.data, self.size, self.seed, self.shard = data, size, seed, shard

    def __getitem__(self, step: int) -> tuple[Batch | DataError, dict[str, str]]:
        known = len(self.data.unreadable)
        try:
            batch: Batch | DataError = self.data.batch(step, self.size, self.seed, self.shard)
        except DataError as error:  # DataLoader would add the worker's traceback to the message
            batch = error
        return batch, dict(list(self.data.unreadable.errors.items())[known:])


def _ignore_stop_signals(_worker: int) -> None:
    """Ignore signals that schedulers and terminals send to all processes; the training process ends its workers."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _classes(folder: Path) -> list[str]:
    if not folder.is_dir():
        raise DataError(f"looked for {folder}/CLASS/*.jpeg and found no folder {folder}")
    classes = sorted(p.name for p in folder.iterdir() if p.is_dir())
    if len(classes) < 2:
        raise DataError(f"looked for at least two class folders in {folder} and found {len(classes)}")
    return classes


def _images(folder: Path, classes: list[str]) -> list[tuple[Path, int]]:
    files = [(path, label) for label, name in enumerate(classes) for path in sorted((folder / name).glob("*"))]
    images = [(path, label) for path, label in files if path.suffix.lower() in SUFFIXES]
    if not images:
        raise DataError(f"looked for {folder}/CLASS/*.jpeg (or {', '.join(sorted(SUFFIXES))}) and found none")
    return images


class Digits(Data):
    """1,797 handwritten digits of 8 × 8 pixels (scikit-learn), 360 of them held out.

    Training images are augmented by small random shifts, rotations, scales and noise.

    A batch has ``num_views`` augmented views of each image, enlarged by the factor ``upscale``. Raises
    MissingPackageError if scikit-learn is missing.
    """

    def __init__(self, *, num_views: int = 1, upscale: int = 1) -> None:
        digits = require("sklearn.datasets", "the handwritten digits", "'sigattn[vision]'").load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1  # (1797, 1, 8, 8) in -1 … 1
        if upscale > 1:
            images = F.interpolate(images, scale_factor=float(upscale), mode="bilinear", align_corners=False)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        self._train, self._held = order[360:], order[:360]
        self._images, self._labels = images, torch.tensor(digits.target)
        self.classes: list[str] = [str(digit) for digit in range(10)]
        self.num_views = num_views

    def batch(self, step: int, size: int, seed: int, shard: tuple[int, int] = (0, 1)) -> Batch:
        """Return images (B, 1, 8, 8), one tensor per view, and labels (B,) if there is one view."""
        index = self._train[torch.tensor([i for i, _ in draw_samples(len(self._train), step, size, seed)])]
        generator = sample_generator(seed, step, 0)  # for the whole batch, so that it does not depend on the shard
        views = [_vary(self._images[index], generator) for _ in range(self.num_views)]
        batch = views if self.num_views > 1 else [*views, self._labels[index]]
        return tuple(part[shard[0] :: shard[1]] for part in batch)

    def validation(self, size: int) -> Iterable[Batch]:
        """Return the held-out images and labels; several views are augmented, in the same way at every call."""
        parts = [(self._images[index], self._labels[index]) for index in self._held.split(size)]
        if self.num_views == 1:
            return parts
        generator = torch.Generator().manual_seed(0)
        return [tuple(_vary(images, generator) for _ in range(self.num_views)) for images, _ in parts]

    def train_and_held_out(self) -> tuple[Batch, Batch]:
        """Return images and labels of the training part and of the held-out part."""
        parts = [(self._images[index], self._labels[index]) for index in (self._train, self._held)]
        return parts[0], parts[1]

    @property
    def fingerprint(self) -> str:
        """Hash of the images and the augmentation."""
        kind = f"digits of {self._images.shape[-1]}, {self.num_views} views, strength 1.0"
        return hashlib.sha256(self._images.numpy().tobytes() + kind.encode()).hexdigest()


def _vary(images: Tensor, generator: torch.Generator) -> Tensor:
    """Return images that are shifted, rotated and scaled at random, with noise."""

    def draw(limit: float) -> Tensor:
        return (2 * torch.rand(len(images), generator=generator) - 1) * limit

    angle, scale = draw(math.pi / 12), 1 + draw(0.15)
    cos, sin = scale * angle.cos(), scale * angle.sin()
    shift = (draw(0.25), draw(0.25))  # in units of half the width: up to one of 8 pixels
    affine = torch.stack([cos, -sin, shift[0], sin, cos, shift[1]], -1).view(-1, 2, 3)
    grid = F.affine_grid(affine, list(images.shape), align_corners=False)
    moved = F.grid_sample(images + 1, grid, align_corners=False) - 1  # pads with the background, -1
    return moved + 0.1 * torch.randn(images.shape, generator=generator)
