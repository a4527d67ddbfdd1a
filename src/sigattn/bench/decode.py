"""``sigattn bench decode``: one new token against a cache, beside PyTorch's softmax, on a GPU or a CPU.

Decoding reads the cache once and does little else, so what counts is bytes a second, beside those of a plain copy on
the same machine. Each implementation is checked against float64 before it is timed. Caches
are (batch, length, heads, head_dim) as flash-attn has them, (batch, heads, length, head_dim), or pages.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

from sigattn.bench import gpu, provenance
from sigattn.bench.baselines import compiled, reset_compiled
from sigattn.bench.results_file import Report
from sigattn.flash import flash_attn_with_kvcache
from sigattn.models.language import LanguageModel, LanguageModelConfig
from sigattn.nn.kv_cache import KVCache
from sigattn.validation import (
    SettingsError,
    check_among,
    check_at_least,
    check_not_empty,
    check_not_negative,
    check_positive,
)

OURS, PAGED, SOFTMAX, FLEX = "sigattn", "sigattn, pages of 64", "SDPA softmax", "Flex softmax"
PAGE = 64
LAYOUTS = ("length first", "heads first")


@dataclass(frozen=True, kw_only=True)
class DecodeBenchmark:
    """What to measure.

    Attributes:
        contexts: keys in the cache.
        batches: numbers of samples.
        heads: query heads of the model.
        kv_heads: key and value heads of the model.
        head_dim: features of a head.
        dtypes: "float32", "bfloat16", "float16".
        most_gib: caches larger than this are left out.
        threads: PyTorch's threads, on a CPU.
        flex: whether FlexAttention takes part, on a GPU.
        prompts: lengths after which a language model makes a token, sigmoid beside its softmax twin.
        rounds: how often each implementation is timed.
        round_seconds: the least time of a round.
        resume: continue the results in the file instead of replacing them.
        results: where to write the results as JSON.
    """

    contexts: tuple[int, ...] = (1024, 4096, 16_384, 65_536, 262_144, 1_048_576)
    batches: tuple[int, ...] = (1, 8, 32, 128)
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtypes: tuple[str, ...] = ("bfloat16",)
    most_gib: float = 8.0
    threads: int = 2
    flex: bool = True
    prompts: tuple[int, ...] = (64, 1024, 8192)
    rounds: int = 7
    round_seconds: float = 0.01
    resume: bool = False
    results: Path = Path("runs/bench/decode.json")

    def __post_init__(self) -> None:
        check_at_least(1, self, "contexts", "batches", "heads", "kv_heads", "head_dim", "threads", "prompts", "rounds")
        check_positive(self, "most_gib")
        if self.heads % self.kv_heads:
            raise SettingsError(f"heads must be a multiple of kv_heads, got {self.heads} and {self.kv_heads}")
        check_not_negative(self, "round_seconds")
        check_among(tuple(gpu.DTYPES), self, "dtypes")
        check_not_empty(self, "contexts", "batches", "dtypes")


@dataclass(frozen=True)
class Cache:
    """One new query for each sample, (B, 1, Hq, D), and the keys and values, (B, M, Hkv, D) seen in one layout."""

    query: Tensor
    key: Tensor
    value: Tensor

    @property
    def bytes(self) -> int:
        """Of keys and values."""
        return 2 * self.key.numel() * self.key.element_size()


def run(config: DecodeBenchmark) -> dict[str, Any]:
    """Measure, write the results after each cache, print tables; return what was written."""
    console, device = Console(), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    described = provenance.describe("decode", {**asdict(config), "results": ""})
    if device.type == "cuda":
        described["device"] = torch.cuda.get_device_name()
    before = torch.get_num_threads()
    torch.set_num_threads(config.threads)
    with Report(config.results, described, resume=config.resume) as report:
        try:
            for dtype, context, batch in report.remaining(cases(config)):
                found = measure(config, context, batch, gpu.DTYPES[dtype], device, report.data["absent"])
                report.add((dtype, context, batch), found)
        finally:
            torch.set_num_threads(before)
        for (prompt,) in report.remaining([(prompt,) for prompt in config.prompts]):
            report.data.setdefault("generation", []).extend(generation(config, prompt, device))
            report.add((prompt,), [])
        result = report.write(generation=report.data.get("generation", []))
    for dtype in config.dtypes:
        console.print(table(result["rows"], dtype))
    for row in result["generation"]:
        console.print(
            f"{row['mechanism']}, {row['prompt']:,} tokens before: {row['tokens_per_second']:.1f} tokens/s "
            f"({row['softmax_time_over_this']:.2f} × softmax)",
            highlight=False,
        )
    console.print(f"results: {config.results}", highlight=False, soft_wrap=True)
    return result


def cases(config: DecodeBenchmark) -> list[tuple[str, int, int]]:
    """Dtype, context and batch size of the caches that are small enough."""

    def size(dtype: str, context: int, batch: int) -> int:
        return 2 * batch * context * config.kv_heads * config.head_dim * gpu.DTYPES[dtype].itemsize

    found = itertools.product(config.dtypes, config.contexts, config.batches)
    return [case for case in found if size(*case) <= config.most_gib * 2**30]


def measure(
    config: DecodeBenchmark, context: int, batch: int, dtype: torch.dtype, device: torch.device, absent: dict[str, str]
) -> list[dict[str, Any]]:
    """All implementations on caches of one size: a row for each implementation and layout."""
    generator = torch.Generator(device).manual_seed(context)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    reset_compiled()
    rows = []
    query = randn(batch, 1, config.heads, config.head_dim)
    for layout in LAYOUTS:
        shape = (batch, context, config.kv_heads, config.head_dim)
        if layout == "heads first":
            b, m, h, d = shape
            key, value = (randn(b, h, m, d).transpose(1, 2) for _ in range(2))
        else:
            key, value = randn(*shape), randn(*shape)
        cache = Cache(query, key, value)
        calls: dict[str, Callable[[], object]] = {}
        errors: dict[str, float] = {}
        for name, call in implementations(config, cache, layout).items():
            try:
                errors[name] = check(name, call, cache)
            except Exception as error:  # wrong, or failed in a way of its own: it is not timed, and the others are
                absent[f"{name}, {dtype}, {context} keys, batch {batch}, {layout}"] = (
                    f"{type(error).__name__}: {error}"[:300]
                )
            else:
                calls[name] = call
        calls["copy"] = functools.partial(torch.empty_like(cache.key).copy_, cache.key)
        with torch.no_grad():
            for name, seconds, ratios in gpu.race(calls, config.rounds, config.round_seconds):
                moved = cache.bytes  # a copy of the keys reads and writes as much as reading keys and values
                rows.append(
                    {
                        "context": context,
                        "batch": batch,
                        "dtype": str(dtype).removeprefix("torch."),
                        "layout": layout,
                        "implementation": name,
                        "median_ms": seconds * 1e3,
                        "gigabytes_per_second": moved / seconds / 1e9,
                        "softmax_time_over_this": ratios.get(SOFTMAX),
                        "copy_time_over_this": ratios["copy"],
                        "relative_error": errors.get(name),
                    }
                )
    return rows


def generation(config: DecodeBenchmark, prompt: int, device: torch.device) -> list[dict[str, Any]]:
    """Tokens a second of a language model (8 layers of 512, 8 heads of which 2 for keys), after a prompt."""
    calls: dict[str, Callable[[], object]] = {}
    for mechanism in ("sigmoid", "softmax"):
        torch.manual_seed(0)
        model = LanguageModel(
            LanguageModelConfig(
                num_layers=8,
                embed_dim=512,
                num_heads=8,
                num_kv_heads=2,
                max_seq_len=prompt + 2048,
                position="rope",
                norm_placement="hybrid",
                activation="sigmoid" if mechanism == "sigmoid" else "softmax",
            )
        ).to(device)
        with torch.no_grad():
            cache, tokens = model.new_kv_cache(), torch.randint(256, (1, prompt), device=device)
            model.eval()(tokens, cache)
        calls[mechanism] = functools.partial(_next_token, model, cache, tokens[:, -1:])
    return [
        {
            "prompt": prompt,
            "mechanism": mechanism,
            "tokens_per_second": 1 / seconds,
            "softmax_time_over_this": ratios["softmax"],
        }
        for mechanism, seconds, ratios in gpu.race(calls, config.rounds, config.round_seconds)
    ]


@torch.no_grad()
def _next_token(model: LanguageModel, cache: list[KVCache], token: Tensor) -> None:
    """One step, after which the cache is as it was."""
    model(token, cache)
    for layer in cache:
        layer.length -= 1


def implementations(config: DecodeBenchmark, cache: Cache, layout: str) -> dict[str, Callable[[], Tensor]]:
    """Who takes part: each gives (B, 1, Hq, D)."""
    q, k, v = cache.query, cache.key, cache.value
    bias = -math.log(k.shape[1])

    def ours() -> Tensor:
        return flash_attn_with_kvcache(q, k, v, causal=True, sigmoid_bias=bias)

    def softmax() -> Tensor:
        queries, keys, values = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(queries, keys, values, enable_gqa=True).transpose(1, 2)

    calls = {SOFTMAX: softmax, OURS: ours}
    if layout == "length first" and k.shape[1] % PAGE == 0:
        key_pages, value_pages = (t.reshape(-1, PAGE, *t.shape[2:]) for t in (k, v))
        places = torch.arange(len(key_pages), device=k.device, dtype=torch.int32).view(len(k), -1)

        def paged() -> Tensor:
            return flash_attn_with_kvcache(
                q, key_pages, value_pages, block_table=places, causal=True, sigmoid_bias=bias
            )

        calls[PAGED] = paged
    if config.flex and q.is_cuda:

        def flex() -> Tensor:
            out: Tensor = _compiled_flex()(*(t.transpose(1, 2) for t in (q, k, v)))
            return out.transpose(1, 2)

        calls[FLEX] = flex
    return calls


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    def flex(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flex_attention(q, k, v, enable_gqa=True)

    return compiled(flex)


def check(name: str, call: Callable[[], Tensor], cache: Cache) -> float:
    """The error of the first sample's first and last head against float64, relative to the largest value.

    Raises:
        RuntimeError: if it is beyond what the dtype explains; a wrong implementation is not timed.
    """
    heads = cache.query.shape[2]
    group = heads // cache.key.shape[2]
    with torch.no_grad():
        out = call()
    errors = []
    for h in (0, heads - 1):
        q = cache.query[0, 0, h].double()
        k, v = (t[0, :, h // group].double() for t in (cache.key, cache.value))
        s = k @ q * q.shape[0] ** -0.5
        p = s.softmax(0) if "softmax" in name else torch.sigmoid(s - math.log(len(k)))
        expected = p @ v
        errors.append(((out[0, 0, h].double() - expected).abs().max() / expected.abs().max()).item())
    worst = gpu.largest(errors)
    if not worst <= gpu.TOLERANCE[out.dtype]:
        raise RuntimeError(f"{name} is wrong at {tuple(cache.key.shape)}, {out.dtype}: relative error {worst}")
    return worst


def table(rows: list[dict[str, Any]], dtype: str) -> Table:
    """The rows of one dtype."""
    result = Table(title=f"{dtype}: one token against a cache")
    for column in ("context", "batch", "layout", "", "ms", "GB/s", "× softmax", "× copy", "error"):
        result.add_column(column, justify="left" if column in ("layout", "") else "right")
    for row in (r for r in rows if r["dtype"] == dtype):
        error = row["relative_error"]
        result.add_row(
            f"{row['context']:,}",
            str(row["batch"]),
            row["layout"],
            row["implementation"],
            f"{row['median_ms']:.3f}",
            f"{row['gigabytes_per_second']:.1f}",
            "–" if row["softmax_time_over_this"] is None else f"{row['softmax_time_over_this']:.2f}",
            f"{row['copy_time_over_this']:.2f}",
            "" if error is None else f"{error:.1e}",
            end_section=row["implementation"] == "copy",
        )
    return result
