"""Summary of a compiled kernel, for ``python -m benchmarks static`` and the tests."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks import machine_code
from sigattn.ops.triton import tuning

# dK and dV in two passes over the queries
PARTS: dict[str, dict[str, Any]] = {"dk": {"grad_value": None}, "dv": {"grad_key": None}}
# Shared memory in KiB, warps and programs of a multiprocessor (CUDA C++ Programming Guide, technical specifications).
_LIMITS = {
    80: (164, 64, 32),
    86: (100, 48, 16),
    87: (164, 48, 16),
    89: (100, 48, 24),
    90: (228, 64, 32),
    100: (228, 64, 32),
    120: (100, 48, 24),
}
_REGISTERS = 65536  # of a multiprocessor, on every architecture
_FMA = ("FFMA", "FMUL", "FADD", "FFMA2", "FMUL2", "FADD2", "HFMA2", "HADD2", "HMUL2", "IMAD")
_TENSOR = ("HGMMA", "HMMA", "UTCHMMA", "UTCMMA", "QGMMA", "IGMMA", "UTCQMMA")


@dataclass(frozen=True)
class Loop:
    """Instructions per score in an innermost loop."""

    special: float  # of the special-function unit (MUFU)
    fma: float
    all: float
    selects: float  # comparisons and selections, the cost of masks
    spills: int  # stores to and loads from local memory in one iteration


@dataclass(frozen=True)
class CompiledKernel:
    """Registers, spills, shared memory and loops of one compiled kernel."""

    kernel: str  # its name, with the variant after a comma
    architecture: int  # compute capability, 90 for sm_90
    dtype: str
    head_dim: int
    causal: bool
    config: tuning.Config
    registers: int  # of a thread
    spills: int  # instructions that store to or load from local memory
    shared: int  # bytes of shared memory
    programs: int | None  # that fit a multiprocessor; None for an architecture with unknown limits
    advisories: list[str]  # of ptxas, that it serialised asynchronous tensor core instructions
    tensor_instructions: str
    loops: tuple[Loop, ...]  # that over tiles without a mask first

    def to_row(self) -> dict[str, Any]:
        """Return the row of the results file."""
        return {**asdict(self), "config": self.config._asdict()}


def summarize(
    compiled: Any, log: str, scores: float, architecture: int, config: tuning.Config, **described: Any
) -> CompiledKernel:
    """Read the machine code of Triton's compiled kernel and ptxas's log; ``scores`` is the number per thread and tile.

    described: the other fields that are not measured: kernel, dtype, head_dim and causal.

    Raises:
        RuntimeError: if no loop computes weights.
    """
    registers, code = machine_code.disassemble(compiled.asm["cubin"])
    bodies = machine_code.inner_loops(code)
    loops = sorted((_loop(body, scores) for body in bodies), key=lambda loop: (loop.selects, loop.all))
    if not loops:
        raise RuntimeError(f"no loop computes weights in {described} on sm_{architecture}, {config}")
    tensor = Counter(op.split(".")[0] for op, _ in code if op.startswith(_TENSOR))
    shared = compiled.metadata.shared
    return CompiledKernel(
        **described,
        architecture=architecture,
        config=config,
        registers=registers,
        spills=sum(op.startswith(("STL", "LDL")) for op, _ in code),
        shared=shared,
        programs=programs(architecture, registers, config.warps, shared),
        advisories=machine_code.advisories(log),
        tensor_instructions=", ".join(tensor) or "none",
        loops=tuple(loops),
    )


def _loop(body: list[tuple[str, str]], scores: float) -> Loop:
    """Count a loop's instructions, (operation, operands); ``scores`` is the number of scores per thread and tile."""
    heads = [op.split(".")[0] for op, _ in body]

    def per_score(*names: str) -> float:
        return sum(h in names for h in heads) / scores

    selects, spills = per_score("ISETP", "FSETP", "SEL", "FSEL"), sum(h in ("STL", "LDL") for h in heads)
    return Loop(per_score("MUFU"), per_score(*_FMA), len(heads) / scores, selects, spills)


def programs(architecture: int, registers: int, warps: int, shared: int) -> int | None:
    """Return how many programs fit a multiprocessor at a time; None for an architecture whose limits are not known.

    registers: of a thread. shared: bytes of a program.
    """
    if architecture not in _LIMITS:
        return None
    memory, max_warps, max_programs = _LIMITS[architecture]
    per_warp = -(-registers * 32 // 256) * 256  # allocated in units of 256
    by_registers = 4 * (_REGISTERS // 4 // per_warp) // warps  # each quarter of the multiprocessor has its own
    return min(by_registers, memory * 1024 // (shared + 1024), max_warps // warps, max_programs)
