"""``sigattn bench static``: compile the GPU kernels and analyse their machine code, without a GPU.

For the default configurations of each architecture it reports registers, spills, shared memory, the instructions per
score of each unit in the innermost loop and, by a model of Hopper, the cycles that each unit takes per score.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from sigattn.bench import machine_code, provenance, static_hopper
from sigattn.bench.compiled_kernel import PARTS, CompiledKernel, summarize
from sigattn.bench.tables import mask_name, print_path
from sigattn.ops.triton import tma, tuning
from sigattn.validation import check_among, check_at_least, check_not_empty

DECODED_ROWS = 4  # query heads that share a key head, with one query each
ELEMENT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}

_TENSORS = {"query", "key", "value", "out", "grad_out", "grad_query", "grad_key", "grad_value"}
_WIDE_TENSORS = {"bias", "mask", "slopes", "shift_pointer", "grad_bias", "grad_slopes", "grad_mask"}
_NUMBERS = {"z_scale", "cap_scale", "bias_value", "shift_value", "out_scale", "logit_scale"}


@dataclass(frozen=True, kw_only=True)
class StaticBenchmark:
    """Configuration of the static analysis.

    Attributes:
        architectures: compute capabilities, 90 for sm_90.
        head_dims: D = Dv.
        dtypes: "bfloat16", "float16", "float32".
        variants: for sm_90 in bfloat16, also compile what is not the default: the other forms of σ, dQ added
            atomically, and every candidate of the Hopper kernels.
        results: where to write the results (JSON); None writes none.
    """

    architectures: tuple[int, ...] = (80, 90, 100)
    head_dims: tuple[int, ...] = (64, 128)
    dtypes: tuple[str, ...] = ("bfloat16",)
    variants: bool = False
    results: Path | None = Path("runs/bench/static.json")

    def __post_init__(self) -> None:
        check_at_least(70, self, "architectures")
        check_at_least(1, self, "head_dims")
        check_among(("bfloat16", "float16", "float32"), self, "dtypes")
        check_not_empty(self, "architectures", "head_dims", "dtypes")


def benchmark_static(config: StaticBenchmark) -> list[dict[str, Any]]:
    """Compile, print tables and write the results; return the rows.

    Raises:
        BenchmarkError: in Triton's interpreter, without Triton, or for an architecture that its ptxas does not know.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise provenance.BenchmarkError("this benchmark compiles kernels, which TRITON_INTERPRET=1 prevents: unset it")
    if importlib.util.find_spec("triton") is None:
        raise provenance.BenchmarkError("this benchmark needs Triton: pip install triton")
    kernels = [
        compile_kernel(kernel, architecture, dtype, d, causal)
        for architecture in config.architectures
        for dtype in config.dtypes
        for d in config.head_dims
        for kernel in kernels_of(architecture, d, dtype)
        for causal in (False, True)
    ]
    if 90 in config.architectures and "bfloat16" in config.dtypes:
        kernels += static_hopper.compile_all(
            (d for d in config.head_dims if d in tuning.HOPPER_CONFIGS[tuning.FWD]), candidates=config.variants
        )
        if config.variants:
            kernels += [variant for d in config.head_dims for variant in _variants(d)]
    rows = [kernel.to_row() for kernel in kernels]
    console = Console()
    console.width = max(console.width, 126)  # the table has no columns to spare
    for architecture in config.architectures:
        console.print(architecture_table(kernels, architecture))
    if config.results is not None:
        provenance.write(config.results, {**provenance.describe("static", asdict(config)), "rows": rows})
        print_path(config.results)
    return rows


def kernels_of(architecture: int, head_dim: int, dtype: str) -> list[str]:
    """Return the names of the kernels that a plain call may launch."""
    split_dkdv = tuning.kernel_config(tuning.DKDV, architecture, head_dim, 4 if dtype == "float32" else 2).split_dkdv
    return [tuning.FWD, *(PARTS if split_dkdv else [tuning.DKDV]), tuning.DQ, tuning.DECODE]


def _variants(head_dim: int) -> Iterator[CompiledKernel]:
    """Compile what is not the default, for sm_90 in bfloat16 (docs/speed.md)."""
    for kernel in (k for k in kernels_of(90, head_dim, "bfloat16") if k != tuning.DECODE):
        default = tuning.kernel_config(tuning.DKDV if kernel in PARTS else kernel, 90, head_dim, 2)
        for form in ("accurate", "paired", "exact", "fast"):
            if form != default.sigmoid:
                variant = compile_kernel(kernel, 90, "bfloat16", head_dim, False, default._replace(sigmoid=form))
                yield replace(variant, kernel=f"{kernel}, {form}")
        if kernel not in PARTS:
            yield from _with_tma(kernel, kernel, head_dim)
    if head_dim <= 128:
        yield from _with_tma(tuning.FUSED, tuning.DKDV, head_dim, ATOMIC_DQ=True)


def _with_tma(name: str, kernel: str, head_dim: int, **constants: Any) -> Iterator[CompiledKernel]:
    """Compile the first two candidates of ``bench tune`` that use TMA."""
    for config in [c for c in tuning.candidates(name, head_dim) if c.tma and c.sigmoid == "paired"][:2]:
        variant = compile_kernel(kernel, 90, "bfloat16", head_dim, False, config, **constants)
        yield replace(variant, kernel=f"{name}, TMA")


def compile_kernel(
    kernel: str,
    architecture: int,
    dtype: str,
    head_dim: int,
    causal: bool,
    config: tuning.Config | None = None,
    **constants: Any,
) -> CompiledKernel:
    """Compile one kernel as ``launch`` would start it for a plain call, and read its machine code.

    config: tile shape; None for that of the tables.
    constants: compile-time arguments that differ from those of a plain call.
    """
    from triton.compiler import ASTSource
    from triton.runtime.errors import PTXASError

    from sigattn.ops.triton.backward import bwd_dkdv_kernel, bwd_dq_kernel
    from sigattn.ops.triton.decode import decode_kernel
    from sigattn.ops.triton.forward import fwd_kernel

    functions = {tuning.FWD: fwd_kernel, tuning.DKDV: bwd_dkdv_kernel, tuning.DQ: bwd_dq_kernel}
    constants = {**PARTS.get(kernel, {}), **constants}
    name, kernel = kernel, tuning.DKDV if kernel in PARTS else kernel
    function = {**functions, tuning.DECODE: decode_kernel}[kernel]
    itemsize = 4 if dtype == "float32" else 2
    if kernel == tuning.DECODE:
        config = config or tuning.decode_config(head_dim, itemsize, DECODED_ROWS)
        constants = {"GROUP": DECODED_ROWS, **constants}
    elif config is None:
        config = tuning.kernel_config(kernel, architecture, head_dim, itemsize)
    values = {**_constants(config, architecture, dtype, head_dim, causal), **constants}
    own = 16 // itemsize  # entries of 16 bytes
    values.setdefault("UNIT", own if values["D"] % 16 and values["D"] % own == values["DV"] % own == 0 else 1)
    signature, constexprs, attributes = _signature(function, ELEMENT[dtype], values)
    try:
        compiled, log = machine_code.compile_with_log(
            ASTSource(function, signature, constexprs, attributes),
            architecture,
            {"num_warps": config.warps, "num_stages": config.stages},
        )
    except PTXASError as error:
        if "is not defined for option 'gpu-name'" not in str(error):
            raise
        raise provenance.BenchmarkError(f"Triton's ptxas does not support architecture sm_{architecture}") from error
    scores = config.block_m * config.block_n / (32 * config.warps)
    return summarize(compiled, log, scores, name, architecture, dtype, head_dim, causal, config)


def _constants(config: tuning.Config, architecture: int, dtype: str, head_dim: int, causal: bool) -> dict[str, Any]:
    padded = tuning.padded_head_dim(head_dim)
    plain = {"BIAS": "number", "MASK": "none", "SHIFT": "number" if dtype == "float16" else "none", "PRECISION": "ieee"}
    sizes = {"GROUP": 1, "D": head_dim, "DV": head_dim, "BLOCK_D": padded, "BLOCK_DV": padded}
    blocks = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_Q": 128, "BLOCK_K": 128}
    off: tuple[str, ...] = (
        "SLOPES",
        "LENGTHS",
        "VARLEN",
        "HAS_LEFT",
        "BOTTOM_RIGHT",
        "DROPOUT",
        "ATOMIC_DQ",
        "NEED_BIAS",
    )
    off = (*off, "NEED_SLOPES", "SUM_ROWS", "SUM_COLUMNS", "FIRST", "ENDS", "TABLE", "SOFTCAP", "BLOCKS")
    needs = {"NEED_KEY": True, "NEED_VALUE": True, "NEED_QUERY": True, "NEED_MASK": "none"}
    sigmoid = {"SIGMOID": "exact" if dtype == "float32" else config.sigmoid, "HAS_RIGHT": causal, "TMA": config.tma}
    sigmoid |= {"WGMMA": architecture == 90}
    return {**plain, **sizes, **blocks, **dict.fromkeys(off, False), **needs, **sigmoid}


def _signature(function: Any, element: str, values: dict[str, Any]) -> tuple[dict[str, str], Any, Any]:
    """Return the argument types of a plain call: dense rows, everything aligned to 16 bytes."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for at, parameter in enumerate(function.params):
        name = parameter.name
        if parameter.is_constexpr:
            signature[name], constants[(at,)] = "constexpr", values[name]
        elif values.get("TMA") and name in tma.TILES:
            rows, width = (values[size] for size in tma.TILES[name])
            signature[name] = f"tensordesc<{element}[1, 1, {rows}, {width}]>"
        elif name in _TENSORS:
            signature[name], attributes[(at,)] = f"*{element}", [["tt.divisibility", 16]]
        elif name == "block_tiles" or (name == "mask" and values["MASK"] == "bool"):
            signature[name] = "*u8"
        elif name in _WIDE_TENSORS:
            signature[name] = "*fp32"
        elif name in {"key_lengths", "starts_q", "starts_k", "lengths", "ends", "first", "table", "block_table"}:
            signature[name] = "*i32"
        elif name in _NUMBERS:
            signature[name] = "fp32"
        elif name == "seed":
            signature[name] = "*i64"
        elif re.fullmatch(r"\w+_[dms]", name):  # strides of the last dimension
            signature[name], constants[(at,)] = "constexpr", 1
        elif re.fullmatch(r"(q|k|v|o|gq|gk|gv)_[bhnps]", name) and (name[-1] != "h" or values["D"] % 16 == 0):
            signature[name], attributes[(at,)] = "i32", [["tt.divisibility", 16]]
        else:
            signature[name] = "i32"
    return signature, constants, attributes


def architecture_table(kernels: list[CompiledKernel], architecture: int) -> Table:
    """Return a table of one architecture's kernels, with instructions and cycles per score in the first loop."""
    result = Table(
        title=f"sm_{architecture}: instructions per score in the loop without masks, and their cycles on Hopper",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    columns = ("kernel", "D", "mask", "tile", "regs", "spills", "KiB", "per SM", "MUFU", "FMA", "all")
    for column in (*columns, "special", "issue", "tensor", "time"):
        result.add_column(column, justify="left" if column in ("kernel", "mask") else "right", no_wrap=True)
    for r in (r for r in kernels if r.architecture == architecture):
        loop = r.loops[0]
        cycles = r.cycles(loop)
        result.add_row(
            r.kernel if r.dtype == "bfloat16" else f"{r.kernel} {r.dtype}",
            str(r.head_dim),
            mask_name(r.causal),
            f"{r.config.block_m}×{r.config.block_n}",
            str(r.registers),
            f"{r.spills} ({loop.spills})" if loop.spills else str(r.spills),
            str(r.shared // 1024),
            "serial" if r.advisories else str(r.programs or "?"),
            f"{loop.special:.2f}",
            f"{loop.fma:.1f}",
            f"{loop.all:.1f}",
            *(f"{cycles[unit]:.3f}" if unit in cycles else "" for unit in ("special", "issue", "tensor", "time")),
        )
    return result
