"""A masked weight is exactly 0 for any logit (docs/operator.md); other non-finite arguments."""

import itertools
import math

import pytest
import torch

from sigattn import sigmoid_attention
from tests.ops.cases import SUPPORTING, path, ways

# interpreted kernels take their time, those of small tiles, with rows of padding and shared reciprocals, less
BACKENDS = [(backend, way) for backend in SUPPORTING for way in ways(backend) if way != "tuned"]
SIZES = {
    "as users meet it": (2, 17, 200), "bfloat16 products": (17,), "bfloat16 products, saved weights": (200,),
    "small tiles": (17,), "small tiles, bfloat16 products": (40,),
}  # fmt: skip
WAYS = [(*way, n) for way in BACKENDS for n in ((17,) if way[0] == "reference" else SIZES[way[1]])]


def added(visible):
    return torch.zeros(visible.shape).masked_fill(~visible, -math.inf)


def masks(n, m):
    """Return which keys are seen, and the arguments that say so, by kind."""
    i, j = torch.arange(n)[:, None], torch.arange(m)
    some, length = (i * 7 + j * 3) % 10 < 7, max(1, 2 * n // 3)
    return {
        "full": (some | True, {}),
        "causal": (j <= i, {"is_causal": True}),
        "window": ((j <= i + 1) & (j >= i - n // 3), {"window": (n // 3, 1)}),
        "left window": (j >= i - 2, {"window": (2, -1)}),
        "bool": (some, {"attn_mask": some}),
        "bool of keys": (some[:1].expand(n, m), {"attn_mask": some[:1]}),
        "no key": (some & False, {"attn_mask": torch.zeros(1, m, dtype=torch.bool)}),
        "-inf": (some, {"attn_mask": added(some)}),
        "-inf of keys and a softcap": (some[:1].expand(n, m), {"attn_mask": added(some[:1]), "softcap": 5.0}),
        "key_lengths": ((j < length).expand(n, m), {"key_lengths": torch.tensor([length])}),
    }


@pytest.mark.parametrize(("backend", "way", "n"), WAYS)
def test_what_a_number_that_is_not_finite_may_reach(backend, way, n):
    """The rule of docs/operator.md: NaN where a weight is visible; elsewhere NaN only where the rule allows it.

    Each head has a number of its own. The last key is beyond the last query of a causal call: a kernel's rows of
    padding would see it.
    """
    m = n + 3
    names, everything = ("query", "key", "value", "grad_out"), slice(None)
    poisons = [("query", n // 2, math.nan), ("grad_out", n // 2, math.nan)]
    poisons += [(name, at, math.nan) for name in ("key", "value") for at in (n - 1, m - 1)]
    poisons += [("key", m - 1, math.inf), ("key", n - 1, -math.inf), ("value", m - 1, math.inf)]
    kinds, dtypes = masks(n, m), (torch.float32, torch.bfloat16)
    if "small" in way or n >= 200:  # which take their time
        kinds = {kind: kinds[kind] for kind in ("causal", "left window", "bool", "-inf", "key_lengths")}
    if backend == "triton":
        poisons, dtypes = poisons[::3], dtypes[:1]
    for dtype, (kind, (visible, options)) in itertools.product(dtypes, kinds.items()):
        if backend == "llvm" and "softcap" in options:
            continue
        torch.manual_seed(n)
        shapes = zip(names, (n, m, m, n), strict=True)
        operands = {name: torch.randn(1, len(poisons), length, 16).to(dtype) for name, length in shapes}
        clean = outputs(backend, way, options, **operands)
        for head, (poisoned, at, poison) in enumerate(poisons):
            operands[poisoned][0, head, at, 3] = poison
        found = outputs(backend, way, options, **operands)
        for head, (poisoned, at, poison) in enumerate(poisons):
            seen = visible[at] if poisoned in ("query", "grad_out") else visible[:, at]  # of keys, or of queries
            itself = (torch.arange(operands[poisoned].shape[2]) == at) & seen.any()
            # rows and features, by result
            reached, allowed = {
                "query": ({"out": itself, "query": itself, "key": seen, "value": seen}, {"key": 3}),
                "key": ({"out": seen, "query": seen, "key": itself, "value": itself}, {"query": 3}),
                "value": ({"query": seen, "key": itself}, {"out": 3, "query": everything, "key": everything}),
                "grad_out": ({"query": itself, "key": seen}, {"query": everything, "key": everything, "value": 3}),
            }[poisoned]
            if kind == "key_lengths" and poisoned in ("key", "value"):  # beyond the length
                allowed = {}
            for name, mine, truth in zip(("out", "query", "key", "value"), found, clean, strict=True):
                mine, expected = mine[0, head], truth[0, head].clone()
                if name in reached:
                    expected[reached[name]] = math.nan
                if allowed.get(name) == 3 and poisoned in ("value", "grad_out"):
                    expected[seen, 3] = math.nan
                if name in allowed:
                    part = expected[:, allowed[name]]  # a view
                    part[~mine[:, allowed[name]].isfinite()] = math.nan
                if poison != poison:
                    mine = torch.where(mine.isinf(), math.nan, mine)
                else:  # weights of 0 or 1 where inf is visible
                    mine = torch.where(expected.isnan(), math.nan, mine)
                case = f"{name}, {poison} in {poisoned} {at}, {kind}, {dtype}"
                torch.testing.assert_close(mine, expected, equal_nan=True, msg=lambda m, case=case: f"{case}: {m}")


def outputs(backend, way, options, query, key, value, grad_out):
    leaves = [t.detach().requires_grad_() for t in (query, key, value)]
    with path(way):
        out = sigmoid_attention(*leaves, bias=-1.0, backend=backend, **options)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]
