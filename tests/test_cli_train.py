"""``sigattn train`` and the commands that use its runs."""

import importlib
import json
import signal
import types
import warnings

import pytest
import torch
from PIL import Image

from sigattn import cli
from sigattn.models.saving import load
from sigattn.models.vision import ViT, ViTConfig
from sigattn.recipes import RECIPES, find_recipe
from sigattn.tasks.language import LanguageModelling
from sigattn.train import metrics
from tests.integrations.tasks import write_task
from tests.test_mistakes import DATA, USAGE, mistake

QUICK = ["--training.max-steps", "6", "--training.batch-size", "8", "--training.validate-every", "6"]


def said(capsys, *arguments):
    cli.main(list(arguments))
    return capsys.readouterr().out


class TestTrain:
    def test_a_language_model_from_training_to_text(self, tmp_path, capsys):
        """Trained once, and not again when resumed."""
        run = str(tmp_path / "run")
        train = ["train", "lm-1b-2k", "--tiny", "--folder", run, *QUICK, "--model.max-seq-len", "32"]
        out = said(capsys, *train, "--resume")
        assert f"nothing to resume in {run}: starting" in out.replace("\n", " ")
        assert "6 steps end within the warm-up of" in out
        assert "step 6 loss" in out
        assert "spikes: 0 of the gradient norm" in out
        rows = metrics.read_metrics(tmp_path / "run" / "metrics.jsonl")
        assert len(rows) == 6
        message = "holds a run already: resume it, or name another folder (--resume, --folder)"
        mistake(train, USAGE, message, capsys)
        assert "nothing to resume" not in said(capsys, *train, "--resume")
        assert metrics.read_metrics(tmp_path / "run" / "metrics.jsonl") == rows
        found = said(capsys, "evaluate", run).split()
        assert float(found[found.index("bits") + 1]) == pytest.approx(rows[-1]["validation_bits"], rel=1e-4)
        text = said(capsys, "generate", run, "--prompt", "A class ", "--max-new-tokens", "9")
        assert text.startswith("A class ")
        assert text == said(capsys, "generate", run, "--prompt", "A class ", "--max-new-tokens", "9")
        mistake(["probe", run], DATA, "LanguageModel (lm-1b-2k-tiny), no vision transformer", capsys)

    def test_sigterm(self, tmp_path, capsys, monkeypatch):
        """SIGINT: test_demo in test_cli.py."""
        evaluate = LanguageModelling.evaluate
        sent = lambda *a: (signal.raise_signal(signal.SIGTERM), evaluate(*a))[1]  # noqa: E731
        monkeypatch.setattr(LanguageModelling, "evaluate", sent)
        with pytest.raises(SystemExit) as stop:
            cli.main(["train", "lm-1b-2k", "--tiny", "--folder", str(tmp_path / "run"), *QUICK])
        assert stop.value.code == 143
        assert "the same command with --resume" in capsys.readouterr().out
        assert (tmp_path / "run" / "checkpoints" / "step-00000006").is_dir()

    @staticmethod
    def check_ecosystem(tmp_path, run, capsys, monkeypatch):
        """The same run among transformers' models and in the evaluation harness."""
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers")
        pytest.importorskip("lm_eval")
        assert "AutoModelForCausalLM" in said(capsys, "export", run, str(tmp_path / "theirs"))
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
        tokens = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")("the cat", return_tensors="pt")
        ours = load(tmp_path / "run" / "model")
        torch.testing.assert_close(theirs(**tokens).logits, ours(tokens.input_ids))
        write_task(tmp_path, [{"question": "the cat", "choices": [" sat", " dog"], "answer": 0}] * 4, monkeypatch)
        said(capsys, "lm-eval", run, "--tasks", "toy_local", "--include", str(tmp_path))
        assert json.loads((tmp_path / "run" / "lm_eval.json").read_text())["toy_local"]["acc"] in (0, 1)
        mistake(["lm-eval", run, "--tasks", "nosuch"], USAGE, "has no task nosuch", capsys)

    def test_options_reach_the_generation_and_no_special_tokens_are_added_to_a_prompt(self, tmp_path, monkeypatch):
        """Such as the end of text that T5's tokenizer adds, after which nothing is to be continued."""
        evaluate = importlib.import_module("sigattn.cli.evaluate")
        tokenizers = pytest.importorskip("tokenizers")
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"</s>": 0, "cat": 1, "the": 2}, "the"))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 0)])
        model, calls = types.SimpleNamespace(), []
        model.generate = lambda rows, count, **options: calls.append((rows[0].tolist(), count, options)) or rows
        monkeypatch.setattr(evaluate, "load_language_model", lambda _: (model, tokenizer, None))
        options = {"temperature": 0.5, "top_k": 3, "top_p": 0.9}
        evaluate.generate(tmp_path, prompt="the cat", stop="cat", max_new_tokens=7, seed=5, **options)
        ((prompt, count, found),) = calls
        assert found.pop("generator").initial_seed() == 5
        assert (prompt, count, found) == ([2, 1], 7, {**options, "stop_tokens": [1]})

    def test_the_documented_route_from_a_corpus_to_text(self, tmp_path, capsys, monkeypatch):
        """tokenizer, pack, train, and then everything that needs the tokenizer, after all three files are gone."""
        text, packed = tmp_path / "text.txt", tmp_path / "corpus.bin"
        text.write_text("the cat sat on the mat, and the dog too. " * 400)
        vocabulary = tmp_path / "t.json"
        out = said(capsys, "tokenizer", "--data", str(text), "--save", str(vocabulary), "--vocab-size", "300")
        assert "tokens:" in out
        said(capsys, "pack", "--data", str(text), "--tokenizer", str(vocabulary), "--save", str(packed))
        vocabulary.unlink()
        train = ["train", "lm-kappa-1", "--tiny", *QUICK, "--data", str(packed), "--model.vocab-size", "320"]
        train += ["--model.max-seq-len", "8", "--folder", str(tmp_path / "run")]
        cli.main(train)
        cli.main([*train, "--resume"])
        (tmp_path / "corpus.bin.tokenizer.json").write_text("{}")
        message = "corpus.bin.tokenizer.json, is missing or has changed"
        mistake([*train, "--resume"], DATA, message, capsys)
        for file in tmp_path.glob("corpus*"):
            file.unlink()
        run = str(tmp_path / "run")
        assert said(capsys, "generate", run, "--prompt", "the cat", "--max-new-tokens", "5").startswith("the cat")
        said(capsys, "evaluate", run, "--data", str(text))
        self.check_ecosystem(tmp_path, run, capsys, monkeypatch)
        (tmp_path / "run" / "tokenizer.json").write_text("{}")
        mistake(["generate", run], DATA, "run/tokenizer.json has changed since it was written", capsys)

    def test_a_masked_autoencoder_is_probed(self, tmp_path, capsys):
        run = str(tmp_path / "run")
        cli.main(["train", "vit-mae", "--tiny", "--softmax", "--folder", run, *QUICK])
        capsys.readouterr()
        assert 0 <= float(said(capsys, "probe", run).split()[-1]) <= 1
        mistake(["generate", run], DATA, "no language model", capsys)

    def test_a_folder_of_images_is_probed_once(self, tmp_path, monkeypatch):
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

    def test_help_shows_every_setting(self, capsys):
        with pytest.raises(SystemExit):
            cli.main(["train", "asr-ls960", "--help"])
        out = capsys.readouterr().out
        flags = "--tiny --softmax --model.layer-drop --model.position --training.decay-every --task.alphabet --data"
        for flag in flags.split():
            assert flag in out
        with pytest.raises(SystemExit):
            cli.main(["train", "vit-mae", "--tiny", "--softmax", "--help"])
        assert "--model.encoder.embed-dim" in capsys.readouterr().out
        with pytest.raises(SystemExit) as stop:
            cli.main(["train"])
        assert stop.value.code == 2
        assert "vit-supervised" in capsys.readouterr().out


def test_recipes_are_listed_and_printed(capsys, monkeypatch):
    names = ("vit-mae", "lm-1b-2k")  # each is built to count its parameters
    with monkeypatch.context() as patch:
        patch.setattr("sigattn.cli.train.RECIPES", {name: RECIPES[name] for name in names})
        out = said(capsys, "recipes")
    for name in names:
        assert name in out
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one = said(capsys, "recipes", "asr-ls100-post").replace("\n", " ")
    for expected in ("word error rate", "parameters: "):
        assert expected in one
    assert "train vit-mae-tiny-softmax --help" in said(capsys, "recipes", "vit-mae-tiny-softmax")


def test_evaluate_speech_by_split_on_librispeech_and_by_duration_on_tedlium(tmp_path, capsys):
    soundfile = pytest.importorskip("soundfile")
    recordings, talk = tmp_path / "fsdd", tmp_path / "ted" / "legacy"
    recordings.mkdir()
    for digit in range(10):
        for index in (0, 7):
            sound = torch.randn(2000 + 200 * digit) / 10
            soundfile.write(recordings / f"{digit}_ann_{index}.wav", sound.numpy(), 8000)
    for part in ("dev", "test"):
        for kind in ("stm", "sph"):
            (talk / part / kind).mkdir(parents=True)
        sound = (torch.randn(14 * 16_000) / 10).numpy()
        soundfile.write(talk / part / "sph" / "bob.sph", sound, 16_000, format="NIST", subtype="PCM_16")
        lines = "bob 1 bob 0.0 2.0 <o,f0,male> one two\nbob 1 bob 2.0 13.5 <o,f0,male> three four\n"
        (talk / part / "stm" / "bob.stm").write_text(lines)
    run = str(tmp_path / "run")
    sizes = ["--model.embed-dim", "16", "--training.batch-size", "20", "--training.max-steps", "2"]
    cli.main(["train", "asr-ls960", "--tiny", "--data", str(recordings), "--folder", run, *sizes])
    capsys.readouterr()
    out = said(capsys, "evaluate", run, "--data", str(tmp_path / "ted"))
    for line in ("0-10s wer", "10-20s wer"):
        assert line in out
    assert "30s" not in out
    for split in ("dev-clean", "test-clean", "test-other"):
        chapter = tmp_path / "libri" / split / "1" / "2"
        chapter.mkdir(parents=True)
        (chapter / "1-2.trans.txt").write_text("1-2-0000 ONE TWO\n")
        soundfile.write(chapter / "1-2-0000.flac", (torch.randn(16_000) / 10).numpy(), 16_000)
    out = said(capsys, "evaluate", run, "--data", str(tmp_path / "libri"))
    splits = [line.split()[0] for line in out.splitlines() if " wer " in line]
    assert splits == ["dev-clean", "test-clean", "test-other"]
