"""Conversion with batches: the report against the model itself. (The fit: test_fit.py.)"""

import copy
import dataclasses
import json
import runpy
from pathlib import Path

import pytest
import torch

from sigattn.conversion import ConversionReport, HeadReport, LayerReport, convert
from tests.conversion.layers import language


def model_and_batches():
    torch.manual_seed(0)
    model = language()
    for block in model.blocks:
        block.attention.query.weight.data *= 3  # attention that is not uniform
    tokens = torch.randint(32, (8, 2, 25))
    return model, [(t[:, :-1], t[:, 1:]) for t in tokens]


def loss(model, batch):
    return model.loss(*batch)


def test_the_losses_are_those_of_the_models():
    model, batches = model_and_batches()
    softmax, held_out = copy.deepcopy(model), batches[6:]
    before = sum(loss(model, b).item() for b in held_out) / 2
    report = convert(model, batches, loss=loss)
    assert report.loss_softmax == pytest.approx(before)
    assert report.loss == pytest.approx(sum(loss(model, b).item() for b in held_out) / 2)
    assert all(layer.error < 0.01 for layer in report.layers)
    with torch.no_grad():
        outputs = [torch.cat([m(tokens) for tokens, _ in held_out]) for m in (softmax, model)]
    assert report.change == pytest.approx(float((outputs[1] - outputs[0]).norm() / outputs[0].norm()), rel=1e-3)


def report_of(error, loss=1.0):
    heads = (HeadReport(0.5, -1.0, -0.5), HeadReport(float("nan"), -2.0, -0.5))
    return ConversionReport((), (LayerReport("a.b", heads, error),), 0.02, 1.0, loss, 3, 1, True, 0.25)


def test_the_report_says_what_is_poor(tmp_path):
    assert report_of(0.49).warnings == []
    (layer,) = report_of(0.5).warnings
    assert "outputs of a.b differ from softmax's by 50% or more" in layer
    shown = repr(report_of(0.3))  # what a notebook shows, and print
    assert "a.b" in shown
    assert "-2.00 … -1.00  -0.50" in shown
    assert "30.00%" in shown
    assert "change of the model's output: 2.00%" in shown
    assert "loss: 1.0000 with softmax, 1.0000 converted" in shown
    assert "converted in 0.2 s" in shown
    report_of(0.6).save(str(tmp_path / "report.json"))
    saved = json.loads((tmp_path / "report.json").read_text())
    assert saved["layers"][0]["heads"][1] == {"r2": None, "constant": -2.0, "slope": -0.5}
    assert saved["warnings"] == report_of(0.6).warnings


@pytest.mark.parametrize(
    ("before", "after", "warns"),
    [(1.0, 1.04, False), (1.0, 1.2, True), (-2.0, -1.95, False), (-2.0, -1.8, True), (0.0, 0.1, True)],
)
def test_losses_that_rise_are_warned_of(before, after, warns):
    report = dataclasses.replace(report_of(0.1, after), loss_softmax=before)
    assert any(f"The loss rose from {before:g} to {after:g}: fine-tune" in w for w in report.warnings) == warns


def test_random_numbers_are_those_of_every_run():
    """An autoencoder draws masks in evaluation mode, too; with other masks its losses could not be compared."""
    model, batches = model_and_batches()
    drawn = []

    def noisy(model, batch):
        drawn.append(torch.rand(()).item())
        return loss(model, batch) + drawn[-1]

    state = torch.get_rng_state()
    report = convert(model, batches, loss=noisy)
    assert torch.equal(torch.get_rng_state(), state)
    assert len(set(drawn)) == 6  # of the batches of the fit; those of the two held-out ones are the first of these
    assert report.loss - report.loss_softmax < 0.5


def test_one_batch_in_inference_mode():
    """The model can be trained after it."""
    model, batches = model_and_batches()
    with torch.inference_mode():
        report = convert(model, batches[:1], loss=loss)
    assert not report.held_out
    assert "There was one batch only" in report.warnings[0]
    loss(model.train(), batches[0]).backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if "bias" in name)


@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_the_example_of_a_trained_sentence_encoder(capsys):
    """Where the packages with all-MiniLM-L6-v2 are installed."""
    pytest.importorskip("all_minilm_l6_v2")
    pytest.importorskip("sentence_transformers")
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "convert_embeddings.py"), run_name="__main__")
    assert float(capsys.readouterr().out.rpartition("least ")[2]) > 0.999
