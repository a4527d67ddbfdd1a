"""``python -m benchmarks static``: compile the GPU kernels and analyse their machine code, without a GPU.

For the default configurations of each architecture it reports registers, spills, shared memory and, for the innermost
loop, instructions per score.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import machine_code, provenance, static_hopper
from benchmarks.compiled_kernel import PARTS, CompiledKernel, summarize
from benchmarks.inputs import check_not_empty
from benchmarks.tables import mask_name
from sigattn.ops.hopper import launch as launch_hopper
from sigattn.ops.triton import kernel_args, tuning
from sigattn.ops.triton.args import Alibi, Bias, Blocks, Mask, Options, Scales, Sequences, Strides
from sigattn.tables import print_table
from sigattn.validation import check_among, check_at_least, check_output_file

DECODED_ROWS = 4  # query heads that share a key head, with one query each
ELEMENT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@dataclass(frozen=True, kw_only=True)
class StaticBenchmark:
    """Configuration of the static analysis.

    Attributes:
        architectures: compute capabilities, 90 for sm_90.
        head_dims: D = Dv.
        dtypes: "bfloat16", "float16", "float32".
        results: where to write the results (JSON); None writes none.
    """

    architectures: tuple[int, ...] = (80, 90, 100)
    head_dims: tuple[int, ...] = (64, 128)
    dtypes: tuple[str, ...] = ("bfloat16",)
    results: Path | None = Path("runs/benchmarks/static.json")

    def __post_init__(self) -> None:
        check_at_least(70, self, "architectures")
        check_at_least(1, self, "head_dims")
        check_among(("bfloat16", "float16", "float32"), self, "dtypes")
        check_not_empty(self, "architectures", "head_dims", "dtypes")
        check_output_file(self.results)


def benchmark_static(config: StaticBenchmark) -> list[dict[str, Any]]:
    """Compile the GPU kernels without a GPU, and report registers, spills and instructions per score.

    Returns:
        The rows.

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
    if (
        90 in config.architectures
        and "bfloat16" in config.dtypes
        and max(launch_hopper.WIDTHS.values()) in config.head_dims
    ):
        kernels += static_hopper.compile_all()
    rows = [kernel.to_row() for kernel in kernels]
    for architecture in config.architectures:
        print_architecture(kernels, architecture)
    if config.results is not None:
        provenance.write(config.results, {**provenance.describe("static", asdict(config)), "rows": rows})
        print(f"results: {config.results}")
    return rows


def kernels_of(architecture: int, head_dim: int, dtype: str) -> list[str]:
    """Return the names of the kernels that a plain call may launch."""
    split_dkdv = tuning.kernel_config(tuning.DKDV, architecture, head_dim, 4 if dtype == "float32" else 2).split_dkdv
    return [tuning.FWD, *(PARTS if split_dkdv else [tuning.DKDV]), tuning.DQ, tuning.DECODE]


def compile_kernel(
    kernel: str,
    architecture: int,
    dtype: str,
    head_dim: int,
    causal: bool,
    config: tuning.Config | None = None,
    **changes: Any,
) -> CompiledKernel:
    """Compile one kernel as ``launch`` would start it for a plain call, and read its machine code.

    config: tile shape; None for that of the tables.
    changes: options and arguments that differ from those of a plain call.
    """
    from triton.compiler import ASTSource
    from triton.runtime.errors import PTXASError

    from sigattn.ops.triton.backward import bwd_dkdv_kernel, bwd_dq_kernel
    from sigattn.ops.triton.decode import decode_kernel
    from sigattn.ops.triton.forward import fwd_kernel

    functions = {tuning.FWD: fwd_kernel, tuning.DKDV: bwd_dkdv_kernel, tuning.DQ: bwd_dq_kernel}
    changes = {**PARTS.get(kernel, {}), **changes}
    name, kernel = kernel, tuning.DKDV if kernel in PARTS else kernel
    function = {**functions, tuning.DECODE: decode_kernel}[kernel]
    itemsize = 4 if dtype == "float32" else 2
    if kernel == tuning.DECODE:
        config = config or tuning.decode_config(head_dim, itemsize, DECODED_ROWS)
        changes = {"GROUP": DECODED_ROWS, **changes}
    elif config is None:
        config = tuning.kernel_config(kernel, architecture, head_dim, itemsize, True)
    options = Options(
        D=head_dim,
        DV=head_dim,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        SHIFT="number" if dtype == "float16" else "none",
        SIGMOID="exact" if dtype == "float32" else config.sigmoid,
        HAS_RIGHT=causal,
        TMA=config.tma,
        WGMMA=architecture == 90,
    )._replace(**{key: value for key, value in changes.items() if key.isupper()})
    own = 16 // itemsize  # entries of 16 bytes
    if "UNIT" not in changes and options.D % 16 and options.D % own == options.DV % own == 0:
        options = options._replace(UNIT=own)
    given = {**_arguments(ELEMENT[dtype], options), **changes}
    signature, constexprs, attributes = _signature([(p.name, given[p.name]) for p in function.params])
    try:
        compiled, log = machine_code.compile_with_log(
            ASTSource(function, signature, constexprs, attributes),
            architecture,
            {**kernel_args.compiler_settings(kernel, config, options), "enable_fp_fusion": True},
        )
    except PTXASError as error:
        if "is not defined for option 'gpu-name'" not in str(error):
            raise
        raise provenance.BenchmarkError(f"Triton's ptxas does not support architecture sm_{architecture}") from error
    scores = config.block_m * config.block_n / (32 * config.warps)
    described = {"kernel": name, "dtype": dtype, "head_dim": head_dim, "causal": causal}
    return summarize(compiled, log, scores, architecture, config, **described)


def _arguments(element: str, options: Options) -> dict[str, Any]:
    """Return the types of a call's arguments: dense rows, everything aligned to 16 bytes.

    A type is a string, with ":16" for a multiple of 16; other values are compile-time constants.
    """
    tensor, number = f"*{element}:16", "i32"
    even = "i32:16"
    head = even if options.D % 16 == 0 else number
    strides = Strides(even, head, even, 1)  # type: ignore[arg-type]
    names = ("query", "key", "value", "grad_out")
    loaded = dict.fromkeys(names, tensor)
    if options.TMA:
        sizes = kernel_args.tile_sizes(options)
        loaded = {name: f"tensordesc<{element}[1, 1, {rows}, {width}]>" for name, (rows, width) in sizes.items()}
    pointer = {"none": None, "added": "*fp32"}.get(options.MASK, "*u8")
    bias = "*fp32" if options.BIAS in ("scalar", "tensor") else None
    shift = "*fp32" if options.SHIFT in ("scalar", "tensor") else None
    mask = (number, number, number, 1)
    integers = "bias_b bias_h bias_n threshold len_q len_k heads query_offset left right table_b mask_keys n kv_heads "
    integers += "pages page_size table_width splits out_split pitch"
    gradients = ("out", "grad_key", "grad_value", "grad_query")
    return {
        **loaded,
        **dict.fromkeys(gradients, tensor),
        **{f"{name}_strides": strides for name in kernel_args.IN_ROWS},
        **dict.fromkeys(integers.split(), number),
        "seqlens": "*i32",
        **dict.fromkeys(("query_ends", "left_padding", "block_table")),
        "bias": Bias(bias, "fp32", number, shift, "fp32"),  # type: ignore[arg-type]
        "mask": None if pointer is None else Mask(pointer, *mask),  # type: ignore[arg-type]
        "alibi": Alibi("*fp32", number, number, 1) if options.SLOPES else None,  # type: ignore[arg-type]
        "blocks": Blocks("*i32", number, number, number, "*u8") if options.BLOCK_Q else None,  # type: ignore[arg-type]
        "sequences": Sequences("*i32" if options.LENGTHS else None, *(("*i32" if options.VARLEN else None,) * 2)),
        **dict.fromkeys(("row_sums", "row_terms"), "*fp32:16" if options.NORMALIZE else None),
        "seed": "*i64" if options.DROPOUT else None,
        "scales": Scales("fp32", "fp32", "fp32", "fp32"),  # type: ignore[arg-type]
        "grad_bias": None,
        "grad_slopes": None,
        "grad_mask": Mask("*fp32", *mask) if options.NEED_MASK != "none" else None,  # type: ignore[arg-type]
        "OPT": options,
    }


def _signature(arguments: list[tuple[str, Any]]) -> tuple[dict[str, Any], dict[Any, Any], dict[Any, Any]]:
    """Return what ``ASTSource`` takes: types by name, and constants and attributes by path."""
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}

    def type_of(path: tuple[int, ...], x: Any) -> Any:
        if isinstance(x, tuple) and not isinstance(x, Options):
            return type(x)(*(type_of((*path, at), field) for at, field in enumerate(x)))
        if not isinstance(x, str):
            constants[path] = x
            return "constexpr"
        name, aligned, _ = x.partition(":16")
        if aligned:
            attributes[path] = [["tt.divisibility", 16]]
        return name

    return {name: type_of((at,), x) for at, (name, x) in enumerate(arguments)}, constants, attributes


def print_architecture(kernels: list[CompiledKernel], architecture: int) -> None:
    """Print a table of one architecture's kernels, with the instructions per score in the first loop."""
    columns = ("kernel", "D", "mask", "tile", "regs", "spills", "KiB", "per SM", "MUFU", "FMA", "all")
    rows = []
    for r in (r for r in kernels if r.architecture == architecture):
        loop = r.loops[0]
        rows.append(
            (
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
            )
        )
    title = f"sm_{architecture}: instructions per score in the loop without masks"
    print_table(columns, rows, title=title, right=columns[3:])
