"""Every experiment at its smallest scale, its page, the statistics and the command."""

import json
import math
import re
import shutil
import statistics
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from matplotlib.figure import Figure
from scipy import stats

from experiments import (
    cache,
    causal_bias,
    dropped_keys,
    intervals,
    k_summation,
    lr_sensitivity,
    pages,
    position_ablation,
    sigma_accuracy,
    sweep,
)
from experiments.ablation import SPIKES, Ablation, Claim
from experiments.experiment import OPTIONS, Experiment, ExperimentError, Result, Setting, Stored
from experiments.intervals import Difference
from experiments.registry import EXPERIMENTS, find_experiment
from sigattn.data.dataset import DataError
from sigattn.recipes import datasets
from sigattn.train import checkpoint

ABOUT = {"date": "2026-01-01", "commit": "0" * 40, "device": "here", "versions": {"torch": "2"}}


# the code of speech-bias, vision-ablations and norm-structure with other variants, which test_run_files.py trains
SAME_CODE = {"speech-stability", "speech-hybrid", "speech-post", "layerscale-free", "relaxations"}
SAME_CODE |= {"speech-structure", "norm-structure-4k", "lm-stability", "length-power"}


# of seven models, "smoke" trains two
USED_OTHERWISE = {"conversion": {"speech"}}
# their evaluation reads bytes, so that the tokenizer that training would read is refused
USED_OTHERWISE |= {"bias-rules": {"tokenizer"}, "dropped-keys": {"tokenizer"}}
USED_OTHERWISE |= {"small-models-transfer": {"tokenizer"}}  # its texts are compared as bytes


class _Recorded(Setting):
    """Setting with ``used``, the names of the options that were read."""

    used: ClassVar[set[str]] = set()

    def __getattribute__(self, name):
        if name in OPTIONS and sys._getframe(1).f_code.co_name not in ("replace", "_replace"):  # copies of a setting
            type(self).used.add(name)
        return super().__getattribute__(name)


@pytest.fixture(scope="module")
def whole_folder(tmp_path_factory):
    """Return a folder whose runs tests share: what one has trained, the next finds."""
    return tmp_path_factory.mktemp("whole")


@pytest.fixture
def without_checkpoints(in_this_process, unchecked, monkeypatch):
    """Train in this process, without checkpoints, whose writing takes longer than a small training."""
    monkeypatch.setattr(checkpoint, "save", lambda folder, *_, **__: folder)


@pytest.fixture(autouse=True)
def _figures_are_drawn_once(monkeypatch):
    """Without the arrangement of their parts, for which Matplotlib draws each figure twice."""
    savefig = Figure.savefig

    def draw(self, *args, **options):
        self.set_layout_engine("none")
        savefig(self, *args, **options)

    monkeypatch.setattr(Figure, "savefig", draw)


FROM_CHECKPOINTS = ("attention-evolution", "attention-maps")  # of the same trainings
CACHED = ("conversion", "initial-norms", "pair-repeat")  # by mechanisms of their own, and by the common one


@pytest.mark.filterwarnings("ignore:.*Ramapuram", "ignore:.*torch.jit.script")
@pytest.mark.usefixtures("in_this_process", "unchecked")
@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if name not in SAME_CODE])
def test_smoke_scale(name, tmp_path, whole_folder, request):
    """Findings, page, figure and data are written; a second run trains nothing."""
    if name not in FROM_CHECKPOINTS:
        request.getfixturevalue("without_checkpoints")
    folder = whole_folder if name in FROM_CHECKPOINTS else tmp_path / name
    # the statistics have their own tests; small-models chooses with some seeds and judges with others
    setting = _Recorded("smoke", 2 if name == "small-models" else 1, folder)
    setting.used.clear()
    result = find_experiment(name).run(setting)
    assert setting.used == set(find_experiment(name).takes) ^ USED_OTHERWISE.get(name, set())
    findings = find_experiment(name).judge(result.data, "smoke")
    assert findings
    assert all(f.verdict in intervals.VERDICTS and f.evidence for f in findings)
    assert all(len(row) == len(result.columns) for row in result.rows)
    written = pages.write_page(tmp_path / name, find_experiment(name), setting, result, ABOUT)
    assert pages.read_pages(tmp_path) == [written]
    text = (tmp_path / name / "page.md").read_text()
    assert all(f.claim in text for f in findings)
    if result.figure is not None:
        assert (tmp_path / name / "figure.svg").stat().st_size > 1000
    rows = [json.loads(line) for line in (tmp_path / name / "data.jsonl").read_text().splitlines()]
    assert rows == json.loads(json.dumps(list(result.data)))
    findings_of_all = pages.write_findings(tmp_path, [written]).read_text()
    assert all(f.claim in findings_of_all for f in findings)
    if name in CACHED:
        before = {p: p.stat().st_mtime_ns for p in folder.rglob("*.json*")}
        assert find_experiment(name).run(setting).data == result.data
        assert {p: p.stat().st_mtime_ns for p in folder.rglob("*.json*")} == before


def test_pages_name_the_text_that_was_loaded(tmp_path):
    """Not that of the recipe, which at these scales is not loaded."""
    setting = Setting("smoke", 1, tmp_path, print)
    sweep._identity(setting, sweep._run(setting, "one block", position_ablation.one_block_recipe(setting, 256), 0), {})
    assert list(setting.fingerprints) == ["CPython's documentation, as bytes"]


class TestStatistics:
    def test_intervals_are_scipy_s(self):
        """Of the difference of means, and of the mean of paired changes."""
        for first, second in (
            ([1.0, 2.0, 4.0], [5.0, 5.5, 7.0, 6.0]),
            ([1.0, 1.1], [3.0, 9.0, 2.0]),
            ([1.0, 2.0] * 20, [3.0, 5.0] * 9),
        ):
            delta, margin = intervals.welch(first, second)
            assert delta == pytest.approx(statistics.mean(second) - statistics.mean(first))
            found = stats.ttest_ind(second, first, equal_var=False).confidence_interval(0.95)
            assert margin == pytest.approx((found.high - found.low) / 2, rel=0.01)
        delta, margin = intervals.paired([1.0, 2.0, 4.0, 8.0], [1.5, 2.25, 5.0, 8.0])
        changes = [0.5, 0.25, 1.0, 0.0]
        assert delta == statistics.mean(changes)
        found = stats.ttest_1samp(changes, 0).confidence_interval(0.95)
        assert margin == pytest.approx((found.high - found.low) / 2, rel=0.001)

    def test_one_seed_has_no_interval(self):
        assert intervals.welch([1.0], [2.0]) == intervals.paired([1.0], [2.0]) == (1.0, math.inf)
        assert str(intervals.welch([1.0], [2.0])) == "+1"
        assert intervals.welch([1.0, 1.0], [2.0, 2.0]) == (1.0, 0.0)

    @pytest.mark.parametrize("sign", [1, -1])
    @pytest.mark.parametrize(
        ("delta", "margin", "verdict"),
        [
            (0.1, 0.15, "agrees"),
            (0.2, 0.05, "equivalent"),
            (0.1, 0.25, "not shown"),  # contains 0 and is narrower than the tolerance, but not within it
            (0.3, 0.2, "not shown"),  # excludes 0, but the difference may matter or not
            (0.6, 0.2, "differs"),
            (0.1, math.inf, "not shown"),
        ],
    )
    def test_equality_by_two_one_sided_tests(self, sign, delta, margin, verdict):
        """The whole interval within the tolerance of 0.3, outside it, or neither."""
        assert Difference(sign * delta, margin).verdict_equal(0.3) == verdict

    @pytest.mark.parametrize(
        ("delta", "margin", "positive", "not_above"),
        [
            (0.0, 0.2, "differs", "agrees"),  # no positive difference that would matter
            (0.05, 0.04, "agrees", "agrees"),
            (0.3, 0.1, "agrees", "not shown"),
            (0.5, 0.1, "agrees", "differs"),
            (0.1, 0.25, "not shown", "not shown"),
            (-0.3, 0.2, "differs", "agrees"),
            (-0.3, math.inf, "not shown", "not shown"),
        ],
    )
    def test_one_sided_claims(self, delta, margin, positive, not_above):
        assert Difference(delta, margin).verdict_positive(0.3) == positive
        assert Difference(delta, margin).verdict_not_above(0.3) == not_above
        assert (-Difference(delta, margin)) == Difference(-delta, margin)

    def test_the_least_favourable_verdict_decides(self):
        assert intervals.verdict_all(["agrees", "agrees"]) == "agrees"
        for worse in ("equivalent", "not shown", "differs"):
            assert intervals.verdict_all(["agrees", worse]) == worse
        assert intervals.verdict_all(["differs", "not shown"]) == "differs"

    def test_sensitivity(self):
        """Losses above the initial loss, and of diverged runs, count as the initial loss."""
        assert lr_sensitivity.sensitivity([2.0, 3.0, 9.0, math.inf], 5.0) == pytest.approx((0 + 1 + 3 + 3) / 4)


def test_k_summation_counts_the_lowest_loss_of_twenty_evaluations(tmp_path, monkeypatch):
    """A loss that rises again before the last step, as at a constant learning rate, does not count."""
    recipes = {}

    def train(_, variants):
        recipes.update(variants)
        rows = [{"step": 1, "validation_loss": x} for x in (0.9, 0.1, 0.8)] + [{"step": 2, "loss": 0.01}]
        outcome = sweep.Outcome(0, rows, {"loss": 0.8}, False, tmp_path)
        return {name: [outcome] for name in variants}

    monkeypatch.setattr(sweep, "train_variants", train)
    result = k_summation.measure_loss_over_k(Setting("small", 1, tmp_path))
    assert {recipe.training.max_steps // recipe.training.validate_every for recipe in recipes.values()} == {20}
    assert {(row["losses"][0], row["last"][0]) for row in result.data} == {(0.1, 0.8)}


def judge(claims, values, spikes=(), **study):
    """Return the findings of an ablation whose metric has these values by variant."""
    rows = [{"variant": n, "cer": v, **({"gradient_spikes": spikes[n]} if spikes else {})} for n, v in values.items()]
    return Ablation(lambda _: None, {}, "cer", "CER", claims, **study).judge(rows, "small")


def test_claims_about_models_that_have_not_learned_are_not_shown():
    claims = [Claim("x is worse.", "x", "higher", "y", 1.0), Claim("z is worse.", "z", "higher", "y", 1.0)]
    values = {"x": [99.0, 100.0, 100.0], "y": [5.0, 5.1, 4.9], "z": [50.0, 51.0, 52.0]}
    findings = judge(claims, values, learned=lambda errors: errors < 90)
    assert [f.verdict for f in findings] == ["not shown", "agrees"]
    assert findings[0].evidence.endswith("; not learned: x")
    claims = [Claim("x is worse.", "x", "higher", "y", 1.0, SPIKES)]  # zero spikes are no sign of an untrained model
    (finding,) = judge(claims, {"x": [0.0], "y": [0.0]}, {"x": [9.0, 9.5], "y": [0.0, 0.0]}, learned=bool)
    assert finding.verdict == "agrees"


def test_a_tolerance_may_be_a_part_of_the_baseline():
    claim = Claim("x is as good as y.", "x", "same", "y")
    errors = {"x": [3.0, 3.1, 3.2], "y": [2.0, 2.1, 2.2]}
    (small,) = judge([claim], errors, tolerance=0.15, relative=True)
    larger = {n: [20 + e for e in values] for n, values in errors.items()}
    (large,) = judge([claim], larger, tolerance=0.15, relative=True)
    assert (small.verdict, large.verdict) == ("differs", "equivalent")
    assert small.evidence.endswith(", tolerance 0.315")


@pytest.mark.usefixtures("in_this_process", "unchecked")
def test_diverged_run_counts_as_infinite_loss(tmp_path):
    setting = Setting("smoke", 1, tmp_path)
    recipe = lr_sensitivity.base(setting, 1).with_transformer(qk_norm="none")
    wild = lr_sensitivity.at_rates(recipe, "wild", [1e30])
    ((outcome,),) = sweep.train_variants(setting, wild, may_diverge=True).values()
    assert outcome.diverged
    assert lr_sensitivity.final_losses([outcome]) == [math.inf]
    with pytest.raises(ExperimentError, match=r"wild, 1e\+30, seed 0: the loss was not finite after"):
        sweep.train_variants(setting, wild)  # as experiments do that compare trained models


def test_run_with_changed_settings_is_repeated(tmp_path, request):
    setting = Setting("smoke", 1, tmp_path)
    recipe = k_summation.base(setting, 1)
    shorter = recipe.with_training(max_steps=2)
    (first,) = sweep.train_variants(setting, {"same name": shorter})["same name"]  # in a process of its own
    request.getfixturevalue("in_this_process")
    (second,) = sweep.train_variants(setting, {"same name": recipe})["same name"]
    assert (len(first.rows), len(second.rows)) == (2, recipe.training.max_steps)


@pytest.mark.usefixtures("in_this_process", "unchecked")
def test_models_over_training_are_those_that_were_validated(whole_folder):
    """A model that is loaded from a checkpoint has the held-out loss that training noted at its step."""
    setting = Setting("smoke", 1, whole_folder)
    recipe = k_summation.base(setting, 1)
    problem = datasets.load_dataset(recipe, None)
    errors = []
    for labels, model, error in k_summation._models_over_training(setting, (2, 8)):
        assert labels["step"] in (2, 8)
        with torch.no_grad():
            loss = recipe.task.evaluate(model, problem.validation(recipe.training.eval_batch_size))["loss"]
        assert error["error"] == pytest.approx(loss, rel=1e-5)
        errors.append(loss)
    assert len(set(errors)) == 4
    with pytest.raises(checkpoint.CheckpointError, match="cannot read the checkpoint"):
        sweep.Outcome(0, [], {}, False, whole_folder / "runs" / "sigmoid" / "0").load_model(9)


@pytest.mark.usefixtures("in_this_process", "unchecked")
def test_run_on_changed_data_is_repeated_and_the_page_names_the_data(tmp_path):
    """The same settings on one text, on another, and on the first after it has changed."""
    recipe = lr_sensitivity.base(Setting("smoke", 1, tmp_path), 1)
    texts = [tmp_path / name for name in ("a.txt", "b.txt")]
    for i, path in enumerate(texts):
        path.write_text(f"the text number {i}. " * 400)

    def losses(path, lines):
        setting = Setting("smoke", 1, tmp_path, lines.append, workers=1, data=path)
        (outcome,) = sweep.train_variants(setting, {"same name": recipe})["same name"]
        page = written(tmp_path / "page", data=path, fingerprints=setting.fingerprints)
        assert [line.split(" (")[0] for line in page.data] == [str(path)]
        assert f"--data {path}" in page.command
        return [row["loss"] for row in outcome.rows], page.data

    lines = []
    first = losses(texts[0], lines)
    assert losses(texts[0], lines) == first
    assert len(lines) == 1  # done once
    assert losses(texts[1], lines)[0] != first[0]
    texts[0].write_text("the text numbex 0. " * 400)  # as long as before
    changed = losses(texts[0], lines)
    assert changed[0] != first[0]
    assert changed[1] != first[1]
    assert len(lines) == 3


def experiment_result():
    return Result(("a",), [("b",)], [])


@pytest.mark.parametrize(
    ("names", "scale", "message"),
    [
        (("position-ablation", "lr-sensitivity", "constant-bias", "length-power", "bias-rules", "dropped-keys"),
         "paper", "C4's realnews"),
        (("vision-ablations", "norm-structure", "layerscale-free", "speech-bias", "train-losses"), "paper",
         "run sigattn train"),
        (("speech-structure",), "small", "--speech"),
        pytest.param(
            ("attention-times", "norm-crossing", "vit-times"), "paper", "on a GPU",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)  # fmt: skip
def test_what_a_scale_needs_is_named(names, scale, message, tmp_path):
    for name in names:
        with pytest.raises(ExperimentError, match=message):
            find_experiment(name).run(Setting(scale, 1, tmp_path))


def written(folder, **setting):
    """Return the page of an experiment without runs."""
    experiment = Experiment("one", "One", "here", lambda _: experiment_result(), lambda rows, scale: [])
    return pages.write_page(folder, experiment, Setting("small", 5, folder, **setting), experiment_result(), ABOUT)


def test_longer_training(tmp_path):
    """Times the steps of the smaller scales, in the page and in its command."""
    assert Setting("small", 1, tmp_path, longer=4).steps(6, 300) == 1200
    assert Setting("paper", 1, tmp_path, longer=4).steps(6, 300, 5000) == 5000
    page = written(tmp_path, longer=4)
    assert page.extent == "Scale: small, 4 times its training, seeds: 5."
    assert page.command == "python -m experiments one --scale small --seeds 5 --longer 4"


class TestMoreSeeds:
    """Variants with more seeds than the others."""

    def test_only_the_named_variants_have_them_at_every_rate(self, tmp_path, monkeypatch):
        seeds = {}

        def train(setting, recipes, **_):
            seeds.update({name: setting.num_seeds(name) for name in recipes})
            raise InterruptedError

        monkeypatch.setattr(sweep, "train_variants", train)
        with pytest.raises(InterruptedError):
            lr_sensitivity.compare_norms(Setting("smoke", 1, tmp_path, more_seeds={"sigmoid, both, κ = 1": 2}))
        assert len(seeds) == 12
        assert {name for name, number in seeds.items() if number == 2} == {
            f"sigmoid, both, κ = 1, {rate}" for rate in (0.001, 0.1)
        }

    def test_a_page_groups_variants_by_number(self, tmp_path):
        page = written(tmp_path, more_seeds={"a, b": 20, "c": 9, "d": 20})
        assert page.extent == "Scale: small, seeds: 5; 9 of c; 20 of a, b and of d."
        assert "--seeds 5 --more-seeds 'a, b' 20 c 9 d 20" in (tmp_path / "page.md").read_text()

    @pytest.mark.parametrize("name", ["lr-sensitivity", "pair-repeat", "lm-stability"])
    def test_unknown_variants_are_refused_before_training(self, name, tmp_path):
        scale = "paper" if name == "lm-stability" else "smoke"
        setting = Setting(scale, 1, tmp_path, pytest.fail, more_seeds={"sigmoid, none": 2})
        with pytest.raises(ExperimentError, match=r"--more-seeds names 'sigmoid, none', which .* variants are '"):
            find_experiment(name).run(setting)
        assert not list(tmp_path.iterdir())

    def test_run_files_have_them(self, tmp_path):
        setting = Setting("paper", 1, tmp_path, more_seeds={"85M, 4k, sigmoid": 3})
        with pytest.raises(ExperimentError, match="these are 7 trainings"):
            find_experiment("lm-stability").run(setting)
        lines = [line for line in (tmp_path / "runs.sh").read_text().splitlines() if line.startswith("sigattn")]
        assert len(lines) == 7
        assert [sum(f"--training.seed {seed}" in line for line in lines) for seed in range(3)] == [5, 1, 1]


class TestExtend:
    """Seeds added to a stored page."""

    def run(self, name, folder, seeds, stored=None, log=lambda _: None, **more):
        """Run an experiment and write its page into a folder; return its rows of data and its page."""
        experiment = find_experiment(name)
        setting = Setting("smoke", seeds, folder / name, log, stored=stored or Stored(), **more)
        result = experiment.run(setting)
        page = pages.write_page(folder / name, experiment, setting, result, ABOUT)
        return [json.loads(line) for line in (folder / name / "data.jsonl").read_text().splitlines()], page

    @pytest.mark.usefixtures("without_checkpoints")
    def test_data_and_table_are_those_of_all_seeds_at_once(self, whole_folder, tmp_path):
        """Only the seeds that the page lacks are trained; curves stay those of the page."""
        name = "norm-structure"
        whole, page = self.run(name, whole_folder, 2)
        self.run(name, whole_folder, 1)  # of the same runs
        figure = (whole_folder / name / "figure.svg").read_text()
        lines = []
        stored = pages.read_stored(whole_folder, find_experiment(name), "smoke", 1)
        extended, longer = self.run(name, tmp_path / "extended", 2, stored, lines.append)
        assert extended == whole
        assert (longer.rows, longer.command, longer.extends) == (page.rows, page.command, [ABOUT])
        trained = [line for line in lines if "seed" in line]
        assert trained
        assert all(line.endswith("seed 1") for line in trained)
        assert (tmp_path / "extended" / name / "figure.svg").read_text() == figure
        assert "The figure shows fewer seeds: 1." in (tmp_path / "extended" / name / "page.md").read_text()

    def test_rows_of_attention_over_training(self, tmp_path, monkeypatch):
        """Those that are measured are added to the stored ones, in the order of all at once."""
        rows = [
            {"activation": a, "seed": s, "step": t, "sparsity": 0.5, "weights_norm": 1.0, "row_mass": 1.0, "error": 0.1}
            | {f"quantile {q}": 0.1 for q in k_summation.QUANTILES}
            for a in k_summation.ACTIVATIONS
            for s in (0, 1)
            for t in (0, 8)
        ]
        monkeypatch.setattr(k_summation, "_models_over_training", lambda *_: iter(()))
        first = [row for row in rows if row["seed"] == 0]
        stored = Stored([*[row for row in rows if row["seed"] == 1], *first])
        result = k_summation.measure_weights_over_training(Setting("smoke", 2, tmp_path, stored=stored))
        assert result.data == rows
        assert find_experiment("attention-evolution").count_seeds(rows) == {"softmax": 2, "sigmoid": 2}

    @pytest.mark.usefixtures("without_checkpoints")
    def test_variants_of_different_seeds(self, whole_folder, tmp_path):
        """More seeds of one variant, twice; origins are listed."""
        more = {"more_seeds": {"softmax": 2}}
        whole, _ = self.run("pair-repeat", whole_folder, 1, more_seeds={"softmax": 3})
        self.run("pair-repeat", whole_folder, 1, **more)
        stored = pages.read_stored(whole_folder, find_experiment("pair-repeat"), "smoke", 1)
        lines = []
        third, _ = self.run("pair-repeat", tmp_path / "new", 1, stored, lines.append, more_seeds={"softmax": 3})
        assert (third, lines) == (whole, ["1 of 1 runs: softmax, seed 2"])
        stored = pages.read_stored(tmp_path / "new", find_experiment("pair-repeat"), "smoke", 1)
        assert (stored.seeds, list(stored.origins)) == ({"sigmoid": 1, "softmax": 3, "mlp": 1}, [ABOUT, ABOUT])
        text = (tmp_path / "new" / "pair-repeat" / "page.md").read_text()
        assert text.count(ABOUT["date"]) == 2
        assert "The first seeds are those of" in text
        assert "The figure shows fewer seeds" not in text
        drawn = [(folder / "pair-repeat" / "figure.svg").read_text() for folder in (whole_folder, tmp_path / "new")]
        assert drawn[0] != drawn[1]  # it is drawn of all seeds
        with pytest.raises(ExperimentError, match="have more seeds: name at least 'softmax' 3 with --more-seeds"):
            self.run("pair-repeat", tmp_path / "new", 1, stored, pytest.fail, **more)

    @pytest.mark.usefixtures("without_checkpoints")
    def test_a_variant_that_the_page_lacks_is_trained(self, whole_folder, tmp_path):
        """As after an experiment has gained one; results of other settings are refused before training."""
        whole, _ = self.run("pair-repeat", whole_folder, 2)
        stored = pages.read_stored(whole_folder, find_experiment("pair-repeat"), "smoke", 1)
        older = replace(
            stored,
            rows=[row for row in stored.rows if row["model"] != "mlp"],
            **{f: {k: v for k, v in getattr(stored, f).items() if k != "mlp"} for f in ("seeds", "identities")},
        )
        lines = []
        extended, _ = self.run("pair-repeat", tmp_path / "new", 2, older, lines.append)
        assert extended == whole
        assert sorted(line.split(": ")[1] for line in lines) == ["mlp, seed 0", "mlp, seed 1"]
        changed = replace(stored, identities={**stored.identities, "mlp": "another"})
        with pytest.raises(ExperimentError, match="of other settings or data than those of 'mlp' here: leave out"):
            self.run("pair-repeat", tmp_path / "other", 3, changed, pytest.fail)

    def test_what_cannot_be_extended_is_refused(self, tmp_path):
        pair = find_experiment("pair-repeat")
        with pytest.raises(ExperimentError, match="--extend is not for conversion, whose table needs all its runs"):
            pages.read_stored(tmp_path, find_experiment("conversion"), "small", 1)
        with pytest.raises(DataError, match="has no page of pair-repeat to extend"):
            pages.read_stored(tmp_path, pair, "small", 1)
        (tmp_path / "pair-repeat").mkdir()
        about = {"findings": [], "has_figure": False, "provenance": ABOUT, "differs": "", "columns": [], "rows": []}
        page = pages.Page("pair-repeat", "N", "here", "small", 5, **about)
        (tmp_path / "pair-repeat" / "page.json").write_text(json.dumps(asdict(page)))
        with pytest.raises(ExperimentError, match="is of scale 'small' and longer=1, not 'small' and 4: name the same"):
            pages.read_stored(tmp_path, pair, "small", 4)
        with pytest.raises(DataError, match="does not name the settings of its runs: leave out --extend"):
            pages.read_stored(tmp_path, pair, "small", 1)


class TestCommittedPages:
    """docs/results and the counts in docs/reproduce.md."""

    folder = Path(__file__).parents[2] / "docs" / "results"

    def test_findings_follow_from_the_data(self, tmp_path):
        """Judging the stored data again writes the same pages and tables."""
        copy = tmp_path / "results"
        shutil.copytree(self.folder, copy, ignore=shutil.ignore_patterns("*.svg"))
        pages.judge_again(copy)
        for path in copy.rglob("*.*"):
            assert path.read_text() == (self.folder / path.relative_to(copy)).read_text(), path.name

    def test_the_counts_and_undecided_claims_are_in_the_text(self):
        """docs/reproduce.md has a reason for each claim of the paper that is not shown."""
        every = pages.read_pages(self.folder)
        assert pages.count_verdicts(every) in " ".join((self.folder.parent / "reproduce.md").read_text().split())
        written = [page for page in every if page.kind == "paper"]
        undecided = {(page.name, f["claim"]) for page in written for f in page.findings if f["verdict"] == "not shown"}
        text = (self.folder.parent / "reproduce.md").read_text()
        section = text.partition("## What is not shown, and why")[2].partition("\n## ")[0]
        assert set(re.findall(r"^\| \[([\w-]+)\].*? \| (.+?) \|", section, re.MULTILINE)) == undecided

    def test_operations_are_the_stored_ones(self):
        rows = [json.loads(line) for line in (self.folder / "flops" / "data.jsonl").read_text().splitlines()]
        assert find_experiment("flops").run(Setting("small", 1, self.folder)).data == rows

    def test_every_experiment_has_a_page(self):
        waiting = {"conversion"}  # its page was of an earlier way of conversion; it is to be run again
        assert {path.parent.name for path in self.folder.glob("*/page.json")} == set(EXPERIMENTS) - waiting


def test_larger_models_take_seeds_by_run(tmp_path):
    """Jobs of further seeds are those of the named run alone; a name without a run is refused."""
    run = "GPT-2, 4 × 128, softmax"
    setting = Setting("smoke", 1, tmp_path, more_seeds={run: 3})
    jobs = causal_bias.plan_jobs(causal_bias.LARGER, setting)
    assert {", ".join(job[:2]) for job in jobs} == set(setting.identities)
    assert [job for job in jobs if job[2]] == [("GPT-2, 4 × 128", "softmax", 1), ("GPT-2, 4 × 128", "softmax", 2)]
    with pytest.raises(ExperimentError, match="names 'GPT-2', which"):
        causal_bias.plan_jobs(causal_bias.LARGER, Setting("smoke", 1, tmp_path, more_seeds={"GPT-2": 2}))


def _count_calls(path):
    path.write_text(path.read_text() + "." if path.exists() else ".")
    return {"calls": len(path.read_text())}


@pytest.mark.usefixtures("in_this_process", "unchecked")
def test_results_are_stored_by_their_settings(tmp_path):
    lines = []

    def run(n):
        job = cache.Job(tmp_path / "measured" / "x.json", {"n": n}, partial(_count_calls, tmp_path / "calls"))
        return cache.run_jobs({"x": job}, 1, lines.append)

    assert run((1, 2)) == run((1, 2)) == {"x": {"calls": 1}}  # JSON has no tuples
    assert run(2) == {"x": {"calls": 2}}
    (tmp_path / "measured" / "x.json").write_text("{")
    assert run(2) == {"x": {"calls": 3}}
    assert lines == ["1 of 1 runs: x"] * 3


def test_coarse_sigmoid():
    """Values lie on the grid; the derivative is the one that a kernel computes from them."""
    x = torch.linspace(-12, 12, 97, requires_grad=True)
    p = sigma_accuracy.coarse_sigmoid(x, 8)
    torch.testing.assert_close(p * 2**9, (p * 2**9).round())
    assert (p - x.sigmoid()).abs().max() <= 2.0**-10 + 1e-7
    (slope,) = torch.autograd.grad(p.sum(), x)
    torch.testing.assert_close(slope, (p * (1 - p)).detach())


def test_keep_mask_selects_the_largest_contributions():
    contribution = torch.tensor([[[0.1, 0.5, 0.3, 0.2], [0.4, 0.4, 0.9, 0.1]]])
    visible = torch.tensor([[[True, True, True, True], [True, True, False, False]]])
    assert dropped_keys.keep_mask(contribution, visible, 0.5).tolist() == [
        [[False, True, True, False], [True, False, False, False]]
    ]
    assert dropped_keys.keep_mask(contribution, visible, 1.0).equal(visible)
