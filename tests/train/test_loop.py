"""Training: the loss decreases, a resumed run equals an uninterrupted one, and errors are clear."""

import functools
import math
import random
import shutil
import signal
import sys
import types
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from sigattn.data.dataset import Data
from sigattn.data.text import TextData, load_text
from sigattn.models.language import LanguageModel, LanguageModelConfig
from sigattn.models.saving import load as load_model
from sigattn.models.saving import save as save_model
from sigattn.models.speech import SpeechModel, SpeechModelConfig
from sigattn.models.vision import ViT, ViTConfig
from sigattn.tasks.byol import BYOL
from sigattn.tasks.ctc import CTC
from sigattn.tasks.distillation import Distillation
from sigattn.tasks.language import LanguageModelling
from sigattn.tasks.simclr import SimCLR
from sigattn.train import checkpoint, loop, metrics
from sigattn.train.config import TrainConfig
from sigattn.train.loop import Interrupted, NonFiniteLossError, StopRequest
from sigattn.train.metrics import count_spikes
from sigattn.train.optimizer import learning_rate_factor, make_optimizer, set_learning_rate
from sigattn.validation import SettingsError

MODEL = LanguageModelConfig(max_seq_len=32, num_layers=2, embed_dim=32, num_heads=2)
TRAIN = TrainConfig(max_steps=12, batch_size=4, warmup_steps=3, validate_every=5, checkpoint_every=4, seed=3)


@pytest.fixture(scope="module")
def text():
    return TextData.from_bytes(load_text()[:40_000], 32, held_out=8)


class Utterances(Data):
    """Four utterances of very different lengths."""

    fingerprint = "noise"

    def batch(self, step, size, seed, shard=(0, 1)):
        torch.manual_seed(step)
        lengths = torch.tensor([90, 80, 20, 15])
        return torch.randn(4, 90, 16), lengths, torch.randint(1, 28, (4, 2)), torch.full((4,), 2)

    def validation(self, size):
        return [self.batch(99, 4, 0)]


def train(model, config, data, folder, **options):
    return loop.train(LanguageModelling(), model, config, data, folder, **options)


def numbers(folder):
    return [
        {k: v for k, v in row.items() if k != "samples_per_second"}
        for row in metrics.read_metrics(folder / "metrics.jsonl")
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, text):
    """The folder of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    train(MODEL, TRAIN, text, folder)
    return folder


@pytest.fixture
def finished(whole, tmp_path):
    """A copy of that run."""
    return Path(shutil.copytree(whole, tmp_path / "finished"))


def test_loss_decreases_and_results_are_saved(tmp_path, text):
    train(MODEL, replace(TRAIN, max_steps=25, learning_rate=1e-2), text, tmp_path)
    rows = metrics.read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(25))
    assert rows[-1]["loss"] < rows[0]["loss"] - 1
    assert [r["step"] for r in rows if "validation_bits" in r] == [*range(4, 25, 5)]
    assert {"loss", "attention_norm", "gradient_norm", "learning_rate"} <= rows[0].keys()
    assert list(tmp_path.glob("events.out.tfevents*"))
    assert [p.name for p in checkpoint.list_checkpoints(tmp_path / "checkpoints")] == ["step-00000024", "step-00000025"]
    assert isinstance(load_model(tmp_path / "model"), LanguageModel)


AVERAGED = replace(TRAIN, optimizer="adagrad", schedule="constant", ema=0.5, statistics_every=3)


@pytest.mark.parametrize("config", [TRAIN, AVERAGED], ids=["adamw", "adagrad, average of weights, statistics"])
def test_a_resumed_run_equals_an_uninterrupted_one(config, tmp_path, text, monkeypatch):
    """Metrics, weights, and random numbers such as dropout's. Ctrl-C lets the step be completed."""
    loss, drawn, last = LanguageModelling.loss, [], 0

    def drawing(self, module, batch):
        drawn.append(torch.rand(()).item())
        if len(drawn) == last:
            signal.raise_signal(signal.SIGINT)
        return loss(self, module, batch)

    monkeypatch.setattr(LanguageModelling, "loss", drawing)
    train(MODEL, config, text, tmp_path / "whole")
    whole, last = drawn.copy(), 6
    assert len(set(whole)) == config.max_steps
    drawn.clear()
    with pytest.raises(Interrupted, match="stopped after 6 of 12 steps"):
        train(MODEL, config, text, tmp_path / "parts")
    train(MODEL, config, text, tmp_path / "parts", resume=True)
    assert drawn == whole
    rows = numbers(tmp_path / "parts")
    assert rows == numbers(tmp_path / "whole")
    assert rows[-1]["loss"] < rows[0]["loss"]
    ours, theirs = (load_model(tmp_path / name / "model").state_dict() for name in ("parts", "whole"))
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name
    drawn.clear()
    train(MODEL, replace(config, seed=4, max_steps=2), text, tmp_path / "other")
    assert not set(drawn) & set(whole)


def test_killed_run_resumes_from_last_checkpoint(whole, tmp_path, text):
    """Rows that were written after the checkpoint are written again, once."""
    parts = tmp_path / "parts"

    def die(row):
        if row["step"] == 6:
            raise SystemExit

    with pytest.raises(SystemExit):
        train(MODEL, TRAIN, text, parts, on_row=die)
    with (parts / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "los')  # cut short
    train(MODEL, TRAIN, text, parts, resume=True)
    assert numbers(parts) == numbers(whole)


def test_resuming_a_finished_run_changes_nothing(whole, finished, text):
    model = train(MODEL, TRAIN, text, finished, resume=True)
    assert numbers(finished) == numbers(whole)
    saved = load_model(finished / "model").state_dict()
    assert torch.equal(model.state_dict()["norm.weight"], saved["norm.weight"])


def test_damaged_rows_are_left_out_with_a_warning(tmp_path):
    """A flipped bit changes no number of a row without a word, and rows before and after it are read."""
    log, path = metrics.MetricsLog(tmp_path), tmp_path / "metrics.jsonl"
    whole = [{"step": step, "loss": 1 / (step + 1), "note\u00e9": float(step)} for step in range(4)]
    for row in whole:
        log.write(row)
    log.close()
    content = path.read_bytes()
    chance = random.Random(0)
    for position in range(len(content)):
        flipped = bytearray(content)
        flipped[position] ^= 1 << chance.randrange(8)
        path.write_bytes(flipped)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            rows = metrics.read_metrics(path)
        assert all(row in whole for row in rows)
        assert len(rows) == 4 or (len(rows) >= 2 and "damaged lines are left out, the first is line" in str(said[0]))
    path.write_bytes(content + b'{"step": 4, "lo')
    assert metrics.read_metrics(path) == whole  # cut short, without a warning


def test_schedules():
    cosine = TrainConfig(max_steps=100, warmup_steps=10, final_learning_rate=0.1)
    assert [learning_rate_factor(cosine, s) for s in (0, 4, 9)] == [0.1, 0.5, 1.0]
    assert learning_rate_factor(cosine, 10) == 1.0
    assert abs(learning_rate_factor(cosine, 99) - 0.1) < 1e-12
    assert all(learning_rate_factor(cosine, s) > learning_rate_factor(cosine, s + 1) for s in range(10, 99))
    steps = replace(cosine, schedule="steps", decay_start=50, decay_every=20)
    factors = [learning_rate_factor(steps, s) for s in (4, 10, 49, 50, 69, 70, 90)]
    assert factors == [0.5, 1.0, 1.0, 0.5, 0.5, 0.25, 0.125]
    constant = replace(cosine, schedule="constant", warmup_steps=0)
    assert {learning_rate_factor(constant, s) for s in range(100)} == {1.0}


def test_weight_decay_and_mup_simple_apply_to_matrices_only():
    """The class token, (1, 1, D), and the bias of each head, (H, 1, 1), are vectors; weights (1, D) are a matrix."""
    model = LanguageModel(replace(MODEL, learn_bias="head"))
    groups = make_optimizer(model, TRAIN, 32).param_groups
    assert [(g["weight_decay"], {p.dim() for p in g["params"]}) for g in groups] == [(0.1, {2}), (0.0, {1, 3})]
    assert sum(len(g["params"]) for g in groups) == len(list(model.parameters()))
    groups = make_optimizer(model, replace(TRAIN, mup_simple=True), 1536).param_groups
    assert {(g["weight_decay"], g["factor"]) for g in groups} == {(0.1, 1.0), (0.0, 1.0), (0.1, 0.5)}
    settings = {"image_size": 8, "patch_size": 4, "num_layers": 1, "embed_dim": 16, "num_heads": 2}
    vision = ViT(ViTConfig(**settings, num_classes=1, pool="cls"))
    bias = "blocks.0.attention.attention_bias.value"
    for module, name, decay in ((vision, "cls", 0.0), (model, bias, 0.0), (vision, "output.weight", 0.1)):
        groups = make_optimizer(module, replace(TRAIN, mup_simple=True), 1536).param_groups
        (group,) = (g for g in groups if any(p is module.get_parameter(name) for p in g["params"]))
        assert (group["weight_decay"], group["factor"]) == (decay, 1.0), name


@pytest.mark.parametrize("independent", [False, True])
def test_weight_decay_shrinks_an_untouched_parameter_by_schedule_or_learning_rate(independent):
    """Weights without a gradient, over a run of a μP model of width 1536 (factor ½) with warm-up and cosine."""
    config = replace(
        TRAIN, max_steps=40, learning_rate=1e-2, weight_decay=0.03, mup_simple=True, independent_decay=independent
    )
    model = LanguageModel(MODEL)
    optimizer = make_optimizer(model, config, 1536)
    before = [parameter.detach().double() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    schedule = [learning_rate_factor(config, step) for step in range(config.max_steps)]
    for factor in schedule:
        set_learning_rate(optimizer, config.learning_rate * factor)
        optimizer.step()
    in_blocks = [id(p) for g in optimizer.param_groups if g["factor"] == 0.5 for p in g["params"]]
    assert in_blocks
    for old, parameter in zip(before, model.parameters(), strict=True):
        rate = 1.0 if independent else config.learning_rate * (0.5 if id(parameter) in in_blocks else 1.0)
        decay = config.weight_decay if parameter.dim() >= 2 else 0.0
        left = math.prod(1 - factor * rate * decay for factor in schedule)
        torch.testing.assert_close(parameter.double(), left * old, rtol=1e-5, atol=1e-9)
        assert (left < 0.6) == (independent and parameter.dim() >= 2)  # else at least 0.99


@pytest.mark.parametrize("optimizer", ["adamw", "adam"])
def test_steps_are_those_of_the_formula(optimizer):
    """Adam (Kingma & Ba, Algorithm 1), with decoupled weight decay (Loshchilov & Hutter, Algorithm 2), in float64."""
    config = replace(TRAIN, optimizer=optimizer, learning_rate=0.1, weight_decay=0.0 if optimizer == "adam" else 0.3)
    model = nn.Linear(3, 2)
    stepped = make_optimizer(model, config, 32)
    (beta1, beta2), values = config.betas, [p.detach().double() for p in model.parameters()]
    moments = [(torch.zeros_like(v), torch.zeros_like(v)) for v in values]
    for step in range(1, 5):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        stepped.step()
        for i, (parameter, (first, second)) in enumerate(zip(model.parameters(), moments, strict=True)):
            gradient = parameter.grad.double()
            first.mul_(beta1).add_((1 - beta1) * gradient)
            second.mul_(beta2).add_((1 - beta2) * gradient**2)
            direction = first / (1 - beta1**step) / ((second / (1 - beta2**step)).sqrt() + config.eps)
            decay = config.weight_decay if parameter.dim() >= 2 else 0.0
            values[i] = values[i] - config.learning_rate * (direction + decay * values[i])
            torch.testing.assert_close(parameter.double(), values[i], rtol=1e-5, atol=1e-6)


def test_independent_decay_needs_adamw():
    for change in ({"optimizer": "adam"}, {"learning_rate": 0.0}):
        with pytest.raises(SettingsError, match="independent_decay=True needs"):
            replace(TRAIN, independent_decay=True, **change)


def test_ema_is_evaluated_and_saved(tmp_path, text):
    """Without dropout, which a training step has."""
    config = replace(TRAIN, ema=0.5, max_steps=3, validate_every=1, schedule="constant")
    dropping = replace(MODEL, dropout=0.5, feed_forward="gelu")
    plain = train(dropping, replace(config, ema=None), text, tmp_path / "plain")
    model = train(dropping, config, text, tmp_path / "average")
    assert not torch.equal(model.norm.weight, plain.norm.weight)
    assert torch.equal(load_model(tmp_path / "average" / "model").norm.weight, model.norm.weight)
    tokens, targets = map(torch.cat, zip(*text.validation(8), strict=True))
    for name, trained in (("plain", plain), ("average", model)):
        with torch.no_grad():
            bits = trained.eval().loss(tokens, targets).item() / math.log(2)
        assert numbers(tmp_path / name)[-1]["validation_bits"] == pytest.approx(bits, rel=1e-5)


@pytest.mark.parametrize("settings", [{"grad_accum_steps": 3}, {"checkpoint_activations": True}], ids=str)
def test_accumulation_and_activation_checkpointing_keep_results(tmp_path, text, settings):
    closely = replace(TRAIN, statistics_every=11)
    train(MODEL, closely, text, tmp_path / "plain")
    train(MODEL, replace(closely, **settings), text, tmp_path / "other")
    for a, b in zip(numbers(tmp_path / "plain"), numbers(tmp_path / "other"), strict=True):
        assert a.keys() == b.keys()
        for name in a.keys() & {"loss", "gradient_norm", "row_mass", "hoyer_sparsity", "max_logit"}:
            assert a[name] == pytest.approx(b[name], rel=2e-4)


def test_micro_batches_are_weighted_by_the_terms_of_their_loss(tmp_path, text):
    """Micro-batches have different numbers of targets if spaces end documents, and speech has of steps."""
    speech = SpeechModelConfig(num_layers=1, embed_dim=16, num_heads=2, num_mel_bins=16, position="rope", dropout=0.0)
    save_model(SpeechModel(speech), tmp_path / "teacher")
    distilled = Distillation(task=CTC(), teacher=str(tmp_path / "teacher"))
    for task, model, data in ((LanguageModelling(end_token=32), MODEL, text), (distilled, speech, Utterances())):
        found = []
        for parts in (1, 3):
            folder = tmp_path / f"{task.metric}-{parts}"
            loop.train(task, model, replace(TRAIN, max_steps=2, grad_accum_steps=parts), data, folder)
            found += [[(row["loss"], row["gradient_norm"]) for row in numbers(folder)]]
        torch.testing.assert_close(*map(torch.tensor, found), rtol=2e-5, atol=0)


def test_losses_of_the_whole_batch_cannot_be_accumulated(tmp_path, text):
    vision = ViTConfig(image_size=8, patch_size=4, channels=1, num_layers=1, embed_dim=16, num_heads=2)
    for task in (SimCLR(projector_dim=8, output_dim=4), BYOL(projector_dim=8, output_dim=4)):
        with pytest.raises(SettingsError, match=f"{type(task).__name__} does not support grad_accum_steps=2"):
            loop.train(task, vision, replace(TRAIN, grad_accum_steps=2), text, tmp_path)


@pytest.mark.parametrize(
    ("task", "model", "training", "message"),
    [
        (LanguageModelling(end_token=10), {}, {}, "end_token=10"),
        (Distillation(task=LanguageModelling(), teacher="teacher"), {}, {}, "teacher='teacher'"),
        (LanguageModelling(), {"dropout": 0.1, "feed_forward": "gelu"}, {}, "dropout=0.1: set dropout=0.0"),
        (LanguageModelling(), {}, {"compile": True}, "compile=True: set compile=False"),
        (LanguageModelling(), {}, {"statistics_every": 5}, "statistics_every=5: set statistics_every=0"),
    ],
    ids=str,
)
def test_unsupported_context_parallelism_raises(tmp_path, text, task, model, training, message):
    config = replace(TRAIN, context_parallel=2, **training)
    with pytest.raises(SettingsError, match=f"does not support .*{message}"):
        loop.train(task, replace(MODEL, **model), config, text, tmp_path)


def test_run_of_several_processes_is_evaluated_on_one(tmp_path, text):
    train(MODEL, replace(TRAIN, max_steps=2), text, tmp_path)
    wanted = loop.evaluate(LanguageModelling(), MODEL, TRAIN, text, tmp_path)
    shared = replace(TRAIN, tensor_parallel=2, context_parallel=2, compile=True)
    assert loop.evaluate(LanguageModelling(), MODEL, shared, text, tmp_path) == wanted


def test_half_precision(tmp_path, text):
    train(MODEL, TRAIN, text, tmp_path / "plain")
    train(MODEL, replace(TRAIN, precision="bfloat16"), text, tmp_path / "half")
    plain, half = (numbers(tmp_path / name)[-1]["loss"] for name in ("plain", "half"))
    assert plain != half
    assert half == pytest.approx(plain, rel=0.02)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.usefixtures("unchecked")
def test_compiled(tmp_path, text, monkeypatch):
    # without inductor, whose kernels take two seconds each
    monkeypatch.setattr(nn.Module, "compile", functools.partialmethod(nn.Module.compile, backend="eager"))
    model = replace(MODEL, num_layers=1)
    train(model, replace(TRAIN, max_steps=3), text, tmp_path / "plain")
    train(model, replace(TRAIN, max_steps=3, compile=True), text, tmp_path / "compiled")
    plain, compiled = (numbers(tmp_path / name)[-1]["loss"] for name in ("plain", "compiled"))
    assert compiled == pytest.approx(plain, rel=1e-4)


def test_non_finite_loss_names_last_good_checkpoint(tmp_path, text, monkeypatch):
    good = LanguageModelling.loss

    def bad(self, module, batch):
        return good(self, module, batch) * (math.nan if len(numbers(tmp_path)) == 9 else 1)

    monkeypatch.setattr(LanguageModelling, "loss", bad)
    with pytest.raises(NonFiniteLossError, match=r"step 9: loss nan.*the last good checkpoint is .*step-00000008"):
        train(MODEL, TRAIN, text, tmp_path)
    monkeypatch.undo()
    train(MODEL, TRAIN, text, tmp_path, resume=True)
    assert len(numbers(tmp_path)) == 12


def test_spikes_are_counted():
    calm = [1.0 + 0.1 * (i % 3) for i in range(100)]
    assert count_spikes(calm, 3.0) == 0
    assert count_spikes([*calm[:40], 9.0, *calm, 5.0, 6.0, 7.0, *calm, 3.0], 3.0) == 2
    assert count_spikes([9.0, *calm], 3.0) == 0  # the beginning is not judged
    assert count_spikes([], 3.0) == 0


def test_unfinished_checkpoints_are_deleted(tmp_path, text):
    folder = tmp_path / "checkpoints"
    (folder / "step-00000006.unfinished").mkdir(parents=True)
    (folder / "step-00000002.old").mkdir()
    assert checkpoint.list_checkpoints(folder) == []
    train(MODEL, replace(TRAIN, max_steps=4, checkpoint_every=2, seed=3), text, tmp_path)
    assert sorted(p.name for p in folder.iterdir()) == ["step-00000002", "step-00000004"]


def test_non_finite_gradient_stops_before_update(tmp_path, text, monkeypatch):
    """The loss itself is finite: the slope of a square root at 0 is infinite, and times 0 NaN."""
    loss, weights = LanguageModelling.loss, []

    def bad(self, module, batch):
        value = loss(self, module, batch)
        if module.training and len(numbers(tmp_path)) == 9:
            weights.append((module, {n: t.clone() for n, t in module.state_dict().items()}))
            value = value + (0 * module.embedding.weight.sum()).sqrt()
        return value

    monkeypatch.setattr(LanguageModelling, "loss", bad)
    with pytest.raises(NonFiniteLossError, match=r"step 9: loss \d.*, gradient norm nan; .*step-00000008"):
        train(MODEL, replace(TRAIN, max_grad_norm=None), text, tmp_path)
    ((module, before),) = weights
    assert all(torch.equal(t, before[n]) for n, t in module.state_dict().items())


def test_a_second_ctrl_c_stops_at_once_and_a_second_sigterm_is_ignored():
    """A scheduler and torchrun may send one SIGTERM each."""
    previous = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    with StopRequest() as request:
        signal.raise_signal(signal.SIGINT)
        assert request.signal == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    with StopRequest() as request:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert request.signal == signal.SIGTERM
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == previous


def test_statistics_every(whole, tmp_path, text):
    """Against the model's own report at the first step; nothing else changes."""
    train(MODEL, replace(TRAIN, statistics_every=5), text, tmp_path / "closely")
    rows = metrics.read_metrics(tmp_path / "closely" / "metrics.jsonl")
    assert [r["step"] for r in rows if "row_mass" in r] == [0, 5, 10]
    names = {"row_mass", "hoyer_sparsity", "max_logit"}
    plain = [{k: v for k, v in r.items() if k not in names} for r in numbers(tmp_path / "closely")]
    assert plain == numbers(whole)
    torch.manual_seed(TRAIN.seed)
    report = LanguageModel(MODEL).attention_report(text.batch(0, TRAIN.batch_size, TRAIN.seed)[0])
    for name, key in (("row_mass", "row_mass_mean"), ("hoyer_sparsity", "hoyer_sparsity")):
        expected = torch.stack([getattr(r, key).mean() for r in report]).mean().item()
        assert rows[0][name] == pytest.approx(expected, rel=1e-4)
    assert rows[0]["max_logit"] == pytest.approx(max(r.max_logit.max().item() for r in report), rel=1e-4)


def test_wandb_receives_the_same_rows(tmp_path, text, monkeypatch):
    """Against a stand-in for wandb: the same run, each row once, and the same run again when resumed."""
    runs = []

    class Run:
        def __init__(self, **settings):
            self.settings, self.rows, self.finished = settings, [], False
            runs.append(self)

        def log(self, row, step):
            self.rows.append({"step": step, **row})

        def finish(self):
            self.finished = True

    module = types.ModuleType("wandb")
    module.init = Run
    monkeypatch.setitem(sys.modules, "wandb", module)
    config = replace(TRAIN, wandb="project")
    train(MODEL, config, text, tmp_path)
    first = runs[-1]
    assert first.rows == metrics.read_metrics(tmp_path / "metrics.jsonl")
    assert first.finished
    assert first.settings["project"] == "project"
    assert first.settings["config"]["learning_rate"] == TRAIN.learning_rate
    train(MODEL, config, text, tmp_path, resume=True)
    assert runs[-1].settings["id"] == first.settings["id"]
    assert runs[-1].rows == []
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match="pip install wandb"):
        train(MODEL, config, text, tmp_path / "other")
