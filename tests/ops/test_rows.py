"""Functions of rows, by kernels and by operators of PyTorch, against their definitions in float64."""

import functools

import pytest
import torch

from sigattn.ops import llvm, rows

HEADS = 3
DTYPES = [torch.float32, torch.bfloat16]
# samples, rows of a head, features: whole blocks of rows, and parts of them and of vectors
SHAPES = [(1, 1, 32), (2, 5, 64), (1, 64, 32), (3, 65, 96), (2, 200, 64), (70, 3, 16), (1, 7, 24)]


def has_kernels(monkeypatch, wanted):
    """Let calls take the kernels as on a processor on which they are the default, or not."""
    if wanted and not (llvm._INSTALLED and llvm._HAS_THREADS):
        pytest.skip("needs llvmlite, and OpenMP under Linux")
    monkeypatch.setattr(llvm, "_MEASURED", wanted)


@pytest.fixture(params=["kernels", "operators"])
def path(request, monkeypatch):
    has_kernels(monkeypatch, request.param == "kernels")
    return request.param


def random(*shape, scale=1.0, dtype=torch.float32, seed=0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def scale_arguments(batch, n, width, dtype):
    """Return rows, of which one is 0 and one in each head has a limited scale, and parameters."""
    output = random(batch, HEADS, n, width, dtype=dtype)
    output[0, :, n // 2] = 0
    output[-1, :, -1] *= 1e4
    gain, power = random(HEADS, scale=0.3, seed=1), torch.tensor([-0.9, 0.0, 0.7])
    return output, gain, power, random(HEADS * width, scale=0.5, seed=2)


def scale_truth(output, gain, power, direction):
    """Return scaled rows and factors by the definition."""
    norm = torch.where(output.eq(0).all(-1, keepdim=True), output.new_zeros(()), output.square().sum(-1, True))
    norm = norm.where(norm == 0, norm.clamp(min=1e-300).sqrt()) + 1e-6
    cosine = torch.einsum("bhnd,hd->bhn", output, direction.view(HEADS, -1))[..., None] / norm
    exponent = gain.view(-1, 1, 1) + power.view(-1, 1, 1) * norm.log() + cosine
    factor = exponent.clamp(-5, 5).exp()
    return output * factor, factor


def quadratic_arguments(batch, n, width, dtype):
    query = random(batch, HEADS, n, width, dtype=dtype)
    linear = random(HEADS * width, scale=0.1, seed=1)
    directions = random(HEADS * width * 8, scale=0.2, seed=2)
    curvature = random(HEADS * 8, seed=3)
    lower, upper = torch.tensor([-0.5, -1e30, -2.0]), torch.tensor([0.7, 1e30, -1.0])
    return query, linear, directions, curvature, lower, upper


def quadratic_truth(query, linear, directions, curvature, lower, upper):
    """Return the limited quadratic form by the definition."""
    width = query.shape[-1]
    y = torch.einsum("bhnd,hdr->bhnr", query, directions.view(HEADS, width, -1))
    term = torch.einsum("bhnd,hd->bhn", query, linear.view(HEADS, width))
    term = term + torch.einsum("bhnr,hr->bhn", y.square(), curvature.view(HEADS, -1))
    return term[..., None].clamp(lower.view(-1, 1, 1), upper.view(-1, 1, 1))


FUNCTIONS = {
    "scale": (rows.scale_rows, scale_truth, scale_arguments),
    "quadratic": (rows.quadratic_form, quadratic_truth, quadratic_arguments),
}


def outputs_and_gradients(function, arguments, seed=7):
    """Return results, and gradients of a random sum of them with respect to the leading arguments that have one."""
    arguments = [t.detach() for t in arguments]
    leaves = [t.requires_grad_() for t in arguments[:4]]
    results = function(*arguments)
    results = results if isinstance(results, tuple) else (results,)
    # weights that every dtype represents
    weights = [random(*r.shape, seed=seed + k).bfloat16().double() for k, r in enumerate(results)]
    total = sum((r.double() * w).sum() for r, w in zip(results, weights, strict=True))
    return [*results, *torch.autograd.grad(total, leaves)]


def errors(found, truth):
    pairs = [(a.detach().double(), b.detach()) for a, b in zip(found, truth, strict=True)]
    return [float((a - b).norm() / b.norm().clamp(min=1e-30)) for a, b in pairs]


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_and_gradients_are_as_precise_as_those_of_the_formula(name, shape, dtype, path):
    function, truth, make = FUNCTIONS[name]
    arguments = make(*shape, dtype)
    exact = outputs_and_gradients(truth, [t.double() for t in arguments])
    plain = outputs_and_gradients(truth, [t.float() for t in arguments])
    plain = [p.to(dtype) if p.shape == arguments[0].shape else p for p in plain]  # results in the dtype of the rows
    found = outputs_and_gradients(function, arguments)
    assert [f.dtype for f in found] == [p.dtype for p in plain]
    for own, of_plain in zip(errors(found, exact), errors(plain, exact), strict=True):
        assert own <= 2 * of_plain + 1e-6
    with torch.no_grad():
        results = function(*arguments)
    for alone, trained in zip(results if isinstance(results, tuple) else (results,), found, strict=False):
        assert torch.equal(alone, trained)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_any_strides(name, dtype, path):
    function, _, make = FUNCTIONS[name]
    first, *others = make(2, 66, 64, dtype)
    expected = outputs_and_gradients(function, [first, *others])
    padded = torch.zeros(2, HEADS, 67, 65, dtype=dtype)
    padded[:, :, 1:, 1:] = first
    for view in (
        first.transpose(1, 2).contiguous().transpose(1, 2),
        first.mT.contiguous().mT,
        padded[:, :, 1:, 1:],
    ):
        found = outputs_and_gradients(function, [view, *others])
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    expanded = first[:1].expand(2, -1, -1, -1)
    found = outputs_and_gradients(function, [expanded, *others])
    alone = outputs_and_gradients(function, [expanded.contiguous(), *others])
    for a, b in zip(found, alone, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_kernels_are_taken(name, monkeypatch):
    """Where the kernels are the default, in training and without gradients; not for float64 or other widths."""
    has_kernels(monkeypatch, True)
    from sigattn.ops.llvm import rows as by_kernels

    calls, run = [], by_kernels._run
    monkeypatch.setattr(
        by_kernels, "_run", lambda kernel, *rest, **kw: calls.append(kernel) or run(kernel, *rest, **kw)
    )
    function, _, make = FUNCTIONS[name]
    outputs_and_gradients(function, make(1, 5, 32, torch.float32))
    assert calls == [name, f"{name}_backward"]
    with torch.no_grad():
        function(*make(1, 5, 32, torch.bfloat16))
    assert calls == [name, f"{name}_backward", {"scale": "scale", "quadratic": "quadratic_term"}[name]]
    outputs_and_gradients(function, make(1, 5, 24, torch.float32))
    outputs_and_gradients(function, make(1, 5, 32, torch.float64))
    function(*(t.double() if k else t for k, t in enumerate(make(1, 5, 32, torch.float32))))
    assert len(calls) == 3


@pytest.mark.parametrize("name", FUNCTIONS)
def test_not_a_number_stays_in_its_row(name, path):
    function, _, make = FUNCTIONS[name]
    first, *others = make(1, 20, 32, torch.float32)
    expected = function(first, *others)
    first[0, 1, 3, 4] = torch.nan
    found = function(first, *others)
    pairs = zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
    for a, b in pairs:
        assert a[0, 1, 3].isnan().all()
        a[0, 1, 3] = b[0, 1, 3]
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_threads_and_sizes_give_the_same_rows(name, monkeypatch):
    """The number of threads divides the work; a row does not depend on it."""
    has_kernels(monkeypatch, True)
    function, _, make = FUNCTIONS[name]
    first, *others = make(5, 130, 64, torch.float32)
    whole = function(first, *others)
    parts = [function(part, *others) for part in first.split([1, 4])]
    if isinstance(whole, tuple):
        whole, parts = whole[0], [p[0] for p in parts]
    assert torch.equal(whole, torch.cat(parts))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_several_gradients_at_once(name, path):
    function, _, make = FUNCTIONS[name]
    arguments = make(2, 5, 32, torch.float32)
    leaves = [t.requires_grad_() for t in arguments[:4]]
    result = function(*arguments)
    result = result[0] if isinstance(result, tuple) else result
    grads = torch.stack([random(*result.shape, seed=k) for k in range(3)])
    batched = torch.autograd.grad(result, leaves, grads, is_grads_batched=True, retain_graph=True)
    for k in range(3):
        alone = torch.autograd.grad(result, leaves, grads[k], retain_graph=True)
        for a, b in zip(batched, alone, strict=True):
            torch.testing.assert_close(a[k], b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_vmap(name, path):
    function, _, make = FUNCTIONS[name]
    first, *others = make(4, 5, 32, torch.float32)
    expected = function(first, *others)
    found = torch.vmap(functools.partial(function), (0, *[None] * len(others)))(first.unsqueeze(1), *others)
    pairs = zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
    for a, b in pairs:
        torch.testing.assert_close(a.squeeze(1), b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_rows_of_other_heads_are_refused(name, path):
    """Kernels would read beyond the parameters."""
    function, _, make = FUNCTIONS[name]
    first, *others = make(2, 5, 32, torch.float32)
    for other in (first[:, :2], first[:, :1], first[..., :16], first.repeat(1, 1, 1, 2), first[0], first[None]):
        with pytest.raises(ValueError, match=r"must be \(batch, 3, length, 32\), as the parameters have 3 heads of 32"):
            function(other, *others)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_rows(name, path):
    function, _, make = FUNCTIONS[name]
    first, *others = make(1, 5, 32, torch.float32)
    for empty in (first[:0], first[:, :, :0]):
        result = outputs_and_gradients(function, [empty, *others])
        assert result[0].shape[:3] == empty.shape[:3]
        assert all(g.eq(0).all() for g in result[-3:])
