"""Conversion with batches: c and a of each head are NumPy's least squares in float64; the report, and the losses."""

import copy
import dataclasses
import json
import math
import runpy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from sigattn.conversion import ConversionReport, HeadReport, LayerReport, convert
from sigattn.conversion.fit import MARGIN, SPREAD, BiasFit, RowStatistics, row_statistics
from sigattn.ops.problem import Problem, make_problem
from tests.conversion.layers import TOKENS, Attend, EagerAttention, Written, X, language, least_squares


class RowRecorder(TorchFunctionMode):
    """Records visible keys and lse of the rows of every softmax, (B, H, N) each, in the order of the calls."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            self.record(logits_of(*args, **kwargs or {}))
        elif getattr(func, "__name__", "") == "softmax":
            self.record(args[0])
        return func(*args, **kwargs or {})

    def record(self, logits):
        visible = logits > -1000
        lse = logits.double().masked_fill(~visible, -math.inf).logsumexp(-1)
        self.calls.append(torch.stack([visible.sum(-1).double().log(), -lse]))


def logits_of(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    key = key.double().repeat_interleave(query.shape[1] // key.shape[1], 1)
    logits = query.double() @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(logits.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is None:
        return logits
    return logits.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype is torch.bool else logits + attn_mask


def run(model, batch):
    return model(**batch) if isinstance(batch, dict) else model(*batch) if isinstance(batch, tuple) else model(batch)


def attend(**options):
    """Attention by PyTorch's function, with logits of several nats."""
    model = Attend()
    model.q.weight.data *= 4
    return model, [{"x": x, **options} for x in X]


def library():
    model = language(position="alibi", num_kv_heads=2)
    for block in model.blocks:
        block.attention.query.weight.data *= 3
    return model, list(TOKENS)


def of_transformers(kind):
    """Return a model of transformers, and batches whose second sample is padded, on the side that the model has."""
    pytest.importorskip("transformers")
    from tests.integrations.small_models import model_of

    model, batches = model_of(kind, "eager"), []
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and "norm" not in name:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    for ids in torch.randint(3, 50, (6, 2, 12)):
        mask = torch.ones(2, 12, dtype=torch.long)
        mask[1, slice(9, None) if kind == "t5" else slice(None, 3)] = 0
        batches.append({"input_ids": ids, "attention_mask": mask, "labels": ids})
    return model, batches


class ByMethod(Attend):
    def __init__(self):
        super().__init__()
        self.inner = Attend()

    def attend(self, *heads):
        return F.scaled_dot_product_attention(*heads, enable_gqa=True)

    def forward(self, x):
        return self.attend(*self.heads(x, x)).transpose(1, 2).flatten(2) + self.inner(x)


class Transposed(Written):
    def weights(self, logits):
        return super().weights(logits.transpose(1, 2)).transpose(1, 2)


def written(kind=Written, lengths=(9, 6, 7, 8), masked=True):
    model = kind(heads=4)
    model.qkv.weight.data.view(3, 4, 4, 16)[:2, 1:3] *= 4
    masks = [torch.full((n, n), -torch.inf).triu(1) if masked else None for n in lengths]
    return model, [(torch.randn(4, n, 16), mask) for n, mask in zip(lengths, masks, strict=True)]


PADDED = (torch.arange(7) < torch.tensor([7, 4])[:, None])[:, None, None]
MODELS = {
    "plain": attend,
    "causal": lambda: attend(is_causal=True),
    "padded": lambda: attend(attn_mask=PADDED),
    "added": lambda: attend(attn_mask=torch.zeros(2, 1, 1, 7).masked_fill(~PADDED, torch.finfo().min)),
    "rows": lambda: attend(attn_mask=torch.ones(7, 7, dtype=torch.bool).tril(2)),
    "cross": lambda: attend(y=torch.randn(2, 5, 16)),
    "by a method, and in a layer inside": lambda: (ByMethod(), list(X)),
    "ALiBi and shared keys": library,
    "llama": lambda: of_transformers("llama"),
    "gemma2": lambda: of_transformers("gemma2"),
    "t5": lambda: of_transformers("t5"),
    "written": written,
    "one head, three dimensions": lambda: (EagerAttention(), list(X)),
    # a dimension that has the number of heads by chance, in the first or the last batches
    "transposed": lambda: written(Transposed, (4, 4, 6, 6), masked=False),
    "transposed, later": lambda: written(Transposed, (6, 6, 4, 4), masked=False),
}


@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.parametrize("name", MODELS)
def test_c_and_a_are_least_squares(name):
    torch.manual_seed(0)
    model, batches = MODELS[name]()
    softmax = copy.deepcopy(model).eval()
    report = convert(model, batches)
    with torch.no_grad(), RowRecorder() as recorder:
        for batch in batches[: report.num_batches]:
            run(softmax, batch)
    count = len(report.layers)
    assert report.num_batches == math.ceil(0.75 * len(batches))
    assert len(recorder.calls) == count * report.num_batches
    for i, layer in enumerate(report.layers):
        seen = torch.cat([rows[0].flatten().exp() for rows in recorder.calls[i::count]])
        assert layer.visible_keys == (seen[seen > 0.5].min().round(), seen.max().round())
        for h, head in enumerate(layer.heads):
            of_head = slice(None) if len(layer.heads) == 1 else h
            x, y = torch.cat([rows[:, :, of_head].flatten(1) for rows in recorder.calls[i::count]], 1).numpy()
            visible = x >= 0
            assert (head.constant, head.slope) == pytest.approx(least_squares(x[visible], y[visible]), abs=1e-3)
    assert len(report.layers[0].heads) == (1 if "transposed" in name or "one head" in name else 4)


def test_as_many_blocks_as_heads_are_not_heads():
    class Blocks(Written):
        def weights(self, logits):
            return super().weights(logits.unflatten(2, (-1, 2))).flatten(2, 3)

    layer = Blocks(heads=2)
    assert len(convert(layer, torch.randn(4, 3, 4, 16).unbind()).layers[0].heads) == 1
    assert layer(torch.randn(3, 8, 16)).shape == (3, 8, 16)


# -- rows by themselves -----------------------------------------------------------------------------------------------

B, H, N, D = 3, 2, 40, 4
LENGTHS = torch.tensor([40, 31, 25])  # the rows behind are padding


def fitted(rows):
    fit = BiasFit(H)
    fit.update(rows)
    return fit.solve()


def test_rows_of_nearly_one_length_give_a_slope_near_minus_one():
    """Two numbers of visible keys that hardly differ, and denominators that differ more, as by chance."""
    visible = torch.tensor([100.0, 101.0]).repeat(50).view(1, 1, 100).expand(1, H, 100)
    lse = 5 + torch.tensor([-0.1, 0.1]).repeat(50).view(1, 1, 100).expand(1, H, 100)
    bias = fitted(RowStatistics(lse, visible, torch.ones_like(lse, dtype=torch.bool)))
    torch.testing.assert_close(bias.slope, -torch.ones(H), rtol=0, atol=0.2)  # that through both is -20
    b = bias(visible=visible.unsqueeze(-1))
    assert (b.squeeze(-1) + lse + MARGIN + SPREAD * 0.1).abs().max() < 0.15


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e4])
def test_rows_of_padding_do_not_count(value):
    query, key = torch.randn(B, H, N, D) * torch.tensor([1.0, 3, 0.5, 2]), torch.randn(B, H, N, D) + 0.5
    padding = (torch.arange(N) >= LENGTHS[:, None])[:, None, :, None]
    fits = []
    for v in (0.0, value):
        q, k = query.masked_fill(padding, v), key.masked_fill(padding, v)
        problem = make_problem(Problem, q, k, key, is_causal=True, key_lengths=LENGTHS)
        fits.append(fitted(row_statistics(problem)))
    for ours, expected in zip(fits[1].parameters(), fits[0].parameters(), strict=True):
        assert torch.equal(ours, expected)


# -- reports ----------------------------------------------------------------------------------------------------------


def model_and_batches():
    torch.manual_seed(0)
    model = language()
    for block in model.blocks:
        block.attention.query.weight.data *= 3  # attention that is not uniform
    tokens = torch.randint(32, (8, 2, 25))
    return model, [(t[:, :-1], t[:, 1:]) for t in tokens]


def loss(model, batch):
    return model.loss(*batch)


def test_the_losses_are_those_of_the_models():
    model, batches = model_and_batches()
    softmax, held_out = copy.deepcopy(model), batches[6:]
    before = sum(loss(model, b).item() for b in held_out) / 2
    report = convert(model, batches, loss=loss)
    assert report.loss_softmax == pytest.approx(before)
    assert report.loss == pytest.approx(sum(loss(model, b).item() for b in held_out) / 2)
    assert all(layer.error < 0.01 for layer in report.layers)
    with torch.no_grad():
        outputs = [torch.cat([m(tokens) for tokens, _ in held_out]) for m in (softmax, model)]
    assert report.change == pytest.approx(float((outputs[1] - outputs[0]).norm() / outputs[0].norm()), rel=1e-3)


def report_of(error, loss=1.0):
    heads = (HeadReport(0.5, -1.0, -0.5), HeadReport(float("nan"), -2.0, -0.5))
    return ConversionReport((), (LayerReport("a.b", heads, error, (3, 17)),), 0.02, 1.0, loss, 3, 1, True, 0.25)


def test_the_report_says_what_is_poor(tmp_path):
    assert report_of(0.49).warnings == []
    (layer,) = report_of(0.5).warnings
    assert "outputs of a.b differ from softmax's by 50% or more" in layer
    shown = repr(report_of(0.3))  # what a notebook shows, and print
    assert "a.b" in shown
    assert "3 … 17" in shown
    assert "-2.00 … -1.00  -0.50" in shown
    assert "30.00%" in shown
    assert "change of the model's output: 2.00%" in shown
    assert "loss: 1.0000 with softmax, 1.0000 converted" in shown
    assert "converted in 0.2 s" in shown
    report_of(0.6).save(str(tmp_path / "report.json"))
    saved = json.loads((tmp_path / "report.json").read_text())
    assert saved["layers"][0]["visible_keys"] == [3, 17]
    assert saved["layers"][0]["heads"][1] == {"r2": None, "constant": -2.0, "slope": -0.5}
    assert saved["warnings"] == report_of(0.6).warnings


@pytest.mark.parametrize(
    ("before", "after", "warns"),
    [(1.0, 1.04, False), (1.0, 1.2, True), (-2.0, -1.95, False), (-2.0, -1.8, True), (0.0, 0.1, True)],
)
def test_losses_that_rise_are_warned_of(before, after, warns):
    report = dataclasses.replace(report_of(0.1, after), loss_softmax=before)
    assert any(f"The loss rose from {before:g} to {after:g}: fine-tune" in w for w in report.warnings) == warns


def test_random_numbers_are_those_of_every_run():
    """An autoencoder draws masks in evaluation mode, too; with other masks its losses could not be compared."""
    model, batches = model_and_batches()
    drawn = []

    def noisy(model, batch):
        drawn.append(torch.rand(()).item())
        return loss(model, batch) + drawn[-1]

    state = torch.get_rng_state()
    report = convert(model, batches, loss=noisy)
    assert torch.equal(torch.get_rng_state(), state)
    assert len(set(drawn)) == 6  # of the batches of the fit; those of the two held-out ones are the first of these
    assert report.loss - report.loss_softmax < 0.5


def test_one_batch_in_inference_mode():
    """The model can be trained after it."""
    model, batches = model_and_batches()
    with torch.inference_mode():
        report = convert(model, batches[:1], loss=loss)
    assert not report.held_out
    assert "There was one batch only" in report.warnings[0]
    loss(model.train(), batches[0]).backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if "bias" in name)


@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_the_example_of_a_trained_sentence_encoder(capsys):
    """Where the packages with all-MiniLM-L6-v2 are installed."""
    pytest.importorskip("all_minilm_l6_v2")
    pytest.importorskip("sentence_transformers")
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "convert_embeddings.py"), run_name="__main__")
    assert float(capsys.readouterr().out.rpartition("least ")[2]) > 0.999
