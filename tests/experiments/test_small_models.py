"""Settings for small models: the choice, the verdicts, and what ``recommend`` says of them."""

import pytest

from experiments import small_models as study
from sigattn.nn import recommend
from sigattn.recipes import find_recipe

OTHER = list(study.CANDIDATES)[1]


def candidates(use, **values):
    """Return rows of three seeds of softmax, the advice and another candidate, from their values by task."""
    return [
        {"task": task, "variant": variant, "seed": seed, "value": value + 1e-4 * seed, "use": use}
        for task, of_task in values.items()
        for variant, value in zip((study.SOFTMAX, study.ADVICE, OTHER), of_task, strict=True)
        for seed in range(3)
    ]


def test_the_worst_task_decides_in_units_of_its_tolerance():
    """Less is better in bits, more in accuracy; what the candidates do on the judging half is not looked at."""
    judged = candidates(study.JUDGING, language=(2.0, 1.0, 3.0), vision=(0.9, 1.0, 0.1))
    better = candidates(study.CHOOSING, language=(2.0, 2.03, 2.01), vision=(0.9, 0.9, 0.89))
    assert study.choose(better + judged) == OTHER
    worse = candidates(study.CHOOSING, language=(2.0, 2.01, 1.90), vision=(0.9, 0.9, 0.86))
    assert study.choose(worse + judged) == study.ADVICE


def test_normalized_attention_is_not_chosen_and_is_paired_with_softmax_of_its_device():
    """Its seeds differ by more than the tolerance, its pairs by 0.001 bits; vision is not trained with it."""
    (normalized,) = study.NORMALIZED

    def rows_of(variant, use, *values):
        about = {"task": "language", "variant": variant, "use": use}
        return [{**about, "seed": seed, "value": value} for seed, value in enumerate(values)]

    values = {"language": (2.0, 2.0, 2.1), "vision": (0.9, 0.9, 0.9)}
    rows = candidates(study.CHOOSING, **values) + candidates(study.JUDGING, **values)
    rows += rows_of(normalized, study.CHOOSING, 1.0) + rows_of(normalized, study.JUDGING, 1.901, 2.001, 2.101)
    assert study.choose(rows) == study.ADVICE
    assert [f.verdict for f in study.judge_search(rows, "small")] == ["agrees", "agrees", "not shown"]
    rows += rows_of(study.SOFTMAX_OF_NORMALIZED, study.JUDGING, 1.9, 2.0, 2.1)
    assert [f.verdict for f in study.judge_search(rows, "small")] == ["agrees"] * 3


@pytest.mark.parametrize("domain", ["vision", "speech", "language"])
def test_recommendation(domain):
    """The settings are those of the chosen variant, with ALiBi's weights in language, and its recipe takes them."""
    r = recommend(domain, small=True)
    task = study.TASKS[domain]
    settings = {"attention_bias": r.attention_bias, "learn_bias": r.learn_bias}
    chosen = study.PER_QUERY | ({"attention_bias": "log_alibi"} if domain == "language" else {})
    assert (r.recipe, settings) == (task.recipe, chosen)
    t = find_recipe(r.recipe).with_transformer(**task.changes, **settings).transformer
    of_recipe = (t.position, t.qk_norm != "none", t.init_values is not None, t.norm_placement)
    assert of_recipe == (r.position, r.qk_norm, r.layer_scale, r.norm_placement)
