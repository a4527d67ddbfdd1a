"""benchmarks/gpu_runner.py: killed at any time it leaves a complete archive, and the next call resumes it."""

import json
import os
import random
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from benchmarks import outcomes
from benchmarks.provenance import BenchmarkError
from benchmarks.results_file import ResultsFile

ROOT = Path(__file__).parents[2]
# A benchmark of 20 cases. Modules that ResultsFile does not need are replaced, because importing PyTorch takes seconds.
STEP = """
import os, signal, sys, time, types
from pathlib import Path
sys.modules |= {name: types.ModuleType(name) for name in ("torch", "sigattn")}
from benchmarks.results_file import ResultsFile
folder, measured, behaviour = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
if behaviour == "ignores SIGINT":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
with ResultsFile(folder / "rows.json", {"date": "today"}, resume=True) as report:
    for case in report.remaining(range(20)):
        time.sleep(0.03)
        with open(measured, "a") as file:
            print(folder.name, case, file=file)
        if behaviour == "dies" and case == 7:
            os.kill(os.getpid(), signal.SIGSEGV)
        while behaviour != "quick" and behaviour != "dies" and case == 12:
            time.sleep(0.05)
        report.add(case, [{"case": case}])
"""
RUNNER = """
import sys
from benchmarks import gpu_runner as gpu
behaviours = sys.argv.pop().split(",")
measured, step = sys.argv.pop(), sys.argv.pop()
gpu.STEPS = tuple(
    gpu.Step(f"step{n}", 60 if b in ("quick", "dies") else 2, ("rows", "", ""), columns=("case",))
    for n, b in enumerate(behaviours)
)
gpu.command = lambda s, folder: [sys.executable, step, str(folder / s.name), measured, behaviours[int(s.name[4:])]]
gpu.fingerprint = lambda wheels: "code"
gpu.GRACE = 1.0
sys.exit(gpu.main())
"""


@pytest.fixture
def runner(tmp_path):
    """Start gpu_runner.py with steps of the given behaviours; options go to it."""
    step, script = tmp_path / "step.py", tmp_path / "runner.py"
    step.write_text(STEP)
    script.write_text(RUNNER)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}

    def start(*behaviours, options=()):
        more = [*options, step, tmp_path / "measured", ",".join(behaviours)]
        command = [sys.executable, script, tmp_path / "out", *more]
        with open(tmp_path / "said", "w") as said:
            return subprocess.Popen([str(x) for x in command], env=environment, stdout=said, stderr=said)

    return start


def measured(tmp_path):
    path = tmp_path / "measured"
    return path.read_text().splitlines() if path.exists() else []


def archived(tmp_path):
    """State of the steps, and the content of each result file, in the archive."""
    if not (tmp_path / "out/results.tar.gz").exists():
        return {}, {}
    with tarfile.open(tmp_path / "out/results.tar.gz") as archive:
        content = {m.name: archive.extractfile(m).read() for m in archive.getmembers()}
    found = {name: json.loads(text) for name, text in content.items() if name.endswith(".json")}
    return found.pop("code/state.json", {}), {name.split("/")[1]: report for name, report in found.items()}


def rows(report):
    return [row["case"] for row in report["rows"]]


def test_killed_at_any_time(runner, tmp_path):
    for seed in range(4):
        before = {f"{step} {case}" for step, report in archived(tmp_path)[1].items() for case in rows(report)}
        enough = (known := len(measured(tmp_path))) + random.Random(seed).randint(3, 9)
        process = runner("quick", "quick")
        while len(measured(tmp_path)) < enough:
            assert process.poll() is None, (tmp_path / "said").read_text()
            time.sleep(0.01)
        process.kill()
        process.wait()
        lines = len(measured(tmp_path))
        assert before.isdisjoint(measured(tmp_path)[known:])  # nothing is measured again
        _, reports = archived(tmp_path)
        assert sum(len(rows(report)) for report in reports.values()) >= len(before)
        assert not (tmp_path / "out").joinpath("summary.txt").read_text().isspace()
    time.sleep(0.1)
    assert len(measured(tmp_path)) <= lines + 1  # the step ended with the runner
    assert len(before) > 5
    process = runner("quick", "quick")
    assert process.wait() == 0, (tmp_path / "said").read_text()
    state, reports = archived(tmp_path)
    assert {step: rows(report) for step, report in reports.items()} == {f"step{n}": list(range(20)) for n in (0, 1)}
    assert [s["complete"] for s in state.values()] == [True, True]
    assert {p.name.strip(".") for p in (tmp_path / "out").iterdir()} == {"results.tar.gz", "summary.txt"}
    known = len(measured(tmp_path))
    runner("quick", "quick").wait()
    assert len(measured(tmp_path)) == known


def test_steps_that_take_too_long_or_die(runner, tmp_path):
    """SIGINT, then SIGKILL; a case during which the process dies twice is skipped, and the others are measured."""
    process = runner("slow", "ignores SIGINT", "dies", options=("--seconds", "60"))
    assert process.wait() == 0, (tmp_path / "said").read_text()
    state, reports = archived(tmp_path)
    assert [s["status"] for s in state.values()] == ["cut off", "cut off", "done"]
    assert [rows(report) for report in reports.values()] == [list(range(12))] * 2 + [[c for c in range(20) if c != 7]]
    assert [report["attempts"] for report in reports.values()] == [{}, {"12": 1}, {"7": 2}]
    assert [report["given_up"] for report in reports.values()] == [[], [], [7]]
    assert "given up, its process ended twice: 7" in (tmp_path / "out/summary.txt").read_text()


def test_too_little_time_for_a_step(runner, tmp_path):
    process = runner("quick", options=("--seconds", "1.5"))
    assert process.wait() == 0
    assert archived(tmp_path)[0]["step0"]["status"] == "not begun"


@pytest.mark.parametrize("parallel", [False, True])
def test_tests_that_lose_the_gpu(tmp_path, parallel):
    """Each failure is reported with its error; after a fault the tests continue in a new process; none runs twice."""
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "lost = False\n"
        "@pytest.mark.parametrize('n', range(6))\n"
        "def test_it(n):\n"
        "    global lost\n"
        "    open('ran', 'a').write(f'{n} ')\n"
        "    assert not lost, 'in a process that lost the GPU'\n"
        "    if n == 1: lost = True; raise RuntimeError('CUDA error: an illegal memory access was encountered')\n"
        "    assert n != 4, 'error 0.5 exceeds 0.1'\n"
        "    if n == 5: pytest.skip('no such GPU')\n"
    )
    names = {"SIGATTN_OUTCOMES": str(tmp_path / "o"), "SIGATTN_OUTCOMES_BEFORE": str(tmp_path / "before")}
    environment = {**os.environ, **names, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    options = ["-p", "xdist.plugin", "-n", "1"] if parallel else []
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "benchmarks.outcomes",
        "-p",
        "no:cacheprovider",
        *options,
        "test_it.py",
    ]
    codes = []
    for _ in range(1 if parallel else 2):
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        codes.append(done.returncode)
        (tmp_path / "before").write_text((tmp_path / "o").read_text() + '{"test": "cut o')
    assert codes == ([1] if parallel else [2, 1]), done.stdout
    found = dict(sorted(outcomes.read(tmp_path / "o").items()))  # after a fault xdist goes on in another order
    assert [row["outcome"] for row in found.values()] == ["passed", "failed", "passed", "passed", "failed", "skipped"]
    why = [row["why"] for row in found.values() if row["outcome"] == "failed"]
    assert "illegal memory access" in why[0]
    assert "error 0.5 exceeds 0.1" in why[1]
    assert sorted((tmp_path / "ran").read_text().split()) == list("012345")


def test_results_of_other_code_are_not_continued(tmp_path):
    described = {"benchmark": "x", "source": "a", "date": "1", "configuration": {"n": (1, 2), "max_seconds": 3.0}}
    with ResultsFile(tmp_path / "x.json", described) as report:
        for case in report.remaining(["first", "second"]):
            report.add(case, [{"value": 1}])
    changed = described | {"configuration": {"n": (1, 2), "max_seconds": 9.0}, "date": "2"}
    assert ResultsFile(tmp_path / "x.json", changed, resume=True).has("second")
    for other in ({"source": "b"}, {"configuration": {"n": (1, 3)}}):
        with pytest.raises(BenchmarkError, match=f"differs in: {next(iter(other))}"):
            ResultsFile(tmp_path / "x.json", described | other, resume=True)
    assert not ResultsFile(tmp_path / "x.json", described).has("second")


def test_an_exception_is_recorded_and_a_case_attempted_twice(tmp_path):
    def run():
        with ResultsFile(tmp_path / "x.json", {"date": ""}, resume=True) as report:
            for case in report.remaining(["first", "second"]):
                raise ValueError(f"{case} is broken")

    for case in ("first", "first", "second"):
        with pytest.raises(ValueError, match=case):
            run()
    found = json.loads((tmp_path / "x.json").read_text())
    assert found["given_up"] == ["first"]
    assert found["absent"]['"first"'] == "ValueError: first is broken"
