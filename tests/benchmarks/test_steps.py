"""``python -m benchmarks steps`` at a tiny size: the models that it times, and its file."""

import functools
import json

import pytest
import torch

from benchmarks import steps
from sigattn.nn import QuadraticBias, VisibleKeysLinearBias
from sigattn.nn.attention import Attention

KINDS = (steps.SOFTMAX, steps.SIGMOID, steps.QUADRATIC, steps.CONVERTED)


@pytest.mark.parametrize("model", ["language", "speech"])
def test_the_models_differ_in_the_attention_only(model, monkeypatch):
    """The same weights, softmax or sigmoid; the converted model has the bias of a conversion."""
    built = {}
    make = steps.make_optimizer
    config = steps.StepsBenchmark(embed_dim=16, num_layers=1, num_heads=2, tokens=32)
    for attention in KINDS:
        monkeypatch.setattr(steps, "make_optimizer", lambda m, *a, kind=attention: make(built.setdefault(kind, m), *a))
        steps._step(config, model, 16, attention, torch.float32, compiled=False)()
    kinds = {k: next(m for m in model.modules() if isinstance(m, Attention)) for k, model in built.items()}
    assert [layer.activation for layer in kinds.values()] == ["softmax", "sigmoid", "sigmoid", "sigmoid"]
    learned = {k: type(layer.attention_bias) for k, layer in kinds.items() if k not in (steps.SOFTMAX, steps.SIGMOID)}
    assert learned == {steps.QUADRATIC: QuadraticBias, steps.CONVERTED: VisibleKeysLinearBias}
    assert [k for k, layer in kinds.items() if layer.normalize] == [steps.CONVERTED]
    softmax, sigmoid = ([*built[k].named_parameters()] for k in (steps.SOFTMAX, steps.SIGMOID))
    shapes = [{name: p.shape for name, p in each if "y_norm" not in name} for each in (softmax, sigmoid)]
    assert shapes[0] == shapes[1]


def test_file(tmp_path):
    config = steps.StepsBenchmark(
        models=("vit",), lengths=(16,), embed_dim=16, num_layers=1, num_heads=2, tokens=32, dtypes=("float32",),
        compiled=False, threads=1, rounds=1, results=tmp_path / "steps.json",
    )  # fmt: skip
    report = steps.benchmark_steps(config)
    assert json.loads(config.results.read_text())["rows"] == report["rows"]
    assert [row["attention"] for row in report["rows"]] == list(KINDS)
    for row in report["rows"]:
        assert row["median_ms"] > 0
    by = {row["attention"]: row for row in report["rows"]}
    assert by[steps.SOFTMAX]["softmax_time_over_this"] == by[steps.SIGMOID]["sigmoid_time_over_this"] == 1
    expected = by[steps.SIGMOID]["median_ms"] / by[steps.CONVERTED]["median_ms"]
    assert by[steps.CONVERTED]["sigmoid_time_over_this"] == pytest.approx(expected)  # one round


@pytest.mark.parametrize(
    ("part", "compiled", "attention"),
    [*(("layer", False, kind) for kind in KINDS), ("block", True, steps.CONVERTED)],
)
def test_pass_of_a_part(part, attention, compiled, unchecked, monkeypatch):
    """Its input and all of its parameters have a gradient; those of a converted one too."""
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    config = steps.StepsBenchmark(embed_dim=16, num_layers=1, num_heads=2, tokens=32)
    gradients = steps._step(config, part, 16, attention, torch.float32, compiled=compiled)()
    assert gradients[0].shape == (2, 16, 16)
    parameters = 4 * 2 + 2  # projections, with biases, and the norms of Q and K
    if part == "block":
        parameters += 2 * 2 + 2 * 2 + 2  # two linear layers and two LayerNorms, with biases, and two LayerScales
    # constant and slope, terms in q, output scale
    learned = {steps.QUADRATIC: 2 + 3 + 3, steps.CONVERTED: 2}.get(attention, 0)
    assert len(gradients) == 1 + parameters + learned
    assert all(g.isfinite().all() for g in gradients)


@pytest.mark.parametrize(("part", "attention"), [("layer-forward", steps.SOFTMAX), ("block-forward", steps.CONVERTED)])
def test_forward_pass_of_a_part(part, attention):
    """Is that of the pass with gradients, without the graph."""
    config = steps.StepsBenchmark(embed_dim=16, num_layers=1, num_heads=2, tokens=32)
    out = steps._step(config, part, 16, attention, torch.float32, compiled=False)()
    assert out.shape == (2, 16, 16)
    assert not out.requires_grad
