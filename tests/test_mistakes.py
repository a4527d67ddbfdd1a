"""Mistakes at the command line: each ends in one line that names it, and in an exit code."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sigattn import cli
from sigattn.cli.runs import read_run, write_run
from sigattn.data.dataset import DataError
from sigattn.data.tokens import load_packed
from sigattn.models import saving
from sigattn.recipes import find_recipe
from sigattn.train import loop
from tests.test_cli import contents, failure

TINY = ["lm-1b-2k", "--tiny", "--training.max-steps", "1", "--training.batch-size", "2", "--model.max-seq-len", "16"]
USAGE, DATA = 2, 1


@pytest.fixture
def run(tmp_path):
    """A run folder of a language model of bytes, as sigattn train leaves it."""
    recipe = find_recipe("lm-1b-2k-tiny").with_transformer(num_layers=1, embed_dim=16, num_heads=2, max_seq_len=16)
    write_run(tmp_path / "run", recipe, "lm-1b-2k-tiny", None, None)
    saving.save(saving.build(recipe.model), tmp_path / "run" / "model")
    return tmp_path / "run"


@pytest.fixture
def corpus(tmp_path):
    """A text, its tokenizer, and both packed."""
    pytest.importorskip("tokenizers")
    text, tokenizer, packed = (str(tmp_path / name) for name in ("text.txt", "tokenizer.json", "text.bin"))
    Path(text).write_text("the cat sat on the mat. " * 400)
    cli.main(["tokenizer", "--data", text, "--save", tokenizer, "--vocab-size", "300"])
    cli.main(["pack", "--data", text, "--tokenizer", tokenizer, "--save", packed])
    return tmp_path


def mistake(arguments, code, message, capsys, main=cli.main):
    """Check that a command fails with a code and one line that holds a message."""
    capsys.readouterr()
    found, said = failure([str(a) for a in arguments], capsys, main)
    assert message in said
    assert found == code


SETTINGS = [
    (["train", *TINY, "--model.embed-dim", "0"], "embed_dim must be at least 1, got 0"),
    (["train", *TINY, "--folder", ""], "a path is empty (''): name a file or folder; the current folder is '.'"),
    (["demo", "--run-folder", ""], "a path is empty ('')"),
    (["train", *TINY, "--model.attention-bias", "log_sample"], "'log_sample' is -log of each sample's length, which "),
    (["train", *TINY, "--task.end-token", "256"], "end_token must be below the vocabulary of 256, got 256"),
    (["train", *TINY, "--workers", "-1"], "workers must be at least 0, got -1"),
    (["train", *TINY, "--workers", "7"], "workers=7 is for folders of images"),
    (["train", *TINY, "--model.num-heads", "5"], "multiple of num_heads, got embed_dim=64, num_heads=5"),
    (["train", "lm-2b"], "no recipe is called 'lm-2b'; sigattn recipes lists them"),
    (["recipes", "lm-2b"], "no recipe is called"),
    (["train", "vit-byol"], "train its tiny form on handwritten digits (--data, --tiny)"),
    (["train", "asr-ls960", "--tiny"], "name its folder (--data)"),
    (["train", "lm-1b-2k"], "(--tokenizer, --data, --model.vocab-size)"),
    (["train", "vit-mae", "--tiny", "--tokenizer", "x"], "takes no tokenizer"),
    (["pack", "--data", "x", "--tokenizer", "y", "--save", "z"], "ends in .bin"),
    (["train", "vit-supervised", "--tiny", "--model.num-classes", "5"], "the model 5 (--model.num-classes)"),
    (["train", "asr-ls960", "--tiny", "--task.alphabet", "ab"], "an alphabet of 2 characters needs vocab_size=3"),
    (["demo", "--log-attention-every", "5"], "log_attention_every must be 1"),
    (["demo", "--embed-dim", "16", "--num-heads", "16"], "head_dim must be even, got 1"),
    (["lm-eval", "run", "--limit", "0"], "limit must be at least 1, got 0"),
    (["tokenizer", "--data", "x", "--save", "y", "--vocab-size", "5"], "vocab_size must be at least 257, got 5"),
    (["pack", "--data", "x", "--tokenizer", "y", "--save", "z.bin", "--limit", "0"], "limit must be at least 1, got 0"),
    (["theory", "--limit", "3"], "limit must be at least 4, got 3"),
]


@pytest.mark.parametrize(("arguments", "message"), [pytest.param(*s, id=" ".join(s[0])) for s in SETTINGS])
def test_settings(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mistake(arguments, USAGE, message, capsys)
    assert not list(tmp_path.iterdir())


def test_export_overwrites_nothing(run, tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for save in ("file", "run", "run/model"):
        mistake(["export", run, tmp_path / save], DATA, "holds a run or a model already: name another folder", capsys)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_more_processes_than_there_are(tmp_path, capsys):
    arguments = ["train", *TINY, "--training.tensor-parallel", "2", "--folder", tmp_path / "run"]
    mistake(arguments, USAGE, "tensor_parallel=2 does not divide the 1 processes", capsys)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--temperature", "nan", "temperature must be a finite number of at least 0, got nan"),
        ("--max-new-tokens", "-1", "max_new_tokens must be at least 0, got -1"),
        ("--prompt", "", "--prompt is empty: give the text to continue"),
        ("--stop", "two", "--stop must be one token, and 'two' has 3"),
        ("--top-p", "2", "top_p must lie in (0, 1]"),
    ],
)
def test_generating(option, value, message, run, capsys):
    mistake(["generate", run, option, value], USAGE, message, capsys)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "run.json has the format None of another version of sigattn, and this version reads 2"),
        ('{"format": 2}', "run.json lacks data, model, recipe, task, tokenizer, training"),
        ("[]", "run.json must hold a JSON object, got list"),
        ("not JSON", "run.json is no JSON"),
        ("[" * 100_000, "run.json is no JSON"),
        (None, "it holds no run.json"),
        ({"recipe": "nosuch"}, "no recipe is called 'nosuch'"),
        ({"recipe": 5}, "run.json has a wrong value for recipe: '5'"),
        ({"training": {"betas": [0.9, 0.95], "max_steps": 0}}, "max_steps must be at least 1, got 0"),
        ({"training": {"nosuch": 0}}, "TrainConfig has no nosuch: these settings were written by"),
        ({"model": {"embed_dim": "wide"}}, "embed_dim must be a whole number, got 'wide'"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_run_json(content, message, run, capsys):
    path = run / "run.json"
    if content is None:
        path.unlink()
    elif isinstance(content, dict):
        path.write_text(json.dumps({**json.loads(path.read_text()), **content}))
    else:
        path.write_text(content)
    mistake(["evaluate", run], DATA, message, capsys)


def test_commands_for_runs_name_the_folder(tmp_path, capsys):
    for command in ("evaluate", "generate", "probe"):
        mistake([command, tmp_path], DATA, f"cannot read the run in {tmp_path}: it holds no run.json", capsys)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", "{}", "config.json lacks config, model"),
        ("config.json", '{"model": "nosuch", "config": {}}', "'nosuch'"),
        ("config.json", '{"model": "language", "config": {"embed_dim": 0}}', "embed_dim must be at least 1, got 0"),
        ("config.json", '{"model": "language", "config": {}}', "config.json has changed since it was written"),
        ("model.safetensors", "no tensors at all", "model.safetensors has changed since it was written"),
        ("SHA256SUMS", None, "model has no SHA256SUMS: the file was deleted, or another version"),
        ("model.safetensors", None, "No such file"),
    ],
)
def test_model_folder(file, content, message, run, capsys):
    path = run / "model" / file
    path.unlink() if content is None else path.write_text(content)
    mistake(["generate", run], DATA, message, capsys)


@pytest.mark.usefixtures("unchecked")
def test_every_flipped_bit_of_a_run_is_reported_or_harmless(run):
    recipe, weights = read_run(run), saving.load(run / "model").state_dict()
    chance, harmless = random.Random(0), 0
    for file in (run / "run.json", run / "SHA256SUMS", *sorted((run / "model").iterdir())):
        content = file.read_bytes()
        for position in chance.sample(range(len(content)), 8):
            flipped = bytearray(content)
            flipped[position] ^= 1 << chance.randrange(8)
            file.write_bytes(flipped)
            try:
                same, loaded = read_run(run), saving.load(run / "model").state_dict()
            except (DataError, saving.ModelError):
                continue
            harmless += 1
            assert same == recipe
            assert all(torch.equal(loaded[name], value) for name, value in weights.items()), (file, position)
        file.write_bytes(content)
    assert harmless < 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"tokens": True}, "wrong value for tokens: 'True'"),
        ({"tokens": 5}, "should hold 5 tokens"),
        (None, "No such file"),
    ],
)
def test_packed_tokens(content, message, corpus, capsys):
    about = corpus / "text.bin.json"
    if content is None:
        about.unlink()
    else:
        about.write_text(json.dumps({**json.loads(about.read_text()), **content}))
    arguments = ["train", *TINY, "--data", corpus / "text.bin", "--model.vocab-size", "300"]
    mistake([*arguments, "--folder", corpus / "run"], DATA, message, capsys)
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
    if name.endswith("parquet"):
        parquet = pytest.importorskip("pyarrow.parquet")
    if isinstance(content, dict):
        parquet.write_table(pytest.importorskip("pyarrow").table(content), corpus / name)
    else:
        (corpus / name).write_bytes(content)
    for command, more in (("tokenizer", []), ("pack", ["--tokenizer", corpus / "tokenizer.json"])):
        mistake([command, "--data", corpus / name, "--save", corpus / "new.bin", *more], DATA, message, capsys)
    assert not list(corpus.glob("new*"))


def test_where_results_go(corpus, capsys):
    text, tokenizer, file = corpus / "text.txt", corpus / "tokenizer.json", corpus / "file"
    file.write_text("in the way")
    (corpus / "folder.bin").mkdir()
    learn, pack = ["tokenizer", "--data", text], ["pack", "--data", text, "--tokenizer"]
    (corpus / "empty.txt").write_text("")
    before = contents(corpus)
    mistake([*learn, "--save", corpus], USAGE, f"name a file to write, got the folder {corpus}", capsys)
    mistake([*learn, "--save", text], USAGE, "is the data itself, which would be overwritten", capsys)
    learn_other = ["tokenizer", "--save", corpus / "new.json", "--data"]
    mistake([*learn_other, corpus / "empty.txt"], DATA, "empty.txt is empty", capsys)
    mistake([*learn_other, "hf:"], DATA, "names no data set: write hf:NAME", capsys)
    mistake([*pack, tokenizer, "--save", corpus / "folder.bin"], USAGE, "got the folder", capsys)
    mistake([*pack, text, "--save", corpus / "x.bin"], DATA, "cannot read the tokenizer", capsys)
    mistake([*learn, "--save", file / "x"], DATA, f"{file}: ", capsys)
    mistake(["train", *TINY, "--folder", file], DATA, f"{file}", capsys)
    mistake(["demo", "--run-folder", file], DATA, f"name a folder to write into, got the file {file}", capsys)
    mistake(["evaluate", file], DATA, f"{file}", capsys)
    mistake(["demo", "--text", corpus / "folder.bin"], DATA, "looked for .txt, .md, .rst, .py files", capsys)
    mistake(["train", "asr-ls960", "--data", "/nowhere"], DATA, "no such file or folder: /nowhere", capsys)
    assert contents(corpus) == before


def raising(error):
    def function(*_args, **_more):
        raise error

    return function


NEEDS_FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full stands for a file on a full disk")


@NEEDS_FULL
@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", "model/config.json"])
def test_full_disk_while_training(name, tmp_path, capsys):
    (tmp_path / "model").mkdir()
    (tmp_path / (f"{name}.unfinished" if name == "metrics.jsonl" else name)).symlink_to("/dev/full")
    mistake(["train", *TINY, "--folder", tmp_path], DATA, f"{name}: No space left on device", capsys)


@NEEDS_FULL
def test_full_disk_while_a_corpus_is_written(corpus, capsys):
    data = ["--data", corpus / "text.txt"]
    for name, command in (
        ("new.bin.unfinished", ["pack", *data, "--tokenizer", corpus / "tokenizer.json", "--save", corpus / "new.bin"]),
        ("new.json", ["tokenizer", *data, "--vocab-size", "300", "--save", corpus / "new.json"]),
    ):
        (corpus / name).symlink_to("/dev/full")
        mistake(command, DATA, f"{name}: No space left on device", capsys)
    assert not list(corpus.glob("new.bin*"))


ADVICE = "): lower the size of batches, models or sequences"


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--model.mlp-dim", 10**13, "can't allocate memory: you tried to allocate "),
        ("--model.embed-dim", 10**10, "Storage size calculation overflowed"),
    ],
)
def test_settings_that_take_too_much_memory(option, value, message, tmp_path, capsys):
    _, said = failure(["train", "lm-1b-2k", "--tiny", "--folder", str(tmp_path / "run"), option, str(value)], capsys)
    assert (message in said, ADVICE in said) == (True, True), said


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")])
def test_memory_errors_advise(error, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(loop, "train", raising(error))
    mistake(["train", *TINY, "--folder", tmp_path / "run"], DATA, ADVICE, capsys)


def test_full_disk_while_safetensors_writes(run, tmp_path, monkeypatch, capsys):
    error = pytest.importorskip("safetensors").SafetensorError("I/O error: No space left on device (os error 28)")
    with monkeypatch.context() as patch:
        patch.setattr("safetensors.torch.save_file", raising(error))
        arguments = ["train", *TINY, "--folder", tmp_path / "new"]
        mistake(arguments, DATA, "model.safetensors: I/O error: No space left", capsys)
    assert not list((tmp_path / "new" / "model").glob("*.safetensors*"))
    pytest.importorskip("transformers")
    monkeypatch.setattr("sigattn.integrations.transformers.model.export", raising(error))
    mistake(["export", run, tmp_path / "exported"], DATA, "exported: I/O error: No space left on device", capsys)


def test_ctrl_c_while_torch_is_imported(tmp_path):
    """The command ends without a traceback; a program that imports the library gets it."""
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
    path = os.pathsep.join((str(tmp_path), str(Path(cli.__file__).parents[2])))

    def run(*command):
        done = subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
        )
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
    arguments = ["train", "asr-ls960", "--tiny", "--data", tmp_path, "--folder", tmp_path / "run"]
    mistake(arguments, DATA, "word error rates need jiwer: pip install 'sigattn[speech]'", capsys)
    assert not (tmp_path / "run").exists()
