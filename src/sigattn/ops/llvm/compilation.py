"""Compilation of the kernels by LLVM, in about a second for each dtype, for calls of all sizes and options."""

from typing import Any

from llvmlite import binding

from sigattn.ops.llvm.kernels import NAMES, make_module
from sigattn.ops.llvm.processor import Processor, Registers, host_processor


def compile_kernels(per_word: int) -> tuple[Any, Any, Registers]:
    """Return the compiler, the library of the kernels with their addresses by name, and the registers that they use."""
    processor = host_processor()
    assert processor is not None, "see unavailable"
    image = compile_object(processor, per_word)
    library = binding.JITLibraryBuilder().add_object_img(image)
    for name in NAMES:
        library.export_symbol(name)
    try:
        jit = binding.create_lljit_compiler(processor.target_machine(), use_jit_link=True)
        return jit, library.link(jit, "sigattn"), processor.registers.of_words(per_word)
    except RuntimeError as error:
        version = ".".join(map(str, binding.llvm_version_info))
        raise RuntimeError(
            f"sigmoid_attention: backend 'llvm': the kernels for {processor.name!r} cannot be linked (LLVM has written "
            f'which symbols it lacks); pass backend="blocked", and please report this. LLVM {version}: {error}'
        ) from error


def compile_object(processor: Processor, per_word: int, level: int = 3) -> bytes:
    """Return the kernels as an object file; arguments as in ``optimize``."""
    machine, module = optimize(processor, per_word, level)
    return machine.emit_object(module)


def optimize(processor: Processor, per_word: int, level: int = 3) -> tuple[Any, Any]:
    """Return LLVM's description of a processor, and the module of the kernels optimised for it (level: 0 to 3)."""
    machine = processor.target_machine()
    module = binding.parse_assembly(str(make_module(processor.registers.of_words(per_word), per_word)))
    options = binding.create_pipeline_tuning_options(speed_level=level)
    # the kernels are vectors already, and unrolled as far as there are registers
    options.loop_vectorization = options.slp_vectorization = options.loop_unrolling = False
    passes = binding.create_pass_builder(machine, options)
    passes.getModulePassManager().run(module, passes)
    return machine, module
