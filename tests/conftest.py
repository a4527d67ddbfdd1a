"""Every test runs with the annotations of sigattn checked at run time, shapes included."""

import os
import sys
from pathlib import Path

import pytest
from jaxtyping import install_import_hook

os.environ.setdefault("OMP_NUM_THREADS", "2")


# Left out: modules whose functions say themselves what is wrong with a call, and what torch.compile traces.
LEFT_OUT = {f"sigattn.ops.{name}" for name in ("attention", "checks", "library", "problem", "statistics")}
_src = Path(__file__).parent.parent / "src"
_modules = {".".join(f.relative_to(_src).with_suffix("").parts) for f in _src.rglob("[!_]*.py")}

assert "sigattn" not in sys.modules, "sigattn must be imported through the hook"
_hook = install_import_hook(sorted(_modules - LEFT_OUT), "beartype.beartype")

import torch  # noqa: E402


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def nan_filled_memory():
    """Fill new memory with NaN, so that an output which is not wholly written shows."""
    deterministic, fill = (
        torch.are_deterministic_algorithms_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = fill
