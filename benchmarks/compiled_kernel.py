"""Summary of a compiled kernel, for ``python -m benchmarks static`` and the tests."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks import hopper_model, machine_code
from sigattn.ops.triton import tuning

# dK and dV in two passes over the queries
PARTS: dict[str, dict[str, Any]] = {"dk": {"grad_value": None}, "dv": {"grad_key": None}}
PRODUCTS = {tuning.FWD: 2, tuning.DKDV: 4, tuning.DQ: 3, tuning.DECODE: 2, "dk": 3, "dv": 2}
HOPPER_ROWS = 128  # queries or keys of a tile of the Hopper kernels: two warp groups with 64 each


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
    loops: tuple[hopper_model.Loop, ...]  # that over tiles without a mask first

    def cycles(self, loop: hopper_model.Loop) -> dict[str, float]:
        """Return the cycles of a Hopper multiprocessor per score, by unit; for sm_90 also ``time``, by the model."""
        kernel, _, variant = self.kernel.partition(",")
        found = loop.cycles(PRODUCTS[kernel], self.head_dim)
        if self.architecture == 90 and self.programs and kernel != tuning.DECODE:
            gluon = "Gluon" in variant
            by_keys = kernel in (tuning.DKDV, *PARTS)
            rows = HOPPER_ROWS if gluon else self.config.block_n if by_keys else self.config.block_m
            row_bytes = 2 * self.head_dim * (4 if self.dtype == "float32" else 2)
            found["time"] = loop.time(found, self.programs, rows, row_bytes, overlapping=gluon)
        return found

    def to_row(self) -> dict[str, Any]:
        """Return the row of the results file."""
        return {
            **{k: v for k, v in asdict(self).items() if k != "loops"},
            "config": self.config._asdict(),
            "loops": [{**asdict(loop), "hopper_cycles": self.cycles(loop)} for loop in self.loops],
        }


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
    loops = sorted((hopper_model.loop_of(body, scores) for body in bodies), key=lambda loop: (loop.selects, loop.all))
    if not loops:
        raise RuntimeError(f"no loop computes weights in {described} on sm_{architecture}, {config}")
    tensor = Counter(op.split(".")[0] for op, _ in code if op.startswith(hopper_model.TENSOR))
    shared = compiled.metadata.shared
    return CompiledKernel(
        **described,
        architecture=architecture,
        config=config,
        registers=registers,
        spills=sum(op.startswith(("STL", "LDL")) for op, _ in code),
        shared=shared,
        programs=hopper_model.programs(architecture, registers, config.warps, shared),
        advisories=machine_code.advisories(log),
        tensor_instructions=", ".join(tensor) or "none",
        loops=tuple(loops),
    )
