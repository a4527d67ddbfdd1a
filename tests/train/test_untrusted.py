"""Untrusted checkpoints: nothing in them is executed as code."""

import contextlib
import os
import pickle
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from sigattn import cli
from sigattn.train import checkpoint, checkpoint_reader
from tests.test_cli import failure

TRAIN = [
    "train",
    "lm-1b-2k",
    "--tiny",
    "--training.max-steps",
    "2",
    "--training.batch-size",
    "4",
    "--model.max-seq-len",
    "16",
]


@dataclass
class Exploit:
    """An object whose unpickling runs a shell command."""

    command: str

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("untrusted") / "run"
    cli.main([*TRAIN, "--folder", str(folder)])
    return folder


def newest(run):
    return checkpoint.list_checkpoints(run / "checkpoints")[-1]


def exploit_as_metadata(run, command):
    (newest(run) / ".metadata").write_bytes(pickle.dumps(Exploit(command)))


def exploit_within_metadata(run, command):
    path = newest(run) / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.planner_data = Exploit(command)
    path.write_bytes(pickle.dumps(metadata))


def exploit_as_value(run, command):
    """A setting of the optimizer, which torch.distributed.checkpoint stores as a pickle of its own."""
    metadata = pickle.loads((newest(run) / ".metadata").read_bytes())
    names = [n for n, v in metadata.state_dict_metadata.items() if isinstance(v, BytesStorageMetadata)]
    index = MetadataIndex(next(n for n in names if n.endswith("betas")))
    torch.save(Exploit(command), newest(run) / "evil.distcp")
    stored = metadata.storage_data[index]
    stored.relative_path, stored.offset = "evil.distcp", 0
    stored.length = (newest(run) / "evil.distcp").stat().st_size
    (newest(run) / ".metadata").write_bytes(pickle.dumps(metadata))


EXPLOITS = [exploit_as_metadata, exploit_within_metadata, exploit_as_value]


@pytest.mark.parametrize("plant", EXPLOITS)
@pytest.mark.parametrize("command", ["evaluate", "evaluate without model", "resume"])
def test_malicious_pickle_is_not_executed(finished, tmp_path, capsys, plant, command):
    run, proof = tmp_path / "run", tmp_path / "proof"
    shutil.copytree(finished, run)
    plant(run, f"touch {proof}")
    if command == "evaluate":  # reads model.safetensors
        cli.main(["evaluate", str(run)])
        assert "bits" in capsys.readouterr().out
    else:
        shutil.rmtree(run / "model")
        arguments = ["evaluate", str(run)] if command.startswith("evaluate") else [*TRAIN, "--folder", str(run)]
        code, message = failure([*arguments, *(["--resume"] if command == "resume" else [])], capsys)
        assert code == 1
        assert "cannot read the checkpoint" in message
    assert not proof.exists()


@pytest.mark.parametrize("plant", EXPLOITS)
def test_exploits_work_with_pytorch_reader(finished, tmp_path, monkeypatch, plant):
    """So that the test above cannot pass because an exploit is broken."""
    run, proof = tmp_path / "run", tmp_path / "proof"
    shutil.copytree(finished, run)
    shutil.rmtree(run / "model")
    plant(run, f"touch {proof}")
    monkeypatch.setattr(checkpoint_reader, "CheckpointReader", FileSystemReader)
    monkeypatch.setattr(checkpoint_reader, "CheckpointPlanner", DefaultLoadPlanner)
    with contextlib.suppress(SystemExit):
        cli.main(["evaluate", str(run)])
    assert proof.exists()


def test_files_outside_the_checkpoint_are_not_read(finished, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    shutil.rmtree(run / "model")
    (newest(run) / "__0_0.distcp").rename(tmp_path / "elsewhere")
    metadata = pickle.loads((newest(run) / ".metadata").read_bytes())
    for stored in metadata.storage_data.values():
        stored.relative_path = str(tmp_path / "elsewhere")
    (newest(run) / ".metadata").write_bytes(pickle.dumps(metadata))
    _, message = failure(["evaluate", str(run)], capsys)
    assert "cannot read the checkpoint" in message


def test_metadata_of_every_kind_is_still_read():
    """All classes that torch.distributed.checkpoint uses in its metadata."""
    from torch.distributed.checkpoint import metadata as classes
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    from sigattn.train.checkpoint_reader import unpickle_metadata

    size = torch.Size([2, 3])
    tensor = classes.TensorStorageMetadata(
        classes.TensorProperties(torch.bfloat16), size, [classes.ChunkStorageMetadata(size, size)]
    )
    index = MetadataIndex("a", size, 1)
    stored = {index: _StorageInfo("__0_0.distcp", 0, 5)}
    about = classes.StorageMeta(Path("somewhere"), "a", "b", ["c"])
    whole = Metadata({"a": tensor, "b": BytesStorageMetadata()}, {"a": ("a", 1)}, stored, about, "1.0.0")
    assert unpickle_metadata(pickle.dumps(whole)) == whole
    with pytest.raises(pickle.UnpicklingError, match="builtins eval"):
        unpickle_metadata(b"cbuiltins\neval\n(V1\ntR.")
