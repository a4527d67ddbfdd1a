"""Conversion with a bias of the number of visible keys only, which no row of queries or outputs is read for."""

import copy
import functools

import pytest
import torch
from torch import nn

from sigattn.conversion import convert as convert_fully
from sigattn.models import saving
from sigattn.nn import BatchLengthBias, QuadraticBias, VisibleKeysLinearBias
from tests.conversion.test_convert import inputs_of, loss, model_and_batches

convert = functools.partial(convert_fully, refine_steps=0, bias=VisibleKeysLinearBias)


def test_least_squares_of_the_denominators():
    """c and a are numpy's over the first layer's rows: without a scale of the output there is no margin."""
    model, batches = model_and_batches()
    layer = model.blocks[0].attention
    x = inputs_of(layer, model, batches[:6])
    convert(model, batches, loss=loss)
    with torch.no_grad():
        q, k, v = layer._project(x, x, 0, None, None)
        i = torch.arange(24)
        logits = (q @ k.mT / 2).double()
        lse = logits.masked_fill(i > i[:, None], -torch.inf).logsumexp(-1)  # (B, H, N)
        design = torch.stack([torch.ones(24), (i + 1.0).log()], 1).double().repeat(len(x), 1)
        bias = layer.attention_bias
        assert type(bias) is VisibleKeysLinearBias
        for h in range(4):
            c, a = torch.linalg.lstsq(design, -lse[:, h].reshape(-1, 1)).solution.flatten().tolist()
            assert bias.constant[h].item() == pytest.approx(c, abs=1e-3)
            assert bias.slope[h].item() == pytest.approx(a, abs=1e-3)
        b = bias.constant.view(-1, 1, 1) + bias.slope.view(-1, 1, 1) * (i[:, None] + 1.0).log()
        weights = (logits + b.double()).sigmoid().masked_fill(i > i[:, None], 0)
        expected = layer.output((weights @ v.double()).float().transpose(1, 2).flatten(2))
        torch.testing.assert_close(layer(x), expected)


def test_the_report_and_the_saved_model(tmp_path):
    """Its loss is that of the model, refinement and the whole bias lower the errors, and the model is read again."""
    model, batches = model_and_batches()
    whole, refined = copy.deepcopy(model), copy.deepcopy(model)
    report = convert(model, batches, loss=loss)
    assert report.loss == pytest.approx(sum(loss(model, b).item() for b in batches[6:]) / 2)
    errors = [sum(layer.error for layer in report.layers)]
    for other, options in ((refined, {"refine_steps": 16}), (whole, {"refine_steps": 16, "bias": QuadraticBias})):
        errors.append(sum(layer.error for layer in convert(other, batches, loss=loss, **options).layers))
    assert errors == sorted(errors, reverse=True)
    saving.save(model, tmp_path / "model")
    again = saving.load(tmp_path / "model")
    tokens = batches[0][0]
    with torch.no_grad():
        torch.testing.assert_close(again(tokens), model.eval()(tokens))


def test_pytorch_and_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, batch_first=True, dropout=0.0), 2)
    convert(encoder, torch.randn(5, 4, 9, 16).unbind())
    assert {type(layer.self_attn.sigmoid_bias) for layer in encoder.layers} == {VisibleKeysLinearBias}
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4
    )
    model = transformers.LlamaForCausalLM(config).eval()
    tokens = torch.randint(32, (5, 2, 12))
    convert(model, list(tokens))
    model.save_pretrained(tmp_path)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(again(tokens[0]).logits, model(tokens[0]).logits)
        made = model.generate(tokens[0], max_new_tokens=4, min_new_tokens=4, do_sample=False)
        assert torch.equal(made, model.generate(tokens[0], max_new_tokens=4, min_new_tokens=4, do_sample=False,
                                                use_cache=False))  # fmt: skip


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("bias", ["VisibleKeysLinearBias", BatchLengthBias, VisibleKeysLinearBias(4)])
def test_other_classes_are_refused(bias):
    model, batches = model_and_batches()
    with pytest.raises(ValueError, match="bias must be VisibleKeysLinearBias or QuadraticBias, a class of sigattn"):
        convert(model, batches, loss=loss, bias=bias)
