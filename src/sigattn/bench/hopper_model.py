"""A model of the time of a score on a multiprocessor: cycles of each unit, and which of them overlap.

It is arithmetic over the machine code and the multiprocessor's limits; no GPU has confirmed it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# Lanes that a Hopper multiprocessor issues in a cycle, its dense 16-bit matrix products, and bytes of shared memory.
SPECIAL_LANES, FMA_LANES, ALU_LANES, ISSUE_LANES, TENSOR_FLOPS, SHARED_BYTES = 16, 128, 64, 128, 4096, 128
# What L2 gives a multiprocessor in a cycle, in bytes: 5120 for the whole chip. NVIDIA states that for the A100; for
# Hopper no figure is published.
L2_BYTES = 5120 / 132
REGISTERS = 65536  # of a multiprocessor, on every architecture

# A multiprocessor's shared memory in KiB, warps and programs (CUDA C++ Programming Guide, technical specifications).
_LIMITS = {
    80: (164, 64, 32),
    86: (100, 48, 16),
    87: (164, 48, 16),
    89: (100, 48, 24),
    90: (228, 64, 32),
    100: (228, 64, 32),
    120: (100, 48, 24),
}

SPECIAL = ("MUFU",)
FMA = ("FFMA", "FMUL", "FADD", "FFMA2", "FMUL2", "FADD2", "HFMA2", "HADD2", "HMUL2", "IMAD")
TENSOR = ("HGMMA", "HMMA", "UTCHMMA", "UTCMMA", "QGMMA", "IGMMA", "UTCQMMA")
ELSEWHERE = ("LD", "ST", "BAR", "WARP", "UTC", "SYNC", "BRA", "ULDC", "LDC", "DEPBAR", "NOP", "U", "R2U", "S2", "CS2R")


def programs(architecture: int, registers: int, warps: int, shared: int) -> int | None:
    """Return how many programs fit a multiprocessor at a time; None for an architecture whose limits are not known.

    registers: of a thread. shared: bytes of a program.
    """
    if architecture not in _LIMITS:
        return None
    memory, most_warps, most = _LIMITS[architecture]
    of_warp = -(-registers * 32 // 256) * 256  # registers are given to a warp in units of 256
    by_registers = 4 * (REGISTERS // 4 // of_warp) // warps  # each quarter of the multiprocessor has its own
    return min(by_registers, memory * 1024 // (shared + 1024), most_warps // warps, most)


@dataclass(frozen=True)
class Loop:
    """An innermost loop: instructions per score, by unit."""

    special: float
    fma: float
    alu: float
    tensor: float
    all: float
    selects: float  # comparisons and selections, what masks cost
    spills: int  # stores to and loads from local memory in one iteration
    tensor_cycles: float  # of wgmma, per score, with its operands' way from shared memory
    operand_bytes: float  # that wgmma reads from shared memory, per score

    def cycles(self, products: int, head_dim: int) -> dict[str, float]:
        """Return the cycles of a Hopper multiprocessor per score, by unit."""
        return {
            "special": self.special / SPECIAL_LANES,
            "fma": self.fma / FMA_LANES,
            "alu": self.alu / ALU_LANES,
            "issue": self.all / ISSUE_LANES,
            "tensor": products * 2 * head_dim / TENSOR_FLOPS,
        }

    def time(self, cycles: dict[str, float], programs: int, rows: int, row_bytes: int, overlapping: bool) -> float:
        """Return the cycles that a score takes on Hopper if only what can overlap does.

        A warp group waits for its products before it computes σ, so the tensor cores and the other units take turns
        within a program; its groups meet at a barrier in each iteration, so they wait together. Two programs on a
        multiprocessor do not wait for each other: one computes σ while the other's products run. Copies overlap.

        rows: of a tile that stays (queries, or keys for dK and dV). row_bytes: of a row that passes by.
        overlapping: the kernel itself overlaps products with σ, or its groups do not meet.
        """
        tensor = max(self.tensor_cycles, cycles["tensor"])
        other = max(cycles[unit] for unit in ("special", "fma", "alu", "issue"))
        both = max(tensor, other) if overlapping or programs > 1 else tensor + other
        copied = row_bytes / rows  # per score
        return max(both, (self.operand_bytes + copied) / SHARED_BYTES, copied / L2_BYTES)


def loop_of(body: list[tuple[str, str]], scores: float) -> Loop:
    """Read a loop's instructions, (operation, operands); ``scores`` of a tile are a thread's."""
    heads = [op.split(".")[0] for op, _ in body]

    def per_score(names: tuple[str, ...]) -> float:
        return sum(h in names for h in heads) / scores

    special, fma, tensor = per_score(SPECIAL), per_score(FMA), per_score(TENSOR)
    known = (*SPECIAL, *FMA, *TENSOR)
    alu = sum(h not in known and not h.startswith(ELSEWHERE) for h in heads) / scores
    products = [_product(op, operands) for op, operands in body if op.startswith("HGMMA")]
    group = scores * 128  # of four warps, which issue a wgmma together
    return Loop(
        special,
        fma,
        alu,
        tensor,
        len(heads) / scores,
        per_score(("ISETP", "FSETP", "SEL", "FSEL")),
        sum(h in ("STL", "LDL") for h in heads),
        sum(cycles for cycles, _ in products) / group,
        sum(read for _, read in products) / group,
    )


def _product(op: str, operands: str) -> tuple[float, int]:
    """Return the cycles of a wgmma of 16 bits or TF32 and the bytes that it reads from shared memory.

    The second operand always comes from there; the first too, unless it is in registers. With few columns that takes
    longer than the product.
    """
    shape = re.search(r"\.(\d+)x(\d+)x(\d+)", op)
    if shape is None:
        raise ValueError(f"an unknown form of wgmma: {op} {operands}")
    m, n, k = map(int, shape.groups())
    size = 16 // k * 2  # k is 32 bytes of an operand
    first_in_registers = re.match(r"\s*R\d+,\s*R\d+", operands) is not None
    read = size * k * (n if first_in_registers else m + n)
    flops_per_cycle = TENSOR_FLOPS * 2 // size
    return max(2 * m * n * k / flops_per_cycle, read / SHARED_BYTES), read
