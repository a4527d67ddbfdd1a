"""Peak memory of one attention, forward and backward, beyond inputs and outputs. Each case has a process of its own."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

import sigattn

_UNIT = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes


IMPLEMENTATIONS: dict[str, Callable[[Tensor, Tensor, Tensor, bool], Tensor]] = {
    "SDPA softmax": lambda q, k, v, causal: F.scaled_dot_product_attention(q, k, v, is_causal=causal),
    "sigattn": lambda q, k, v, causal: sigattn.sigmoid_attention(q, k, v, is_causal=causal),
    "naive sigmoid": lambda q, k, v, _: torch.sigmoid(q @ k.mT * q.shape[-1] ** -0.5 - 8.0) @ v,
}


def cases(heads: int, head_dim: int, threads: int) -> list[dict[str, Any]]:
    """The peak memory of softmax and of our sigmoid, at 4096 tokens and, with one head, 65,536."""
    return [
        in_own_process(implementation, n, h, head_dim, dtype, causal, threads)
        for n, h in ((4096, heads), (65_536, 1))
        for dtype in ("float32", "bfloat16")
        for causal in (False, True)
        for implementation in ("SDPA softmax", "sigattn")
    ]


def in_own_process(*case: Any) -> dict[str, Any]:
    """``report`` in a fresh process; what it printed."""
    code = f"from sigattn.bench import memory; memory.report(*{case!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def report(implementation: str, n: int, heads: int, head_dim: int, dtype: str, causal: bool, threads: int) -> None:
    """Measure one case in this process and print it as JSON."""
    torch.set_num_threads(threads)
    kind: torch.dtype = getattr(torch, dtype)

    def attend(length: int) -> int:
        """One forward and backward; gives the bytes the process had at most, less inputs and outputs."""
        q, k, v, g = torch.randn(4, 1, heads, length, head_dim).to(kind).unbind()
        q, k, v = (t.clone().requires_grad_() for t in (q, k, v))
        before = _peak()
        out = IMPLEMENTATIONS[implementation](q, k, v, causal)
        gradients = torch.autograd.grad(out, (q, k, v), g)
        outputs = sum(t.numel() * t.element_size() for t in (out, *gradients))
        return max(0, _peak() - before - outputs)

    attend(1024)  # threads, compiled kernels and what else a first call sets up
    extra = attend(n)
    print(
        json.dumps(
            {
                "implementation": implementation,
                "n": n,
                "heads": heads,
                "dtype": dtype,
                "causal": causal,
                "extra_mib": extra / 2**20,
            }
        )
    )


def _peak() -> int:
    """The most memory this process has had, in bytes.

    Linux keeps it with the process's own memory. What getrusage gives there starts at the parent's peak, so that a
    small process of a large parent would seem to need nothing.
    """
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT


def table(rows: list[dict[str, Any]]) -> Table:
    """The cases."""
    result = Table(title="peak memory of forward and backward, beyond inputs and outputs")
    for column in ("n", "heads", "dtype", "mask", "", "MiB"):
        result.add_column(column, justify="right" if column in ("n", "heads", "MiB") else "left")
    for row in rows:
        mask = "causal" if row["causal"] else "full"
        cells = (row["n"], row["heads"], row["dtype"], mask, row["implementation"], f"{row['extra_mib']:.1f}")
        result.add_row(*map(str, cells))
    return result
