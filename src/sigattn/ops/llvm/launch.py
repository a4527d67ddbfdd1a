"""Compilation of the kernels for this processor by LLVM, and their launch on the threads of OpenMP.

A kind of kernels is compiled at its first call in a process, which takes about a second.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Mapping
from typing import Any

import torch
from llvmlite import binding

from sigattn.ops.llvm.kernels import FIELDS, make_module
from sigattn.ops.llvm.microtiles import Kind, Registers

_INDEX = {name: index for index, name in enumerate(FIELDS)}
_lock = threading.Lock()
# runs a function of one pointer on some of OpenMP's threads, which are PyTorch's
_on_threads: Any = ctypes.CDLL(None).GOMP_parallel
_on_threads.restype = None
_on_threads.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)


class Kernels:
    """Compiled kernels of one kind, "forward" or "backward"."""

    def __init__(self, kind: Kind, direction: str) -> None:
        module = binding.parse_assembly(str(make_module(kind, direction)))
        machine = _target_machine()
        options = binding.create_pipeline_tuning_options(speed_level=3)
        # the kernels are vectors already, and unrolled as far as there are registers
        options.loop_vectorization = options.slp_vectorization = options.loop_unrolling = False
        passes = binding.create_pass_builder(machine, options)
        passes.getModulePassManager().run(module, passes)
        self._engine = binding.create_mcjit_compiler(module, machine)
        self._engine.finalize_object()
        names = ("pack", "forward") if direction == "forward" else ("backward",)
        self._addresses = {name: self._engine.get_function_address(name) for name in names}

    def run(self, name: str, tasks: int, arguments: Mapping[str, int]) -> None:
        """Run a kernel on PyTorch's number of threads.

        Args:
            name: "pack", "forward" or "backward". tasks: number of its tasks. arguments: values of ``kernels.FIELDS``.
        """
        data = (ctypes.c_int64 * len(FIELDS))()
        data[_INDEX["tasks"]] = tasks
        for field, value in arguments.items():
            data[_INDEX[field]] = value
        threads = min(torch.get_num_threads(), tasks)
        _on_threads(self._addresses[name], ctypes.addressof(data), threads, 0)


def float_bits(x: float) -> int:
    """Return the bits of a float32, in the first half of 64."""
    return int.from_bytes(struct.pack("f", x) + bytes(4), "little" if struct.pack("h", 1)[0] else "big")


def kernels_of(kind: Kind, direction: str) -> Kernels:
    """Return the "forward" or "backward" kernels of a kind, compiled once in a process."""
    with _lock:
        return _compile(kind, direction)


@functools.cache
def _compile(kind: Kind, direction: str) -> Kernels:
    return Kernels(kind, direction)


@functools.cache
def registers() -> Registers:
    """Return the size of a microtile for this processor."""
    _initialize()
    features = binding.get_host_cpu_features()
    if features.get("avx512f"):
        return Registers(lanes=16, rows=6, columns=4)  # 32 registers
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
