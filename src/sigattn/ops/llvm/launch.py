"""Compilation of the kernels for this processor by LLVM, and their launch on the threads of OpenMP.

They are compiled at the first call of a dtype in a process, in about a second, for calls of all sizes and options.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from collections.abc import Sequence
from typing import Any

import torch
from llvmlite import binding

from sigattn.ops.cpu.matmul import keep_memory_warm
from sigattn.ops.llvm.kernels import NAMES, make_module
from sigattn.ops.llvm.microtiles import Registers

compilation = threading.Lock()  # LLVM compiles in one thread at a time
# runs a function of one pointer on some of OpenMP's threads, which are PyTorch's
_on_threads: Any = ctypes.CDLL(None).GOMP_parallel
_on_threads.restype = None
_on_threads.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)


class Compiled:
    """Compiled kernels.

    Args:
        module: the kernels. names: of the kernels.
    """

    def __init__(self, module: Any, names: Sequence[str]) -> None:
        keep_memory_warm()
        parsed = binding.parse_assembly(str(module))
        machine = _target_machine()
        options = binding.create_pipeline_tuning_options(speed_level=3)
        # the kernels are vectors already, and unrolled as far as there are registers
        options.loop_vectorization = options.slp_vectorization = options.loop_unrolling = False
        passes = binding.create_pass_builder(machine, options)
        passes.getModulePassManager().run(parsed, passes)
        self._engine = binding.create_mcjit_compiler(parsed, machine)
        self._engine.finalize_object()
        self._addresses = {name: self._engine.get_function_address(name) for name in names}

    def run(self, name: str, tasks: int, data: ctypes.Array[ctypes.c_int64], threads: int) -> None:
        """Run a kernel.

        Args:
            name: of the kernel. tasks: number of its tasks. data: its arguments, of which the first two are set.
            threads: number of threads, as many as there are tasks at most.
        """
        data[0], data[1] = 0, tasks
        _on_threads(self._addresses[name], ctypes.addressof(data), min(threads, tasks), 0)


class Kernels(Compiled):
    """Compiled kernels of sigmoid attention (``kernels.NAMES``)."""

    def __init__(self, registers: Registers, word: int) -> None:
        super().__init__(make_module(registers, word), NAMES[word])
        self.registers, self.word = registers, word
        self.multiple = word * registers.lanes  # numbers of a tensor in a vector


@functools.lru_cache(maxsize=256)
def float_bits(x: float) -> int:
    """Return the bits of a float32, in the first half of 64; infinite if x is too large."""
    return int.from_bytes(bytes(ctypes.c_float(x)) + bytes(4), sys.byteorder)


def kernels(dtype: torch.dtype) -> Kernels:
    """Return the kernels for tensors of a dtype, compiled once in a process."""
    with compilation:
        return _compile(registers(), word=4 // dtype.itemsize)


@functools.cache
def _compile(registers: Registers, word: int) -> Kernels:
    return Kernels(registers, word)


@functools.cache
def registers() -> Registers:
    """Return the size of a microtile for this processor."""
    _initialize()
    features = binding.get_host_cpu_features()
    if features.get("avx512f"):
        return Registers(16, 6, 4, bool(features.get("avx512bf16")))  # 32 registers
    if features.get("avx2") and features.get("fma"):
        return Registers(lanes=8, rows=6, columns=2)  # 16 registers
    return Registers(lanes=4, rows=6, columns=4)  # NEON: 32 registers


@functools.cache
def _initialize() -> None:
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()


def _target_machine() -> Any:
    """Return LLVM's description of this processor, a new one, because each engine owns its own."""
    _initialize()
    features = binding.get_host_cpu_features().flatten()
    target = binding.Target.from_default_triple()
    return target.create_target_machine(cpu=binding.get_host_cpu_name(), features=features, opt=3, jit=True)
