"""Mutate the operator, or another part of the library, and count the mutants that the tests catch (by cosmic-ray).

    make mutation N=40
    make mutation N=30 PART=src/sigattn/train/checkpoint.py

draws mutants at random, of ``src/sigattn/ops`` without the GPU kernels, or of ``--part``, a file or folder with tests
in ``LIKELY``. Each is tested in a copy of the checkout by the tests of its file, up to the first failure, so that the
score is a lower bound: other tests may catch what these let pass. Mutants in type annotations are left out, because
nothing evaluates those. Survivors are printed as diffs. The copy and the results are kept in ``runs/mutation``: a run
that was stopped is resumed, and a larger N extends the sample. ``--fresh`` starts again from the present sources.
"""

from __future__ import annotations

import argparse
import ast
import collections
import os
import random
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
COPIED = ("src", "tests", "benchmarks", "experiments", "docs", "pyproject.toml", "README.md", "Makefile")
OPERATOR = Path("src/sigattn/ops")
TIMEOUT = 10.0  # times what the tests take without a mutant
CONFIG = """
[cosmic-ray]
module-path = ["{part}"]
timeout = 900
excluded-modules = ["src/sigattn/ops/triton/*.py", "src/sigattn/ops/hopper/*.py"]
test-command = ""
[cosmic-ray.distributor]
name = "local"
"""
# Left out: interpreted kernels, and tests that take seconds and compute what cheaper ones compute as well.
SELECTED = "not triton and not hopper and not real_tiles and not kernels and not decoding and not interpreter"


# Tests by a file's name, with its folder's where the name alone is ambiguous, or by its folder's; in ``tests/ops``
# unless a folder is given; the most likely to fail first. All tests would take minutes for each survivor.
LIKELY = {
    "attention": "test_correctness test_bad_input test_scalars test_borders test_pytorch",
    "autograd": "test_autograd test_pytorch test_onnx",
    "block_mask": "test_block_mask",
    "blocked": "test_correctness test_masked_weights test_borders",
    "broadcasting": "test_broadcasting",
    "checkpoint": "tests/train/test_loop.py tests/train/test_checkpoint_files.py tests/train",
    "custom_ops": "test_pytorch test_backends test_correctness tests/export/test_fx.py",
    "dropout": "test_dropout",
    "conversion/fit": "tests/conversion/test_fit.py",
    "gradients": "test_correctness test_autograd",
    "kvcache": "test_varlen_and_kvcache tests/test_flash_kvcache.py tests/flash",
    "llvm": "test_llvm test_dropout test_llvm_requirements test_llvm_compilation",
    "mask": "test_mask test_correctness",
    "normalization": "test_normalization tests/distributed/test_context_parallel.py",
    "nested": "test_nested",
    "sharding": "tests/distributed/test_context_parallel.py",
    "problem": "test_problem test_correctness test_borders tests/test_flash.py",
    "reference": "test_correctness test_masked_weights test_borders test_dropout test_statistics",
    "scalars": "test_scalars test_bad_input",
    "settings": "test_backends test_default_device test_backend_context test_pytorch",
    "statistics": "test_statistics",
    "transformers/mask": "tests/integrations/test_transformers.py",
    "tiles": "test_correctness test_borders test_block_mask",
    "vmap": "test_pytorch test_autograd",
    "validation": "test_bad_input test_scalars test_correctness",
    "varlen": "test_varlen_and_kvcache tests/test_flash.py tests/flash test_autograd test_pytorch",
}


def tests_of(module: Path) -> list[str]:
    """Return the files and folders of tests that a mutant of a file has to pass, in their order."""
    keys = f"{module.parent.name}/{module.stem}", module.stem, module.parent.name
    names = next(LIKELY[key] for key in keys if key in LIKELY)
    return [name if "/" in name else f"tests/ops/{name}.py" for name in names.split()]


def command(tests: Iterable[str]) -> str:
    """Return the command that runs the given tests in their order."""
    words = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-k", SELECTED]
    return shlex.join([*words, *dict.fromkeys(tests)])


def annotations(path: Path) -> set[int]:
    """Return the lines that hold type annotations."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        for part in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if part is not None:
                lines.update(range(part.lineno, part.end_lineno + 1))
    return lines


def copy_checkout(folder: Path, part: Path) -> None:
    """Copy what the tests need, and list all mutants of a file or folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copy(ROOT / name, folder / name)
    (folder / "config.toml").write_text(CONFIG.format(part=part))
    subprocess.run(
        [sys.executable, "-m", "cosmic_ray.cli", "init", "config.toml", "new.sqlite"], cwd=folder, check=True
    )
    (folder / "new.sqlite").rename(folder / "session.sqlite")


def sample(items: list, seed: int) -> list:
    """Return the mutants outside annotations in a random order."""
    lines = {path: annotations(path) for path in {m.module_path for item in items for m in item.mutations}}
    useful = [i for i in items if all(m.start_pos[0] not in lines[m.module_path] for m in i.mutations)]
    useful.sort(key=lambda item: (str(item.mutations), item.job_id))
    print(f"{len(items)} mutants, {len(useful)} outside annotations", flush=True)
    random.Random(seed).shuffle(useful)
    return useful


def report(results: list[tuple]) -> None:
    """Print survivors, and how many were caught of each file and of all."""
    caught: dict[str, list[bool]] = collections.defaultdict(list)
    for item, result in results:
        caught[str(item.mutations[0].module_path)].append(result.is_killed)
        if not result.is_killed:
            print(result.diff)
    for path, outcomes in sorted(caught.items()):
        print(f"{path}: {sum(outcomes)} of {len(outcomes)} caught")
    print(f"{sum(map(sum, caught.values()))} of {sum(map(len, caught.values()))} mutants caught")


def main() -> None:
    """Test the first mutants of a random order, those without a result yet."""
    from cosmic_ray.mutating import mutate_and_test
    from cosmic_ray.work_db import use_db

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "mutation")
    parser.add_argument("--part", type=Path, default=OPERATOR, help="a file or folder, from the root of the checkout")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results and copy the sources again")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve() / arguments.part.stem
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    if arguments.fresh or not (folder / "session.sqlite").exists():
        copy_checkout(folder, arguments.part)
    os.chdir(folder)
    with use_db(folder / "session.sqlite") as database:
        items = list(database.work_items)
        if not (folder / "seconds").exists():  # or every mutant would count as caught
            start = time.perf_counter()
            modules = dict.fromkeys(item.mutations[0].module_path for item in items)
            subprocess.run(shlex.split(command(name for module in modules for name in tests_of(module))), check=True)
            (folder / "seconds").write_text(f"{time.perf_counter() - start}\n")
        timeout = TIMEOUT * float((folder / "seconds").read_text())
        tested = []
        for item in sample(items, arguments.seed)[: arguments.count]:
            result = dict(database.results).get(item.job_id)
            if result is None:
                result = mutate_and_test(item.mutations, command(tests_of(item.mutations[0].module_path)), timeout)
                database.set_result(item.job_id, result)
            tested.append((item, result))
            print(f"{len(tested)}: {item.mutations[0].module_path}, {result.test_outcome}", flush=True)
    report(tested)


if __name__ == "__main__":
    main()
