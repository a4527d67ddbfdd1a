"""Mutate the operator, or another part of the library, and count the mutants that the tests catch (by cosmic-ray).

    make mutation N=40
    make mutation N=30 PART=src/sigattn/train/checkpoint.py

draws mutants at random, of ``src/sigattn/ops`` without the GPU kernels, or of ``--part``, a file or folder with tests
in ``LIKELY``. Each is tested in a copy of the checkout by the tests of its file, up to the first failure, so that the
score is a lower bound: other tests may catch what these let pass. Mutants in type annotations are left out, because
nothing evaluates those. Survivors are printed as diffs. ``--skip`` leaves out mutants that an earlier run has tested.
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
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parent.parent.parent
OPERATOR = Path("src/sigattn/ops")
# Left out: interpreted kernels, and tests that take seconds and compute what cheaper ones compute as well.
SELECTED = "not triton and not hopper and not real_tiles and not kernels and not decoding and not interpreter"
# Tests by a file's name, with its folder's where the name alone is ambiguous, or by its folder's, or else test_NAME; in
# ``tests/ops`` unless a folder is given; the most likely to fail first. All tests would take minutes for each survivor.
LIKELY = {
    "attention": "test_correctness test_wrong_calls test_scalars test_borders test_pytorch",
    "autograd": "test_autograd test_pytorch test_onnx",
    "block_mask": "test_mask test_wrong_calls",
    "blocked": "test_correctness test_masked_weights test_borders",
    "checkpoint": "tests/train/test_loop.py tests/train/test_checkpoint_files.py tests/train",
    "custom_ops": "test_pytorch test_llvm test_correctness tests/export/test_fx.py",
    "conversion/fit": "tests/conversion/test_fit.py tests/conversion/test_refusals.py",
    "gradients": "test_correctness test_autograd",
    "kvcache": "test_varlen_and_kvcache tests/test_flash_kvcache.py test_wrong_calls",
    "llvm": "test_llvm test_wrong_calls test_dropout test_llvm_requirements test_saved_weights",
    "mask": "test_mask test_correctness test_wrong_calls",
    "normalization": "test_normalization tests/distributed/test_context_parallel.py",
    "nested": "test_nested test_wrong_calls",
    "sharding": "tests/distributed/test_context_parallel.py",
    "packed": "test_varlen_and_kvcache tests/test_flash_kvcache.py tests/test_flash.py",
    "problem": "test_correctness test_borders tests/test_flash.py test_varlen_and_kvcache test_pytorch",
    "reference": "test_correctness test_masked_weights test_borders test_dropout test_statistics",
    "scalars": "test_scalars test_wrong_calls",
    "settings": "test_default_device test_backend_context test_pytorch",
    "statistics": "test_statistics test_wrong_calls",
    "transformers/mask": "tests/integrations/test_transformers.py",
    "tiles": "test_correctness test_borders test_mask test_masked_weights",
    "vmap": "test_pytorch test_autograd",
    "validation": "test_wrong_calls test_scalars test_correctness",
    "varlen": "test_varlen_and_kvcache tests/test_flash.py test_wrong_calls test_autograd test_pytorch",
}


def tests_of(module: Path) -> list[str]:
    """Return the files and folders of tests that a mutant of a file has to pass, in their order."""
    keys = f"{module.parent.name}/{module.stem}", module.stem, module.parent.name
    names = next((LIKELY[key] for key in keys if key in LIKELY), f"test_{module.stem}")
    return [name if "/" in name else f"tests/ops/{name}.py" for name in names.split()]


def command(tests: Iterable[str]) -> str:
    """Return the command that runs the given tests in their order."""
    words = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-k", SELECTED]
    return shlex.join([*words, *dict.fromkeys(tests)])


def annotations(path: Path) -> set[int]:
    """Return the lines that hold type annotations."""
    parts = [
        getattr(node, name, None)
        for node in ast.walk(ast.parse(path.read_text()))
        for name in ("annotation", "returns")
    ]
    return {line for part in parts if part is not None for line in range(part.lineno, part.end_lineno + 1)}


def main() -> None:
    """Test the first mutants of a random order, after those to skip."""
    from cosmic_ray.commands import init
    from cosmic_ray.mutating import mutate_and_test
    from cosmic_ray.work_db import use_db

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", type=Path, default=OPERATOR, help="a file or folder, from the root of the checkout")
    parser.add_argument("--skip", type=int, default=0, help="number of mutants to leave out first")
    arguments = parser.parse_args()
    with TemporaryDirectory() as folder:
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", "runs", "__pycache__"), dirs_exist_ok=True)
        os.chdir(folder)
        os.environ["PYTHONPATH"] = os.pathsep.join([f"{folder}/src", *filter(None, [os.environ.get("PYTHONPATH")])])
        files = [arguments.part] if arguments.part.is_file() else sorted(arguments.part.rglob("*.py"))
        files = [path for path in files if path.stat().st_size and path.parent.name not in ("triton", "hopper")]
        lines = {str(path): annotations(path) for path in files}
        with use_db(f"{folder}/session.sqlite") as database:
            init(files, database, {})
            mutations = [item.mutations[0] for item in database.work_items]
        mutations = [m for m in mutations if m.start_pos[0] not in lines[str(m.module_path)]]
        mutations.sort(key=str)
        random.Random(arguments.seed).shuffle(mutations)
        print(f"{len(mutations)} mutants outside annotations", flush=True)
        start = time.perf_counter()  # the tests must pass without a mutant, or every one would count as caught
        subprocess.run(shlex.split(command(name for path in files for name in tests_of(path))), check=True)
        timeout, caught = 10 * (time.perf_counter() - start), collections.defaultdict(list)
        for m in mutations[arguments.skip :][: arguments.count]:
            result = mutate_and_test([m], command(tests_of(Path(m.module_path))), timeout)
            caught[str(m.module_path)].append(result.is_killed)
            print(m.module_path, result.test_outcome, "" if result.is_killed else f"\n{result.diff}", flush=True)
    for path, outcomes in sorted(caught.items()):
        print(f"{path}: {sum(outcomes)} of {len(outcomes)} caught")
    print(f"{sum(map(sum, caught.values()))} of {sum(map(len, caught.values()))} mutants caught")


if __name__ == "__main__":
    main()
