"""Every test runs with the annotations of sigattn checked at run time, shapes included."""

import os
import sys

import pytest
from jaxtyping import install_import_hook

os.environ.setdefault("OMP_NUM_THREADS", "2")

assert "sigattn" not in sys.modules, "sigattn must be imported through the hook"
_hook = install_import_hook("sigattn", "beartype.beartype")

import torch  # noqa: E402


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def nan_filled_memory():
    """Fill new memory with NaN, so that an output which is not wholly written shows."""
    deterministic, fill = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = fill
