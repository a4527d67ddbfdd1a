"""A masked weight is exactly 0 for any logit (docs/operator.md); other non-finite arguments."""

import itertools
import math

import pytest
import torch

from sigattn import sigmoid_attention
from tests.ops.cases import SUPPORTING, path, ways

POISONED = 9  # the key, or value, that holds inf or NaN in its column 3
# interpreted kernels take their time
BACKENDS = [(backend, way) for backend in SUPPORTING for way in ways(backend) if way != "tuned"]
N, M = 20, 24


def triangle():
    return torch.ones(N, M, dtype=torch.bool).tril()


def some_rows():
    visible = torch.ones(N, M, dtype=torch.bool)
    visible[: N // 2, POISONED] = False
    return visible


def no_row():
    visible = torch.ones(N, M, dtype=torch.bool)
    visible[:, POISONED] = False
    return visible


def added(visible):
    return torch.zeros(visible.shape).masked_fill(~visible, -math.inf)


# By name: which keys are seen, and the arguments that say so. "beyond the last query" moves the poison to a key that a
# kernel's padding rows would see.
KINDS = {
    "bool": (some_rows(), {"attn_mask": some_rows()}),
    "bool for every query": (no_row(), {"attn_mask": no_row()[:1]}),
    "-inf": (some_rows(), {"attn_mask": added(some_rows())}),
    "-inf for every query": (no_row(), {"attn_mask": added(no_row())[:1]}),
    "-inf and a softcap": (no_row(), {"attn_mask": added(no_row()), "softcap": 5.0}),
    "causal": (triangle(), {"is_causal": True}),
    "beyond the last query": (triangle(), {"is_causal": True}),
    "window": (triangle().triu(-5), {"window": (5, 0)}),
    "left window": (torch.ones(N, M, dtype=torch.bool).triu(-2), {"window": (2, -1)}),
    "key_lengths": (torch.arange(M).expand(N, M) < POISONED, {"key_lengths": torch.tensor([POISONED])}),
}


def formula(q, k, v, grad_out, visible, softcap=0.0):
    """Return output and gradients in float64, without computing the logits of masked weights."""
    q, k, v, grad_out = (t.detach().double() for t in (q, k, v, grad_out))
    scale = q.shape[-1] ** -0.5
    product = scale * q @ k.mT
    capped = softcap * torch.tanh(product / softcap) if softcap else product
    slope = 1 - torch.tanh(product / softcap).square() if softcap else 1.0
    p = torch.where(visible, torch.sigmoid(capped - 1.0), 0.0)
    ds = torch.where(visible, grad_out @ v.mT * p * (1 - p) * slope, 0.0)
    return p @ v, scale * ds @ k, scale * ds.mT @ q, p.mT @ grad_out


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("backend", "way"), BACKENDS)
def test_inf_and_nan_in_a_masked_key(backend, way, kind):
    visible, options = KINDS[kind]
    if backend == "llvm" and "softcap" in options:
        pytest.skip("it does not support softcap")
    poisoned = N + 2 if kind == "beyond the last query" else POISONED
    seeing = visible[:, poisoned]
    pairs = [(torch.bfloat16, math.nan), *((torch.float32, p) for p in (math.inf, -math.inf, math.nan))]
    for dtype, poison in pairs if backend != "triton" else pairs[1::2]:
        torch.manual_seed(0)
        q, k, v = (torch.randn(1, 2, n, 8).to(dtype) for n in (N, M, M))
        grad_out = torch.randn(1, 2, N, 8).to(dtype)
        k[:, :, poisoned, 3] = poison
        if kind == "key_lengths":
            v[:, :, poisoned, 3] = poison
        q, k, v = (t.requires_grad_() for t in (q, k, v))
        with path(way):
            out = sigmoid_attention(q, k, v, bias=-1.0, backend=backend, **options)
            found = [out, *torch.autograd.grad(out, (q, k, v), grad_out)]
        existing = [torch.where(t.isfinite(), t, 0.0) if kind == "key_lengths" else t for t in (q, k, v)]
        expected = formula(*existing, grad_out, visible, options.get("softcap", 0.0))
        tolerance = {"rtol": 0.05, "atol": 0.1} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
        for name, mine, truth in zip(("output", "query", "key", "value"), found, expected, strict=True):
            mine = mine.detach().double()
            if name == "query":  # a sum of dS · K, which has 0 · NaN in column 3
                columns = [c for c in range(8) if c != 3 or kind == "key_lengths"]
                mine, truth = mine[:, :, ~seeing][..., columns], truth[:, :, ~seeing][..., columns]
            elif poison != poison or name in ("key", "value"):
                mine, truth = (t if name == "output" or not seeing.any() else drop(t, poisoned) for t in (mine, truth))
            torch.testing.assert_close(mine, truth, equal_nan=True, **tolerance, msg=f"{name}, {poison}, {dtype}")


SIZES = (2, 17, 65, 200, 300)
GUARANTEES = [(b, n) for b in SUPPORTING for n in (SIZES if b != "triton" else (17,))]


def masks(n):
    """Return which keys are seen, and the arguments that say so, by kind."""
    i, j = torch.arange(n)[:, None], torch.arange(n)
    some = (i * 7 + j * 3) % 10 < 7
    length = max(1, 2 * n // 3)
    return {
        "full": (some | True, {}),
        "causal": (j <= i, {"is_causal": True}),
        "window": ((j <= i + 1) & (j >= i - n // 3), {"window": (n // 3, 1)}),
        "bool": (some, {"attn_mask": some}),
        "bool of keys": (some[:1].expand(n, n), {"attn_mask": some[:1]}),
        "no key": (torch.zeros(n, n, dtype=torch.bool), {"attn_mask": torch.zeros(1, n, dtype=torch.bool)}),
        "-inf": (some, {"attn_mask": added(some)}),
        "key_lengths": ((j < length).expand(n, n), {"key_lengths": torch.tensor([length])}),
    }


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize(("backend", "n"), GUARANTEES)
def test_what_a_nan_may_reach(backend, n):
    """The rule of docs/operator.md: NaN where a weight is visible; elsewhere NaN only where the rule allows it."""
    dtypes, kinds = (torch.float32, torch.bfloat16), masks(n)
    if backend == "triton":  # interpreted kernels take their time
        dtypes, kinds = dtypes[:1], {kind: kinds[kind] for kind in ("causal", "bool", "bool of keys", "no key")}
    names, results, everything = ("query", "key", "value", "grad_out"), ("out", "query", "key", "value"), slice(None)
    for dtype, (kind, (visible, options)) in itertools.product(dtypes, kinds.items()):
        torch.manual_seed(n)
        operands = dict(zip(names, torch.randn(4, 1, 2, n, 16).to(dtype), strict=True))
        clean = outputs(backend, options, **operands)
        for poisoned in names:
            is_query = poisoned in ("query", "grad_out")
            at = n // 2 if is_query else n - 1
            seen = visible[at] if is_query else visible[:, at]  # of keys, or of queries
            itself = (torch.arange(n) == at) & seen.any()
            tensor = operands[poisoned].clone()
            tensor[0, 1, at, 3] = math.nan
            found = outputs(backend, options, **{**operands, poisoned: tensor})
            # rows and features, by result
            reached, allowed = {
                "query": ({"out": itself, "query": itself, "key": seen, "value": seen}, {"key": 3}),
                "key": ({"out": seen, "query": seen, "key": itself, "value": itself}, {"query": 3}),
                "value": ({"query": seen, "key": itself}, {"out": 3, "query": everything, "key": everything}),
                "grad_out": ({"query": itself, "key": seen}, {"query": everything, "key": everything, "value": 3}),
            }[poisoned]
            if kind == "key_lengths" and not is_query:  # beyond the length
                allowed = {}
            for name, mine, truth in zip(results, found, clean, strict=True):
                expected = truth.clone()
                if name in reached:
                    expected[0, 1, reached[name]] = math.nan
                if allowed.get(name) == 3 and poisoned in ("value", "grad_out"):
                    expected[0, 1, seen, 3] = math.nan
                if name in allowed:
                    part = expected[0, 1, :, allowed[name]]  # a view
                    part[mine[0, 1, :, allowed[name]].isnan()] = math.nan
                case = f"{name}, NaN in {poisoned}, {kind}, {dtype}"
                torch.testing.assert_close(mine, expected, equal_nan=True, msg=case)


def outputs(backend, options, query, key, value, grad_out):
    """Return the output and the gradients of query, key and value."""
    leaves = [t.detach().requires_grad_() for t in (query, key, value)]
    ways = {"blocked": "bfloat16 products", "triton": "small tiles"}  # rows of padding; pairs that share a reciprocal
    with path(ways.get(backend, "as users meet it")):
        out = sigmoid_attention(*leaves, bias=-1.0, backend=backend, **options)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]


def drop(t, row):
    """Return the tensor without one row."""
    return t[:, :, [i for i in range(t.shape[2]) if i != row]]


@pytest.mark.parametrize(("backend", "way"), BACKENDS)
@pytest.mark.filterwarnings("ignore:(invalid|overflow|divide).*:RuntimeWarning")
def test_an_infinite_bias(backend, way):
    """All weights are 1 or all are 0."""
    for dtype, bias in itertools.product((torch.float32, torch.bfloat16), (math.inf, -math.inf, 3.4e38)):
        q, k, v = (torch.randn(1, 2, n, 8).to(dtype) for n in (N, M, M))
        expected = v.double().sum(2, keepdim=True).expand(q.shape) * (bias > 0)
        tolerance = 0.1 if dtype is torch.bfloat16 else 1e-4
        for given in (bias, torch.full((2, 1, 1), bias)):
            with path(way):
                out = sigmoid_attention(q, k, v, bias=given, backend=backend)
            torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("backend", ["reference", "blocked", None])
def test_values_without_features(backend):
    q, k = torch.randn(2, 1, 2, 40, 4, requires_grad=True)
    v = torch.randn(1, 2, 40, 0, requires_grad=True)
    gradients = torch.autograd.grad(sigmoid_attention(q, k, v, backend=backend).sum(), (q, k, v))
    assert [g.shape for g in gradients] == [q.shape, k.shape, v.shape]
    assert not any(g.any() for g in gradients)
