"""Mutate the operator and the checkpoints, and count the mutants that the tests catch (by cosmic-ray).

    make mutation N=40

draws N mutants at random from ``src/sigattn/ops`` (without kernels, which the interpreter would make slow to test) and
``src/sigattn/train/checkpoint.py``, each tested in a copy of the checkout by the tests of its package. Mutants in type
annotations are left out, because nothing evaluates those. Survivors are printed as diffs.
"""

from __future__ import annotations

import argparse
import ast
import collections
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
COPIED = ("src", "tests", "pyproject.toml", "README.md", "Makefile")
# each mutated path, and the tests that ought to catch its mutants
TARGETS = {
    "src/sigattn/ops": "tests/ops tests/flash tests/test_flash.py tests/test_flash_kvcache.py",
    "src/sigattn/train/checkpoint.py": "tests/train",
}
CONFIG = """
[cosmic-ray]
module-path = "{module}"
timeout = 900.0
excluded-modules = ["src/sigattn/ops/triton/*.py"]
test-command = "{python} -m pytest -x -q -n {workers} -p no:cacheprovider {tests}"
[cosmic-ray.distributor]
name = "local"
"""


def annotations(path: Path) -> set[int]:
    """Return the lines that hold type annotations."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        for name in ("annotation", "returns"):
            part = getattr(node, name, None)
            if part is not None:
                lines.update(range(part.lineno, part.end_lineno + 1))
    return lines


def sample(database: Path, folder: Path, count: int, generator: random.Random) -> None:
    """Mark all pending mutants but ``count`` random ones as skipped."""
    from cosmic_ray.work_db import use_db
    from cosmic_ray.work_item import WorkerOutcome, WorkResult

    lines: dict[Path, set[int]] = {}
    with use_db(database) as db:
        items = sorted(db.pending_work_items, key=lambda item: (str(item.mutations), item.job_id))
        useful = []
        for item in items:
            (mutation,) = item.mutations
            path = folder / mutation.module_path
            lines.setdefault(path, annotations(path))
            if mutation.start_pos[0] not in lines[path]:
                useful.append(item.job_id)
        chosen = set(generator.sample(useful, min(count, len(useful))))
        print(f"{len(items)} mutants, {len(useful)} outside annotations, {len(chosen)} drawn", flush=True)
        db.set_multiple_results([i.job_id for i in items if i.job_id not in chosen], WorkResult(WorkerOutcome.SKIPPED))


def report(database: Path) -> tuple[int, int]:
    """Print results by file and the survivors; return the numbers of mutants caught and tested."""
    from cosmic_ray.work_db import use_db
    from cosmic_ray.work_item import TestOutcome

    caught: dict[str, list[bool]] = collections.defaultdict(list)
    with use_db(database) as db:
        paths = {item.job_id: str(item.mutations[0].module_path) for item in db.work_items if item.mutations}
        for job, result in db.results:
            if result.test_outcome is None:
                continue
            caught[paths[job]].append(result.is_killed)
            if result.test_outcome == TestOutcome.SURVIVED:
                print(result.diff)
    for path, outcomes in sorted(caught.items()):
        print(f"{path}: {sum(outcomes)} of {len(outcomes)} caught")
    return sum(map(sum, caught.values())), sum(map(len, caught.values()))


def main() -> None:
    """Run a sample for each target."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    generator, caught, tested = random.Random(arguments.seed), 0, 0
    for at, (module, tests) in enumerate(TARGETS.items()):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for part in COPIED:
                copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy2
                copy(ROOT / part, folder / part)
            (folder / "config.toml").write_text(
                CONFIG.format(module=module, tests=tests, python=sys.executable, workers=arguments.workers)
            )
            command = [sys.executable, "-m", "cosmic_ray.cli"]
            environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder / "src"), *sys.path[1:]])}
            subprocess.run([*command, "init", "config.toml", "session.sqlite"], cwd=folder, check=True, env=environment)
            share = arguments.count - arguments.count // 5 if at == 0 else arguments.count // 5
            sample(folder / "session.sqlite", folder, share, generator)
            subprocess.run([*command, "exec", "config.toml", "session.sqlite"], cwd=folder, check=True, env=environment)
            found = report(folder / "session.sqlite")
        caught, tested = caught + found[0], tested + found[1]
    print(f"{caught} of {tested} mutants caught")


if __name__ == "__main__":
    main()
