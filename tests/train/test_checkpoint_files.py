"""Checkpoint files: damage of any byte is reported, nothing in them is code, and no file outside them is read."""

import contextlib
import os
import pickle
import random
import shutil
import signal
import sys
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from sigattn.distributed.process_mesh import ProcessMesh
from sigattn.train import checkpoint
from sigattn.train.checkpoint import CheckpointError

SETTINGS = {"learning_rate": 0.1}


def trained(seed=0):
    torch.manual_seed(seed)
    module = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    module(torch.ones(3)).sum().backward()
    optimizer.step()
    return module, optimizer


def state(module, optimizer):
    moments = [value for values in optimizer.state.values() for value in values.values()]
    return [t.clone() for t in (*module.parameters(), *moments)]


def save(folder, seed=0, step=1):
    return checkpoint.save(folder, *trained(seed), step, SETTINGS, ProcessMesh())


def load(path, seed=0):
    """Load a checkpoint into another module; return its step. Its state must be that of ``trained(seed)``."""
    module, optimizer = trained(seed=9)
    step = checkpoint.load(path, module, optimizer, SETTINGS, ProcessMesh())
    assert all(map(torch.equal, state(module, optimizer), state(*trained(seed))))
    return step


def test_every_flipped_bit_is_reported_or_harmless(tmp_path):
    path = save(tmp_path)
    chance, harmless, flips = random.Random(0), 0, 0
    for file in sorted(path.iterdir()):
        content = file.read_bytes()
        for position in chance.sample(range(len(content)), min(len(content), 25)):
            flipped = bytearray(content)
            flipped[position] ^= 1 << chance.randrange(8)
            file.write_bytes(flipped)
            flips += 1
            with contextlib.suppress(CheckpointError):
                assert load(path) == 1, (file, position)
                harmless += 1
        file.write_bytes(content)
    assert flips == 75
    assert harmless < 3  # such as a line feed that becomes a vertical tab
    assert load(path) == 1  # the files are whole again


@pytest.mark.parametrize("change", ["deleted", "added", "renamed", "outside", "older"])
def test_other_files_than_were_saved_are_reported(tmp_path, change):
    path = save(tmp_path / "run")
    (file,), sums = path.glob("*.safetensors"), path / "SHA256SUMS"
    other, message = file.with_name("shard-00002.safetensors"), r"\.safetensors is missing, or not in SHA256SUMS"
    if change == "deleted":
        file.unlink()
    elif change == "added":
        shutil.copy(file, other)
    elif change == "renamed":
        file.rename(other)
    elif change == "outside":
        file.rename(tmp_path / "outside.safetensors")
        sums.write_text(sums.read_text().replace(file.name, "../../outside.safetensors"))
        message = "SHA256SUMS is damaged"
    else:
        (path / "about.json").write_text('{"format": 1, "settings": {"learning_rate": 0.1}, "step": 1}\n')
        message = r"\(start in another run folder\): about\.json has the format 1 of another version of sigattn"
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(path, *trained(), SETTINGS, ProcessMesh())


@dataclass
class Exploit:
    """An object whose unpickling runs a shell command."""

    command: str

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.mark.parametrize("pattern", ["about.json", "SHA256SUMS", "*.safetensors"])
def test_pickles_are_not_executed(tmp_path, pattern):
    path = save(tmp_path)
    (file,) = path.glob(pattern)
    file.write_bytes(pickle.dumps(Exploit(f"touch {tmp_path / 'proof'}")))
    with pytest.raises(CheckpointError, match="cannot read the checkpoint"):
        load(path)
    assert not (tmp_path / "proof").exists()


def test_tied_and_transposed_weights_are_restored(tmp_path):
    """Files of safetensors hold neither tensors that share memory nor tensors that are not contiguous."""

    def tied(seed):
        torch.manual_seed(seed)
        module = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3), "c": nn.Linear(3, 2)})
        module["b"].weight = module["a"].weight
        module["c"].weight = nn.Parameter(torch.randn(3, 2).t())
        return module, torch.optim.SGD(module.parameters(), lr=0.1)

    path = checkpoint.save(tmp_path, *tied(0), 1, SETTINGS, ProcessMesh())
    module, optimizer = tied(1)
    checkpoint.load(path, module, optimizer, SETTINGS, ProcessMesh())
    for name, value in tied(0)[0].state_dict().items():
        assert torch.equal(module.state_dict()[name], value), name


def test_large_states_are_written_in_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "MAX_FILE_BYTES", 32)
    path = save(tmp_path)
    assert len(list(path.glob("*.safetensors"))) > 1
    assert load(path) == 1


def test_what_an_interrupted_process_left_is_deleted(tmp_path):
    (tmp_path / "step-00000006.unfinished").mkdir()
    (tmp_path / "step-00000002.old").mkdir()
    assert checkpoint.list_checkpoints(tmp_path) == []
    path = save(tmp_path)
    assert list(tmp_path.iterdir()) == checkpoint.list_checkpoints(tmp_path) == [path]


def test_failed_write_leaves_the_checkpoint_before(tmp_path):
    """A limit on the size of files stands for a full disk: the operating system refuses the write itself."""
    resource = pytest.importorskip("resource")
    first = save(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, hard))
    try:
        with pytest.raises(CheckpointError, match=r"cannot write the checkpoint .*step-00000002: .*File too large"):
            save(tmp_path, 1, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == [first]
    assert load(first) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of fork in a process of several threads
def test_a_process_killed_while_it_saves_leaves_a_whole_checkpoint(tmp_path):
    """Killed at 20 of the function calls of saving, the last ones among them."""
    calls, last = 0, 0

    def count(*_):
        nonlocal calls
        calls += 1
        if calls == last:
            os.kill(os.getpid(), signal.SIGKILL)

    def save_and_count(folder, step):
        sys.setprofile(count)
        save(folder, step, step)
        sys.setprofile(None)

    for name in ("imports", "first"):
        calls = 0
        save_and_count(tmp_path / name, 1)
    total, steps, chance = calls, [], random.Random(0)
    for moment in (*chance.sample(range(1, total), 10), *range(total - 9, total + 1)):
        folder = shutil.copytree(tmp_path / "first", tmp_path / str(moment))
        calls, last = 0, moment
        if (child := os.fork()) == 0:
            save_and_count(folder, 2)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) in (0, -signal.SIGKILL)
        newest = checkpoint.list_checkpoints(folder)[-1]
        steps.append(int(newest.name[-1]))
        assert load(newest, seed=steps[-1]) == steps[-1]
    assert set(steps) == {1, 2}
