"""Training: the loss decreases, a resumed run equals an uninterrupted one, and errors are clear."""

import math
import os
import random
import shutil
import signal
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest import mock

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
from sigattn.tasks import BYOL, CTC, Distillation, LanguageModelling, SimCLR
from sigattn.train import checkpoint, loop, metrics
from sigattn.train.config import TrainConfig
from sigattn.train.folder_lock import FolderInUseError, lock_folder
from sigattn.train.loop import Interrupted, NonFiniteLossError, StopRequest
from sigattn.train.metrics import count_spikes
from sigattn.train.optimizer import learning_rate_factor, make_optimizer, set_learning_rate
from sigattn.validation import SettingsError
from tests.test_mistakes import contents

MODEL = LanguageModelConfig(max_seq_len=16, num_layers=1, embed_dim=16, num_heads=2)
TRAIN = TrainConfig(max_steps=6, batch_size=4, warmup_steps=1, validate_every=3, checkpoint_every=2, seed=3)
VISION = ViTConfig(image_size=8, patch_size=4, channels=1, num_layers=1, embed_dim=16, num_heads=2, num_classes=1)


@pytest.fixture(scope="module")
def text():
    return TextData.from_bytes(load_text()[:20_000], 16, held_out=8)


class Utterances(Data):
    fingerprint = "noise"

    def batch(self, step, size, seed, shard=(0, 1)):
        torch.manual_seed(step)
        lengths = torch.tensor([90, 80, 20, 15])
        return torch.randn(4, 90, 16), lengths, torch.randint(1, 28, (4, 2)), torch.full((4,), 2)

    def validation(self, size):
        return [self.batch(99, 4, 0)]


def train(data, folder, config=TRAIN, model=MODEL, **options):
    return loop.train(LanguageModelling(), model, config, data, folder, **options)


def numbers(folder):
    rows = metrics.read_metrics(folder / "metrics.jsonl")
    return [{k: v for k, v in row.items() if k != "samples_per_second"} for row in rows]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, text):
    folder = tmp_path_factory.mktemp("whole")
    train(text, folder)
    return folder


@pytest.fixture(scope="module")
def measured(tmp_path_factory, text):
    folder = tmp_path_factory.mktemp("measured")
    train(text, folder, replace(TRAIN, statistics_every=5))
    return folder


@pytest.fixture
def finished(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "finished")


def test_loss_decreases_and_results_are_saved(tmp_path, text):
    train(text, tmp_path, replace(TRAIN, max_steps=20, learning_rate=3e-2, checkpoint_every=6))
    rows = metrics.read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(20))
    assert rows[-1]["loss"] < rows[0]["loss"] - 1
    assert [r["step"] for r in rows if "validation_bits" in r] == [2, 5, 8, 11, 14, 17, 19]
    assert {"loss", "attention_norm", "gradient_norm", "learning_rate"} <= rows[0].keys()
    assert list(tmp_path.glob("events.out.tfevents*"))
    assert [p.name for p in checkpoint.list_checkpoints(tmp_path / "checkpoints")] == ["step-00000018", "step-00000020"]
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
    train(text, tmp_path / "whole", config)
    whole, last = drawn.copy(), 3
    assert len(set(whole)) == config.max_steps
    drawn.clear()
    with pytest.raises(Interrupted, match="stopped after 3 of 6 steps"):
        train(text, tmp_path / "parts", config)
    train(text, tmp_path / "parts", config, resume=True)
    assert drawn == whole
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")
    ours, theirs = (load_model(tmp_path / name / "model").state_dict() for name in ("parts", "whole"))
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name
    drawn.clear()
    train(text, tmp_path / "other", replace(config, seed=4, max_steps=2))
    assert not set(drawn) & set(whole)


def test_killed_run_resumes_from_its_last_whole_checkpoint(whole, tmp_path, text):
    """Rows written after the checkpoint are written again, once. Resuming the finished run changes nothing."""

    def die(row):
        if row["step"] == 4:
            raise SystemExit

    with pytest.raises(SystemExit):
        train(text, tmp_path, on_row=die)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "los')  # cut short
    newest = checkpoint.list_checkpoints(tmp_path / "checkpoints")[-1]
    (file,) = newest.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-3] ^= 16  # in a weight
    file.write_bytes(content)
    before = contents(tmp_path)
    message = rf"cannot read the checkpoint {newest} \(delete it to continue from step-00000002\): {file} has changed"
    with pytest.raises(checkpoint.CheckpointError, match=message):
        train(text, tmp_path, resume=True)
    assert contents(tmp_path) == before
    shutil.rmtree(newest)
    train(text, tmp_path, resume=True)
    assert numbers(tmp_path) == numbers(whole)
    model = train(text, tmp_path, resume=True)
    assert numbers(tmp_path) == numbers(whole)
    assert torch.equal(model.norm.weight, load_model(whole / "model").norm.weight)


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


@pytest.mark.parametrize(
    ("optimizer", "independent", "mup"),
    [("adam", False, False), ("adamw", False, True), ("adamw", True, False), ("adamw", True, True)],
)
def test_steps_are_those_of_the_formula(optimizer, independent, mup):
    """Adam (Kingma & Ba, Algorithm 1), with decoupled weight decay (Loshchilov & Hutter, Algorithm 2), in float64.

    Decay is for matrices: the class token, (1, 1, D), and the bias of each head, (H, 1, 1), are vectors, and the
    output's weight, (1, D), is a matrix. μP-simple halves the learning rate of the matrices in blocks at width 1536.
    """
    config = replace(
        TRAIN, optimizer=optimizer, learning_rate=0.1, weight_decay=0.0 if optimizer == "adam" else 0.3,
        independent_decay=independent, mup_simple=mup,
    )  # fmt: skip
    model = ViT(replace(VISION, pool="cls", learn_bias="head", attention_bias=0.0))
    stepped = make_optimizer(model, config, 1536)
    (beta1, beta2), parameters = config.betas, dict(model.named_parameters())
    assert {"cls", "output.weight", "blocks.0.attention.attention_bias.value"} <= parameters.keys()
    values = {n: p.detach().double() for n, p in parameters.items()}
    moments = {n: (torch.zeros_like(v), torch.zeros_like(v)) for n, v in values.items()}
    for step in range(1, 5):
        factor = learning_rate_factor(config, step)
        set_learning_rate(stepped, config.learning_rate * factor)
        for parameter in parameters.values():
            parameter.grad = torch.randn_like(parameter)
        stepped.step()
        for name, parameter in parameters.items():
            first, second = moments[name]
            gradient = parameter.grad.double()
            first.mul_(beta1).add_((1 - beta1) * gradient)
            second.mul_(beta2).add_((1 - beta2) * gradient**2)
            direction = first / (1 - beta1**step) / ((second / (1 - beta2**step)).sqrt() + config.eps)
            is_vector = parameter.dim() == 1 or name in ("cls", "blocks.0.attention.attention_bias.value")
            in_block = mup and name.startswith("blocks") and not is_vector
            rate = config.learning_rate * factor * (0.5 if in_block else 1.0)
            decay = 0.0 if is_vector else config.weight_decay * (factor if independent else rate)
            values[name] = values[name] - rate * direction - decay * values[name]
            torch.testing.assert_close(parameter.double(), values[name], rtol=1e-5, atol=1e-6, msg=name)


def test_ema_is_evaluated_and_saved(tmp_path, text):
    """Without dropout, which a training step has."""
    config = replace(TRAIN, ema=0.5, max_steps=3, validate_every=1, schedule="constant")
    dropping = replace(MODEL, dropout=0.5, feed_forward="gelu")
    plain = train(text, tmp_path / "plain", replace(config, ema=None), dropping)
    model = train(text, tmp_path / "average", config, dropping)
    assert not torch.equal(model.norm.weight, plain.norm.weight)
    assert torch.equal(load_model(tmp_path / "average" / "model").norm.weight, model.norm.weight)
    tokens, targets = map(torch.cat, zip(*text.validation(8), strict=True))
    for name, trained in (("plain", plain), ("average", model)):
        with torch.no_grad():
            bits = trained.eval().loss(tokens, targets).item() / math.log(2)
        assert numbers(tmp_path / name)[-1]["validation_bits"] == pytest.approx(bits, rel=1e-5)


def test_accumulation_and_activation_checkpointing_keep_results(measured, tmp_path, text):
    train(text, tmp_path, replace(TRAIN, statistics_every=5, grad_accum_steps=3, checkpoint_activations=True))
    for a, b in zip(numbers(measured), numbers(tmp_path), strict=True):
        assert a.keys() == b.keys()
        for name in a.keys() & {"loss", "gradient_norm", "row_mass", "hoyer_sparsity", "max_logit"}:
            assert a[name] == pytest.approx(b[name], rel=2e-4)


def test_micro_batches_are_weighted_by_the_terms_of_their_loss(tmp_path, text):
    """Micro-batches have different numbers of targets if spaces end documents, and speech has of steps."""
    speech = SpeechModelConfig(num_layers=1, embed_dim=16, num_heads=2, num_mel_bins=16, position="rope", dropout=0.0)
    save_model(SpeechModel(speech), tmp_path / "teacher")
    distilled = Distillation(task=CTC(), teacher=str(tmp_path / "teacher"))
    for task, model, data in ((LanguageModelling(end_token=32), MODEL, text), (distilled, speech, Utterances())):
        folders = [tmp_path / f"{task.metric}-{parts}" for parts in (1, 3)]
        for parts, folder in zip((1, 3), folders, strict=True):
            loop.train(task, model, replace(TRAIN, max_steps=2, grad_accum_steps=parts), data, folder)
        rows = [[(row["loss"], row["gradient_norm"]) for row in numbers(folder)] for folder in folders]
        torch.testing.assert_close(*map(torch.tensor, rows), rtol=2e-5, atol=0)


@pytest.mark.parametrize(
    ("task", "model", "training", "message"),
    [
        (LanguageModelling(end_token=10), {}, {}, "end_token=10"),
        (Distillation(task=LanguageModelling(), teacher="teacher"), {}, {}, "teacher='teacher'"),
        (LanguageModelling(), {"dropout": 0.1, "feed_forward": "gelu"}, {}, "dropout=0.1: set dropout=0.0"),
        (LanguageModelling(), {}, {"compile": True}, "compile=True: set compile=False"),
        (LanguageModelling(), {}, {"statistics_every": 5}, "statistics_every=5: set statistics_every=0"),
        (SimCLR(projector_dim=8, output_dim=4), None, {"grad_accum_steps": 2}, "grad_accum_steps=2"),
        (BYOL(projector_dim=8, output_dim=4), None, {"grad_accum_steps": 2}, "grad_accum_steps=2"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_together_raise(tmp_path, text, task, model, training, message):
    """Context parallelism, and losses that need the whole batch."""
    config = replace(TRAIN, **(training if model is None else {"context_parallel": 2, **training}))
    with pytest.raises(SettingsError, match=f"does not support .*{message}"):
        loop.train(task, VISION if model is None else replace(MODEL, **model), config, text, tmp_path)


@pytest.mark.parametrize("change", [{"optimizer": "adam"}, {"learning_rate": 0.0}])
def test_independent_decay_needs_adamw_and_a_learning_rate(change):
    with pytest.raises(SettingsError, match="independent_decay=True needs"):
        replace(TRAIN, independent_decay=True, **change)


def test_run_of_several_processes_is_evaluated_on_one(whole, finished, text):
    shared = replace(TRAIN, tensor_parallel=2, context_parallel=2, compile=True)
    wanted = loop.evaluate(LanguageModelling(), MODEL, TRAIN, text, whole)
    assert wanted["bits"] == pytest.approx(numbers(whole)[-1]["validation_bits"])
    for _ in range(2):  # the saved model, then the last checkpoint
        assert loop.evaluate(LanguageModelling(), MODEL, shared, text, finished) == wanted
        shutil.rmtree(finished / "model", ignore_errors=True)


def test_half_precision(whole, tmp_path, text):
    train(text, tmp_path, replace(TRAIN, precision="bfloat16"))
    plain, half = (numbers(folder)[-1]["loss"] for folder in (whole, tmp_path))
    assert plain != half
    assert half == pytest.approx(plain, rel=0.02)


def test_compile_compiles_the_module(tmp_path, text, monkeypatch):
    """Losses and gradients of compiled modules: tests/recipes."""
    compiled = []
    monkeypatch.setattr(nn.Module, "compile", lambda self: compiled.append(self))
    assert train(text, tmp_path, replace(TRAIN, max_steps=1, compile=True)) is compiled[0]


@pytest.mark.parametrize("what", ["loss nan, gradient norm ", r"loss \d.*, gradient norm nan"])
def test_what_is_not_finite_stops_before_the_update(what, whole, tmp_path, text, monkeypatch):
    """The message names the last checkpoint. The slope of a square root at 0 is infinite, and times 0 NaN."""
    loss, weights = LanguageModelling.loss, []

    def bad(self, module, batch):
        value = loss(self, module, batch)
        if module.training and len(numbers(tmp_path)) == 5:
            weights.append((module, {n: t.clone() for n, t in module.state_dict().items()}))
            return value * math.nan if "loss nan" in what else value + (0 * module.embedding.weight.sum()).sqrt()
        return value

    monkeypatch.setattr(LanguageModelling, "loss", bad)
    with pytest.raises(NonFiniteLossError, match=rf"step 5: {what}.*; the last good checkpoint is .*step-00000004"):
        train(text, tmp_path)
    ((module, before),) = weights
    assert all(torch.equal(t, before[n]) for n, t in module.state_dict().items())
    monkeypatch.undo()
    train(text, tmp_path, resume=True)
    assert numbers(tmp_path) == numbers(whole)


def ruin(monkeypatch, after):
    """Make a weight NaN by an update whose loss and gradient are finite."""
    step, count = torch.optim.AdamW.step, []

    def ruined(optimizer, *args):
        step(optimizer, *args)
        count.append(1)
        if len(count) == after:
            optimizer.param_groups[-1]["params"][-1].data.fill_(math.nan)

    monkeypatch.setattr(torch.optim.AdamW, "step", ruined)


@pytest.mark.parametrize(
    ("validate_every", "checkpoint_every", "last"),
    [(6, 2, "the last good checkpoint is .*-00000002"), (2, 6, "there is no checkpoint yet")],
)
def test_weights_that_are_not_finite_are_neither_validated_nor_kept(
    validate_every, checkpoint_every, last, whole, tmp_path, text, monkeypatch
):
    ruin(monkeypatch, 4)
    config = replace(TRAIN, validate_every=validate_every, checkpoint_every=checkpoint_every)
    with pytest.raises(NonFiniteLossError, match=f"step 3: weights that are not finite; {last}$"):
        train(text, tmp_path, config)
    assert not (tmp_path / "model").exists()
    monkeypatch.undo()
    train(text, tmp_path, config, resume=True)
    assert [row["loss"] for row in numbers(tmp_path)] == [row["loss"] for row in numbers(whole)]
    ruin(monkeypatch, 1)  # nor at an interrupt
    with pytest.raises(NonFiniteLossError, match="step 0: weights that are not finite; there is no checkpoint"):
        train(text, tmp_path / "other", on_row=lambda _: signal.raise_signal(signal.SIGTERM))


def test_non_finite_validation_loss_raises(tmp_path, text, monkeypatch):
    monkeypatch.setattr(LanguageModelling, "evaluate", lambda *_: {"loss": math.nan})
    with pytest.raises(NonFiniteLossError, match=r"step 2: held-out loss nan; .*step-00000002"):
        train(text, tmp_path / "validated")


def test_spikes_are_counted():
    calm = [1.0 + 0.1 * (i % 3) for i in range(100)]
    assert count_spikes(calm, 3.0) == 0
    assert count_spikes([*calm[:40], 9.0, *calm, 5.0, 6.0, 7.0, *calm, 3.0], 3.0) == 2
    assert count_spikes([9.0, *calm], 3.0) == 0  # the beginning is not judged
    assert count_spikes([], 3.0) == 0


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


def test_statistics_every(whole, measured, text):
    """Against the model's own report at the first step; nothing else changes."""
    rows, names = numbers(measured), {"row_mass", "hoyer_sparsity", "max_logit"}
    assert [r["step"] for r in rows if "row_mass" in r] == [0, 5]
    assert [{k: v for k, v in r.items() if k not in names} for r in rows] == numbers(whole)
    torch.manual_seed(TRAIN.seed)
    report = LanguageModel(MODEL).attention_report(text.batch(0, TRAIN.batch_size, TRAIN.seed)[0])
    for name, key in (("row_mass", "row_mass_mean"), ("hoyer_sparsity", "hoyer_sparsity")):
        expected = torch.stack([getattr(r, key).mean() for r in report]).mean().item()
        assert rows[0][name] == pytest.approx(expected, rel=1e-4)
    assert rows[0]["max_logit"] == pytest.approx(max(r.max_logit.max().item() for r in report), rel=1e-4)


def test_wandb_receives_the_same_rows(tmp_path, text, monkeypatch):
    """Against a stand-in for wandb: the same run, each row once, and the same run again when resumed."""
    wandb, config = mock.MagicMock(), replace(TRAIN, wandb="project", max_steps=2)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for resume in (False, True):
        train(text, tmp_path, config, resume=resume)
    rows = [{**call.args[0], "step": call.kwargs["step"]} for call in wandb.init.return_value.log.call_args_list]
    assert rows == metrics.read_metrics(tmp_path / "metrics.jsonl")
    assert wandb.init.return_value.finish.call_count == 2
    first, again = (call.kwargs for call in wandb.init.call_args_list)
    assert first["project"] == "project"
    assert first["config"]["learning_rate"] == TRAIN.learning_rate
    assert first["id"] == again["id"]
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match="pip install wandb"):
        train(text, tmp_path / "other", config)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of fork in a process of several threads
def test_one_process_at_a_time_writes_into_a_folder(finished, text):
    """Its lock is released when the process is killed."""
    before = contents(finished)
    locked, report = os.pipe()
    if (child := os.fork()) == 0:
        with lock_folder(finished):
            os.write(report, b"x")
            signal.pause()
    os.read(locked, 1)
    try:
        for options in ({"resume": True}, {"config": replace(TRAIN, seed=1)}):
            with pytest.raises(FolderInUseError, match="another process or thread is writing into the run folder"):
                train(text, finished, **options)
        assert contents(finished) | before == contents(finished)
        assert contents(finished).keys() - before.keys() <= {finished / "run.lock"}
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    train(text, finished, resume=True)
    os.waitpid(child, 0)


def test_one_thread_at_a_time_writes_into_a_folder(tmp_path):
    refused = pytest.raises(FolderInUseError, match="another process or thread is writing into the run folder")
    with lock_folder(tmp_path), lock_folder(tmp_path), ThreadPoolExecutor(1) as pool, refused:
        pool.submit(lock_folder(tmp_path / ".").__enter__).result()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lock_folder(tmp_path).__enter__).result()
