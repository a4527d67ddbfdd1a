"""Every file of the operator has tests of its mutants."""

from pathlib import Path

from tests.mutation import run

MORE = ("train/checkpoint.py", "conversion/fit.py", "integrations/transformers/mask.py")


def test_tests_of_each_module_exist():
    modules = [path for path in (run.ROOT / run.OPERATOR).rglob("*.py") if path.stat().st_size]
    modules = [path for path in modules if path.parent.name not in ("triton", "hopper")]
    for module in [*modules, *(Path("src/sigattn", name) for name in MORE)]:
        assert all((run.ROOT / file).exists() for file in run.tests_of(module)), module
