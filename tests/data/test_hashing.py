"""Fingerprints: data that differs in content only has another fingerprint."""

import io
import os

import pytest

import sigattn.files
from sigattn.data.images import ImageFolder
from sigattn.data.speech import CharTokenizer, Speech, Utterance


def changed(path):
    """Change a file's last byte, at equal size."""
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def test_files(tmp_path, monkeypatch):
    files = [(name, tmp_path / name) for name in ("a", "b", "missing")]
    for _, path in files[:2]:
        path.write_bytes(b"content")
    (tmp_path / "folder").mkdir()
    files.append(("folder", tmp_path / "folder"))
    before = sigattn.files.files_sha256(files)
    assert sigattn.files.files_sha256(files) == before
    changed(files[0][1])
    assert sigattn.files.files_sha256(files) != before
    monkeypatch.setattr(sigattn.files, "MAX_HASHED_BYTES", 10)  # names and sizes alone
    large = sigattn.files.files_sha256(files)
    changed(files[0][1])
    assert sigattn.files.files_sha256(files) == large
    files[0][1].write_bytes(b"contents")
    assert sigattn.files.files_sha256(files) != large


def test_unreadable_file_is_hashed_as_unreadable(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(b"content")
    readable = sigattn.files.files_sha256([("a", tmp_path / "a")])

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(sigattn.files, "file_sha256", refuse)
    assert sigattn.files.files_sha256([("a", tmp_path / "a")]) != readable


def png(shade):
    image = pytest.importorskip("PIL.Image")
    buffer = io.BytesIO()
    image.new("L", (4, 4), shade).save(buffer, "png")
    return buffer.getvalue()


@pytest.mark.torchvision
def test_images(tmp_path):
    pytest.importorskip("torchvision")
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            (tmp_path / split / name).mkdir(parents=True)
            (tmp_path / split / name / "0.png").write_bytes(png(1))
    before = ImageFolder(tmp_path, 4, "none").fingerprint
    assert ImageFolder(tmp_path, 4, "none").fingerprint == before
    changed(tmp_path / "val" / "dog" / "0.png")
    assert ImageFolder(tmp_path, 4, "none").fingerprint != before


def test_recordings(tmp_path):
    path = tmp_path / "a.wav"
    path.write_bytes(b"RIFF and so on")
    utterance = Utterance(((path, 0.0, 1.0),), "one", 1.0)
    before = Speech([utterance], [], CharTokenizer("abc")).fingerprint
    assert Speech([utterance], [], CharTokenizer("abc")).fingerprint == before
    changed(path)
    os.utime(path, ns=(0, 1))
    assert Speech([utterance], [], CharTokenizer("abc")).fingerprint != before
