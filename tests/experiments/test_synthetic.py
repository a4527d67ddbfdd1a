"""The synthetic problems: samples, losses, parameter counts, and the model."""

import math
from dataclasses import replace

import pytest
import torch

from experiments import synthetic
from experiments.sequence_model import SequenceModel, SequenceModelConfig
from sigattn.models.saving import build


def test_k_summation():
    data = synthetic.KSummationData(10, 3)
    inputs, sums = data.batch(0, 200, seed=0)
    values, chosen = inputs.chunk(2, 1)
    assert (chosen.sum(1) == 3).all()
    assert set(chosen.unique().tolist()) == {0.0, 1.0}
    torch.testing.assert_close(
        sums.squeeze(1), torch.stack([v[c.bool()].sum() for v, c in zip(values, chosen, strict=True)])
    )
    parts = [data.batch(0, 200, seed=0, shard=(rank, 3)) for rank in range(3)]
    assert torch.equal(parts[1][0], inputs[1::3])
    assert not torch.equal(data.batch(1, 200, seed=0)[0], inputs)
    task = synthetic.KSummation()
    model = task.build(SequenceModelConfig(embed_dim=16, num_heads=2, seq_len=10))
    expected = (model(inputs) - sums).square().mean()
    torch.testing.assert_close(task.loss(model, (inputs, sums)), expected)
    with pytest.raises(ValueError, match="length must be even and k within"):
        synthetic.KSummationData(10, 6)


def test_pair_repeat():
    data = synthetic.PairRepeatData(num_symbols=3, max_length=12, lengths=(6, 9))
    symbols, answers = data.batch(0, 400, seed=0)
    lengths = (symbols < 3).sum(1)
    assert set(lengths.tolist()) == {6, 9}
    assert answers.sum() == 200
    indices = set()
    for row, n, answer in zip(symbols.tolist(), lengths.tolist(), answers.tolist(), strict=True):
        assert row[n:] == [3] * (12 - n)
        repeats = [i for i in range(2, n - 1) if row[i : i + 2] == row[:2]]
        assert bool(repeats) == bool(answer)
        indices |= set(repeats)
    assert indices == set(range(2, 8))
    ((held, _),) = data.of_length(11, 2000)
    assert ((held < 3).sum(1) == 11).all()
    assert len(held) == 1024
    with pytest.raises(ValueError, match="lengths within 4"):
        synthetic.PairRepeatData(lengths=(3,))


def test_pair_repeat_metrics():
    logits, answers = torch.tensor([[-0.5], [0.5], [0.5], [-0.5]]), torch.tensor([0, 1, 0, 1])
    metrics = synthetic.PairRepeat().evaluate(torch.nn.Identity(), [(logits, answers)])
    assert metrics["accuracy"] == 0.5
    expected = (math.log(1 + math.exp(-0.5)) + math.log(1 + math.exp(0.5))) / 2
    assert metrics["loss"] == pytest.approx(expected)


def test_parameters():
    """The paper's numbers; the MLP of pair repeat has "a similar number of parameters"."""

    def parameters(config):
        return sum(p.numel() for p in build(config, "meta").parameters())

    assert parameters(SequenceModelConfig()) == pytest.approx(187_000, abs=50)
    assert parameters(SequenceModelConfig(kind="mlp")) == 307_501
    model = synthetic.pair_repeat().model
    assert parameters(replace(model, kind="mlp")) == pytest.approx(parameters(model), rel=0.01)


@pytest.mark.parametrize("kind", ["transformer", "mlp"])
def test_sequence_models_take_numbers_or_symbols_of_one_length(kind):
    config = SequenceModelConfig(embed_dim=16, num_heads=2, seq_len=6, kind=kind)
    numbers = SequenceModel(config)
    assert numbers(torch.randn(3, 6)).shape == (3, 1)
    symbols = SequenceModel(replace(config, num_symbols=4, num_outputs=2))
    assert symbols(torch.randint(5, (3, 6))).shape == (3, 2)
    with pytest.raises(ValueError, match=r"\(batch, 6\), got \(3, 7\)"):
        numbers(torch.randn(3, 7))
