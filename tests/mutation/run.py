"""Mutate the operator and the checkpoints, and count the mutants that the tests catch (by cosmic-ray).

    make mutation N=40
    make mutation N=30 PART=src/sigattn/ops/llvm

draws mutants at random, four of ``src/sigattn/ops`` (without the kernels, which are slow to test in the interpreter) to
each one of ``src/sigattn/train/checkpoint.py``, and runs the tests of the mutated file on each, in a copy of the
checkout, up to the first failure. So the score is a lower bound: other tests may catch what these let pass. Mutants in
type annotations are left out, because nothing evaluates those. Survivors are printed as diffs. The copy and the results
are kept in ``runs/mutation``: a run that was stopped is resumed, and a larger N extends the sample. ``--fresh`` starts
again from the present sources. ``--part`` draws from one file or folder, which may be another of those that have tests
below.
"""

from __future__ import annotations

import argparse
import ast
import collections
import itertools
import os
import random
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
COPIED = ("src", "tests", "benchmarks", "experiments", "docs", "pyproject.toml", "README.md", "Makefile")
OPERATOR, CHECKPOINT = Path("src/sigattn/ops"), Path("src/sigattn/train/checkpoint.py")
TIMEOUT = 10.0  # times what the tests take without a mutant
CONFIG = """
[cosmic-ray]
module-path = {paths}
timeout = 900
excluded-modules = ["src/sigattn/ops/triton/*.py", "src/sigattn/ops/hopper/*.py"]
test-command = ""
[cosmic-ray.distributor]
name = "local"
"""
# Left out: interpreted kernels, and tests that take seconds and compute what cheaper ones compute as well.
SELECTED = "not triton and not hopper and not real_tiles and not kernels and not decoding and not interpreter"


# The tests of a file, or of all files of a folder, by its name, with its folder's where the name alone is ambiguous;
# in ``tests/ops`` unless a folder is given. All tests would take ten minutes for each survivor.
LIKELY = {
    "autocast": "test_pytorch test_correctness",
    "attention": "test_correctness test_bad_input test_scalars test_borders test_pytorch",
    "autograd": "test_autograd test_pytorch",
    "block_mask": "test_block_mask",
    "blocked": "test_correctness test_masked_weights test_borders",
    "broadcasting": "test_broadcasting",
    "custom_ops": "test_pytorch test_backends test_correctness",
    "dropout": "test_dropout",
    "conversion/fit": "tests/conversion/test_fit.py",
    "gradients": "test_correctness test_autograd",
    "kvcache": "test_varlen_and_kvcache tests/test_flash_kvcache.py tests/flash",
    "llvm": "test_llvm test_dropout test_llvm_requirements test_llvm_compilation",
    "mask": "test_mask test_correctness",
    "normalization": "test_normalization tests/distributed/test_context_parallel.py",
    "memory": "test_backends",
    "nested": "test_nested",
    "positions": "test_correctness test_borders test_dropout",
    "onnx": "test_onnx",
    "proxies": "tests/export/test_fx.py",
    "sharding": "tests/distributed/test_context_parallel.py",
    "problem": "test_problem test_correctness test_borders tests/test_flash.py",
    "reference": "test_correctness test_masked_weights test_borders test_statistics",
    "scalars": "test_scalars test_bad_input",
    "settings": "test_backends test_default_device test_backend_context",
    "statistics": "test_statistics",
    "transformers/mask": "tests/integrations/test_transformers.py",
    "tiles": "test_correctness test_borders test_block_mask",
    "vmap": "test_pytorch test_autograd",
    "validation": "test_bad_input test_scalars test_correctness",
    "varlen": "test_varlen_and_kvcache tests/test_flash.py tests/flash test_autograd test_pytorch",
}


def tests_of(module: Path) -> list[str]:
    """Return the files of tests that a mutant of a file has to pass, the most likely to fail first."""
    if module == CHECKPOINT:
        return ["tests/train/test_loop.py", "tests/train/test_checkpoint_files.py", "tests/train"]
    keys = f"{module.parent.name}/{module.stem}", module.stem, module.parent.name
    names = next(LIKELY[key] for key in keys if key in LIKELY)
    return [name if "/" in name else f"tests/ops/{name}.py" for name in names.split()]


def command(tests: list[str]) -> str:
    """Return the command that runs the given files in their order."""
    files = [
        str(f) for name in tests for f in (sorted(Path(name).glob("test_*.py")) if Path(name).is_dir() else [name])
    ]
    words = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-k", SELECTED]
    return shlex.join([*words, *dict.fromkeys(files)])


def annotations(path: Path) -> set[int]:
    """Return the lines that hold type annotations."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        for name in ("annotation", "returns"):
            part = getattr(node, name, None)
            if part is not None:
                lines.update(range(part.lineno, part.end_lineno + 1))
    return lines


def copy_checkout(folder: Path, paths: list[str]) -> None:
    """Copy what the tests need, and list all mutants of some paths."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for part in COPIED:
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy2
        copy(ROOT / part, folder / part)
    (folder / "config.toml").write_text(CONFIG.format(paths=paths))
    subprocess.run(
        [sys.executable, "-m", "cosmic_ray.cli", "init", "config.toml", "new.sqlite"], cwd=folder, check=True
    )
    (folder / "new.sqlite").rename(folder / "session.sqlite")


def sample(items: list, seed: int) -> Iterator:
    """Yield mutants outside annotations in a random order, one of the checkpoints after four of the operator."""
    lines: dict[Path, set[int]] = {}
    useful = [
        item
        for item in items
        for mutation in item.mutations
        if mutation.start_pos[0] not in lines.setdefault(mutation.module_path, annotations(mutation.module_path))
    ]
    useful.sort(key=lambda item: (str(item.mutations), item.job_id))
    print(f"{len(items)} mutants, {len(useful)} outside annotations", flush=True)
    random.Random(seed).shuffle(useful)
    kinds: dict[bool, list] = {is_operator: [] for is_operator in (True, False)}
    for item in useful:
        kinds[item.mutations[0].module_path != CHECKPOINT].append(item)
    operator, checkpoint = iter(kinds[True]), iter(kinds[False])
    while drawn := [*itertools.islice(operator, 4), *itertools.islice(checkpoint, 1)]:
        yield from drawn


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
    parser.add_argument("--part", type=Path, help="a file or folder of src, from the root of the checkout")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results and copy the sources again")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    modules = [CHECKPOINT, *(OPERATOR / f"{name}.py" for name in LIKELY)]
    if arguments.part:
        modules, folder = [arguments.part], folder / arguments.part.stem
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    if arguments.fresh or not (folder / "session.sqlite").exists():
        copy_checkout(folder, [str(arguments.part)] if arguments.part else [str(OPERATOR), str(CHECKPOINT)])
    os.chdir(folder)
    if not (folder / "seconds").exists():  # or every mutant would count as caught
        start = time.perf_counter()
        subprocess.run(shlex.split(command([name for m in modules for name in tests_of(m)])), check=True)
        (folder / "seconds").write_text(f"{time.perf_counter() - start}\n")
    timeout = TIMEOUT * float((folder / "seconds").read_text())
    with use_db(folder / "session.sqlite") as database:
        tested = []
        for item, _ in zip(sample(list(database.work_items), arguments.seed), range(arguments.count), strict=False):
            result = dict(database.results).get(item.job_id)
            if result is None:
                result = mutate_and_test(item.mutations, command(tests_of(item.mutations[0].module_path)), timeout)
                database.set_result(item.job_id, result)
            tested.append((item, result))
            print(f"{len(tested)}: {item.mutations[0].module_path}, {result.test_outcome}", flush=True)
    report(tested)


if __name__ == "__main__":
    main()
