"""The device of the GPU benchmarks.

Without a GPU they run on a CPU with interpreted kernels (TRITON_INTERPRET=1), at tiny sizes, as a rehearsal. Such
results say so, and their times are meaningless.
"""

from __future__ import annotations

import os

import torch

from benchmarks.provenance import BenchmarkError


def kernels_run() -> bool:
    """Return True if Triton kernels can run: on a GPU or in the interpreter."""
    return torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"


def device() -> torch.device:
    """Return the GPU, or without one the CPU if kernels are interpreted.

    Raises:
        BenchmarkError: if there is neither.
    """
    if not kernels_run():
        raise BenchmarkError("this benchmark needs a GPU; to try it without one, at tiny sizes, set TRITON_INTERPRET=1")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
