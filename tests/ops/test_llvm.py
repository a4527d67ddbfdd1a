"""Backend "llvm": kernels that llvmlite compiles for this processor, and for others; forks of the process."""

import os
import re
import signal
import struct
import subprocess
import sys
import threading
from unittest import mock

import pytest
import torch

from sigattn import sigmoid_attention
from sigattn.ops import llvm
from sigattn.ops.attention import DENSE
from sigattn.ops.problem import Problem
from tests.ops import test_correctness
from tests.ops.cases import Case, nan_filled_memory, numbers, random_case

if llvm.machine_unavailable() is not None:
    pytest.skip(llvm.machine_unavailable(), allow_module_level=True)

from llvmlite import binding

from sigattn.ops.llvm import calls, compilation, plan
from sigattn.ops.llvm.processor import AVX2, AVX512, AVX512_BF16, NEON, NEON_BF16, Processor, host_processor

# processors whose instructions this one has, one of each kind of registers; small microtiles compile in less time, and
# small calls cross their borders
PROCESSORS = {"this one": host_processor()}
if torch.cpu.get_capabilities()["architecture"] == "x86_64":
    PROCESSORS["vectors of 128 bits"] = Processor(NEON._replace(by_element=False, rows=2, columns=1), "haswell")
    if torch.cpu.get_capabilities()["avx512_bw"]:
        PROCESSORS |= {"avx2": Processor(AVX2, "haswell"), "no bfloat16": Processor(AVX512, "skylake-avx512")}
COMPILED = {name: {} for name in PROCESSORS} | {"this one": calls._compiled}  # kernels of each by dtype
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def measured(monkeypatch):
    """As on a processor on which the kernels are the default."""
    monkeypatch.setattr(llvm, "_FAST", dict.fromkeys(DTYPES, True))


def served(case):
    case.dtype = case.dtype if case.dtype in DTYPES else torch.float32
    case.softcap = 0.0
    return case


def check(case, backend, repeats=0):
    """Compare with the formula; the gradient of a mask is not computed."""
    case.frozen = (*case.frozen, "attn_mask")
    test_correctness.check(case, backend, repeats)


@pytest.fixture
def compile_for(monkeypatch):
    """Return a function that lets calls compile the kernels for another processor."""

    def compile_for(name):
        monkeypatch.setattr(compilation, "host_processor", lambda: PROCESSORS[name])
        monkeypatch.setattr(calls, "_compiled", COMPILED[name])

    return compile_for


@pytest.mark.parametrize(
    ("processor", "number"), [(p, n) for p in PROCESSORS for n in numbers(40 if p == "this one" else 10)]
)
def test_output_and_gradients_match_the_formula(compile_for, processor, number):
    """Gradients of weights that are computed again, and of saved ones; every second time new memory is NaN."""
    compile_for(processor)
    case = random_case(number)
    with (
        mock.patch.object(calls, "MAX_SAVED", (0, 10**6)[number % 2]),
        mock.patch.object(calls, "_ONE_ALLOCATION", 1 << 20 if case.seed % 3 else 0),
        nan_filled_memory(case.seed % 2 == 1),
    ):
        check(served(case), "llvm")


# blocks and groups of queries and of keys, head sizes of several microtiles, query heads that share a key head
TILES = ((1, 1, 2, 391, 270, 80, 144), (1, 2, 391, 1), True, "length first")
# more threads than heads: keys are divided, and queries, because the memory for the gradients of each split is limited
SPLITS = ((1, 2, 1, 203, 203, 16, 16), (1, 2, 203, 1), False, "contiguous")


@pytest.mark.parametrize(
    ("sizes", "threads", "dtype", "causal", "window", "most_saved"),
    [
        (TILES, 2, torch.float32, False, None, 10**6),
        (TILES, 2, torch.float32, True, (130, 40), 0),
        (TILES, 1, torch.float32, True, None, 0),
        (TILES, 1, torch.bfloat16, True, (130, 40), 10**6),
        (SPLITS, 7, torch.float32, True, None, 0),
        (SPLITS, 2, torch.bfloat16, True, None, 0),
        (SPLITS, 2, torch.float32, True, None, 10**6),
        (SPLITS, 7, torch.bfloat16, True, None, 10**6),
    ],
)
def test_sizes_that_cross_tiles_and_splits(sizes, threads, dtype, causal, window, most_saved, monkeypatch):
    monkeypatch.setattr(calls, "MAX_SAVED", most_saved)
    limits = {"_ONE_THREAD": 0, "_SUMS": 0} if sizes is SPLITS else {"_QUERIES": 1 << 17, "_KEYS": 64}
    for name, limit in limits.items():
        monkeypatch.setattr(plan, name, limit)
    shape, bias, lengths, layout = sizes
    case = Case(shape, dtype, causal, None, window, bias, None, "sides", lengths, layout, 5)
    plan.make_plan.cache_clear()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with nan_filled_memory():
            check(case, "llvm", repeats=1)
    finally:
        torch.set_num_threads(before)
        plan.make_plan.cache_clear()


@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_of_a_long_sequence(dtype):
    """Of one head, 16 MiB a tensor in float32: the keys are copied once forward, and bfloat16 is summed in float32."""
    shape = (1, 1, 65_536, 64)
    found = plan.make_plan(calls.kernels(dtype), 2, shape, shape, None, -1, -1, 0)
    sums = found.args.splits * found.args.part_size * 64 * 4
    assert sum(found.forward.values()) <= 17 << 20
    assert sum(found.backward.values()) + sums <= (3 if dtype is torch.float32 else 36) << 20


@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_of_any_size(dtype, processor, compile_for):
    compile_for(processor)
    logits = [-torch.inf, -200.0, -88.0, -87.5, -80.0, -1.0, 0.0, 1.0, 30.0, 200.0, torch.inf, torch.nan]
    payload = torch.tensor([0x7FC10000], dtype=torch.int32).view(torch.float32)  # also a NaN
    q = torch.cat([torch.tensor(logits), payload]).to(dtype).view(1, 1, -1, 1)
    one = torch.ones(1, 1, 1, 1, dtype=dtype)
    out = sigmoid_attention(q, one, one, scale=1.0, bias=0.0, backend="llvm")
    rtol = 1e-6 if dtype is torch.float32 else torch.finfo(dtype).eps / 2 + 2**-13
    torch.testing.assert_close(out, q.double().sigmoid().to(dtype), rtol=rtol, atol=2e-38, equal_nan=True)


@pytest.mark.parametrize("processor", PROCESSORS)
def test_rounding_to_bfloat16(processor, compile_for):
    """To the nearest, ties to even, by an instruction or by operations on integers where the processor lacks it."""
    compile_for(processor)
    high = torch.tensor([1.0, 1.0078125, 1.0, 1.0, -1.0078125, 1.9921875, 3.3895e38, torch.inf])
    low = torch.tensor([1 / 256, 1 / 256, 1 / 256 + 1 / 32768, 1 / 512, -1 / 256, 1 / 256, 1e36, 1.0])
    values = torch.stack([high, low]).bfloat16()
    q, k = torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16), torch.zeros(1, 1, 2, 1, dtype=torch.bfloat16)
    out = sigmoid_attention(q, k, values.view(1, 1, 2, -1), bias=200.0, backend="llvm")  # weights of 1
    assert torch.equal(out.flatten(), values.float().sum(0).bfloat16())
    # adding half of the last bit would make -0 of the first NaN, and dropping the last bits inf of the second
    nan = torch.tensor([0x7FFFFFFF, 0x7F800001, 0x7FC00000], dtype=torch.int32).view(torch.float32)
    one = torch.ones(1, 1, 3, 1, dtype=torch.bfloat16)
    assert sigmoid_attention(one, one, one, bias=nan.view(3, 1), backend="llvm").isnan().all()


def test_the_gradient_of_a_mask_is_not_lost_if_the_op_is_called_directly():
    t, mask = torch.randn(1, 1, 5, 8), torch.zeros(1, 1, 5, 5, requires_grad=True)
    out = DENSE.forward_op(*Problem(t, t, t, attn_mask=mask), "llvm", False)[0]
    with pytest.raises(RuntimeError, match="'llvm': it does not compute the gradient of attn_mask"):
        out.sum().backward()


def test_it_is_the_default_for_what_it_supports(measured, monkeypatch):
    t = torch.empty(1, 1, 256, 64)
    problem = Problem(t, t, t)
    assert DENSE.choose(problem, None) == "llvm"
    assert DENSE.choose(problem._replace(softcap=3.0), None) == "blocked"
    assert DENSE.choose(Problem(*(t.bfloat16(),) * 3), None) == "llvm"
    assert DENSE.choose(Problem(*(t.half(),) * 3), None) == "blocked"
    assert DENSE.choose(Problem(*(t[:, :, :1],) * 3), None) == "llvm"
    monkeypatch.setattr(llvm, "_FAST", {})
    assert DENSE.choose(problem, None) == "blocked"


class Attention(torch.nn.Module):
    def forward(self, q):
        return sigmoid_attention(q, q, q, is_causal=True)


@pytest.mark.filterwarnings("ignore:.*[Dd]eprecat", "ignore::torch.jit.TracerWarning")
def test_an_exported_program_does_not_need_it(measured):
    """It may run on another machine, without llvmlite."""
    q = torch.randn(1, 2, 70, 16)
    program = torch.export.export(Attention(), (q,))
    traced = torch.jit.trace(Attention(), q)
    for code in (program.graph_module.code, str(traced.graph)):
        assert re.findall("blocked|llvm", code.replace("test_llvm", "")) == ["blocked"]
    torch.testing.assert_close(program.module()(q), Attention()(q))


@pytest.mark.filterwarnings("ignore:.*[Dd]eprecat")
def test_a_compiled_graph_calls_it(unchecked, measured):
    q = torch.randn(1, 2, 70, 16, requires_grad=True)
    calls = []
    compiled = torch.compile(Attention(), backend=lambda graph, _: calls.append(graph.code) or graph)
    torch.testing.assert_close(compiled(q), Attention()(q))
    assert "llvm" in calls[0]


@pytest.mark.parametrize(("platform", "library"), [("linux", None), ("darwin", "libomp.dylib")])
def test_the_runtime_of_other_systems(platform, library, monkeypatch):
    """The library that has ``GOMP_parallel`` is used."""

    def load(path):
        if (path and os.path.basename(path)) != library:
            raise OSError
        return mock.Mock(GOMP_parallel=mock.Mock(name=str(library)))

    monkeypatch.setattr(calls.sys, "platform", platform)
    monkeypatch.setattr(calls.ctypes, "CDLL", load)
    function = calls.parallel.__wrapped__()
    monkeypatch.setattr(calls, "parallel", lambda: function)
    assert llvm._machine_unavailable.__wrapped__() is None
    assert str(library) in repr(function)


WINDOWS = """
import os, sys, torch, llvmlite.binding
del os.fork, os.register_at_fork
sys.platform = "win32"
import sigattn
q = torch.randn(1, 1, 256, 64)
assert torch.equal(sigattn.sigmoid_attention(q, q, q), sigattn.sigmoid_attention(q, q, q, backend="blocked"))
try:
    sigattn.sigmoid_attention(q, q, q, backend="llvm")
except ValueError as error:
    print(error)
"""


def test_windows_has_another_backend():
    done = subprocess.run([sys.executable, "-c", WINDOWS], capture_output=True, text=True)
    assert "it needs GOMP_parallel" in done.stdout, done.stderr


binding.initialize_all_targets()
binding.initialize_all_asmprinters()
X86, ARM = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"
TARGETS = [
    *(Processor(AVX2, name, triple=X86) for name in ("haswell", "znver2", "znver3", "alderlake")),
    *(Processor(AVX512, name, triple=X86) for name in ("skylake-avx512", "icelake-server")),
    *(Processor(AVX512_BF16, name, triple=X86) for name in ("sapphirerapids", "znver4", "znver5")),
    *(Processor(NEON, name, triple=ARM) for name in ("neoverse-n1", "apple-m1")),
    *(Processor(NEON_BF16, name, triple=ARM) for name in ("neoverse-v1", "neoverse-v2", "apple-m4")),
]
EVERYTHING = "SIGATTN_FUZZ_EXAMPLES" in os.environ
EACH = TARGETS if EVERYTHING else {processor.registers: processor for processor in reversed(TARGETS)}.values()


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


@pytest.mark.parametrize("word", [1, 2] if EVERYTHING else [2])  # 1 for float32; 2 for bfloat16, summed in float32
@pytest.mark.parametrize("processor", EACH, ids=lambda x: x.name)
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
