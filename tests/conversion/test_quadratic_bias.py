"""The bias with terms in the query: its formula, its fit on exact and on Gaussian data, and its choice by layer."""

import copy
import functools

import pytest
import torch

from sigattn.conversion import convert as convert_fully
from sigattn.conversion.fit import BiasFit
from sigattn.conversion.row_statistics import RowStatistics, row_statistics
from sigattn.models import LanguageModel, LanguageModelConfig
from sigattn.nn import QuadraticBias
from sigattn.ops.problem import Problem, make_problem

# two steps of refinement, which has its own tests (test_refinement.py), instead of 64
convert = functools.partial(convert_fully, refine_steps=2)

H, D = 4, 6


def problem_of(query, key, **options):
    value = torch.randn(*key.shape[:-1], 3)
    return make_problem(Problem, query, key, value, **options)


def random_bias(size=0.3):
    bias = QuadraticBias(H, 3, D)
    with torch.no_grad():
        for p in bias.parameters():
            p.normal_(std=size)
    return bias


def formula(bias, query, visible):
    """c + a log(visible) + w·q + Σ λ (u·q)², head by head in float64."""
    out = []
    for h in range(H):
        q, w = query[:, h].double(), bias.query_term.linear.double().view(H, D)[h]
        u, curvature = (
            bias.query_term.directions.double().view(H, D, D)[h],
            bias.query_term.curvature.double().view(H, D),
        )
        term = q @ w + sum(curvature[h, r] * (q @ u[:, r]) ** 2 for r in range(D))
        term = term.clamp(bias.query_term.lower[h].double(), bias.query_term.upper[h].double())
        out.append(bias.constant[h].double() + bias.slope[h].double() * visible.double().log() + term)
    return torch.stack(out, 1).unsqueeze(-1)


def test_the_formula_and_its_limits():
    bias, query = random_bias(), torch.randn(2, H, 7, D)
    visible = torch.arange(1.0, 8.0)
    given = {"visible": visible.view(1, 1, 7, 1), "query": query}
    torch.testing.assert_close(bias(7, 7, **given).double(), formula(bias, query, visible), rtol=1e-5, atol=1e-5)
    free = bias(7, 7, **given)
    bias.query_term.lower.fill_(-0.1)
    bias.query_term.upper.fill_(0.2)
    torch.testing.assert_close(bias(7, 7, **given).double(), formula(bias, query, visible), rtol=1e-5, atol=1e-5)
    assert not torch.equal(bias(7, 7, **given), free)
    bias.query_term.reset_parameters()
    assert torch.equal(bias.query_term(query), torch.zeros(2, H, 7, 1))
    with pytest.raises(ValueError, match="pass query"):
        bias(7, 7, visible=given["visible"])


def test_in_half_precision():
    """A converted model may be loaded in bfloat16: coefficients are rounded, the arithmetic is float32."""
    bias, query = random_bias().bfloat16(), torch.randn(2, H, 7, D).bfloat16()
    visible = torch.arange(1.0, 8.0)
    found = bias(7, 7, visible=visible.view(1, 1, 7, 1), query=query)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.double(), formula(bias, query, visible), rtol=1e-5, atol=1e-5)


def written_out(query, linear, directions, curvature, lower, upper):
    y = query @ directions.view(H, D, D)
    term = query @ linear.view(H, D, 1) + (curvature.view(H, 1, D) * y.square()).sum(-1, keepdim=True)
    return term.clamp(lower.view(H, 1, 1), upper.view(H, 1, 1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["heads first", "heads inside"])
def test_gradients(dtype, layout, unchecked):
    """The backward pass against autograd's of the formula in float64, with rows beyond both limits."""
    torch.compiler.reset()
    torch.manual_seed(0)
    term = random_bias().query_term.to(dtype)
    term.lower.fill_(-0.25)
    term.upper.fill_(0.5)
    query = (torch.randn(2, H, 7, D) if layout == "heads first" else torch.randn(2, 7, H, D).transpose(1, 2)).to(dtype)
    inputs = [query.requires_grad_(), *term.parameters()]
    limits, weights = (term.lower, term.upper), torch.randn(2, H, 7, 1)

    def gradients(y, inputs):
        return torch.autograd.grad((y.double() * weights).sum(), inputs)

    doubles = [t.detach().double().requires_grad_() for t in inputs]
    truth = written_out(*doubles, *(t.double() for t in limits))
    assert truth.eq(-0.25).any()
    assert truth.eq(0.5).any()
    true, plain = gradients(truth, doubles), gradients(written_out(*inputs, *limits), inputs)
    for found in term(query), torch.compile(term, fullgraph=True, backend="aot_eager")(query):
        assert found.dtype is torch.promote_types(dtype, torch.float32)
        for got, expected, p in zip(gradients(found, inputs), true, plain, strict=True):
            assert got.dtype is dtype
            rounding = 4 * torch.finfo(dtype).eps * expected.abs().max()
            assert (got - expected).abs().max() <= 2 * (p - expected).abs().max() + rounding


def test_transforms():
    term = random_bias().query_term.double()
    x = torch.randn(4, 2, H, 7, D, dtype=torch.float64)
    parameters = dict(term.named_parameters())

    def loss(parameters, x):
        return torch.func.functional_call(term, parameters, (x,)).square().sum()

    mapped = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    for i, sample in enumerate(x):
        written = written_out(sample, *term.parameters(), term.lower, term.upper)
        expected = torch.autograd.grad(written.square().sum(), term.parameters())
        torch.testing.assert_close(tuple(mapped[name][i] for name in parameters), expected)


@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated
def test_a_trace_can_be_saved(tmp_path):
    term, x = random_bias().query_term, torch.randn(2, H, 7, D)
    torch.jit.save(torch.jit.trace(term, x), str(tmp_path / "term.pt"))
    x = torch.randn(3, H, 7, D)
    torch.testing.assert_close(torch.jit.load(str(tmp_path / "term.pt"))(x), term(x))


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_a_target_that_is_exactly_of_this_form_is_recovered(kv_heads):
    truth, generator = random_bias(0.1), torch.Generator().manual_seed(0)
    fit = None
    for _ in range(3):
        query = torch.randn(20, H, 50, D, generator=generator) * torch.tensor([1, 2, 0.5, 1, 1, 3])
        key = torch.randn(20, kv_heads, 50, D, generator=generator)
        problem = problem_of(query, key, is_causal=True)
        fit = fit or BiasFit(problem)
        visible = torch.arange(1.0, 51).expand(20, H, 50)
        counted = torch.ones(20, H, 50, dtype=torch.bool)
        lse = -formula(truth, query, torch.arange(1.0, 51)).squeeze(-1).float()
        lse[:, :, 40:], counted[:, :, 40:] = torch.nan, False  # rows of padding
        fit.update(query, RowStatistics(lse, visible, counted))
    found = fit.solve(with_query=True)
    wanted = formula(truth, query, torch.arange(1.0, 51)).detach()[:, :, :40]
    missed = found(50, 50, visible=visible.unsqueeze(-1), query=query).double()[:, :, :40] - wanted
    term = found.query_term(query)[:, :, :40]
    lower, upper = (t.view(-1, 1, 1) for t in (found.query_term.lower, found.query_term.upper))
    inside = (term > lower) & (term < upper)
    assert inside.double().mean() > 0.98
    assert missed[inside].std() < 0.02 * wanted.std()  # ridge
    plain = fit.solve(with_query=False)
    assert plain.query_term(query).eq(0).all()
    assert plain(50, 50, visible=visible.unsqueeze(-1), query=query)[:, :, :40].sub(wanted).std() > 0.5 * wanted.std()


def test_gaussian_keys():
    """-lse of many Gaussian keys is quadratic in the query, so that nearly all of its variance is explained."""
    torch.manual_seed(0)
    mean, factor = torch.randn(H, 1, D), torch.randn(H, D, D) / 2
    fit, rows, query = None, None, None
    for _ in range(4):
        query = torch.randn(2, H, 300, D)
        problem = problem_of(query, mean + torch.randn(2, H, 300, D) @ factor)
        rows = row_statistics(problem)
        fit = fit or BiasFit(problem)
        fit.update(query, rows)
    bias = fit.solve(with_query=True)
    b = bias(300, 300, visible=rows.visible.unsqueeze(-1), query=query).squeeze(-1)
    unexplained = (b + rows.lse).var((0, 2)) / rows.lse.var((0, 2))
    assert (unexplained < 0.1).all()


def test_wide_heads_use_the_directions_in_which_logits_vary():
    """Heads of 64: 8 directions are squared, and they contain those of the keys' variance, however small in q."""
    torch.manual_seed(0)
    scale = torch.ones(64)
    scale[:56] = 0.01  # of the keys: these features do not matter
    query, key = torch.randn(4, 2, 500, 64), torch.randn(4, 2, 500, 64) * scale * 3
    problem = problem_of(query, key)
    rows = row_statistics(problem)
    fit = BiasFit(problem)
    fit.update(query, rows)
    assert fit.features.projection.shape == (2, 64, 8)
    assert fit.features.projection[:, :56].norm() < 0.1 * fit.features.projection.norm()
    bias = fit.solve(with_query=True)
    b = bias(500, 500, visible=rows.visible.unsqueeze(-1), query=query).squeeze(-1)
    assert ((b + rows.lse).var((0, 2)) / rows.lse.var((0, 2)) < 0.3).all()


@pytest.mark.parametrize("norm", [torch.nn.LayerNorm(D), torch.nn.RMSNorm(D)])
def test_directions_that_queries_do_not_take(norm):
    """Normalised queries lie on a sphere; where training moves them off it, b hardly changes."""
    torch.manual_seed(0)
    with torch.no_grad():
        query, key = norm(torch.randn(4, H, 500, D)), norm(torch.randn(4, H, 500, D))
    problem = problem_of(query, key)
    rows = row_statistics(problem)
    fit = BiasFit(problem)
    fit.update(query, rows)
    bias = fit.solve(with_query=True)
    visible = rows.visible.unsqueeze(-1)
    b = bias(500, 500, visible=visible, query=query)
    for moved in (query + 0.01, query * 1.01):
        assert (bias(500, 500, visible=visible, query=moved) - b).abs().max() < 0.1 * b.std()


@pytest.mark.parametrize("rows", [2, 200])
def test_few_rows_do_no_harm(rows):
    """With fewer rows than features the terms in the query are not used; a conversion never gets worse by them."""
    torch.manual_seed(0)
    model = LanguageModel(LanguageModelConfig(activation="softmax", num_layers=1, embed_dim=32, num_heads=2))
    batches = torch.randint(256, (3, rows // 2, 2)).unbind() if rows == 2 else torch.randint(256, (4, 10, 20)).unbind()
    report = convert(model, list(batches))
    bias = model.blocks[0].attention.attention_bias
    assert isinstance(bias, QuadraticBias)
    assert all(p.isfinite().all() for p in bias.parameters())
    assert report.layers[0].error <= report.layers[0].error_log_n * 1.5
    assert model.config.learn_bias == "quadratic"


def test_the_random_state_is_kept():
    """Two conversions of one model are equal, also in layers that do not use the query."""
    torch.manual_seed(0)
    model = LanguageModel(LanguageModelConfig(activation="softmax", num_layers=1, embed_dim=32, num_heads=2))
    other, batches = copy.deepcopy(model), torch.randint(256, (3, 1, 2)).unbind()
    before = torch.get_rng_state()
    convert(model, batches)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(1)
    convert(other, batches)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_autocast():
    """A loss under autocast: statistics are computed in float32, and so are bias and scale of the result."""
    torch.manual_seed(0)
    config = LanguageModelConfig(activation="softmax", num_layers=2, embed_dim=32, num_heads=2, max_seq_len=32)
    batches = torch.randint(256, (6, 4, 32)).unbind()
    found = []
    for enabled in (False, True):
        torch.manual_seed(1)
        model = LanguageModel(config)
        with torch.no_grad():
            for block in model.blocks:
                block.attention.query_norm.weight *= 2

        def loss(model, tokens, enabled=enabled):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                return model.loss(tokens, tokens)

        report = convert(model, batches, loss=loss)
        found.append([value for layer in report.layers for value in (layer.error, *(h.r2 for h in layer.heads))])
        bias = model.blocks[0].attention.attention_bias
        query, output = torch.randn(2, 1, 2, 5, 16).unbind()
        with torch.autocast("cpu", torch.bfloat16):
            given = bias.query_term(query), *bias.row_scale(output)
        for value, expected in zip(given, (bias.query_term(query), *bias.row_scale(output)), strict=True):
            assert torch.equal(value, expected)
    assert found[1] == pytest.approx(found[0], abs=0.02)
