"""Peak memory of attention, forward and both passes, beyond inputs and outputs; each case has its own subprocess."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks import isa
from benchmarks.inputs import DTYPES
from sigattn import sigmoid_attention

COLUMNS = {
    "n": ("n", ","),
    "heads": ("heads", "d"),
    "dtype": ("dtype", ""),
    "mask": ("causal", ""),
    "": ("implementation", ""),
    "forward MiB": ("forward_mib", ".1f"),
    "both MiB": ("extra_mib", ".1f"),
}
IMPLEMENTATIONS: dict[str, Callable[..., Tensor]] = {
    "SDPA softmax": F.scaled_dot_product_attention,
    "sigattn": sigmoid_attention,
    "sigattn, normalized": partial(sigmoid_attention, normalize=True),
    "sigattn, blocked": partial(sigmoid_attention, backend="blocked"),
}
_BYTES_OF_MAXRSS = 1 if sys.platform == "darwin" else 1024  # the unit of ru_maxrss


def measure_all(
    dtypes: Sequence[str], num_heads: int, head_dim: int, threads: int, held_to: str | None = None
) -> list[dict[str, Any]]:
    """Measure every implementation at 4096 tokens and, with one head, 65,536."""
    return [
        measure_in_subprocess(name, n, h, head_dim, dtype, causal, threads, held_to)
        for n, h in ((4096, num_heads), (65_536, 1))
        for dtype in dtypes
        for causal in (False, True)
        for name in IMPLEMENTATIONS
    ]


def measure_in_subprocess(*case: Any) -> dict[str, Any]:
    """Run ``print_peak`` in a new process; return the row that it prints."""
    code = f"from benchmarks import memory; memory.print_peak(*{case!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    row: dict[str, Any] = json.loads(done.stdout)
    return row


def print_peak(
    name: str, n: int, heads: int, head_dim: int, dtype: str, causal: bool, threads: int, held_to: str | None = None
) -> None:
    """Measure an implementation in this process, held to an instruction set, and print a row as JSON."""
    torch.set_num_threads(threads)
    isa.hold_kernels(held_to)

    def extra_mib(length: int) -> dict[str, float]:
        """Return the increase of the process's peak memory by the forward pass and by both passes, less the outputs."""
        # in the dtype itself: memory of a conversion would be reused, and missing in the increase of the peak
        q, k, v, grad_out = (torch.randn(1, heads, length, head_dim, dtype=DTYPES[dtype]) for _ in range(4))
        q, k, v = (t.requires_grad_() for t in (q, k, v))
        before = _peak_bytes()
        out = IMPLEMENTATIONS[name](q, k, v, is_causal=causal)
        forward = _peak_bytes() - before - out.nbytes
        gradients = torch.autograd.grad(out, (q, k, v), grad_out)
        both = _peak_bytes() - before - sum(t.nbytes for t in (out, *gradients))
        return {"forward_mib": max(0, forward) / 2**20, "extra_mib": max(0, both) / 2**20}

    extra_mib(1024)  # threads, compiled kernels and what else the first call sets up
    row = {"implementation": name, "n": n, "heads": heads, "dtype": dtype, "causal": causal}
    print(json.dumps(row | extra_mib(n)))


def _peak_bytes() -> int:
    """Return the peak memory of this process.

    On Linux from /proc, because getrusage starts at the parent's peak there, and a small child of a large parent would
    seem to need nothing.
    """
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _BYTES_OF_MAXRSS
