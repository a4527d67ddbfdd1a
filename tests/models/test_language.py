"""The language model: sizes, causality, bias, generation."""

import math

import pytest
import torch

from sigattn.models.language import LanguageModel, LanguageModelConfig
from sigattn.nn.documents import Documents

SMALL = {"vocab_size": 50, "max_seq_len": 16, "num_layers": 2, "embed_dim": 24, "num_heads": 3}


def test_an_output_that_was_replaced():
    """As LoRA and quantisation do, whose layers need not have the attributes of the layer that they replace."""
    model = LanguageModel(LanguageModelConfig(**SMALL, tie_embeddings=False))
    tokens = torch.randint(50, (3, 16))
    logits = model(tokens)
    model.output = torch.nn.Sequential(model.output, torch.nn.Threshold(math.inf, 1.0))
    assert (model(tokens) == 1).all()
    assert not (logits == 1).any()


def test_generation_is_repeated_by_its_generator():
    model, prompt = LanguageModel(LanguageModelConfig(**SMALL)), torch.tensor([[1, 2, 3]])
    drawn = [model.generate(prompt, 20, generator=torch.Generator().manual_seed(s)) for s in (0, 0, 1)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


class TestDocuments:
    TOKENS = torch.tensor([[5, 3, 0, 7, 7, 9, 0, 0, 4, 8, 2, 6], [1, 2, 3, 4, 5, 6, 7, 8, 9, 8, 7, 0]])
    PARTS = ([slice(0, 3), slice(3, 7), slice(7, 8), slice(8, 12)], [slice(0, 12)])

    @pytest.mark.filterwarnings("ignore:.*sigmoid attention without a bias")
    @pytest.mark.parametrize(
        "settings",
        [
            {"learn_bias": "head", "num_kv_heads": 1},
            {"position": "sincos", "learn_bias": "layer", "temperature": 0.3, "attention_bias": -2.0},
            {"activation": "relu2", "length_power": 1.0, "norm_placement": "hybrid"},
            {"attention_bias": "log_visible", "learn_bias": "quadratic"},
            {"position": "alibi", "attention_bias": "log_alibi", "learn_bias": "quadratic"},
        ],
        ids=str,
    )
    def test_as_if_alone(self, settings):
        model = LanguageModel(LanguageModelConfig(**SMALL, **settings)).double()
        for name, parameter in model.named_parameters():
            if "query_term" in name:
                torch.nn.init.normal_(parameter)
        together = model(self.TOKENS, documents=Documents.from_end_token(self.TOKENS, 0))
        documents = [(row, part) for row, parts in enumerate(self.PARTS) for part in parts]
        alone = [model(self.TOKENS[row : row + 1, part])[0] for row, part in documents]
        for (row, part), logits in zip(documents, alone, strict=True):
            torch.testing.assert_close(together[row, part], logits, rtol=1e-5, atol=1e-5)
        losses = together.square().sum(), sum(logits.square().sum() for logits in alone)
        gradients = (torch.autograd.grad(loss, list(model.parameters())) for loss in losses)
        for ours, theirs in zip(*gradients, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)

    def test_statistics(self):
        model = LanguageModel(LanguageModelConfig(**SMALL)).eval()
        report = model.attention_report(self.TOKENS[:1], documents=Documents.from_end_token(self.TOKENS[:1], 0))
        alone = model.attention_report(self.TOKENS[:1])
        assert (report[0].row_mass_mean < alone[0].row_mass_mean).all()
