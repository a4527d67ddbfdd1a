"""Instruction sets to which a benchmark on a CPU is held: PyTorch, oneDNN, MKL, and the kernels of "llvm"."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.provenance import ROOT, BenchmarkError
from sigattn.ops import llvm


class InstructionSet(NamedTuple):
    """Instruction set.

    Attributes:
        needs: features of the processor (``torch.cpu.get_capabilities``).
        names: of the set in ATEN_CPU_CAPABILITY, ONEDNN_MAX_CPU_ISA and MKL_ENABLE_INSTRUCTIONS, which are read when
            PyTorch is loaded.
        target: LLVM's name of a processor with these instructions and no others, and its registers in
            ``ops.llvm.processor``.
    """

    needs: tuple[str, ...]
    names: tuple[str, str, str]
    target: tuple[str, str]


ISAS = {
    "avx2": InstructionSet(("avx2", "fma3"), ("avx2", "AVX2", "AVX2"), ("haswell", "AVX2")),
    # without BF16 and AMX
    "avx512": InstructionSet(
        ("avx2", "avx512_f", "avx512_bw", "avx512_dq", "avx512_vl"),
        ("avx512", "AVX512_CORE", "AVX512"),
        ("skylake-avx512", "AVX512"),
    ),
}
_VARIABLES = "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS"


def is_held(name: str) -> bool:
    """Return True if this process was started with the variables of an instruction set."""
    return all(os.environ.get(key) == value for key, value in zip(_VARIABLES, ISAS[name].names, strict=True))


def hold_kernels(name: str | None) -> None:
    """Compile the kernels of "llvm" for an instruction set, in this process, before their first call; None: no change.

    The default backend is then that of a processor with these instructions.
    """
    if name is None or llvm.machine_unavailable() is not None:
        return
    from sigattn.ops.llvm import compilation, processor

    target, registers = ISAS[name].target
    held = processor.Processor(getattr(processor, registers), target)
    compilation.host_processor = lambda: held  # type: ignore[assignment,attr-defined]
    llvm._FAST.update(llvm.defaults(dict.fromkeys(ISAS[name].needs, True)))


def run_held(name: str, code: str, results: Path) -> dict[str, Any]:
    """Run Python code in a process that is held to an instruction set; return the content of the file that it writes.

    Raises:
        BenchmarkError: if the processor lacks the instructions, or the code fails.
    """
    has = torch.cpu.get_capabilities()
    if missing := [feature for feature in ISAS[name].needs if not has.get(feature)]:
        raise BenchmarkError(f"isa {name}: this processor lacks {', '.join(missing)}; leave out --isa")
    environment = {**os.environ, **dict(zip(_VARIABLES, ISAS[name].names, strict=True))}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    done = subprocess.run([sys.executable, "-c", code], env=environment)
    if done.returncode:
        raise BenchmarkError(f"isa {name}: the benchmark failed in its process, exit code {done.returncode}")
    content: dict[str, Any] = json.loads(results.read_text())
    return content
