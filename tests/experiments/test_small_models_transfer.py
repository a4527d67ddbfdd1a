"""The verdicts on the settings for small models, on tasks that had no part in choosing them."""

import pytest

from experiments import small_models_transfer
from experiments.experiment import ExperimentError, Setting
from experiments.small_models_transfer import LARGER, SMALL, SOFTMAX, SOURCE_CODE, TASKS, VISIBLE

SUM = "k-summation, k = 4"


def rows(**values):
    """Three seeds of softmax and of the recommended sigmoid, by task."""
    return [
        {"task": task, "variant": name, "seed": seed, "value": value + 1e-4 * seed}
        for task, found in values.items()
        for name, value in zip((SOFTMAX, SMALL), found, strict=True)
        for seed in range(3)
    ]


def test_verdicts():
    """Less is better; a task that softmax has not learned decides nothing."""
    data = rows(**{SOURCE_CODE: (2.0, 1.9), SUM: (0.01, 0.1)})
    assert [f.verdict for f in small_models_transfer.judge(data, "small")] == ["agrees", "differs"]
    data = rows(**{SOURCE_CODE: (4.5, 1.9), SUM: (0.6, 0.1)})
    assert [f.verdict for f in small_models_transfer.judge(data, "small")] == ["not shown", "not shown"]


@pytest.mark.parametrize(("value", "verdict"), [(1.9, "agrees"), (1.8, "differs"), (1.7, "differs")])
def test_starts_of_the_bias(value, verdict):
    """The sum of ALiBi's weights is the better start only if the number of visible keys has more bits."""
    data = rows(**{LARGER: (1.8, 1.8)})
    data += [{"task": LARGER, "variant": VISIBLE, "seed": seed, "value": value + 1e-4 * seed} for seed in range(3)]
    assert small_models_transfer.judge(data, "small")[-1].verdict == verdict


@pytest.mark.parametrize("name", TASKS)
def test_only_the_bias_differs(name):
    """On each task, the recommended sigmoid is the recipe's with another bias, and softmax has its other settings."""
    plain = small_models_transfer.recipe_of(TASKS[name])
    small = small_models_transfer.with_small_advice(plain).transformer
    changed = {k for k, v in vars(plain.transformer).items() if v != getattr(small, k)}
    assert {"learn_bias"} <= changed <= {"learn_bias", "attention_bias"}


def test_sums_are_judged_by_the_part_of_their_variance(tmp_path, monkeypatch):
    """A model of four terms that always predicts 0 has an error of 4, the value 1."""
    setting = Setting("smoke", 1, tmp_path)
    outcome = [small_models_transfer.sweep.Outcome(0, [], {"loss": 4.0}, False, tmp_path)]
    failed = [small_models_transfer.sweep.Outcome(0, [], {}, True, tmp_path)]
    names = [f"{SUM}, {variant}" for variant in (SOFTMAX, SMALL)]
    found = dict(zip(names, (outcome, failed), strict=True))
    monkeypatch.setattr(small_models_transfer.sweep, "train_variants", lambda *_, **__: found)
    assert [row["value"] for row in small_models_transfer._train(setting, SUM)] == [1.0, 1.0]


def test_unknown_variants_and_missing_data(tmp_path):
    more = {"source code, tanh": 4}
    with pytest.raises(ExperimentError, match="'source code, softmax'"):
        small_models_transfer.measure_new_tasks(Setting("smoke", 1, tmp_path, more_seeds=more))
    with pytest.raises(ExperimentError, match="no such scale"):
        small_models_transfer.measure_new_tasks(Setting("paper", 5, tmp_path))
    with pytest.raises(ExperimentError, match="name it with --data"):
        small_models_transfer.measure_new_tasks(Setting("small", 5, tmp_path))
