"""Compilation of the kernels by LLVM, and their launch on the threads of OpenMP.

They are compiled at the first call of a dtype in a process, in about a second, for calls of all sizes and options.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import threading
from typing import Any

import torch
from llvmlite import binding

from sigattn.ops.llvm.arguments import KernelArguments
from sigattn.ops.llvm.kernels import NAMES, make_module
from sigattn.ops.llvm.processor import Processor, host_processor
from sigattn.ops.memory import keep_memory_warm

# LLVM compiles in one thread at a time. A fork waits for it, because the child would inherit the locks of LLVM and
# llvmlite as they are. Reentrant for a fork in a signal handler of the thread that compiles.
_compilation = threading.RLock()
os.register_at_fork(
    before=_compilation.acquire, after_in_parent=_compilation.release, after_in_child=_compilation.release
)

# runs a function of one pointer on some of OpenMP's threads, which are PyTorch's
_on_threads: Any = ctypes.CDLL(None).GOMP_parallel
_on_threads.restype = None
_on_threads.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)


class Kernels:
    """Compiled kernels of sigmoid attention (``kernels.NAMES``).

    Args:
        processor: that they are compiled for. per_word: elements of a tensor in a word of 32 bits.
    """

    def __init__(self, processor: Processor, per_word: int) -> None:
        keep_memory_warm()
        image = compile_object(processor, per_word)
        library = binding.JITLibraryBuilder().add_object_img(image)
        for name in NAMES[per_word]:
            library.export_symbol(name)
        try:
            self._jit = binding.create_lljit_compiler(
                processor.target_machine(), use_jit_link=True, suppress_errors=True
            )
            self._addresses = library.link(self._jit, "sigattn")
        except RuntimeError as error:
            symbols = ", ".join(undefined_symbols(image)) or "none"
            raise RuntimeError(
                f"sigmoid_attention: backend 'llvm': the kernels for {processor.name!r} cannot be linked (symbols from "
                f'outside: {symbols}); pass backend="blocked", and please report this. LLVM {_version()}: {error}'
            ) from error
        self.registers, self.per_word = processor.registers, per_word
        self.multiple = per_word * processor.registers.lanes  # elements of a tensor in a vector

    def run(self, name: str, tasks: int, args: KernelArguments, threads: int) -> None:
        """Run a kernel on at most as many threads as there are tasks."""
        args.counter, args.tasks = 0, tasks
        _on_threads(self._addresses[name], ctypes.addressof(args), min(threads, tasks), 0)


def compile_object(processor: Processor, per_word: int, level: int = 3) -> bytes:
    """Return the kernels as an object file.

    Args:
        processor: that runs them. per_word: elements of a tensor in a word. level: of optimisation, 0 to 3.
    """
    machine = processor.target_machine()
    module = binding.parse_assembly(str(make_module(processor.registers, per_word)))
    options = binding.create_pipeline_tuning_options(speed_level=level)
    # the kernels are vectors already, and unrolled as far as there are registers
    options.loop_vectorization = options.slp_vectorization = options.loop_unrolling = False
    passes = binding.create_pass_builder(machine, options)
    passes.getModulePassManager().run(module, passes)
    return machine.emit_object(module)


def undefined_symbols(image: bytes) -> list[str]:
    """Return the names of the symbols that an object file of 64-bit ELF needs from outside."""
    sections = {section.name(): section.data() for section in binding.ObjectFileRef.from_data(image).sections()}
    names = sections[b".strtab"]
    symbols = struct.iter_unpack("<IBBHQQ", sections[b".symtab"])  # of which the first is empty
    starts = [name for name, _, _, section, _, _ in symbols if section == 0 and name]
    return sorted(names[start : names.index(b"\0", start)].decode() for start in starts)


def _version() -> str:
    return ".".join(map(str, binding.llvm_version_info))


def kernels(dtype: torch.dtype) -> Kernels:
    """Return the kernels for tensors of a dtype on this machine, compiled once in a process."""
    processor = host_processor()
    assert processor is not None, "see unavailable"
    with _compilation:
        return _kernels(processor, 4 // dtype.itemsize)


@functools.cache
def _kernels(processor: Processor, per_word: int) -> Kernels:
    return Kernels(processor, per_word)
