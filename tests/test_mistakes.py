"""Mistakes at the command line: each ends in one line that names it, and in an exit code."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sigattn import cli
from sigattn.cli.runs import write_run
from sigattn.data.dataset import DataError
from sigattn.data.tokens import load_packed
from sigattn.models import saving
from sigattn.recipes import find_recipe
from sigattn.train import loop

TINY = "train lm-1b-2k --tiny --training.max-steps 1 --training.batch-size 2 --model.max-seq-len 16"
USAGE, DATA = 2, 1


def failure(arguments, capsys, main=cli.main):
    """Exit code and what was said; it must be one line."""
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    assert said.err.count("\n") == 1, said.err
    return stop.value.code, said.err


def contents(folder):
    """Return the bytes of every file."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def run(tmp_path):
    """A run folder of a language model of bytes, as sigattn train leaves it."""
    recipe = find_recipe("lm-1b-2k-tiny").with_transformer(num_layers=1, embed_dim=16, num_heads=2, max_seq_len=16)
    write_run(tmp_path / "run", recipe, "lm-1b-2k-tiny", None, None)
    saving.save(saving.build(recipe.model), tmp_path / "run" / "model")
    return tmp_path / "run"


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """The current folder, with a text, its tokenizer, and both packed."""
    pytest.importorskip("tokenizers")
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("the cat sat on the mat. " * 400)
    cli.main(shlex.split("tokenizer --data text.txt --save tokenizer.json --vocab-size 300"))
    cli.main(shlex.split("pack --data text.txt --tokenizer tokenizer.json --save text.bin"))
    return tmp_path


def mistake(arguments, code, message, capsys, main=cli.main):
    """Check that a command, a string or its words, fails with a code and one line that holds a message."""
    capsys.readouterr()
    words = shlex.split(arguments) if isinstance(arguments, str) else [str(a) for a in arguments]
    stopped, said = failure(words, capsys, main)
    assert message in said
    assert stopped == code


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (f"{TINY} --model.embed-dim 0", "embed_dim must be at least 1, got 0"),
        (f"{TINY} --folder ''", "a path is empty (''): name a file or folder; the current folder is '.'"),
        ("demo --run-folder ''", "a path is empty ('')"),
        (f"{TINY} --model.attention-bias log_sample", "'log_sample' is -log of each sample's length, which "),
        (f"{TINY} --task.end-token 256", "end_token must be below the vocabulary of 256, got 256"),
        (f"{TINY} --workers -1", "workers must be at least 0, got -1"),
        (f"{TINY} --workers 7", "workers=7 is for folders of images"),
        (f"{TINY} --model.num-heads 5", "num_heads must divide embed_dim, and num_kv_heads num_heads, got embed_dim="),
        ("train lm-2b", "no recipe is called 'lm-2b'; sigattn recipes lists them"),
        ("recipes lm-2b", "no recipe is called"),
        ("train vit-byol", "train its tiny form on handwritten digits (--data, --tiny)"),
        ("train asr-ls960 --tiny", "name its folder (--data)"),
        ("train lm-1b-2k", "(--tokenizer, --data, --model.vocab-size)"),
        ("train vit-mae --tiny --tokenizer x", "takes no tokenizer"),
        ("pack --data x --tokenizer y --save z", "ends in .bin"),
        ("train vit-supervised --tiny --model.num-classes 5", "the model 5 (--model.num-classes)"),
        ("train asr-ls960 --tiny --task.alphabet ab", "an alphabet of 2 characters needs vocab_size=3"),
        ("demo --log-attention-every 5", "log_attention_every must be 1"),
        ("demo --embed-dim 16 --num-heads 16", "head_dim must be even, got 1"),
        ("lm-eval run --limit 0", "limit must be at least 1, got 0"),
        ("tokenizer --data x --save y --vocab-size 5", "vocab_size must be at least 257, got 5"),
        ("pack --data x --tokenizer y --save z.bin --limit 0", "limit must be at least 1, got 0"),
        ("theory --limit 3", "limit must be at least 4, got 3"),
        ("convert . --learning-rate 0", "learning_rate must be a finite number above 0"),
        ("convert . --distil 1", "pass steps too (--steps)"),
        ("convert . --learning-rate 5", "pass steps too (--steps)"),
        ("convert . --resume", "pass steps too (--steps)"),
    ],
)
def test_settings(command, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mistake(command, USAGE, message, capsys)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--temperature nan", "temperature must be a finite number of at least 0, got nan"),
        ("--max-new-tokens -1", "max_new_tokens must be at least 0, got -1"),
        ("--prompt ''", "--prompt is empty: give the text to continue"),
        ("--stop two", "--stop must be one token, and 'two' has 3"),
        ("--top-p 2", "top_p must lie in (0, 1]"),
    ],
)
def test_generating(options, message, run, capsys):
    mistake(f"generate {run} {options}", USAGE, message, capsys)


def test_more_processes_than_there_are(tmp_path, capsys):
    command = f"{TINY} --training.tensor-parallel 2 --folder {tmp_path / 'run'}"
    mistake(command, USAGE, "tensor_parallel=2 does not divide the 1 processes", capsys)


def test_export_overwrites_nothing(run, tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    before = contents(tmp_path)
    for save in ("file", "run", "run/model"):
        message = "holds a run or a model already: name another folder"
        mistake(["export", run, tmp_path / save], DATA, message, capsys)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("run.json", "{}", "run.json has the format None of another version of sigattn, and this version reads 2"),
        ("run.json", '{"format": 2}', "run.json lacks data, model, recipe, task, tokenizer, training"),
        ("run.json", "[]", "run.json must hold a JSON object, got list"),
        ("run.json", "not JSON", "run.json is no JSON"),
        ("run.json", "[" * 100_000, "run.json is no JSON"),
        ("run.json", None, "it holds no run.json"),
        ("run.json", {"data": "other.bin"}, "run.json has changed since it was written"),
        ("SHA256SUMS", None, "has no SHA256SUMS: the file was deleted, or another version"),
        ("run.json", {"recipe": "nosuch"}, "no recipe is called 'nosuch'"),
        ("run.json", {"recipe": 5}, "run.json has a wrong value for recipe: '5'"),
        ("run.json", {"training": {"betas": [0.9, 0.95], "max_steps": 0}}, "max_steps must be at least 1, got 0"),
        ("run.json", {"training": {"nosuch": 0}}, "TrainConfig has no nosuch: these settings were written by"),
        ("run.json", {"model": {"embed_dim": "wide"}}, "embed_dim must be a whole number, got 'wide'"),
        ("model/config.json", "{}", "config.json lacks config, model"),
        ("model/config.json", '{"model": "nosuch", "config": {}}', "'nosuch'"),
        ("model/config.json", {"config": {"embed_dim": 0}}, "embed_dim must be at least 1, got 0"),
        ("model/config.json", {"config": {}}, "config.json has changed since it was written"),
        (
            "model/config.json",
            {"config": {"gate": 1}},
            "has no gate: these settings were written by another",
        ),
        ("model/model.safetensors", "no tensors at all", "model.safetensors has changed since it was written"),
        ("model/model.safetensors", None, "No such file"),
        ("model/SHA256SUMS", None, "model has no SHA256SUMS: the file was deleted, or another version"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_files_of_a_run(file, content, message, run, capsys):
    damage(run / file, content)
    mistake(["generate", run], DATA, message, capsys)


def damage(path, content):
    """Delete a file (None), change entries of its JSON (a dict), or write another text."""
    if content is None:
        path.unlink()
    else:
        changed = {**json.loads(path.read_text()), **content} if isinstance(content, dict) else None
        path.write_text(json.dumps(changed) if changed else content)


def test_folders_without_a_run_are_named(tmp_path, capsys):
    for command in ("evaluate", "generate", "probe"):
        mistake([command, tmp_path], DATA, f"cannot read the run in {tmp_path}: it holds no run.json", capsys)
        mistake([command, tmp_path / "x"], DATA, f"the run in {tmp_path / 'x'}: there is no such folder", capsys)
    mistake(["convert", tmp_path], DATA, "holds neither a run (run.json) nor a model", capsys)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    message = "holds a model of transformers (model_type 'llama'), which sigattn's commands do not read: load it in "
    mistake(["convert", tmp_path], DATA, f"{message}Python with transformers; sigattn.convert converts it", capsys)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"tokens": True}, "wrong value for tokens: 'True'"),
        ({"tokens": 5}, "should hold 5 tokens"),
        (None, "No such file"),
    ],
)
def test_packed_tokens(content, message, corpus, capsys):
    damage(corpus / "text.bin.json", content)
    mistake(f"{TINY} --data text.bin --model.vocab-size 300 --folder run", DATA, message, capsys)
    assert not (corpus / "run").exists()


@pytest.mark.parametrize("token", [300, -1])
def test_tokens_beyond_the_vocabulary(token, corpus):
    file = corpus / "text.bin"
    before = file.stat()
    tokens = torch.from_file(str(file), shared=True, size=before.st_size // 4, dtype=torch.int32)
    tokens[[5, -5]] = token
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))  # otherwise the change itself is found
    text = load_packed(file, 300, seq_len=8)
    for read in (lambda: text.batch(0, 2000, seed=0), lambda: text.validation(2000)):
        with pytest.raises(DataError, match=f"holds token {token}, and the model has a vocabulary of 300"):
            read()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": 5}\n', 'a.jsonl, line 1: expected JSON with a "text", got'),
        ("a.jsonl", b'{"text": "fine"}\n' + b"[" * 100_000, "a.jsonl, line 2: expected JSON"),
        ("a.jsonl.gz", b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff" + b"x" * 50, "cannot read"),
        ("a.parquet", b"no parquet", "a.parquet: "),
        ("a.parquet", {"text": [1, 2]}, 'the column "text" of'),
        ("a.parquet", {"words": ["one"]}, 'no column "text"'),
    ],
)
def test_corpora(name, content, message, corpus, capsys):
    if isinstance(content, dict):
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pytest.importorskip("pyarrow").table(content), name)
    else:
        Path(name).write_bytes(content)
    for command in ("tokenizer", "pack --tokenizer tokenizer.json"):
        mistake(f"{command} --data {name} --save new.bin", DATA, message, capsys)
    assert not list(corpus.glob("new*"))


def test_where_data_comes_from_and_results_go(corpus, capsys):
    Path("file").write_text("in the way")
    Path("folder.bin").mkdir()
    Path("empty.txt").write_text("")
    before = contents(corpus)
    for command, code, message in (
        ("tokenizer --data text.txt --save .", USAGE, "name a file to write, got the folder ."),
        ("tokenizer --data text.txt --save text.txt", USAGE, "is the data itself, which would be overwritten"),
        ("tokenizer --data text.txt --save file/x", DATA, "file: "),
        ("tokenizer --data empty.txt --save new.json", DATA, "empty.txt is empty"),
        ("tokenizer --data hf: --save new.json", DATA, "names no data set: write hf:NAME"),
        ("pack --data text.txt --tokenizer tokenizer.json --save folder.bin", USAGE, "got the folder"),
        ("pack --data text.txt --tokenizer text.txt --save x.bin", DATA, "cannot read the tokenizer"),
        (f"{TINY} --folder file", DATA, "file"),
        ("demo --run-folder file", DATA, "name a folder to write into, got the file file"),
        ("demo --text folder.bin", DATA, "looked for .txt, .md, .rst, .py files"),
        ("evaluate file", DATA, "file"),
        ("train asr-ls960 --data /nowhere", DATA, "no such file or folder: /nowhere"),
    ):
        mistake(command, code, message, capsys)
    assert contents(corpus) == before


def raising(error):
    def function(*_args, **_more):
        raise error

    return function


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full stands for a file on a full disk")
@pytest.mark.parametrize(
    ("file", "name", "command"),
    [
        ("run/run.json", "run.json", f"{TINY} --folder run"),
        ("run/metrics.jsonl.unfinished", "metrics.jsonl", f"{TINY} --folder run"),  # the rows before are kept
        ("run/model/config.json", "model/config.json", f"{TINY} --folder run"),
        ("new.bin.unfinished", "new.bin.unfinished", "pack --data text.txt --tokenizer tokenizer.json --save new.bin"),
        ("new.json", "new.json", "tokenizer --data text.txt --vocab-size 300 --save new.json"),
    ],
)
def test_full_disk(file, name, command, corpus, capsys):
    (corpus / file).parent.mkdir(parents=True, exist_ok=True)
    (corpus / file).symlink_to("/dev/full")
    mistake(command, DATA, f"{name}: No space left on device", capsys)
    assert not list(corpus.glob("new.bin*"))


def test_full_disk_while_safetensors_writes(run, tmp_path, monkeypatch, capsys):
    error = pytest.importorskip("safetensors").SafetensorError("I/O error: No space left on device (os error 28)")
    with monkeypatch.context() as patch:
        patch.setattr("safetensors.torch.save_file", raising(error))
        message = "model.safetensors: I/O error: No space left"
        mistake(f"{TINY} --folder {tmp_path / 'new'}", DATA, message, capsys)
    assert not list((tmp_path / "new" / "model").glob("*.safetensors*"))
    pytest.importorskip("transformers")
    monkeypatch.setattr("sigattn.integrations.transformers.model.export", raising(error))
    mistake(["export", run, tmp_path / "exported"], DATA, "exported: I/O error: No space left on device", capsys)


ADVICE = "): lower the size of batches, models or sequences"


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (f"--model.mlp-dim {10**13}", "can't allocate memory: you tried to allocate "),
        (f"--model.embed-dim {10**10}", "Storage size calculation overflowed"),
    ],
)
def test_settings_that_take_too_much_memory(option, message, tmp_path, capsys):
    _, said = failure(shlex.split(f"train lm-1b-2k --tiny --folder {tmp_path / 'run'} {option}"), capsys)
    assert (message in said, ADVICE in said) == (True, True), said


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")])
def test_memory_errors_advise(error, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(loop, "train", raising(error))
    mistake(f"{TINY} --folder {tmp_path / 'run'}", DATA, ADVICE, capsys)


def test_ctrl_c_while_torch_is_imported(tmp_path):
    """The command ends without a traceback; a program that imports the library gets it."""
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
    path = os.pathsep.join((str(tmp_path), str(Path(cli.__file__).parents[2])))

    def run(*command):
        environment = {**os.environ, "PYTHONPATH": path}
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment)
        return done.returncode, done.stdout, done.stderr

    assert run("-m", "sigattn", "info") == (130, "", "")
    assert run("-c", "try:\n    import sigattn\nexcept KeyboardInterrupt:\n    print('mine')")[1] == "mine\n"


def test_defects_keep_their_traceback(monkeypatch):
    """One line is for mistakes of users; a ValueError from within is a defect."""
    monkeypatch.setattr("sigattn.cli.train.find_recipe", raising(ValueError("a defect")))
    with pytest.raises(ValueError, match="a defect"):
        cli.main(["recipes", "lm-1b-2k"])


def test_what_validation_needs_is_missed_before_training(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "jiwer", None)
    command = f"train asr-ls960 --tiny --data {tmp_path} --folder {tmp_path / 'run'}"
    mistake(command, DATA, "word error rates need jiwer: pip install 'sigattn[speech]'", capsys)
    assert not (tmp_path / "run").exists()
