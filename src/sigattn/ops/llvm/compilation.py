"""Compilation of the kernels by LLVM, in about a second for each dtype, for calls of all sizes and options."""

from __future__ import annotations

import struct
from typing import Any

from llvmlite import binding

from sigattn.ops.llvm.kernels import NAMES, make_module
from sigattn.ops.llvm.processor import Processor, Registers, host_processor


def compile_kernels(per_word: int) -> tuple[Any, Any, Registers]:
    """Return the compiler, the library of the kernels with their addresses by name, and the registers that they use.

    Args:
        per_word: elements of a tensor in a word of 32 bits.
    """
    processor = host_processor()
    assert processor is not None, "see unavailable"
    image = compile_object(processor, per_word)
    library = binding.JITLibraryBuilder().add_object_img(image)
    for name in NAMES:
        library.export_symbol(name)
    try:
        jit = binding.create_lljit_compiler(processor.target_machine(), use_jit_link=True, suppress_errors=True)
        return jit, library.link(jit, "sigattn"), processor.registers
    except RuntimeError as error:
        symbols = ", ".join(undefined_symbols(image)) or "none known"
        raise RuntimeError(
            f"sigmoid_attention: backend 'llvm': the kernels for {processor.name!r} cannot be linked (symbols from "
            f'outside: {symbols}); pass backend="blocked", and please report this. LLVM {_version()}: {error}'
        ) from error


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
    """Return the names of the symbols that an object file needs from outside; none if it is not of 64-bit ELF."""
    if not image.startswith(b"\x7fELF\2"):
        return []
    sections = {section.name(): section.data() for section in binding.ObjectFileRef.from_data(image).sections()}
    names = sections[b".strtab"]
    symbols = struct.iter_unpack("<IBBHQQ", sections[b".symtab"])  # of which the first is empty
    starts = [name for name, _, _, section, _, _ in symbols if section == 0 and name]
    return sorted(names[start : names.index(b"\0", start)].decode() for start in starts)


def _version() -> str:
    return ".".join(map(str, binding.llvm_version_info))
