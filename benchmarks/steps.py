"""``python -m benchmarks steps``: whole training steps on a CPU, with sigmoid attention and with softmax.

A step is the forward pass, the loss, the backward pass and the optimizer's update of a small language model, ViT or
speech model on random data; or the forward and the backward pass of one block of that ViT, or of its attention alone;
or the forward pass of either without a gradient. The model with softmax differs in the attention only, and the
converted ones are the sigmoid model with the bias of the visible keys, or with the bias and the output scale that
``sigattn.convert`` gives by default. Use the ratios: they run in turns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import baselines, provenance
from benchmarks.inputs import DTYPES, check_not_empty
from benchmarks.tables import print_rows
from benchmarks.timing import time_calls
from sigattn.nn.attention import Attention
from sigattn.nn.block import Block
from sigattn.recipes import find_recipe
from sigattn.recipes.recipe import Recipe
from sigattn.train.optimizer import make_optimizer
from sigattn.validation import check_among, check_at_least, check_output_file

_COLUMNS = {
    "model": ("model", ""),
    "tokens": ("n", ",d"),
    "dtype": ("dtype", ""),
    "": ("mode", ""),
    "attention": ("attention", ""),
    "ms a step": ("median_ms", ".2f"),
    "× softmax": ("softmax_time_over_this", ".2f"),
    "× sigmoid": ("sigmoid_time_over_this", ".2f"),
}
SOFTMAX, SIGMOID, CONVERTED = "softmax", "sigmoid", "sigmoid, converted"
_SETTINGS: dict[str, dict[str, Any]] = {
    CONVERTED: {"attention_bias": "log_visible", "learn_bias": "head", "normalize": True}
}
_RECIPES = {"language": "lm-1b-2k-tiny", "vit": "vit-supervised-tiny", "speech": "asr-ls960-tiny"}
_PARTS: dict[str, tuple[type[nn.Module], bool]] = {  # parts of "vit", and whether they are differentiated
    "block": (Block, True),
    "block-forward": (Block, False),
    "layer": (Attention, True),
    "layer-forward": (Attention, False),
}


@dataclass(frozen=True, kw_only=True)
class StepsBenchmark:
    """Configuration of the benchmark of training steps.

    Attributes:
        models: "language" (causal, with ALiBi), "vit", "speech" (key lengths, dropout); "block" (attention with its
            projections, feed-forward layer and norms) and "layer" (attention with its projections), both without
            optimizer; "block-forward" and "layer-forward" (their forward passes, without gradient).
        lengths: tokens of a sequence, for "vit" the nearest square below.
        tokens: tokens of a batch, at least one sequence.
        embed_dim: width of the models.
        num_heads: number of heads.
        num_layers: number of blocks.
        dtypes: "float32", "bfloat16" (by autocast).
        compiled: also time steps of models compiled by ``torch.compile``.
        threads: PyTorch's threads.
        rounds: how often each model is timed.
        results: where to write the results (JSON).
    """

    models: tuple[str, ...] = ("language", "vit", "speech", "layer")
    lengths: tuple[int, ...] = (64, 256, 1024, 4096)
    tokens: int = 4096
    embed_dim: int = 256
    num_heads: int = 4
    num_layers: int = 2
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    compiled: bool = True
    threads: int = 2
    rounds: int = 9
    results: Path = Path("runs/benchmarks/steps.json")

    def __post_init__(self) -> None:
        check_at_least(1, self, "lengths", "tokens", "embed_dim", "num_heads", "num_layers", "threads", "rounds")
        check_among((*_RECIPES, *_PARTS), self, "models")
        check_among(("float32", "bfloat16"), self, "dtypes")
        check_not_empty(self, "models", "lengths", "dtypes")
        check_output_file(self.results)


def benchmark_steps(config: StepsBenchmark) -> dict[str, Any]:
    """Time training steps of small models with softmax, sigmoid and converted attention on the CPU.

    Returns:
        The content of the results file.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(config.threads)
    rows = []
    try:
        for model in config.models:
            for n in config.lengths:
                found = [row for dtype in config.dtypes for row in _measure(config, model, n, dtype)]
                print_rows(f"{model}, {n:,} tokens", found, _COLUMNS)
                rows += found
    finally:
        torch.set_num_threads(threads)
    report = {**provenance.describe("steps", asdict(config)), "rows": rows}
    provenance.write(config.results, report)
    print(f"results: {config.results}")
    return report


def _measure(config: StepsBenchmark, model: str, n: int, dtype: str) -> list[dict[str, Any]]:
    calls: dict[tuple[bool, str], Callable[[], object]] = {}
    for compiled in (False, True) if config.compiled else (False,):
        for attention in (SOFTMAX, SIGMOID, CONVERTED):
            calls[compiled, attention] = _step(config, model, n, attention, DTYPES[dtype], compiled=compiled)
    baselines.reset_compiled()
    timings = time_calls({f"{c} {a}": call for (c, a), call in calls.items()}, config.rounds)
    return [
        {
            "model": model,
            "n": n,
            "dtype": dtype,
            "mode": "compiled" if compiled else "eager",
            "attention": attention,
            "median_ms": timing.seconds * 1e3,
            "softmax_time_over_this": timing.ratios[f"{compiled} {SOFTMAX}"],
            "sigmoid_time_over_this": timing.ratios[f"{compiled} {SIGMOID}"],
        }
        for (compiled, attention), timing in zip(calls, timings, strict=True)
    ]


def _step(
    config: StepsBenchmark, model: str, n: int, attention: str, dtype: torch.dtype, *, compiled: bool
) -> Callable[[], object]:
    """Return a training step of a model, built with the same seed for every attention."""
    torch.manual_seed(0)
    recipe, batch = _recipe_and_batch(config, model, n)
    if attention == SOFTMAX:
        recipe = recipe.softmax()
    elif attention in _SETTINGS:
        recipe = recipe.with_transformer(**_SETTINGS[attention])
    module: nn.Module = recipe.task.build(recipe.model).train()
    if model in _PARTS:
        kind, differentiated = _PARTS[model]
        part = next(m for m in module.modules() if isinstance(m, kind))
        x = torch.randn(max(1, config.tokens // n), n, config.embed_dim, requires_grad=differentiated)
        return _pass(part, x, dtype, compiled=compiled)
    optimizer = make_optimizer(module, recipe.training, config.embed_dim)
    call: Any = torch.compile(module, dynamic=False) if compiled else module

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
            loss = recipe.task.loss(call, batch)
        loss.backward()
        optimizer.step()

    return step


def _pass(part: nn.Module, x: Tensor, dtype: torch.dtype, *, compiled: bool) -> Callable[[], object]:
    """Return the forward pass of a part of a model at x, and the backward pass if x needs a gradient."""
    call: Any = torch.compile(part, dynamic=False) if compiled else part
    inputs = [x, *part.parameters()]

    def run() -> object:
        autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is torch.bfloat16)
        with autocast, torch.set_grad_enabled(x.requires_grad):
            out = call(x)
        return torch.autograd.grad(out, inputs, torch.ones_like(out)) if x.requires_grad else out

    return run


def _recipe_and_batch(config: StepsBenchmark, model: str, n: int) -> tuple[Recipe, tuple[Tensor, ...]]:
    """Return the recipe of a model of this length, and a random batch."""
    recipe, size = find_recipe(_RECIPES["vit" if model in _PARTS else model]), max(1, config.tokens // n)
    shared: dict[str, Any] = {
        "embed_dim": config.embed_dim,
        "num_heads": config.num_heads,
        "num_layers": config.num_layers,
    }
    if model == "language":
        tokens = torch.randint(256, (size, n + 1))
        return recipe.with_transformer(**shared, max_seq_len=n), (tokens[:, :-1], tokens[:, 1:])
    if model == "vit" or model in _PARTS:
        side = 2 * math.isqrt(n)  # patches of 2 x 2 pixels
        images = torch.randn(size, 1, side, side)
        return recipe.with_transformer(**shared, image_size=side, pool="average"), (images, torch.randint(10, (size,)))
    frames = torch.randn(size, 3 * n, 80)  # a stride of 3
    lengths = torch.randint(2 * n, 3 * n + 1, (size,))
    lengths[0] = 3 * n
    letters = max(1, n // 8)
    targets = torch.randint(1, 29, (size, letters))
    return recipe.with_transformer(**shared), (frames, lengths, targets, torch.full((size,), letters))
