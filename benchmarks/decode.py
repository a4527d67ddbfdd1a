"""``python -m benchmarks decode``: one new token with a key/value cache, and PyTorch's softmax, on a GPU or a CPU.

Decoding is bound by reading the cache, so the measure is bytes per second, compared with a plain copy on the same
machine. Each implementation is checked against float64 before it is timed. Caches are (batch, length, heads, head_dim)
as in flash-attn, (batch, heads, length, head_dim), or paged.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks import reference
from benchmarks.baselines import OURS, SDPA, compiled, error_line, reset_compiled
from benchmarks.inputs import DTYPES, check_not_empty
from benchmarks.results_file import ResultsFile
from benchmarks.tables import print_rows
from benchmarks.timing import TimedBenchmark, time_calls, time_graphs
from sigattn import validation
from sigattn.flash import flash_attn_with_kvcache
from sigattn.models.language import LanguageModel, LanguageModelConfig
from sigattn.nn.kv_cache import KVCache

PAGED, FLEX = f"{OURS}, pages of 64", "Flex softmax"
PAGE = 64
_COLUMNS = {
    "context": ("context_length", ","),
    "batch": ("batch_size", "d"),
    "layout": ("layout", ""),
    "": ("implementation", ""),
    "ms": ("median_ms", ".3f"),
    "as graph": ("graph_ms", ".3f"),
    "GB/s": ("gigabytes_per_second", ".1f"),
    "× softmax": ("softmax_time_over_this", ".2f"),
    "× copy": ("copy_time_over_this", ".2f"),
    "error": ("relative_error", ".1e"),
}
LENGTH_FIRST, HEADS_FIRST = "length first", "heads first"


@dataclass(frozen=True, kw_only=True)
class DecodeBenchmark(TimedBenchmark):
    """Configuration of the decoding benchmark.

    Attributes:
        context_lengths: numbers of keys in the cache.
        batch_sizes: numbers of samples.
        num_kv_heads: key and value heads of the model.
        head_dim: features of a head.
        dtypes: "float32", "bfloat16", "float16".
        max_gib: omit larger caches.
        threads: PyTorch's threads, on a CPU.
        flex: also time FlexAttention, on a GPU.
        prompt_lengths: prompts after which language models with sigmoid and with softmax generate a token.
        results: where to write the results (JSON).
    """

    context_lengths: tuple[int, ...] = (1024, 4096, 16_384, 65_536, 262_144, 1_048_576)
    batch_sizes: tuple[int, ...] = (1, 8, 32, 128)
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    dtypes: tuple[str, ...] = ("bfloat16",)
    max_gib: float = 8.0
    threads: int = 2
    flex: bool = True
    prompt_lengths: tuple[int, ...] = (64, 1024, 8192)
    results: Path = Path("runs/benchmarks/decode.json")

    def __post_init__(self) -> None:
        super().__post_init__()
        counts = ("context_lengths", "batch_sizes", "num_kv_heads", "head_dim", "threads", "prompt_lengths")
        validation.check_at_least(1, self, *counts)
        validation.check_positive(self, "max_gib")
        if self.num_heads % self.num_kv_heads:
            raise validation.SettingsError(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and {self.num_kv_heads}"
            )
        validation.check_among(tuple(DTYPES), self, "dtypes")
        validation.check_output_file(self.results)
        check_not_empty(self, "context_lengths", "batch_sizes", "dtypes")


def benchmark_decode(config: DecodeBenchmark) -> dict[str, Any]:
    """Time one new token with a cache of 1k to 1M keys, compared with softmax and a copy: GB/s, on a GPU or a CPU.

    A cache that fits into the GPU's L2 cache (50 MB on an H200) is read from there, by the copy too.

    Returns:
        The content of the results file.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    threads = torch.get_num_threads()
    torch.set_num_threads(config.threads)
    with ResultsFile.of("decode", config) as results:
        try:
            for dtype, context_length, batch_size in results.remaining(cases(config)):
                rows = measure(config, context_length, batch_size, dtype, device, results.data["absent"])
                results.add((dtype, context_length, batch_size), rows)
        finally:
            torch.set_num_threads(threads)
        for (prompt_length,) in results.remaining([(length,) for length in config.prompt_lengths]):
            results.data.setdefault("generation", []).extend(measure_generation(config, prompt_length, device))
            results.add((prompt_length,), [])
        written = results.write(generation=results.data.get("generation", []))
    for dtype in config.dtypes:
        print_rows(f"{dtype}: one token with a cache", [r for r in written["rows"] if r["dtype"] == dtype], _COLUMNS)
    for row in written["generation"]:
        print(
            f"{row['activation']}, prompt of {row['prompt_length']:,} tokens: {row['tokens_per_second']:.1f} tokens/s "
            f"({row['softmax_time_over_this']:.2f} × softmax)"
        )
    print(f"results: {config.results}")
    return written


def cases(config: DecodeBenchmark) -> list[tuple[str, int, int]]:
    """Return dtype, context length and batch size of the caches of at most ``max_gib``."""

    def size(dtype: str, context_length: int, batch_size: int) -> int:
        return 2 * batch_size * context_length * config.num_kv_heads * config.head_dim * DTYPES[dtype].itemsize

    found = itertools.product(config.dtypes, config.context_lengths, config.batch_sizes)
    return [case for case in found if size(*case) <= config.max_gib * 2**30]


@dataclass(frozen=True)
class CacheInputs:
    """One new query for each sample, (B, 1, Hq, D), and the cached keys and values, (B, M, Hkv, D)."""

    query: Tensor
    key: Tensor
    value: Tensor


def measure(
    config: DecodeBenchmark,
    context_length: int,
    batch_size: int,
    dtype: str,
    device: torch.device,
    absent: dict[str, str],
) -> list[dict[str, Any]]:
    """Time all implementations on caches of one size; return a row for each implementation and layout.

    absent: receives the reasons of the implementations that are not timed.
    """
    generator = torch.Generator(device).manual_seed(context_length)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(DTYPES[dtype])

    reset_compiled()
    rows = []
    query = randn(batch_size, 1, config.num_heads, config.head_dim)
    for layout in (LENGTH_FIRST, HEADS_FIRST):
        b, m, h, d = batch_size, context_length, config.num_kv_heads, config.head_dim
        key, value = (
            randn(b, h, m, d).transpose(1, 2) if layout == HEADS_FIRST else randn(b, m, h, d) for _ in range(2)
        )
        inputs = CacheInputs(query, key, value)
        calls: dict[str, Callable[[], object]] = {}
        errors: dict[str, float] = {}
        for name, call in implementations(config, inputs, layout).items():
            try:
                errors[name] = check(name, call, inputs)
                calls[name] = call
            except Exception as error:  # implementations fail in various ways; the results give the reason
                absent[f"{name}, {dtype}, {context_length} keys, batch {batch_size}, {layout}"] = error_line(error)
        calls["copy"] = functools.partial(torch.empty_like(key).copy_, key)
        moved = key.nbytes + value.nbytes  # a copy of the keys reads and writes as many bytes
        with torch.no_grad():
            timings = time_calls(calls, config.rounds, config.round_seconds)
            graphs = time_graphs(calls, config.rounds, config.round_seconds)
        rows += [
            {
                "context_length": context_length,
                "batch_size": batch_size,
                "dtype": dtype,
                "layout": layout,
                "implementation": name,
                "median_ms": seconds * 1e3,
                "graph_ms": graphs[name].seconds * 1e3 if name in graphs else None,
                "gigabytes_per_second": moved / seconds / 1e9,
                "softmax_time_over_this": ratios.get(SDPA),
                "copy_time_over_this": ratios["copy"],
                "relative_error": errors.get(name),
            }
            for name, seconds, ratios in timings
        ]
    return rows


def measure_generation(config: DecodeBenchmark, prompt_length: int, device: torch.device) -> list[dict[str, Any]]:
    """Measure the tokens per second of a language model after a prompt (8 layers, width 512, 8 heads, 2 key heads)."""
    calls: dict[str, Callable[[], object]] = {}
    for name in ("sigmoid", "sigmoid, normalize", "softmax"):
        torch.manual_seed(0)
        model = LanguageModel(
            LanguageModelConfig(
                num_layers=8,
                embed_dim=512,
                num_heads=8,
                num_kv_heads=2,
                max_seq_len=prompt_length + 2048,
                position="rope",
                norm_placement="hybrid",
                activation="softmax" if name == "softmax" else "sigmoid",
                normalize=name == "sigmoid, normalize",
            )
        ).to(device)
        with torch.no_grad():
            cache, tokens = model.new_kv_cache(), torch.randint(256, (1, prompt_length), device=device)
            model.eval()(tokens, cache)
        calls[name] = functools.partial(_next_token, model, cache, tokens[:, -1:])
    return [
        {
            "prompt_length": prompt_length,
            "activation": name,
            "tokens_per_second": 1 / seconds,
            "softmax_time_over_this": ratios["softmax"],
        }
        for name, seconds, ratios in time_calls(calls, config.rounds, config.round_seconds)
    ]


@torch.no_grad()
def _next_token(model: LanguageModel, cache: list[KVCache], token: Tensor) -> None:
    """Run one step and remove its token from the cache again."""
    model(token, cache)
    for layer in cache:
        layer.length -= 1


@compiled
def _flex(q: Tensor, k: Tensor, v: Tensor) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention(q, k, v, enable_gqa=True)


def implementations(config: DecodeBenchmark, inputs: CacheInputs, layout: str) -> dict[str, Callable[[], Tensor]]:
    """Return the calls that are timed; each returns (B, 1, Hq, D)."""
    q, k, v = inputs.query, inputs.key, inputs.value
    bias = -math.log(k.shape[1])

    def ours() -> Tensor:
        return flash_attn_with_kvcache(q, k, v, causal=True, sigmoid_bias=bias)

    def softmax() -> Tensor:
        queries, keys, values = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(queries, keys, values, enable_gqa=True).transpose(1, 2)

    calls = {SDPA: softmax, OURS: ours}
    if layout == LENGTH_FIRST and k.shape[1] % PAGE == 0:
        key_pages, value_pages = (t.reshape(-1, PAGE, *t.shape[2:]) for t in (k, v))
        table = torch.arange(len(key_pages), device=k.device, dtype=torch.int32).view(len(k), -1)

        def paged() -> Tensor:
            return flash_attn_with_kvcache(q, key_pages, value_pages, block_table=table, causal=True, sigmoid_bias=bias)

        calls[PAGED] = paged
    if config.flex and q.is_cuda:

        def flex() -> Tensor:
            out: Tensor = _flex(*(t.transpose(1, 2) for t in (q, k, v)))
            return out.transpose(1, 2)

        calls[FLEX] = flex
    return calls


def check(name: str, call: Callable[[], Tensor], inputs: CacheInputs) -> float:
    """Return the error of the first sample's first and last head against float64, relative to the largest value.

    Raises:
        WrongResultError: if it exceeds the tolerance of the dtype, or is NaN.
    """
    with torch.no_grad():
        out = call()
    errors = []
    for h in (0, -1):  # of the queries, and of the keys that they see
        q, k, v = inputs.query[0, 0, h].double(), inputs.key[0, :, h].double(), inputs.value[0, :, h].double()
        s = k @ q * q.shape[0] ** -0.5
        expected = (s.softmax(0) if "softmax" in name else torch.sigmoid(s - math.log(len(k)))) @ v
        errors.append(((out[0, 0, h].double() - expected).abs().max() / expected.abs().max()).item())
    if not all(error <= reference.tolerance(out) for error in errors):  # max() may skip NaN
        raise reference.WrongResultError(
            f"{name} is wrong for a cache of {tuple(inputs.key.shape)}, {out.dtype}: relative errors {errors}"
        )
    return max(errors)
