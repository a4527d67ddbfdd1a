"""The command line: demo, info, help, and ``train``, ``convert`` and the commands that use their runs."""

import importlib
import io
import json
import re
import shlex
import signal
import sys
import types
import warnings
from functools import partial

import pytest
import torch
from PIL import Image

import sigattn
from sigattn import cli
from sigattn.cli.errors import exit_on_errors
from sigattn.cli.runs import TrainingProgress, read_run, write_run
from sigattn.demo import training
from sigattn.models import LanguageModel, LanguageModelConfig, ViT, ViTConfig, load, saving
from sigattn.recipes import RECIPES, Recipe, find_recipe
from sigattn.tasks import LanguageModelling
from sigattn.train import metrics
from tests.integrations.tasks import tokenizer_of_words, write_task
from tests.test_mistakes import DATA, USAGE, contents, failure, mistake

SMALL = [
    "--max-seq-len", "32", "--num-layers", "1", "--embed-dim", "16", "--num-heads", "2",
    "--max-steps", "6", "--batch-size", "2", "--validate-every", "3",
]  # fmt: skip


def test_an_interrupted_demo_is_resumed_and_writes_a_report(tmp_path, capsys, monkeypatch):
    folder, text = tmp_path / "run", tmp_path / "the.txt"
    text.write_text("the text of a demo. " * 200)
    arguments = ["demo", "--run-folder", str(folder), "--text", str(text), *SMALL]
    monkeypatch.setattr(training, "generate_sample", partial(training.generate_sample, length=5))
    evaluate = LanguageModelling.evaluate

    def interrupted(*args):
        monkeypatch.setattr(LanguageModelling, "evaluate", evaluate)
        signal.raise_signal(signal.SIGINT)
        return evaluate(*args)

    monkeypatch.setattr(LanguageModelling, "evaluate", interrupted)
    with pytest.raises(SystemExit) as stop:
        cli.main([*arguments, "--resume"])
    assert stop.value.code == 130
    said = capsys.readouterr().out
    assert f"nothing to resume in {folder}: starting" in said
    assert "the same command with --resume" in said
    code, message = failure(arguments, capsys)
    assert code == 2
    assert "or name another folder (--resume, --run-folder)" in message
    cli.main([*arguments, "--resume"])
    said = capsys.readouterr().out
    assert "nothing to resume" not in said
    assert "report.html" in said.replace("\n", "")
    for name in ("softmax", "sigmoid-log-n", "sigmoid-no-bias"):
        assert [row["step"] for row in metrics.read_metrics(folder / name / "metrics.jsonl")] == [*range(6)]
        assert (folder / name / "model" / "model.safetensors").exists()
    page = (folder / "report.html").read_text()
    assert page.count("<svg") == 1
    addresses = {address.removeprefix("www.") for address in re.findall(r"http://([\w.]*)", page)}
    assert addresses <= {"w3.org", "purl.org", "creativecommons.org"}  # self-contained: names of XML dialects only
    settings = "<td>model: embed_dim</td><td>16</td>"
    for expected in ("sigmoid, b = 0", "held-out bits per byte", "torch", "sample of text", "the.txt", settings):
        assert expected in page
    before = contents(folder)
    failure([*arguments, "--learning-rate", "1", "--resume"], capsys)
    assert contents(folder) == before


def test_info(capsys):
    cli.main(["info"])
    said = capsys.readouterr().out
    for expected in ("sigattn 0.", "torch 2.", "on cpu:", "reference", "blocked", "(default)", "float64"):
        assert expected in said
    for dtype in ("float32", "bfloat16", "float16", "float64"):  # each has one default on each device
        assert said.count(f" {dtype} (default)") == said.count("\non ")


def test_a_terminal_without_unicode(monkeypatch):
    """Characters that it lacks are spelled in ASCII; they raised UnicodeEncodeError."""
    screen = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(screen, encoding="ascii"))
    with exit_on_errors("sigattn"):
        print("σ 1 ± 2 ≤ 3 …", flush=True)
    assert screen.getvalue() == b"sigma 1 +- 2 ? 3 ...\n"


@pytest.mark.parametrize("command", [*cli.COMMANDS, "train lm-1b-2k", ""])
def test_help_fits_a_terminal_of_80_columns(command, monkeypatch, capsys):
    """Lines are broken between words; a usage line is one word."""
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stop:
        cli.main([*command.split(), "--help"])
    assert stop.value.code == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("usage: ")]
    assert len(lines) > 2
    assert max(map(len, lines)) <= 80


def test_recipes_fit_a_terminal_of_80_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(Recipe, "parameters", lambda _: 1_234_567_890)  # without building each
    cli.main(["recipes"])
    *lines, _ = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert all(any(line.startswith(f" {name} ") for line in lines) for name in RECIPES)


def test_version(capsys):
    cli.main(["--version"])
    assert capsys.readouterr().out == f"sigattn {sigattn.__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["dmeo"], ["train"], ["demo", "--max-steps", "many"]])
def test_invalid_command_line(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2


QUICK = "--training.max-steps 6 --training.batch-size 8 --training.validate-every 6"


def said(capsys, command):
    """Return what a command prints."""
    capsys.readouterr()
    cli.main(shlex.split(command))
    return capsys.readouterr().out


def test_a_language_model_from_training_to_text(tmp_path, capsys):
    """Trained once, and not again when resumed."""
    run = tmp_path / "run"
    train = f"train lm-1b-2k --tiny --folder {run} {QUICK} --model.max-seq-len 32"
    printed = said(capsys, f"{train} --resume")
    assert f"nothing to resume in {run}: starting" in printed.replace("\n", " ")
    for expected in ("6 steps end within the warm-up of", "step 6 loss", "spikes: 0 of the gradient norm"):
        assert expected in printed
    rows = metrics.read_metrics(run / "metrics.jsonl")
    assert len(rows) == 6
    message = "holds a run already: resume it, or name another folder (--resume, --folder)"
    mistake(train, USAGE, message, capsys)
    assert "nothing to resume" not in said(capsys, f"{train} --resume")
    assert metrics.read_metrics(run / "metrics.jsonl") == rows
    evaluated = said(capsys, f"evaluate {run}").split()
    assert float(evaluated[evaluated.index("bits") + 1]) == pytest.approx(rows[-1]["validation_bits"], rel=1e-4)
    generate = f"generate {run} --prompt 'A class ' --max-new-tokens 9"
    text = said(capsys, generate)
    assert text.startswith("A class ")
    assert said(capsys, generate) == text
    mistake(["probe", run], DATA, "LanguageModel (lm-1b-2k-tiny), no vision transformer", capsys)


def test_sigterm_ends_with_a_checkpoint_and_its_own_code(tmp_path, capsys, monkeypatch):
    """SIGINT: test_an_interrupted_demo_is_resumed_and_writes_a_report."""
    evaluate = LanguageModelling.evaluate
    sent = lambda *a: (signal.raise_signal(signal.SIGTERM), evaluate(*a))[1]  # noqa: E731
    monkeypatch.setattr(LanguageModelling, "evaluate", sent)
    with pytest.raises(SystemExit) as stop:
        cli.main(f"train lm-1b-2k --tiny --folder {tmp_path / 'run'} {QUICK}".split())
    assert stop.value.code == 143
    assert "the same command with --resume" in capsys.readouterr().out
    assert (tmp_path / "run" / "checkpoints" / "step-00000006").is_dir()


def check_ecosystem(folder, run, capsys, monkeypatch):
    """The same run among transformers' models and in the evaluation harness."""
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("lm_eval")
    theirs = folder / "theirs"
    assert "AutoModelForCausalLM" in said(capsys, f"export {run} {theirs}")
    tokens = transformers.AutoTokenizer.from_pretrained(theirs)("the cat", return_tensors="pt")
    logits = transformers.AutoModelForCausalLM.from_pretrained(theirs)(**tokens).logits
    torch.testing.assert_close(logits, load(run / "model")(tokens.input_ids))
    write_task(folder, [{"question": "the cat", "choices": [" sat", " dog"], "answer": 0}] * 4, monkeypatch)
    said(capsys, f"lm-eval {run} --tasks toy_local --include {folder}")
    assert json.loads((run / "lm_eval.json").read_text())["toy_local"]["acc"] in (0, 1)
    mistake(f"lm-eval {run} --tasks nosuch", USAGE, "has no task nosuch", capsys)


def test_options_reach_the_generation_and_no_special_tokens_are_added_to_a_prompt(tmp_path, monkeypatch):
    """Such as the end of text that T5's tokenizer adds, after which nothing is to be continued."""
    evaluate = importlib.import_module("sigattn.cli.evaluate")
    tokenizer = tokenizer_of_words("</s>")
    model, calls = types.SimpleNamespace(), []
    model.generate = lambda rows, count, **options: calls.append((rows[0].tolist(), count, options)) or rows
    monkeypatch.setattr(evaluate, "load_language_model", lambda _: (model, tokenizer, None))
    options = {"temperature": 0.5, "top_k": 3, "top_p": 0.9}
    evaluate.generate(tmp_path, prompt="the cat", stop="cat", max_new_tokens=7, seed=5, **options)
    ((prompt, count, passed),) = calls
    assert passed.pop("generator").initial_seed() == 5
    assert (prompt, count, passed) == ([2, 1], 7, {**options, "stop_tokens": [1]})


def test_the_documented_route_from_a_corpus_to_text(tmp_path, capsys, monkeypatch):
    """tokenizer, pack, train, and then everything that needs the tokenizer, after all three files are gone."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("the cat sat on the mat, and the dog too. " * 400)
    assert "tokens:" in said(capsys, "tokenizer --data text.txt --save t.json --vocab-size 300")
    said(capsys, "pack --data text.txt --tokenizer t.json --save corpus.bin")
    (tmp_path / "t.json").unlink()
    train = f"train lm-kappa-1 --tiny {QUICK} --data corpus.bin --model.vocab-size 320 --model.max-seq-len 8"
    cli.main(f"{train} --folder run".split())
    cli.main(f"{train} --folder run --resume".split())
    (tmp_path / "corpus.bin.tokenizer.json").write_text("{}")
    message = "corpus.bin.tokenizer.json, is missing or has changed"
    mistake(f"{train} --folder run --resume", DATA, message, capsys)
    for file in tmp_path.glob("corpus*"):
        file.unlink()
    assert said(capsys, "generate run --prompt 'the cat' --max-new-tokens 5").startswith("the cat")
    said(capsys, "evaluate run --data text.txt")
    check_ecosystem(tmp_path, tmp_path / "run", capsys, monkeypatch)
    (tmp_path / "run" / "tokenizer.json").write_text("{}")
    mistake("generate run", DATA, "run/tokenizer.json has changed since it was written", capsys)


def test_a_masked_autoencoder_is_probed(tmp_path, capsys):
    run = tmp_path / "run"
    cli.main(f"train vit-mae --tiny --softmax --folder {run} {QUICK}".split())
    assert 0 <= float(said(capsys, f"probe {run}").split()[-1]) <= 1
    mistake(["generate", run], DATA, "no language model", capsys)


def test_a_folder_of_images_is_probed_once(tmp_path, monkeypatch):
    """Each training image once, also where their number is no multiple of the batch size."""
    evaluate = importlib.import_module("sigattn.cli.evaluate")
    for split, count in (("train", 130), ("val", 1)):
        for name in ("a", "b"):
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (8, 8), (i, 0, 0)).save(tmp_path / split / name / f"{i}.png")

    def plain(*_):
        return lambda image: torch.tensor(list(image.tobytes())).view(8, 8, 3).movedim(2, 0).float()

    model = ViT(ViTConfig(image_size=8, patch_size=8, num_layers=1, embed_dim=8, num_heads=1, num_classes=0))
    model.features = lambda images: images[:, 0, 0, :1]  # the number of the image
    probed = []
    monkeypatch.setattr("sigattn.data.images.transforms", plain)
    monkeypatch.setattr(evaluate, "read_run", lambda _: (find_recipe("vit-simclr"), tmp_path, None))
    monkeypatch.setattr(evaluate.saving, "load", lambda _: model)
    monkeypatch.setattr(evaluate, "linear_probe", lambda *parts: probed.extend(parts) or 0.0)
    evaluate.probe(tmp_path)
    seen = sorted(zip(probed[0][0].flatten().tolist(), probed[0][1].tolist(), strict=True))
    assert seen == [(i, label) for i in range(130) for label in (0, 1)]


def test_recipes_are_printed(capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one = said(capsys, "recipes asr-ls100-post").replace("\n", " ")
    assert "word error rate" in one
    assert "parameters: " in one
    assert "train vit-mae-tiny-softmax --help" in said(capsys, "recipes vit-mae-tiny-softmax")


def test_evaluate_speech_by_split_on_librispeech_and_by_duration_on_tedlium(tmp_path, capsys):
    soundfile = pytest.importorskip("soundfile")

    def record(file, samples, rate=16_000, **layout):
        file.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(file, (torch.randn(samples) / 10).numpy(), rate, **layout)

    for digit in range(10):
        for index in (0, 7):
            record(tmp_path / "fsdd" / f"{digit}_ann_{index}.wav", 2000 + 200 * digit, 8000)
    for part in ("dev", "test"):
        talk = tmp_path / "ted" / "legacy" / part
        record(talk / "sph" / "bob.sph", 14 * 16_000, format="NIST", subtype="PCM_16")
        (talk / "stm").mkdir()
        lines = "bob 1 bob 0.0 2.0 <o,f0,male> one two\nbob 1 bob 2.0 13.5 <o,f0,male> three four\n"
        (talk / "stm" / "bob.stm").write_text(lines)
    for split in ("dev-clean", "test-clean", "test-other"):
        chapter = tmp_path / "libri" / split / "1" / "2"
        record(chapter / "1-2-0000.flac", 16_000)
        (chapter / "1-2.trans.txt").write_text("1-2-0000 ONE TWO\n")
    run = tmp_path / "run"
    sizes = "--model.embed-dim 16 --training.batch-size 20 --training.max-steps 2"
    cli.main(f"train asr-ls960 --tiny --data {tmp_path / 'fsdd'} --folder {run} {sizes}".split())
    for corpus, parts in (("ted", ["0-10s", "10-20s"]), ("libri", ["dev-clean", "test-clean", "test-other"])):
        printed = said(capsys, f"evaluate {run} --data {tmp_path / corpus}")
        assert [line.split()[0] for line in printed.splitlines() if " wer " in line] == parts


@pytest.fixture(scope="module")
def softmax_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "softmax"
    command = f"train lm-1b-2k --tiny --softmax --folder {folder} {QUICK} --model.max-seq-len 32"
    cli.main(command.split())
    recipe, _, _ = read_run(folder)
    recipe = recipe.with_training(tensor_parallel=2)  # as if trained on two processes
    write_run(folder, recipe, "lm-1b-2k-tiny-softmax", None, None)
    return folder


def test_a_run_is_converted_and_fine_tuned_once(softmax_run, capsys):
    command = f"convert {softmax_run} --batches 4 --steps 3"
    printed = said(capsys, command)
    folder = softmax_run.with_name("softmax-sigmoid")
    assert saving.load(folder / "model").config.activation == "sigmoid"
    report = json.loads((folder / "conversion.json").read_text())
    assert [layer["name"] for layer in report["layers"]] == ["blocks.0.attention", "blocks.1.attention"]
    rows = metrics.read_metrics(folder / "metrics.jsonl")
    assert len(rows) == 3
    assert rows[0]["loss"] == pytest.approx(report["loss"], rel=0.1)  # it starts from the converted weights
    assert all(f"{name}: loss" in printed for name in ("softmax", "converted", "fine-tuned, 3 steps"))
    evaluated = said(capsys, f"evaluate {folder}").split()
    bits = float(evaluated[evaluated.index("bits") + 1])
    assert bits == pytest.approx(rows[-1]["validation_bits"], rel=1e-4)
    assert said(capsys, f"generate {folder} --prompt A --max-new-tokens 5").startswith("A")
    before = contents(folder)
    mistake(command, USAGE, "holds a run already", capsys)
    mistake(f"convert {softmax_run} --batches 4 --steps 5 --resume", DATA, "differs in max_steps", capsys)
    message = "activation='sigmoid': only softmax is converted"
    mistake(f"convert {folder} --folder {folder / 'x'}", USAGE, message, capsys)
    assert contents(folder) == before


def test_interrupted_and_resumed_with_distillation(softmax_run, tmp_path, capsys, monkeypatch):
    command = f"convert {softmax_run} --steps 4 --batches 2"
    whole, parts = (f"{command} --distil 1 --folder {tmp_path / name}" for name in ("whole", "parts"))
    assert f"nothing to resume in {tmp_path / 'whole'}: starting" in said(capsys, f"{whole} --resume")

    class Interrupting(TrainingProgress):
        def show(self, name, row):
            super().show(name, row)
            if row["step"] == 1:
                signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr("sigattn.cli.runs.TrainingProgress", Interrupting)
        with pytest.raises(SystemExit) as stopped:
            cli.main(parts.split())
    assert stopped.value.code == 130
    assert "stopped after 2 of 4 steps" in capsys.readouterr().out
    # another loss, without the divergence
    mistake(f"{command} --folder {tmp_path / 'parts'} --resume", DATA, "task", capsys)
    cli.main(f"{parts} --resume".split())
    weights, resumed = (saving.load(tmp_path / name / "model").state_dict() for name in ("whole", "parts"))
    assert all(torch.equal(resumed[name], value) for name, value in weights.items())
    rows = metrics.read_metrics(tmp_path / "parts" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]


def test_a_model_folder_without_a_run_is_converted_once(tmp_path, capsys):
    model = LanguageModel(LanguageModelConfig(activation="softmax", num_layers=1, embed_dim=16, max_seq_len=16))
    saving.save(model, tmp_path / "model")
    command = f"convert {tmp_path / 'model'} --folder {tmp_path / 'new'} --batch-size 2"
    assert "converted: loss" in said(capsys, f"{command} --batches 2")
    assert saving.load(tmp_path / "new" / "model").config.normalize
    before = contents(tmp_path / "new")
    mistake(f"{command} --batches 3", USAGE, "holds a model already", capsys)
    assert contents(tmp_path / "new") == before
