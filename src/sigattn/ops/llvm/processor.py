"""Processors for which the kernels of backend "llvm" are compiled, and their vector registers."""

import functools
import platform
from typing import NamedTuple

import torch
from llvmlite import binding


class Registers(NamedTuple):
    """Vector registers of a processor, and the microtile that they hold."""

    lanes: int  # numbers of float32 in a vector
    rows: int  # of a microtile, even; see of_words
    columns: int  # vectors in a row of a microtile
    has_bf16: bool = False  # instructions multiply, add and round bfloat16 (AVX512-BF16, or BF16 of ARM)
    by_element: bool = False  # instructions multiply a vector by an element of another (NEON)

    @property
    def tile(self) -> int:
        """Columns of a microtile."""
        return self.lanes * self.columns

    def of_words(self, per_word: int) -> "Registers":
        """Return them with the microtile for words of one float32 or two bfloat16.

        Without instructions for bfloat16, widened factors take registers, and sums of more than 4 rows would spill.
        """
        return self if per_word == 1 or self.has_bf16 else self._replace(rows=min(self.rows, 4))


AVX512_BF16 = Registers(lanes=16, rows=6, columns=4, has_bf16=True)  # 32 registers
AVX512 = Registers(lanes=16, rows=6, columns=4)
AVX2 = Registers(lanes=8, rows=6, columns=2)  # 16 registers
NEON = Registers(lanes=4, rows=6, columns=4, by_element=True)  # 32 registers
NEON_BF16 = NEON._replace(has_bf16=True)


class Processor(NamedTuple):
    """Processor to compile for."""

    registers: Registers
    name: str  # LLVM's, such as "znver4"
    features: str = ""  # LLVM's that differ from those of the name, such as "+avx512bf16,-sse4a"
    triple: str = binding.get_default_triple()  # architecture and operating system, such as "aarch64-unknown-linux-gnu"

    def target_machine(self) -> binding.TargetMachine:
        """Return a new description of the processor for LLVM."""
        target = binding.Target.from_triple(self.triple)
        return target.create_target_machine(cpu=self.name, features=self.features, opt=3, jit=True)


@functools.cache
def host_processor() -> Processor | None:
    """Return the processor of this machine, or None if the kernels do not support it."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    features = binding.get_host_cpu_features()
    if features.get("avx512f"):
        registers = AVX512_BF16 if features.get("avx512bf16") else AVX512
    elif features.get("avx2") and features.get("fma"):
        registers = AVX2
    elif platform.machine() in ("aarch64", "arm64"):
        features["bf16"] = torch.cpu.get_capabilities().get("bf16", False)  # which LLVM does not find
        registers = NEON_BF16 if features["bf16"] else NEON
    else:
        return None
    return Processor(registers, binding.get_host_cpu_name(), features.flatten())
