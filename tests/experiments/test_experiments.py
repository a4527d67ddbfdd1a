"""Every experiment at its smallest scale, its page, the statistics, stored runs and the committed pages."""

import itertools
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import statistics
import sys
import time
from dataclasses import asdict, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from matplotlib.figure import Figure

from experiments import cache, dropped_keys, intervals, lr_sensitivity, pages, sigma_accuracy, sweep, workers
from experiments.ablation import SPIKES, Ablation, Claim
from experiments.experiment import OPTIONS, Experiment, ExperimentError, Result, Setting, Stored
from experiments.intervals import Difference
from experiments.registry import EXPERIMENTS, find_experiment
from sigattn.data.dataset import DataError
from sigattn.recipes import datasets
from sigattn.train import checkpoint, loop

ABOUT = {"date": "2026-01-01", "commit": "0" * 40, "device": "here", "versions": {"torch": "2"}}

# the code of speech-bias, vision-ablations and norm-structure with other variants, which test_commands.py builds
SAME_CODE = {"speech-stability", "speech-hybrid", "speech-post", "layerscale-free", "relaxations"}
SAME_CODE |= {"speech-structure", "norm-structure-4k", "lm-stability", "length-power"}
FROM_CHECKPOINTS = ("attention-evolution", "attention-maps")  # of the same trainings
CACHED = ("conversion", "initial-norms", "pair-repeat")  # by mechanisms of their own, and by the common one

# of seven models, "smoke" trains two
USED_OTHERWISE = {"conversion": {"speech"}}
# their evaluation reads bytes, so that the tokenizer that training would read is refused
USED_OTHERWISE |= {"bias-rules": {"tokenizer"}, "dropped-keys": {"tokenizer"}}


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
    """Train in this process, without checkpoints and with few held-out samples: all take longer than a training."""
    monkeypatch.setattr(checkpoint, "save", lambda folder, *_, **__: folder)
    monkeypatch.setattr(datasets, "spoken_digits", lru_cache(datasets.spoken_digits))
    validate = loop.Trainer.validate

    def validate_one_batch(trainer):
        kind, whole = type(trainer.data), type(trainer.data).validation
        with monkeypatch.context() as patch:
            patch.setattr(kind, "validation", lambda data, size: itertools.islice(whole(data, min(size, 32)), 1))
            return validate(trainer)

    monkeypatch.setattr(loop.Trainer, "validate", validate_one_batch)


@pytest.fixture(autouse=True)
def _figures_are_drawn_once(monkeypatch):
    """Without the arrangement of their parts, for which Matplotlib draws each figure four times."""
    monkeypatch.setattr(Figure, "get_layout_engine", lambda _: None)


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
    assert not any("C4" in text for text in setting.fingerprints)  # that of the recipe, which is not loaded
    findings = find_experiment(name).judge(result.data, "smoke")
    assert findings
    assert all(f.verdict in intervals.VERDICTS and f.evidence for f in findings)
    assert all(len(row) == len(result.columns) for row in result.rows)
    page = pages.write_page(tmp_path / name, find_experiment(name), setting, result, ABOUT)
    assert pages.read_pages(tmp_path) == [page]
    written = (tmp_path / name / "page.md").read_text(), pages.write_findings(tmp_path, [page]).read_text()
    assert all(f.claim in text for f in findings for text in written)
    if result.figure is not None:
        assert (tmp_path / name / "figure.svg").stat().st_size > 1000
    assert stored_rows(tmp_path / name) == json.loads(json.dumps(list(result.data)))
    if name in CACHED:
        before = {p: p.stat().st_mtime_ns for p in folder.rglob("*.json*")}
        assert find_experiment(name).run(setting).data == result.data
        assert {p: p.stat().st_mtime_ns for p in folder.rglob("*.json*")} == before


def stored_rows(folder):
    return [json.loads(line) for line in (folder / "data.jsonl").read_text().splitlines()]


class TestStatistics:
    def test_intervals_are_scipy_s(self):
        """Of the difference of means, and of the mean of paired changes."""
        from scipy import stats  # here: a second, which others need not wait for

        for first, second in (
            ([1.0, 2.0, 4.0], [5.0, 5.5, 7.0, 6.0]),
            ([1.0, 1.1], [3.0, 9.0, 2.0]),
            ([1.0, 2.0] * 20, [3.0, 5.0] * 9),
        ):
            delta, margin = intervals.welch(first, second)
            assert delta == pytest.approx(statistics.mean(second) - statistics.mean(first))
            expected = stats.ttest_ind(second, first, equal_var=False).confidence_interval(0.95)
            assert margin == pytest.approx((expected.high - expected.low) / 2, rel=0.01)
        delta, margin = intervals.paired([1.0, 2.0, 4.0, 8.0], [1.5, 2.25, 5.0, 8.0])
        changes = [0.5, 0.25, 1.0, 0.0]
        assert delta == statistics.mean(changes)
        expected = stats.ttest_1samp(changes, 0).confidence_interval(0.95)
        assert margin == pytest.approx((expected.high - expected.low) / 2, rel=0.001)

    def test_one_seed_has_no_interval(self):
        assert intervals.welch([1.0], [2.0]) == intervals.paired([1.0], [2.0]) == (1.0, math.inf)
        assert str(intervals.welch([1.0], [2.0])) == "+1"
        assert intervals.welch([1.0, 1.0], [2.0, 2.0]) == (1.0, 0.0)

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
    def test_equality_by_two_one_sided_tests(self, delta, margin, verdict):
        """The whole interval within the tolerance of 0.3, outside it, or neither."""
        assert Difference(delta, margin).verdict_equal(0.3) == verdict
        assert (-Difference(delta, margin)).verdict_equal(0.3) == verdict

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

    def test_the_least_favourable_verdict_decides(self):
        assert intervals.verdict_all(["agrees", "agrees"]) == "agrees"
        for worse in ("equivalent", "not shown", "differs"):
            assert intervals.verdict_all(["agrees", worse]) == worse
        assert intervals.verdict_all(["differs", "not shown"]) == "differs"

    def test_sensitivity(self):
        """Losses above the initial loss, and of diverged runs, count as the initial loss."""
        assert lr_sensitivity.sensitivity([2.0, 3.0, 9.0, math.inf], 5.0) == pytest.approx((0 + 1 + 3 + 3) / 4)


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


class TestMeasurements:
    def test_coarse_sigmoid(self):
        """Values lie on the grid; the derivative is the one that a kernel computes from them."""
        x = torch.linspace(-12, 12, 97, requires_grad=True)
        p = sigma_accuracy.coarse_sigmoid(x, 8)
        torch.testing.assert_close(p * 2**9, (p * 2**9).round())
        assert (p - x.sigmoid()).abs().max() <= 2.0**-10 + 1e-7
        (slope,) = torch.autograd.grad(p.sum(), x)
        torch.testing.assert_close(slope, (p * (1 - p)).detach())

    def test_keep_mask_selects_the_largest_contributions(self):
        contribution = torch.tensor([[[0.1, 0.5, 0.3, 0.2], [0.4, 0.4, 0.9, 0.1]]])
        visible = torch.tensor([[[True, True, True, True], [True, True, False, False]]])
        expected = [[[False, True, True, False], [True, False, False, False]]]
        assert dropped_keys.keep_mask(contribution, visible, 0.5).tolist() == expected
        assert dropped_keys.keep_mask(contribution, visible, 1.0).equal(visible)


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


def written(folder, **setting):
    """Return the page of an experiment without runs, and its text."""
    result = Result(("a",), [("b",)], [])
    experiment = Experiment("one", "One", "here", lambda _: result, lambda rows, scale: [])
    page = pages.write_page(folder, experiment, Setting("small", 5, folder, **setting), result, ABOUT)
    return page, (folder / "page.md").read_text()


@pytest.mark.usefixtures("in_this_process", "unchecked")
def test_run_on_changed_settings_or_data_is_repeated_and_the_page_names_the_data(tmp_path):
    """The same settings on one text, on another, and on the first after it has changed; then other settings."""
    recipe = lr_sensitivity.base(Setting("smoke", 1, tmp_path), 1)
    texts = [tmp_path / name for name in ("a.txt", "b.txt")]
    for i, path in enumerate(texts):
        path.write_text(f"the text number {i}. " * 400)

    def losses(path, lines, recipe=recipe):
        setting = Setting("smoke", 1, tmp_path, lines.append, workers=1, data=path)
        (outcome,) = sweep.train_variants(setting, {"same name": recipe})["same name"]
        page, _ = written(tmp_path / "page", data=path, fingerprints=setting.fingerprints)
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
    assert len(losses(texts[0], lines, recipe.with_training(max_steps=2))[0]) == 2
    assert len(lines) == 4


def _count_calls(path):
    path.write_text(path.read_text() + "." if path.exists() else ".")
    return {"calls": len(path.read_text())}


@pytest.fixture
def forked(monkeypatch):
    """Fork the workers, which need not import PyTorch then."""
    if not hasattr(os, "fork"):
        pytest.skip("forks")
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: fork)


@pytest.mark.usefixtures("forked")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of fork in a process of several threads
def test_results_are_stored_by_their_settings(tmp_path, request):
    """The first is computed in a process of its own."""
    lines = []

    def run(n):
        job = cache.Job(tmp_path / "measured" / "x.json", {"n": n}, partial(_count_calls, tmp_path / "calls"))
        return cache.run_jobs({"x": job}, 1, lines.append)

    assert run((1, 2)) == run((1, 2)) == {"x": {"calls": 1}}  # JSON has no tuples
    request.getfixturevalue("in_this_process")
    assert run(2) == {"x": {"calls": 2}}
    (tmp_path / "measured" / "x.json").write_text("{")
    assert run(2) == {"x": {"calls": 3}}
    assert lines == ["1 of 1 runs: x"] * 3


def test_longer_training_and_more_seeds_are_on_the_page_and_in_its_command(tmp_path):
    assert Setting("small", 1, tmp_path, longer=4).steps(6, 300) == 1200
    assert Setting("paper", 1, tmp_path, longer=4).steps(6, 300, 5000) == 5000
    page, _ = written(tmp_path, longer=4)
    assert page.extent == "Scale: small, 4 times its training, seeds: 5."
    assert page.command == "python -m experiments one --scale small --seeds 5 --longer 4"
    page, text = written(tmp_path, more_seeds={"a, b": 20, "c": 9, "d": 20})
    assert page.extent == "Scale: small, seeds: 5; 9 of c; 20 of a, b and of d."
    assert "--seeds 5 --more-seeds 'a, b' 20 c 9 d 20" in text


def _report_and_sleep(pipe):
    os.write(pipe, str(os.getpid()).encode())
    time.sleep(60)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="forks, and looks for a process in /proc")
@pytest.mark.usefixtures("forked")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_workers_end_with_a_killed_parent():
    read, write = os.pipe()
    if (parent := os.fork()) == 0:
        list(workers.run_in_workers({0: partial(_report_and_sleep, write)}, 1))
    worker = Path(f"/proc/{int(os.read(read, 20))}/stat")
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    end = time.monotonic() + 20
    while worker.exists() and worker.read_text().split(")")[1].split()[0] != "Z":
        assert time.monotonic() < end
        time.sleep(0.05)


class TestExtend:
    def run(self, name, folder, seeds, stored=None, log=lambda _: None, **more):
        """Run an experiment and write its page into a folder; return its rows of data and its page."""
        experiment = find_experiment(name)
        setting = Setting("smoke", seeds, folder / name, log, stored=stored or Stored(), **more)
        page = pages.write_page(folder / name, experiment, setting, experiment.run(setting), ABOUT)
        return stored_rows(folder / name), page

    @pytest.mark.usefixtures("without_checkpoints")
    def test_data_and_table_are_those_of_all_seeds_at_once(self, whole_folder, tmp_path):
        """Only the seeds that the page lacks are trained; curves stay those of the page."""
        name = "norm-structure"
        whole, page = self.run(name, whole_folder, 2)
        self.run(name, whole_folder, 1)  # of the same runs
        figure = (whole_folder / name / "figure.svg").read_text()
        lines = []
        stored = pages.read_stored(whole_folder, find_experiment(name), "smoke", 1)
        extended, longer = self.run(name, tmp_path, 2, stored, lines.append)
        assert extended == whole
        assert (longer.rows, longer.command, longer.extends) == (page.rows, page.command, [ABOUT])
        assert {line.rpartition(", ")[2] for line in lines} == {"seed 1"}
        assert (tmp_path / name / "figure.svg").read_text() == figure
        assert "The figure shows fewer seeds: 1." in (tmp_path / name / "page.md").read_text()

    @pytest.mark.usefixtures("without_checkpoints")
    def test_seeds_and_variants_that_the_page_lacks_are_trained(self, whole_folder, tmp_path):
        """More seeds of one variant, and a variant that the experiment has gained; origins are listed."""
        name, more = "pair-repeat", {"more_seeds": {"softmax": 2}}
        whole, _ = self.run(name, whole_folder, 1, **more)
        self.run(name, whole_folder, 1)
        stored = pages.read_stored(whole_folder, find_experiment(name), "smoke", 1)
        older = replace(
            stored,
            rows=[row for row in stored.rows if row["model"] != "mlp"],
            **{f: {k: v for k, v in getattr(stored, f).items() if k != "mlp"} for f in ("seeds", "identities")},
        )
        lines = []
        extended, _ = self.run(name, tmp_path, 1, older, lines.append, **more)
        assert extended == whole
        assert sorted(line.split(": ")[1] for line in lines) == ["mlp, seed 0", "softmax, seed 1"]
        text = (tmp_path / name / "page.md").read_text()
        assert text.count(ABOUT["date"]) == 2
        assert "The first seeds are those of" in text
        assert "The figure shows fewer seeds" not in text  # it is drawn of all seeds
        new = pages.read_stored(tmp_path, find_experiment(name), "smoke", 1)
        assert (new.seeds, list(new.origins)) == ({"sigmoid": 1, "softmax": 2, "mlp": 1}, [ABOUT, ABOUT])
        with pytest.raises(ExperimentError, match="have more seeds: name at least 'softmax' 2 with --more-seeds"):
            self.run(name, tmp_path, 1, new, pytest.fail)
        changed = replace(stored, identities={**stored.identities, "mlp": "another"})
        with pytest.raises(ExperimentError, match="of other settings or data than those of 'mlp' here: leave out"):
            self.run(name, tmp_path, 2, changed, pytest.fail)

    def test_pages_that_cannot_be_extended_are_refused(self, tmp_path):
        pair = find_experiment("pair-repeat")
        (tmp_path / "pair-repeat").mkdir()
        about = {"findings": [], "has_figure": False, "provenance": ABOUT, "differs": "", "columns": [], "rows": []}
        page = pages.Page("pair-repeat", "N", "here", "small", 5, **about)
        (tmp_path / "pair-repeat" / "page.json").write_text(json.dumps(asdict(page)))
        with pytest.raises(ExperimentError, match="is of scale 'small' and longer=1, not 'small' and 4: name the same"):
            pages.read_stored(tmp_path, pair, "small", 4)
        with pytest.raises(DataError, match="does not name the settings of its runs: leave out --extend"):
            pages.read_stored(tmp_path, pair, "small", 1)


class TestCommittedPages:
    folder = Path(__file__).parents[2] / "docs" / "results"

    def test_findings_follow_from_the_data(self, tmp_path):
        """Judging the stored data again writes the same pages and tables."""
        copy = tmp_path / "results"
        shutil.copytree(self.folder, copy, ignore=shutil.ignore_patterns("*.svg"))
        pages.judge_again(copy)
        for path in copy.rglob("*.*"):
            assert path.read_text() == (self.folder / path.relative_to(copy)).read_text(), path.name

    def test_tables_of_ablations_follow_from_the_data(self):
        pages_of = {page.name: page for page in pages.read_pages(self.folder)}
        ablations = {n: e.run for n, e in EXPERIMENTS.items() if isinstance(e.run, Ablation) and n in pages_of}
        assert len(ablations) > 10
        for name, ablation in ablations.items():
            lines = (self.folder / name / "data.jsonl").read_text().splitlines()
            columns, rows = ablation.table([json.loads(line) for line in lines])
            assert ([*columns], [[*row] for row in rows]) == (pages_of[name].columns, pages_of[name].rows), name

    def test_a_page_begins_with_its_conclusion_which_other_verdicts_remove(self, tmp_path):
        for page in pages.read_pages(self.folder):
            assert page.conclusion.endswith("."), f"{page.name}: write the result in a sentence into page.json"
            assert len(page.conclusion.split()) <= 31, page.name
            assert (self.folder / page.name / "page.md").read_text().splitlines()[2] == page.conclusion
        shutil.copytree(self.folder / "flops", tmp_path / "flops")
        path = tmp_path / "flops" / "page.json"
        (page,) = pages.judge_again(tmp_path)
        assert page.conclusion
        path.write_text(path.read_text().replace('"agrees"', '"differs"'))
        (page,) = pages.judge_again(tmp_path)
        assert (page.verdicts, page.conclusion) == (["agrees"], "")
        assert "per token and head: the claim agrees.\n" in (tmp_path / "flops" / "page.md").read_text()

    def test_the_counts_and_undecided_claims_are_in_the_text(self):
        """docs/reproduce.md has a reason for each claim of the paper that is not shown."""
        every = pages.read_pages(self.folder)
        text = (self.folder.parent / "reproduce.md").read_text()
        assert pages.count_verdicts(every) in " ".join(text.split())
        of_paper = [page for page in every if page.kind == "paper"]
        undecided = {(page.name, f["claim"]) for page in of_paper for f in page.findings if f["verdict"] == "not shown"}
        section = text.partition("## What is not shown, and why")[2].partition("\n## ")[0]
        listed = set(re.findall(r"^\| \[([\w-]+)\].*? \| (.+?) \|", section, re.MULTILINE))
        assert listed == undecided

    def test_operations_are_the_stored_ones(self):
        rows = stored_rows(self.folder / "flops")
        assert find_experiment("flops").run(Setting("small", 1, self.folder)).data == rows

    def test_every_experiment_has_a_page(self):
        assert {path.parent.name for path in self.folder.glob("*/page.json")} == set(EXPERIMENTS)
