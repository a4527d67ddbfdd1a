"""``python -m benchmarks microtiles``: multiply-adds of backend "llvm" in a cycle, by LLVM's models of processors.

The kernels spend most of their time in the inner loops of two functions, which multiply microtiles held in registers.
Each is compiled for a processor, which need not be at hand, and given to llvm-mca, which simulates the pipeline with
all data in the first cache. The result is an upper bound, as good as LLVM's description of the processor.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llvmlite import binding

from benchmarks.provenance import BenchmarkError, describe, write
from benchmarks.tables import print_rows
from sigattn.ops.llvm.compilation import optimize
from sigattn.ops.llvm.processor import AVX2, AVX512, AVX512_BF16, NEON, NEON_BF16, Processor
from sigattn.validation import check_at_least

X86, ARM = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"
# processor and its registers; float32 multiply-adds in a cycle, by its vendor; what LLVM's description lacks
PROCESSORS = (
    (Processor(AVX2, "haswell", triple=X86), 16, ""),
    (Processor(AVX2, "znver2", triple=X86), 16, ""),
    (Processor(AVX2, "znver3", triple=X86), 16, ""),
    (Processor(AVX512, "skylake-avx512", triple=X86), 32, ""),
    (Processor(AVX512, "icelake-server", triple=X86), 32, "one unit of 512 bits instead of two"),
    (Processor(AVX512_BF16, "sapphirerapids", triple=X86), 32, "one unit of 512 bits instead of two"),
    (Processor(AVX512_BF16, "znver4", triple=X86), 16, "bfloat16 slower than executed"),
    (Processor(AVX512_BF16, "znver5", triple=X86), 32, "znver4's units"),
    (Processor(NEON, "neoverse-n1", triple=ARM), 8, ""),
    (Processor(NEON_BF16, "neoverse-v1", triple=ARM), 16, ""),
    (Processor(NEON_BF16, "neoverse-v2", triple=ARM), 16, ""),
    (Processor(NEON, "apple-m1", triple=ARM), 16, "the units of Cyclone, of 2013"),
)
_MULTIPLY_ADD = re.compile(r"^\s*(?:vfmadd\w+ps|vdpbf16ps|fmla|bfdot)\b", re.MULTILINE)
_STACK = re.compile(r"\(%[re]sp|\[sp")
_COLUMNS = {
    "processor": ("processor", ""),
    "dtype": ("dtype", ""),
    "rows": ("rows", "d"),
    "vectors": ("columns", "d"),
    "multiply-adds": ("multiply_adds", ".1f"),
    "of peak": ("of_peak", ".2f"),
    "on the stack": ("stack", "d"),
    "bottleneck": ("bottleneck", ""),
}


@dataclass(frozen=True, kw_only=True)
class MicrotileBenchmark:
    """Configuration of the model of microtiles.

    Attributes:
        rows: rows of the microtile, in numbers, instead of each processor's own.
        columns: columns of the microtile, in vectors, instead of each processor's own.
        llvm_mca: the program, of LLVM 19 or later, with which it knows every processor here.
        results: file for the results (JSON).
    """

    rows: int | None = None
    columns: int | None = None
    llvm_mca: str = "llvm-mca"
    results: Path = Path("runs/benchmarks/microtiles.json")

    def __post_init__(self) -> None:
        check_at_least(1, self, "rows", "columns")


def benchmark_microtiles(config: MicrotileBenchmark) -> dict[str, Any]:
    """Model the inner loops of backend "llvm" on a dozen processors, in float32 and bfloat16.

    Returns:
        The content of the results file.

    Raises:
        BenchmarkError: without llvm-mca, or if it is too old.
    """
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    version = next(line for line in _run([config.llvm_mca, "--version"]).splitlines() if "version" in line)
    rows = []
    for processor, peak, note in PROCESSORS:
        registers = processor.registers
        registers = registers._replace(rows=config.rows or registers.rows, columns=config.columns or registers.columns)
        for per_word in (1, 2):
            row = _model(config.llvm_mca, processor._replace(registers=registers), per_word, peak)
            rows.append({**row, "note": note if per_word == 2 or not note.startswith("bfloat16") else ""})
    print_rows("multiply-adds in a cycle, by llvm-mca", rows, _COLUMNS)
    report = describe("microtiles", asdict(config)) | {"llvm-mca": version, "rows": rows}
    write(config.results, report)
    print(f"results: {config.results}")
    return report


def _model(tool: str, processor: Processor, per_word: int, peak: int) -> dict[str, Any]:
    """Return a row of the table: the slower of the two functions."""
    registers = processor.registers.of_words(per_word)
    pairs = per_word if registers.has_bf16 else 1  # multiply-adds of an element of a vector by one instruction
    machine, module = optimize(processor, per_word)
    text = machine.emit_assembly(module)
    loops = []
    for function in (f"product_{registers.rows}", f"add_product_{registers.rows}"):
        loop = _inner_loop(text, function)
        cycles, bottleneck = _simulate(tool, processor, loop)
        rate = len(_MULTIPLY_ADD.findall(loop)) * registers.lanes * pairs / cycles
        loops.append((rate, len(_STACK.findall(loop)), bottleneck))
    rate, stack, bottleneck = min(loops)
    return {
        "processor": processor.name,
        "dtype": "float32" if per_word == 1 else "bfloat16",
        "rows": registers.rows,
        "columns": registers.columns,
        "multiply_adds": rate,
        "of_peak": rate / (peak * pairs),
        "stack": stack,
        "bottleneck": bottleneck,
    }


def _inner_loop(text: str, function: str) -> str:
    """Return the loop of a function with the most multiply-adds."""
    body = re.split(rf"^{function}:", text, flags=re.MULTILINE)[1]
    body = re.split(r"^\.?Lfunc_end", body, flags=re.MULTILINE)[0]
    blocks = re.split(r"^(\.?L\w+):.*$", body, flags=re.MULTILINE)
    loops = []
    for label, block in zip(blocks[1::2], blocks[2::2], strict=True):
        if jump := re.search(rf"^\s*(?:j\w+|b\.\w+)\s+{re.escape(label)}\s*$", block, re.MULTILINE):
            loops.append(block[: jump.end()] + "\n")
    return max(loops, key=lambda loop: len(_MULTIPLY_ADD.findall(loop)))


def _simulate(tool: str, processor: Processor, loop: str, iterations: int = 200) -> tuple[float, str]:
    """Return the cycles of an iteration, and what llvm-mca names as most of the pressure."""
    command = [tool, f"-mtriple={processor.triple}", f"-mcpu={processor.name}", f"-iterations={iterations}"]
    text = _run([*command, "-bottleneck-analysis"], loop)
    cycles = re.search(r"Total Cycles:\s+(\d+)", text)
    assert cycles, text
    pressure = re.findall(r"^\s+- (\w[\w ]*?)\s*\[ ([\d.]+)% \]", text, re.MULTILINE)
    if not pressure:
        return int(cycles[1]) / iterations, "dispatch"
    return int(cycles[1]) / iterations, max(pressure, key=lambda pair: float(pair[1]))[0]


def _run(command: list[str], text: str = "") -> str:
    """Return what a program prints, given a text."""
    try:
        return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:
        raise BenchmarkError(f"microtiles: {command[0]} was not found; pass --llvm-mca with its path") from None
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or ["no message"]
        raise BenchmarkError(f"microtiles: {command[0]} failed; LLVM 19 or later is needed: {lines[0]}") from None
