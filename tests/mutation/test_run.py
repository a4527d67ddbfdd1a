"""Tests of the mutants."""

from pathlib import Path

import pytest

from tests.mutation import run

FILES = [path for path in sorted((run.ROOT / run.OPERATOR).rglob("*.py")) if path.stat().st_size]
MODULES = [path.relative_to(run.ROOT) for path in FILES if path.parent.name not in ("triton", "hopper")]
MODULES += [
    run.CHECKPOINT,
    Path("src/sigattn/conversion/fit.py"),
    Path("src/sigattn/integrations/transformers/mask.py"),
]


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_tests_of_each_module_are_known(module):
    files = run.tests_of(module)
    assert files
    assert all((run.ROOT / file).exists() for file in files)
