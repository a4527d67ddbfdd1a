"""Shards: images and labels are plain files, and a label is a class index; anything else is an error by name."""

import io
import tarfile

import pytest

from sigattn.data.dataset import DataError
from sigattn.data.shards import MAX_CLASSES, index_shards


def shard(path, *members):
    """Write members: pairs of a name and bytes, or of a name and the name that it links to."""
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            if isinstance(content, bytes):
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
            else:
                info.type, info.linkname = tarfile.SYMTYPE, content
                archive.addfile(info)
    return [path]


@pytest.mark.parametrize(("content", "label"), [(b"0", 0), (b"12\n", 12), (str(MAX_CLASSES - 1).encode(), 2**20 - 1)])
def test_labels(tmp_path, content, label):
    (image,) = index_shards(shard(tmp_path / "a.tar", ("1.cls", content), ("1.jpg", b"x")))
    assert (image.label, image.open().read()) == (label, b"x")


@pytest.mark.parametrize(
    "content", [b"-3", b"1000000000000", str(MAX_CLASSES).encode(), b"1_0", b"2.0", b"", "٣".encode(), b"1" * 40]
)
def test_labels_that_are_no_class_index_are_refused(tmp_path, content):
    files = shard(tmp_path / "a.tar", ("1.jpg", b"x"), ("1.cls", content))
    with pytest.raises(DataError, match=r"cannot read .*a\.tar: 1\.cls must hold a class index, a whole number in 0 "):
        index_shards(files)


@pytest.mark.parametrize(
    ("members", "name"),
    [
        ([("1.jpg", b"x"), ("1.cls", "nowhere")], "1.cls"),
        ([("1.jpg", b"x"), ("1.cls", "1.cls")], "1.cls"),  # to itself
        ([("1.jpg", b"x"), ("2.cls", "1.cls"), ("1.cls", "2.cls")], "2.cls"),  # a loop
        ([("1.jpg", "2.jpg"), ("1.cls", b"0")], "1.jpg"),
    ],
)
def test_links_are_refused(tmp_path, members, name):
    files = shard(tmp_path / "a.tar", *members)
    with pytest.raises(DataError, match=f"cannot read .*: {name} must be a plain file, and is a link or a sparse file"):
        index_shards(files)


def test_two_images_with_one_label_are_refused(tmp_path):
    files = shard(tmp_path / "a.tar", ("1.jpg", b"x"), ("1.png", b"y"), ("1.cls", b"0"))
    with pytest.raises(DataError, match=r"'1' has two images, 1\.jpg and 1\.png"):
        index_shards(files)


def test_links_of_other_kinds_and_folders_are_left_out(tmp_path):
    members = [("a.json", "nowhere"), ("1.jpg", b"x"), ("1.cls", b"3")]
    with tarfile.open(shard(tmp_path / "a.tar", *members)[0], "a") as archive:
        folder = tarfile.TarInfo("b.jpg")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
    assert [image.name for image in index_shards([tmp_path / "a.tar"])] == ["1.jpg"]
