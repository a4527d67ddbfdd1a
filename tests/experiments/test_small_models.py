"""The search for settings of small models: its choice, its verdicts, and what ``recommend`` says of it."""

import pytest

from experiments import small_models
from experiments.experiment import ExperimentError, Setting
from experiments.small_models import ADVICE, CANDIDATES, CHOOSING, JUDGING, SOFTMAX
from sigattn.nn import recommend
from sigattn.recipes import find_recipe

OTHER = list(CANDIDATES)[1]


def rows(use, **values):
    """Three seeds of each variant: values by task are those of softmax, the paper's advice and another candidate."""
    names = (SOFTMAX, ADVICE, OTHER)
    return [
        {"task": task, "variant": name, "use": use, "seed": seed, "value": value + 1e-4 * seed}
        for task, found in values.items()
        for name, value in zip(names, found, strict=True)
        for seed in range(3)
    ]


def test_the_worst_task_decides_in_units_of_its_tolerance():
    """Less is better in bits, more in accuracy; what the candidates do on the judging half is not looked at."""
    judged = rows(JUDGING, language=(2.0, 1.0, 3.0), vision=(0.9, 1.0, 0.1))
    assert small_models.choose(rows(CHOOSING, language=(2.0, 2.03, 2.01), vision=(0.9, 0.9, 0.89)) + judged) == OTHER
    assert small_models.choose(rows(CHOOSING, language=(2.0, 2.01, 1.90), vision=(0.9, 0.9, 0.86)) + judged) == ADVICE


def test_verdicts():
    chosen = rows(CHOOSING, language=(2.0, 2.03, 1.9), vision=(0.9, 0.8, 0.9))
    judged = rows(JUDGING, language=(2.0, 2.1, 1.9), vision=(0.9, 0.89, 0.8))
    found = {f.claim: f.verdict for f in small_models.judge(chosen + judged, "small")}
    assert found == {
        "The paper's advice is at least level with softmax: language.": "differs",
        "The paper's advice is at least level with softmax: vision.": "agrees",
        "The chosen recipe is at least level with softmax: language.": "agrees",
        "The chosen recipe is at least level with softmax: vision.": "differs",
    }


@pytest.mark.parametrize(
    ("scale", "seeds", "message"), [("paper", 7, "no such scale"), ("small", 1, "--seeds 7, not 1")]
)
def test_what_it_cannot_do(scale, seeds, message, tmp_path):
    with pytest.raises(ExperimentError, match=message):
        small_models.search(Setting(scale, seeds, tmp_path))


@pytest.mark.parametrize("domain", ["vision", "speech", "language"])
def test_recommendation(domain):
    """The settings are those of the chosen variant, with ALiBi's weights in language, and its recipe takes them."""
    r = recommend(domain, small=True)
    task = small_models.TASKS[domain]
    settings = {"attention_bias": r.attention_bias, "learn_bias": r.learn_bias}
    chosen = small_models.PER_QUERY | ({"attention_bias": "log_alibi"} if domain == "language" else {})
    assert (r.recipe, settings) == (task.recipe, chosen)
    t = find_recipe(r.recipe).with_transformer(**task.changes, **settings).transformer
    assert (t.position, t.qk_norm != "none", t.init_values is not None, t.norm_placement) == (
        r.position, r.qk_norm, r.layer_scale, r.norm_placement
    )  # fmt: skip
