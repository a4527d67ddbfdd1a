"""Settings for small models: the choice and the verdicts."""

from experiments import small_models as study

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
