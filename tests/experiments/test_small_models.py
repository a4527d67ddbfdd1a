"""Settings for small models: the choice, the verdicts, and what ``recommend`` says of them."""

import pytest

from experiments import sweep
from experiments.experiment import ExperimentError, Setting
from experiments.registry import find_experiment
from experiments.small_models import (
    ADVICE,
    CANDIDATES,
    CHOOSING,
    JUDGING,
    NEW_TASKS,
    PER_QUERY,
    SMALL,
    SOFTMAX,
    SOURCE_CODE,
    TASKS,
    choose,
    with_small_advice,
)
from sigattn.nn import recommend
from sigattn.recipes import find_recipe

SEARCH, TRANSFER = find_experiment("small-models"), find_experiment("small-models-transfer")
OTHER = list(CANDIDATES)[1]
SUM = "k-summation, k = 4"


def rows(variants, values, **more):
    """Three seeds of each variant, from its value by task."""
    return [
        {"task": task, "variant": variant, "seed": seed, "value": value + 1e-4 * seed, **more}
        for task, of_task in values.items()
        for variant, value in zip(variants, of_task, strict=True)
        for seed in range(3)
    ]


def candidates(use, **values):
    return rows((SOFTMAX, ADVICE, OTHER), values, use=use)


def test_the_worst_task_decides_in_units_of_its_tolerance():
    """Less is better in bits, more in accuracy; what the candidates do on the judging half is not looked at."""
    judged = candidates(JUDGING, language=(2.0, 1.0, 3.0), vision=(0.9, 1.0, 0.1))
    better = candidates(CHOOSING, language=(2.0, 2.03, 2.01), vision=(0.9, 0.9, 0.89))
    assert choose(better + judged) == OTHER
    worse = candidates(CHOOSING, language=(2.0, 2.01, 1.90), vision=(0.9, 0.9, 0.86))
    assert choose(worse + judged) == ADVICE


@pytest.mark.parametrize("domain", ["vision", "speech", "language"])
def test_recommendation(domain):
    """The settings are those of the chosen variant, with ALiBi's weights in language, and its recipe takes them."""
    r = recommend(domain, small=True)
    task = TASKS[domain]
    settings = {"attention_bias": r.attention_bias, "learn_bias": r.learn_bias}
    chosen = PER_QUERY | ({"attention_bias": "log_alibi"} if domain == "language" else {})
    assert (r.recipe, settings) == (task.recipe, chosen)
    t = find_recipe(r.recipe).with_transformer(**task.changes, **settings).transformer
    assert (t.position, t.qk_norm != "none", t.init_values is not None, t.norm_placement) == (
        r.position, r.qk_norm, r.layer_scale, r.norm_placement
    )  # fmt: skip


def test_only_the_bias_differs_from_the_recipe():
    for task in NEW_TASKS.values():
        small = with_small_advice(task.base).transformer
        changed = {k for k, v in vars(task.base.transformer).items() if v != getattr(small, k)}
        assert {"learn_bias"} <= changed <= {"learn_bias", "attention_bias"}


def test_sums_are_judged_by_the_part_of_their_variance(tmp_path, monkeypatch):
    """A model of four terms that always predicts 0 has an error of 4, the value 1, as has one that diverged."""
    final = {"bits": 2.0, "loss": 4.0}

    def train(_, recipes, **__):
        return {n: [sweep.Outcome(0, [], final, n.endswith(SMALL), tmp_path)] for n in recipes}

    monkeypatch.setattr(sweep, "train_variants", train)
    data = TRANSFER.run(Setting("small", 1, tmp_path, data=tmp_path)).data
    assert [row["value"] for row in data if row["task"] == SUM] == [1.0, 1.0]
    assert [row["value"] for row in data if row["task"] == SOURCE_CODE] == [2.0, 8.0, 2.0]


@pytest.mark.parametrize(
    ("experiment", "scale", "seeds", "message"),
    [
        (SEARCH, "paper", 7, "no such scale"),
        (SEARCH, "small", 1, "--seeds 7, not 1"),
        (TRANSFER, "paper", 5, "no such scale"),
        (TRANSFER, "small", 5, "name it with --data"),
    ],
)
def test_refused_settings(experiment, scale, seeds, message, tmp_path):
    with pytest.raises(ExperimentError, match=message):
        experiment.run(Setting(scale, seeds, tmp_path))
