"""Archives: contents, and limits of the unpacked size."""

import gzip
import io
import tarfile
import tracemalloc

import pytest

from sigattn.data import archives
from sigattn.data.corpora import spoken_digits
from sigattn.data.dataset import DataError
from sigattn.data.shards import index_shards


def write(path, files, mode="w:gz", **options):
    with tarfile.open(path, mode, **options) as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


@pytest.mark.parametrize("mode", ["w:gz", "w:bz2", "w:xz", "w"])
def test_members(tmp_path, mode):
    files = {"recordings/a.wav": b"one", "recordings/" + "b" * 200 + ".wav": b"two" * 9999, "README": b"no"}
    archive = write(tmp_path / "archive", files, mode)
    assert archives.read_members(archive, ".wav") == {n: c for n, c in files.items() if n.endswith(".wav")}


@pytest.mark.parametrize("content", [b"", b"no archive at all", b"\x1f\x8b no gzip"])
def test_not_an_archive(tmp_path, content):
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(DataError, match="cannot read the archive"):
        archives.read_members(tmp_path / "a", ".wav")


def test_truncated_archive(tmp_path):
    archive = write(tmp_path / "a", {"a.wav": bytes(range(256)) * 400})
    archive.write_bytes(archive.read_bytes()[:-300])
    with pytest.raises(DataError, match="cannot read the archive"):
        archives.read_members(archive, ".wav")


def header_bomb(path, size):
    """A gzipped tar whose extended header, which tarfile reads whole, is of that size."""
    header = tarfile.TarInfo("././@PaxHeader")
    header.type, header.size = tarfile.XHDTYPE, size
    with gzip.open(path, "wb") as file:
        file.write(header.tobuf(tarfile.USTAR_FORMAT))
        for _ in range(size >> 20):
            file.write(bytes(1 << 20))
    return path


@pytest.mark.parametrize("kind", ["member", "other member", "header"])
def test_decompression_bomb_raises_before_it_is_read(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(archives, "MAX_BYTES", 1 << 20)
    if kind == "header":
        archive = header_bomb(tmp_path / "bomb.tar.gz", 64 << 20)
    else:
        name = "0_ann_0.wav" if kind == "member" else "README"
        archive = write(tmp_path / "bomb.tar.gz", {name: bytes(64 << 20)})
    assert archive.stat().st_size < 100_000
    tracemalloc.start()
    with pytest.raises(DataError, match=r"bomb\.tar\.gz unpacks to more than 1 MB: unpack it"):
        spoken_digits(archive)
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()


def test_too_many_members(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "MAX_MEMBERS", 3)
    archive = write(tmp_path / "many.tar.gz", {f"{i}.wav": b"" for i in range(4)})
    with pytest.raises(DataError, match="more than 3 members"):
        archives.read_members(archive, ".wav")


def test_sparse_label_of_huge_size(tmp_path):
    """A sparse member: 1 TB of zeros in a file of a kilobyte."""
    member = tarfile.TarInfo("a.cls")
    member.type = tarfile.REGTYPE
    member.pax_headers = {
        "GNU.sparse.map": f"0,0,{1 << 40},0",
        "GNU.sparse.size": str(1 << 40),
        "GNU.sparse.name": "a.cls",
    }
    with tarfile.open(tmp_path / "train.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(member)
    with pytest.raises(DataError, match=r"cannot read .*train\.tar"):
        index_shards([tmp_path / "train.tar"])
