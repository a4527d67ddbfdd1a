"""``python -m benchmarks``: every benchmark at a tiny size, what its file holds, and its mistakes."""

import dataclasses
import functools
import importlib
import itertools
import json
import re
import typing

import pytest
import torch

from benchmarks import baselines, cpu, isa, kernels, memory, microtiles, steps, subprocesses, timing
from benchmarks.__main__ import BENCHMARKS, main
from benchmarks.baselines import IMPLEMENTATIONS, NAIVE, OURS, SDPA, Implementation
from benchmarks.parts import PARTS
from benchmarks.provenance import BenchmarkError
from sigattn.nn import Attention, VisibleKeysLinearBias
from sigattn.ops import llvm
from sigattn.ops.llvm.processor import AVX2, AVX512, NEON, Processor
from sigattn.ops.triton import tuning
from sigattn.train import loop
from tests.test_mistakes import DATA, USAGE, mistake

WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="benchmarks/gpu.sh is the test on a GPU")
MASKS, PASSES = (False, True), ("forward", "backward", "training")
ONCE = {"num_heads": 1, "rounds": 1, "round_seconds": 0.0}
SHORT = {**ONCE, "lengths": (16,), "dtype": "float32"}
CPU = {"lengths": (16,), "num_heads": 2, "threads": 1, "rounds": 1}
STEPS = {**CPU, "embed_dim": 16, "num_layers": 1, "tokens": 32}
TINY = {
    "cpu": {**CPU, "dtypes": ("float32",), "memory": False, "backends": ("blocked",)},
    "decode": {
        **ONCE, "context_lengths": (64, 128), "batch_sizes": (2,), "num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
        "dtypes": ("float32", "bfloat16"), "prompt_lengths": (16,), "threads": 1,
    },
    "hybridnorm": {**SHORT, "head_dim": 16},
    "kernels": {**SHORT, "head_dims": (16,), "batch_size": 1, "precompile": False},
    "overhead": {**ONCE, "n": 20, "head_dim": 16, "batch_sizes": (1,), "dtype": "float32"},
    "parts": {**CPU, "head_dim": 16},
    "steps": {**STEPS, "models": ("vit", "layer-forward"), "dtypes": ("float32",), "compiled": False},
    "training": {
        "kappas": (1,), "seconds": 60.0, "max_steps": 1, "batch_size": 1, "upscale": 1, "num_layers": 1,
    },
    "tune": {**ONCE, "lengths": (32,), "head_dims": (16,), "max_flops": 1.0, "max_candidates": 1},
}  # fmt: skip
ROWS = {  # fields that identify the rows of all implementations that run here, and their values
    "cpu": (("causal", "pass"), set(itertools.product(MASKS, PASSES))),
    "decode": (("dtype", "context_length"), set(itertools.product(("float32", "bfloat16"), (64, 128)))),
    "hybridnorm": (("n", "causal"), {(16, False), (16, True)}),
    "kernels": (("causal", "alibi", "pass"), set(itertools.product(MASKS, MASKS, PASSES))),
    "overhead": (("batch_size", "pass"), {(1, "forward"), (1, "training")}),
    "parts": (("causal", "pass"), set(itertools.product(MASKS, ("forward", "backward")))),
    "steps": (("model",), {("vit",), ("layer-forward",)}),
    "training": (("activation",), {("sigmoid",), ("softmax",)}),
    "tune": (("kernel",), {(tuning.FWD,), (tuning.DKDV,), (tuning.DQ,)}),
}
MORE = {  # further parts of a file
    "average_speed_up": lambda rows: {row["over"] for row in rows} == {SDPA},
    "crossings": lambda rows: len({(row["causal"], row["norm"]) for row in rows}) == 4,
    "generation": lambda rows: [row["activation"] for row in rows] == ["sigmoid", "sigmoid, normalize", "softmax"],
    "host_times": lambda rows: {("dense", "training"), ("cached", "forward")} <= {(r["call"], r["pass"]) for r in rows},
}
TIMES = ("ms", "median_ms", "microseconds", "tokens_or_images_per_second")


def configuration(name):
    (kind,) = filter(dataclasses.is_dataclass, typing.get_type_hints(BENCHMARKS[name]).values())
    return kind


def run(name, folder, **settings):
    """Run a benchmark with ``TINY`` and other settings; return what it writes."""
    kind = configuration(name)
    file = folder / f"{name}.json"
    BENCHMARKS[name](kind(**TINY[name] | settings, results=file if kind().results.suffix else folder))
    return json.loads(file.read_text())


@pytest.fixture
def quick(monkeypatch, unchecked):
    """Call formulas instead of interpreted and compiled kernels, which other tests call."""
    formula = Implementation(False, baselines.with_backend("reference"), cpu=True, alibi=True)
    monkeypatch.setitem(IMPLEMENTATIONS, OURS, formula)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    monkeypatch.setattr(timing, "capture_graph", lambda call: call)
    seconds_per_call = timing._seconds_per_call
    monkeypatch.setattr(timing, "_seconds_per_call", lambda call, repeats: seconds_per_call(call, 1))
    monkeypatch.setattr(cpu, "_MATMUL_SIZE", 64)
    monkeypatch.setattr(loop.Trainer, "validate", lambda self: {})  # of 1,000 windows, and no part of the results
    monkeypatch.setattr(subprocesses, "find_failures", lambda _, tasks, **__: {case: {} for case in tasks})


@WITHOUT_GPU
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", TINY)
def test_the_file_has_provenance_and_a_row_of_each_case(name, tmp_path, monkeypatch):
    if name == "parts":
        if llvm.machine_unavailable() is not None:
            pytest.skip(llvm.machine_unavailable())
        compilation = importlib.import_module("sigattn.ops.llvm.compilation")  # of three variants
        monkeypatch.setattr(compilation, "compile_object", functools.partial(compilation.compile_object, level=0))
    report = run(name, tmp_path)
    assert {"benchmark", "date", "commit", "source", "device", "versions", "configuration"} <= report.keys()
    fields, expected = ROWS[name]
    rows = report["rows"]
    assert {tuple(row[field] for field in fields) for row in rows} == expected
    assert all(any(row.get(time, 0) > 0 for time in TIMES) for row in rows)
    for row in rows if name in ("cpu", "steps") else ():  # one round: each ratio is that of the times
        kind = next(field for field in ("implementation", "attention") if field in row)
        (softmax,) = (r for r in rows if "softmax" in r[kind] and all(r[field] == row[field] for field in fields))
        assert row["softmax_time_over_this"] == pytest.approx(softmax["median_ms"] / row["median_ms"])
        if name == "cpu":  # the same products in another time
            assert row["of_matmul"] * row["median_ms"] == pytest.approx(softmax["of_matmul"] * softmax["median_ms"])
        if name == "parts":
            assert sum(row[part] for part in PARTS) == pytest.approx(1)
            assert row["hidden"] > 0 if row["causal"] else row["hidden"] >= 0
    for part, check in MORE.items():
        if part in report:
            assert check(report[part]), report[part]
    if name == "kernels":
        assert any("it needs a GPU" in reason for reason in report["absent"].values())
        assert {path.name for path in tmp_path.glob("*.png")} == {"d16.png", "d16_alibi.png"}
    assert tuning.DIRECT_LAUNCH


@WITHOUT_GPU
def test_what_time_and_memory_do_not_allow_is_left_out(tmp_path):
    report = run("kernels", tmp_path, max_seconds=1e-9, alibi=False, plot=False)
    assert (report["rows"], len(report["left_out_for_time"])) == ([], 2)
    assert run("decode", tmp_path, max_gib=1e-6, prompt_lengths=())["rows"] == []
    config = cpu.CpuBenchmark(max_naive_gib=1.0, compiled=False)
    assert [NAIVE in cpu.implementations(config, n) for n in (2048, 16384)] == [True, False]


@pytest.mark.usefixtures("quick")
def test_an_implementation_that_fails_in_its_subprocess_is_not_timed(monkeypatch, tmp_path):
    def failures(function, groups, **_):
        assert function == "benchmarks.kernels:try_once"
        kernels.try_once(groups[NAIVE, 16, True, False, 0][0])
        return {key: {0: "no end after 30 s"} if key[0] == SDPA else {} for key in groups}

    monkeypatch.setattr(subprocesses, "find_failures", failures)
    report = run("kernels", tmp_path, precompile=True, alibi=False, plot=False, baselines=(NAIVE, SDPA))
    assert {row["implementation"] for row in report["rows"]} == {OURS, NAIVE}
    assert set(report["absent"].values()) == {"no end after 30 s"}


def test_models_of_steps_differ_in_the_attention_only(tmp_path, monkeypatch):
    """The converted model has the bias of a conversion."""
    models = []
    make = steps.make_optimizer
    monkeypatch.setattr(steps, "make_optimizer", lambda model, *args: models.append(model) or make(model, *args))
    run("steps", tmp_path, models=("language",))
    layers = [next(m for m in model.modules() if isinstance(m, Attention)) for model in models]
    assert [layer.activation for layer in layers] == ["softmax", "sigmoid", "sigmoid"]
    assert type(layers[2].attention_bias) is VisibleKeysLinearBias
    assert [layer.normalize for layer in layers] == [False, False, True]
    softmax, sigmoid = ({n: p.shape for n, p in model.named_parameters()} for model in models[:2])
    assert softmax == sigmoid


@pytest.mark.skipif(not torch.cpu.get_capabilities().get("avx2"), reason="needs AVX2")
def test_results_of_an_instruction_set_are_of_a_process_that_is_held_to_it(tmp_path, monkeypatch):
    report = run("cpu", tmp_path, compiled=False, matmul=False, isa="avx2", dtypes=("bfloat16",), backends=())
    assert report["configuration"]["isa"] == "avx2"
    assert report["device"].endswith("(AVX2)")
    if llvm.machine_unavailable() is None:
        from sigattn.ops.llvm import compilation

        monkeypatch.setattr(compilation, "host_processor", None)
        monkeypatch.setattr(llvm, "_FAST", {})
        for name, registers in {"avx512": AVX512, "avx2": AVX2}.items():
            isa.hold_kernels(name)
            assert compilation.host_processor().registers is registers
            assert {torch.float32: True, torch.bfloat16: name == "avx2"} == llvm._FAST


def test_memory_of_packed_keys_and_tiles():
    """The weights, which are not stored, take 64 MiB. Inputs drawn in float32 would leave 10 free below the peak."""
    row = memory.measure_in_subprocess("sigattn, normalized", 2048, 8, 64, "bfloat16", True, 1)
    assert 2 < max(row["forward_mib"], row["extra_mib"]) < 64


LLVM_MCA = """#!/bin/sh
[ "$1" = --version ] || cat > {folder}/loop.s
echo 'LLVM version 19'
echo 'Total Cycles:      1200'
echo '  - V1UnitV0  [ 97.00% ]'
echo '  - Data Dependencies:  [ 98.00% ]'
"""


def test_rates_of_microtiles(tmp_path, monkeypatch):
    """6 multiply-adds of 4 lanes in 1,200 / 200 cycles; bfloat16 is widened, and multiplied as 12."""
    tool = tmp_path / "llvm-mca"
    tool.write_text(LLVM_MCA.format(folder=tmp_path))
    tool.chmod(0o755)
    processor = Processor(NEON, "neoverse-n1", triple=microtiles.ARM)
    monkeypatch.setattr(microtiles, "PROCESSORS", ((processor, 32, ""),))
    config = microtiles.MicrotileBenchmark(rows=2, columns=3, llvm_mca=str(tool), results=tmp_path / "results.json")
    row, widened = microtiles.benchmark_microtiles(config)["rows"]
    assert (row["multiply_adds"], row["of_peak"], row["stack"], row["bottleneck"]) == (4.0, 0.125, 0, "V1UnitV0")
    assert (widened["multiply_adds"], widened["of_peak"]) == (8.0, 0.25)
    assert (tmp_path / "loop.s").read_text().count("fmla") == 12


@pytest.mark.parametrize("name", ["haswell", "skylake-avx512", "neoverse-n1"])
def test_registers_hold_a_microtile_of_widened_bfloat16(name):
    microtiles.binding.initialize_all_targets()
    microtiles.binding.initialize_all_asmprinters()
    processor = next(processor for processor, *_ in microtiles.PROCESSORS if processor.name == name)
    machine, module = microtiles.optimize(processor, per_word=2)
    text, rows = machine.emit_assembly(module), processor.registers.of_words(2).rows
    for function in ("product", "add_product"):
        assert not microtiles._STACK.search(microtiles._inner_loop(text, f"{function}_{rows}"))


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("cpu", {"isa": "avx2"}, "isa avx2: this processor lacks fma3"),
        ("microtiles", {"llvm_mca": "none"}, "none was not found; pass --llvm-mca"),
        ("kernels", {}, "needs a GPU"),
    ],
)
@WITHOUT_GPU
def test_what_a_machine_lacks_is_named(name, settings, message, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True})
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(BenchmarkError, match=message):
        BENCHMARKS[name](configuration(name)(**settings))


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["cpu", "--isa", "sse"], USAGE, "isa must be one of avx2, avx512, got 'sse'"),
        (["cpu", "--lengths", "0"], USAGE, "lengths must be at least 1, got 0"),
        (["cpu", "--lengths", "--no-memory"], USAGE, "lengths must name at least one"),
        (["cpu", "--dtypes", "float8"], USAGE, "dtypes must be one of float32, bfloat16, got 'float8'"),
        (["decode", "--num-heads", "3", "--num-kv-heads", "2"], USAGE, "num_heads must be a multiple of num_kv_heads"),
        (["cpu", "--results", "."], USAGE, "name a file to write, got the folder"),
        (["steps", "--results", "text.txt/x.json"], DATA, "text.txt: is a file, so that"),
    ],
)
def test_mistakes_are_reported_before_the_work(arguments, code, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("a text")
    mistake(arguments, code, message, capsys, main)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"text.txt": "a text"}


@pytest.mark.parametrize(
    ("command", "code", "expected"),
    [("--help", 0, "NAME --help"), ("cpu --help", 0, " options "), ("", 2, ""), ("cpuu", 2, "")],
)
def test_help_and_unknown_commands(command, code, expected, capsys):
    with pytest.raises(SystemExit) as stop:
        main(command.split())
    said = capsys.readouterr().out
    assert stop.value.code == code
    assert expected in said
    assert not re.search("(options|config)[. ](training )?options", said)  # the name of a parameter


@pytest.mark.parametrize("name", BENCHMARKS)
def test_benchmarks_do_not_overwrite_the_committed_results(name):
    assert configuration(name)().results.is_relative_to("runs/benchmarks")
