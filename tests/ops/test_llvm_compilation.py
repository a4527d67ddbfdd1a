"""Compilation of the kernels of backend "llvm": symbols that they need, and forks of the process."""

import os
import subprocess
import sys

import pytest

from sigattn.ops import llvm

if llvm.machine_unavailable() is not None:
    pytest.skip(llvm.machine_unavailable(), allow_module_level=True)

from llvmlite import binding

from sigattn.ops.llvm import compilation
from sigattn.ops.llvm.processor import AVX2, AVX512, AVX512_BF16, NEON, Processor, host_processor

binding.initialize_all_targets()
binding.initialize_all_asmprinters()
X86, ARM = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"
PROCESSORS = [
    *(Processor(AVX2, name, triple=X86) for name in ("haswell", "znver2", "znver3", "alderlake")),
    *(Processor(AVX512, name, triple=X86) for name in ("skylake-avx512", "icelake-server")),
    *(Processor(AVX512_BF16, name, triple=X86) for name in ("sapphirerapids", "znver4", "znver5")),
    *(Processor(NEON, name, triple=ARM) for name in ("neoverse-n1", "neoverse-v1", "neoverse-v2")),
    *(Processor(NEON, name, triple=ARM) for name in ("apple-m1", "apple-m4")),
]
FIRST = {processor.registers: processor for processor in reversed(PROCESSORS)}
CALLS = [(processor, 2) for processor in (PROCESSORS if "SIGATTN_FUZZ_EXAMPLES" in os.environ else FIRST.values())]
CALLS += [(PROCESSORS[0], 1), (PROCESSORS[-1], 1)]


@pytest.mark.parametrize(("processor", "word"), CALLS, ids=lambda x: getattr(x, "name", None))
def test_no_symbol_from_outside_is_needed(processor, word):
    """For what a processor lacks, LLVM calls functions of a library that a process need not have.

    Optimised, they call memset, which each has.
    """
    assert compilation.undefined_symbols(compilation.compile_object(processor, word, level=0)) == []


def test_a_missing_symbol_is_an_error_of_compilation(monkeypatch):
    text = "declare void @__missing()\n"
    text += "\n".join(
        f"define void @{name}(ptr %0) {{ call void @__missing() ret void }}" for name in compilation.NAMES
    )
    image = host_processor().target_machine().emit_object(binding.parse_assembly(text))
    monkeypatch.setattr(compilation, "compile_object", lambda *_: image)
    with pytest.raises(RuntimeError, match=r"cannot be linked \(symbols from outside: __missing\); pass backend="):
        compilation.compile_kernels(1)


FORK = """
import os, threading, torch
from sigattn import sigmoid_attention
from sigattn.ops.llvm import compilation
torch.set_num_threads(1)
q = torch.randn(1, 1, 40, 16)
started, make_module = threading.Event(), compilation.make_module
compilation.make_module = lambda *args: started.set() or make_module(*args)
thread = threading.Thread(target=sigmoid_attention, args=(q, q, q), kwargs={"backend": "llvm"})
thread.start()
started.wait()
child = os.fork()
if not child:
    sigmoid_attention(q, q, q, backend="llvm")
    os._exit(7)
thread.join()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")
def test_a_child_can_call_it_that_is_forked_while_another_thread_compiles():
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=60)
