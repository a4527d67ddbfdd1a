"""Checkpoint files: damage of any byte is reported, nothing in them is code, and no file outside them is read."""

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

from sigattn import cli
from sigattn.distributed.process_mesh import ProcessMesh
from sigattn.train import checkpoint
from sigattn.train.checkpoint import CheckpointError
from tests.test_cli import contents, failure

TRAIN = ["train", "lm-1b-2k", "--tiny", "--training.max-steps", "2", "--training.batch-size", "4"]
TRAIN += ["--training.checkpoint-every", "1", "--model.max-seq-len", "16", "--model.embed-dim", "16"]
TRAIN += ["--model.num-heads", "2", "--model.num-layers", "1"]
SETTINGS = {"learning_rate": 0.1}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints") / "run"
    cli.main([*TRAIN, "--folder", str(folder)])
    return folder


@pytest.fixture
def run(finished, tmp_path):
    """A run folder with two checkpoints and without the trained model."""
    shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "model")
    return tmp_path / "run"


def newest(run):
    return checkpoint.list_checkpoints(run / "checkpoints")[-1]


def trained(seed=0):
    """A module and its optimiser after a step."""
    torch.manual_seed(seed)
    module = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    module(torch.ones(3)).sum().backward()
    optimizer.step()
    return module, optimizer


def state(module, optimizer):
    moments = [value for values in optimizer.state.values() for value in values.values()]
    return [t.clone() for t in (*module.parameters(), *moments)]


def test_every_flipped_bit_is_reported_or_harmless(tmp_path):
    saved = state(*trained())
    path = checkpoint.save(tmp_path, *trained(), 1, SETTINGS, ProcessMesh())
    chance, harmless, flips = random.Random(0), 0, 0
    for file in sorted(path.iterdir()):
        content = file.read_bytes()
        for position in chance.sample(range(len(content)), min(len(content), 25)):
            flipped = bytearray(content)
            flipped[position] ^= 1 << chance.randrange(8)
            file.write_bytes(flipped)
            module, optimizer = trained(seed=1)
            flips += 1
            try:
                step = checkpoint.load(path, module, optimizer, SETTINGS, ProcessMesh())
            except CheckpointError:
                continue
            harmless += 1
            assert step == 1
            assert all(map(torch.equal, state(module, optimizer), saved)), (file, position)
        file.write_bytes(content)
    assert flips == 75
    assert harmless < 3  # such as a line feed that becomes a vertical tab
    module, optimizer = trained(seed=1)
    checkpoint.load(path, module, optimizer, SETTINGS, ProcessMesh())  # the files are whole again
    assert all(map(torch.equal, state(module, optimizer), saved))


def command_on(run, command):
    return ["evaluate", str(run)] if command == "evaluate" else [*TRAIN, "--folder", str(run), "--resume"]


@pytest.mark.parametrize("command", ["evaluate", "resume"])
def test_a_flipped_bit_stops_the_command(run, capsys, command):
    (file,) = newest(run).glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-3] ^= 16  # in a weight
    file.write_bytes(content)
    before = contents(run)
    code, message = failure(command_on(run, command), capsys)
    assert code == 1
    assert contents(run) == before
    assert f"cannot read the checkpoint {newest(run)} (delete it to continue from step-00000001)" in message
    assert f"{file} has changed since it was written" in message
    shutil.rmtree(newest(run))
    cli.main(["evaluate", str(run)])


@pytest.mark.parametrize("change", ["deleted", "added", "renamed", "outside", "older"])
def test_other_files_than_were_saved_are_reported(tmp_path, change):
    path = checkpoint.save(tmp_path / "run", *trained(), 1, SETTINGS, ProcessMesh())
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
        message = "another version of sigattn: it has format 1, and this version reads 2"
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(path, *trained(), SETTINGS, ProcessMesh())


@dataclass
class Exploit:
    """An object whose unpickling runs a shell command."""

    command: str

    def __reduce__(self):
        return os.system, (self.command,)


PICKLED = [".metadata", "__0_0.distcp", "about.json", "SHA256SUMS", "safetensors"]


@pytest.mark.parametrize(
    ("name", "command"), [*((name, "evaluate") for name in PICKLED), (".metadata", "resume"), ("safetensors", "resume")]
)
def test_pickles_are_not_executed(run, tmp_path, capsys, name, command):
    """The first two are the files of torch.distributed.checkpoint's own format."""
    (file,) = newest(run).glob("*.safetensors")
    file = file if name == "safetensors" else newest(run) / name
    is_new = not file.exists()
    file.write_bytes(pickle.dumps(Exploit(f"touch {tmp_path / 'proof'}")))
    arguments = command_on(run, command)
    if is_new:
        cli.main(arguments)
    else:
        assert "cannot read the checkpoint" in failure(arguments, capsys)[1]
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
    path = checkpoint.save(tmp_path, *trained(), 1, SETTINGS, ProcessMesh())
    assert len(list(path.glob("*.safetensors"))) > 1
    module, optimizer = trained(seed=1)
    checkpoint.load(path, module, optimizer, SETTINGS, ProcessMesh())
    assert all(map(torch.equal, state(module, optimizer), state(*trained())))


def test_failed_write_leaves_the_checkpoint_before(tmp_path):
    """A limit on the size of files stands for a full disk: the operating system refuses the write itself."""
    resource = pytest.importorskip("resource")
    first = checkpoint.save(tmp_path, *trained(), 1, SETTINGS, ProcessMesh())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, hard))
    try:
        with pytest.raises(CheckpointError, match=r"cannot write the checkpoint .*step-00000002: .*File too large"):
            checkpoint.save(tmp_path, *trained(1), 2, SETTINGS, ProcessMesh())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == [first]
    module, optimizer = trained(seed=1)
    assert checkpoint.load(first, module, optimizer, SETTINGS, ProcessMesh()) == 1
    assert all(map(torch.equal, state(module, optimizer), state(*trained())))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of fork in a process of several threads
def test_a_process_killed_while_it_saves_leaves_a_whole_checkpoint(tmp_path):
    """Killed at 30 of the function calls of saving, the last ones among them."""
    calls = 0

    def count(*_):
        nonlocal calls
        calls += 1
        if calls == last:
            os.kill(os.getpid(), signal.SIGKILL)

    def save(folder, step):
        sys.setprofile(count)
        path = checkpoint.save(folder, *trained(step), step, SETTINGS, ProcessMesh())
        sys.setprofile(None)
        return path

    last = 0
    for name in ("imports", "first"):
        calls = 0
        save(tmp_path / name, 1)
    total, steps, chance = calls, [], random.Random(0)
    for moment in (*chance.sample(range(1, total), 20), *range(total - 9, total + 1)):
        folder = shutil.copytree(tmp_path / "first", tmp_path / str(moment))
        calls, last = 0, moment
        if (child := os.fork()) == 0:
            save(folder, 2)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) in (0, -signal.SIGKILL)
        module, optimizer = trained(seed=5)
        newest = checkpoint.list_checkpoints(folder)[-1]
        steps.append(checkpoint.load(newest, module, optimizer, SETTINGS, ProcessMesh()))
        assert all(map(torch.equal, state(module, optimizer), state(*trained(steps[-1]))))
    assert set(steps) == {1, 2}
