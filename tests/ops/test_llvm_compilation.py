"""Compilation of the kernels of backend "llvm": symbols that they need, and forks of the process."""

import os
import signal
import struct
import threading

import pytest
import torch

from sigattn import sigmoid_attention
from sigattn.ops import llvm

if llvm.machine_unavailable() is not None:
    pytest.skip(llvm.machine_unavailable(), allow_module_level=True)

from llvmlite import binding

from sigattn.ops.llvm import calls, compilation
from sigattn.ops.llvm.processor import AVX2, AVX512, AVX512_BF16, NEON, NEON_BF16, Processor, host_processor

binding.initialize_all_targets()
binding.initialize_all_asmprinters()
X86, ARM = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"
PROCESSORS = [
    *(Processor(AVX2, name, triple=X86) for name in ("haswell", "znver2", "znver3", "alderlake")),
    *(Processor(AVX512, name, triple=X86) for name in ("skylake-avx512", "icelake-server")),
    *(Processor(AVX512_BF16, name, triple=X86) for name in ("sapphirerapids", "znver4", "znver5")),
    *(Processor(NEON, name, triple=ARM) for name in ("neoverse-n1", "apple-m1")),
    *(Processor(NEON_BF16, name, triple=ARM) for name in ("neoverse-v1", "neoverse-v2", "apple-m4")),
]
EVERYTHING = "SIGATTN_FUZZ_EXAMPLES" in os.environ
EACH = PROCESSORS if EVERYTHING else {processor.registers: processor for processor in reversed(PROCESSORS)}.values()


def small(processor):
    """Return a processor with small microtiles, which need the same instructions and compile in a part of the time."""
    return processor._replace(registers=processor.registers._replace(rows=2, columns=1))


def undefined_symbols(image):
    """Return the names of the symbols that an object file of 64-bit ELF needs from outside."""
    sections = {section.name(): section.data() for section in binding.ObjectFileRef.from_data(image).sections()}
    names = sections[b".strtab"]
    symbols = struct.iter_unpack("<IBBHQQ", sections[b".symtab"])  # of which the first is empty
    starts = [name for name, _, _, section, _, _ in symbols if section == 0 and name]
    return sorted(names[start : names.index(b"\0", start)].decode() for start in starts)


@pytest.mark.parametrize(
    ("processor", "word"),  # 1 for float32, 2 for bfloat16
    [(p, 2) for p in EACH] + [(p, 1) for p in EACH if p.registers in (AVX2, NEON) or EVERYTHING],
    ids=lambda x: getattr(x, "name", x),
)
def test_no_symbol_from_outside_is_needed(processor, word):
    """For what a processor lacks, LLVM calls functions of a library that a process need not have.

    Optimised, they call memset, which each has.
    """
    assert undefined_symbols(compilation.compile_object(small(processor), word, level=0)) == []


def test_a_missing_symbol_is_an_error_of_compilation(monkeypatch, capfd):
    text = "declare void @__missing()\n"
    text += "\n".join(
        f"define void @{name}(ptr %0) {{ call void @__missing() ret void }}" for name in compilation.NAMES
    )
    image = host_processor().target_machine().emit_object(binding.parse_assembly(text))
    assert undefined_symbols(image) == ["__missing"]
    monkeypatch.setattr(compilation, "compile_object", lambda *_: image)
    with pytest.raises(RuntimeError, match=r"cannot be linked \(.*\); pass backend="):
        compilation.compile_kernels(1)
    assert "__missing" in capfd.readouterr().err


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")
def test_a_child_can_call_it_that_is_forked_while_another_thread_compiles(monkeypatch):
    q, started, make_module = torch.randn(1, 1, 4, 16), threading.Event(), compilation.make_module
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(compilation, "host_processor", lambda: small(host_processor()))
    monkeypatch.setattr(compilation, "make_module", lambda *args: started.set() or make_module(*args))
    monkeypatch.setattr(calls, "_compiled", {})
    thread = threading.Thread(target=sigmoid_attention, args=(q, q, q), kwargs={"backend": "llvm"})
    thread.start()
    started.wait()
    if (child := os.fork()) == 0:
        signal.alarm(60)  # ends a child that waits for a lock
        sigmoid_attention(q, q, q, backend="llvm")
        os._exit(7)
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
