"""Compilation of kernels for a GPU that may be absent, and analysis of ptxas's log and the machine code."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_EXPONENTIAL = ("MUFU.EX2", "MUFU.TANH")


def compile_with_log(source: Any, architecture: int, options: dict[str, Any]) -> tuple[Any, str]:
    """Compile a Triton or Gluon source for a compute capability (90 for sm_90); return the kernel and ptxas's log."""
    import triton
    from triton.backends.compiler import GPUTarget

    printed = io.StringIO()
    with triton.knobs.nvidia.scope(), contextlib.redirect_stdout(printed):
        triton.knobs.nvidia.dump_ptxas_log = True
        compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    log = printed.getvalue()
    if "ptxas info" not in log:  # the kernel was in the compiler's cache
        log = ptxas_log(compiled.asm["ptx"], architecture)
    return compiled, log


def advisories(log: str) -> list[str]:
    """Return the advisories C7500 … C7599 in a log of ptxas, without C7519.

    By these, ptxas makes every asynchronous tensor core instruction (wgmma) wait for the previous one. C7519 only says
    that it added a ``warpgroup.arrive``, which orders accesses to registers.
    """
    return [line for line in log.splitlines() if re.search(r"\(C75(?!19)\d\d\)|wgmma.*serialized", line)]


def ptxas_log(ptx: str, architecture: int) -> str:
    """Return the log of Triton's own ptxas."""
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [get_ptxas(architecture).path, "-v", f"-arch={sm_arch_from_capability(architecture)}", str(source)]
        done = subprocess.run([*command, "-o", f"{source}.cubin"], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def disassemble(cubin: bytes) -> tuple[int, list[tuple[str, str]]]:
    """Return the registers of a thread, and the instructions as (operation, operands); labels are ("", name)."""
    import triton.backends.nvidia

    tools = Path(triton.backends.nvidia.__file__).parent / "bin"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage = _output(tools / "cuobjdump", "-res-usage", path)
        text = _output(tools / "nvdisasm", "--no-dataflow", "-c", path)
    found = re.search(r"REG:(\d+)", usage)
    assert found, usage
    code = []
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            code.append(("", label.group(1)))
        elif part := re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.x]*)(.*?);", line):
            code.append((part.group(1), part.group(2)))
    return int(found.group(1)), code


def _output(*command: str | Path) -> str:
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, check=True).stdout


def inner_loops(code: list[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    """Yield the instructions of each innermost loop that computes weights."""
    labels = {name: at for at, (op, name) in enumerate(code) if not op}
    spans = []
    for at, (op, operands) in enumerate(code):
        target = re.search(r"\.L_x_\d+", operands) if op.startswith("BRA") else None
        if target and labels.get(target.group(0), at) < at:
            spans.append((labels[target.group(0)], at))
    computing = [(a, b) for a, b in spans if any(op.startswith(_EXPONENTIAL) for op, _ in code[a:b])]
    for start, stop in computing:  # a small loop inside may wait for a barrier
        if not any(start <= a and b <= stop and (a, b) != (start, stop) for a, b in computing):
            yield [(op, operands) for op, operands in code[start:stop] if op]
