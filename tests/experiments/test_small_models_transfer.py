"""The verdicts on the settings for small models, on tasks that had no part in choosing them."""

import pytest

from sigattn.experiments import small_models_transfer
from sigattn.experiments.experiment import ExperimentError, Setting
from sigattn.experiments.small_models_transfer import ADVICE, SMALL, SOFTMAX, TASKS


def rows(**values):
    """Three seeds of softmax, the paper's advice and the chosen recipe, by task."""
    return [
        {"task": task.replace("_", " "), "variant": name, "seed": seed, "value": value + 1e-4 * seed}
        for task, found in values.items()
        for name, value in zip((SOFTMAX, ADVICE, SMALL), found, strict=True)
        for seed in range(3)
    ]


def test_verdicts():
    """Less is better in bits, more in accuracy; a task that softmax has not learned decides nothing."""
    data = rows(source_code=(2.0, 2.1, 1.9), pair_repeat=(0.9, 0.95, 0.8))
    assert [f.verdict for f in small_models_transfer.judge(data, "small")] == ["differs", "agrees", "agrees", "differs"]
    data = rows(source_code=(4.5, 2.1, 4.5), pair_repeat=(0.7, 0.95, 0.7))
    assert {f.verdict for f in small_models_transfer.judge(data, "small")} == {"not shown"}


def test_only_the_bias_differs():
    """On each task, the recommended sigmoid is the recipe's with another bias."""
    for task in TASKS.values():
        plain = small_models_transfer.recipe_of(task)
        small = small_models_transfer.with_small_advice(plain).transformer
        changed = {k for k, v in vars(plain.transformer).items() if v != getattr(small, k)}
        assert {"learn_bias"} <= changed <= {"learn_bias", "attention_bias"}


def test_the_papers_scale_is_refused(tmp_path):
    with pytest.raises(ExperimentError, match="no such scale"):
        small_models_transfer.measure_new_tasks(Setting("paper", 5, tmp_path))
