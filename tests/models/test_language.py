"""The language model: generation, the cache behind it, and documents."""

import math

import pytest
import torch

from sigattn.models.generation import SamplingConfig
from sigattn.models.language import LanguageModel, LanguageModelConfig
from sigattn.nn.attention import Attention
from sigattn.nn.documents import Documents
from sigattn.nn.kv_cache import KVCache

SMALL = {"vocab_size": 11, "max_seq_len": 24, "num_layers": 2, "embed_dim": 24, "num_heads": 4}
MODELS = [
    {"position": "rope"},
    {"position": "sincos"},
    {"position": "alibi", "attention_bias": "log_alibi"},
    {"position": "alibi", "learn_bias": "head", "temperature": 0.5},
    {"position": "rope", "activation": "softmax", "num_kv_heads": 1},
]


def model_of(settings, sizes=SMALL, **more):
    torch.manual_seed(0)
    model = LanguageModel(LanguageModelConfig(**sizes, **settings, **more))
    with torch.no_grad():  # decided about its next token
        model.embedding.weight.mul_(5)
    return model.eval()


def greedy(model, prompt, new_tokens):
    """Without a cache, one whole forward a token; past the context, from the last half of it."""
    size = model.config.max_seq_len
    tokens, seen = prompt, min(len(prompt), size)
    for _ in range(new_tokens):
        tokens = torch.cat((tokens, model(tokens[None, -seen:])[0, -1].argmax(-1, keepdim=True)))
        seen = seen + 1 if seen < size else size // 2
    return tokens


@pytest.mark.parametrize(
    ("settings", "lengths", "new_tokens"),
    [*((settings, (3, 1, 9), 6) for settings in MODELS), (MODELS[1], (3, 3), 6), ({}, (5, 20, 40), 22)],
    ids=str,
)
def test_prompts_of_any_lengths(settings, lengths, new_tokens):
    """With a cache, and padding on the left if they differ. Past the context of 24 tokens, each begins again."""
    model = model_of(settings)
    prompts = [torch.randint(11, (n,)) for n in lengths]
    for prompt, row in zip(prompts, model.generate(prompts, new_tokens, temperature=0.0), strict=True):
        assert torch.equal(row, greedy(model, prompt, new_tokens))


def test_a_full_context_starts_again_from_its_last_half():
    model, lengths = model_of({}), []
    model.register_forward_pre_hook(lambda _, inputs: lengths.append(inputs[0].shape[1]))
    model.generate(torch.randint(11, (1, 24)), 4, temperature=0.0)
    assert lengths == [24, 12, 1, 1]


def test_stopping():
    model = model_of({})
    prompts = torch.randint(11, (4, 3))
    free = model.generate(prompts, 15, temperature=0.0)
    stop = int(free[0, 6])
    found = model.generate(list(prompts), 15, temperature=0.0, stop_tokens=[stop])
    filled = model.generate(prompts, 15, temperature=0.0, stop_tokens=[stop])
    assert filled.shape[1] == max(map(len, found))
    for row, whole, padded in zip(found, free, filled, strict=True):
        ends = (whole[3:] == stop).nonzero()
        length = 3 + int(ends[0]) + 1 if len(ends) else 18
        assert torch.equal(row, whole[:length])
        assert torch.equal(padded, torch.cat([row, row[-1:].expand(len(padded) - length)]))
    assert model.generate(prompts, 0).tolist() == prompts.tolist()


class TestChoice:
    LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0, 3.0]])

    def drawn(self, **settings):
        g = torch.Generator().manual_seed(0)
        tokens = SamplingConfig(**settings).sample_token(self.LOGITS.expand(20_000, -1), g)
        return torch.bincount(tokens, minlength=5) / 20_000

    @pytest.mark.parametrize(
        ("settings", "divisor", "excluded"),
        [
            ({}, 1.0, []),
            ({"temperature": 0.5}, 0.5, []),
            ({"top_k": 3}, 1.0, [2, 3]),
            ({"top_k": 9}, 1.0, []),
            ({"top_p": 0.6}, 1.0, [0, 1, 2, 3]),  # the probabilities are 0.234, 0.086, 0.032, 0.012, 0.636
            ({"top_p": 0.7}, 1.0, [1, 2, 3]),
            ({"top_p": 1.0}, 1.0, []),
        ],
        ids=str,
    )
    def test_probabilities(self, settings, divisor, excluded):
        logits = self.LOGITS[0] / divisor
        logits[excluded] = -torch.inf
        torch.testing.assert_close(self.drawn(**settings), logits.softmax(0), rtol=0, atol=0.015)

    def test_greedy(self):
        assert SamplingConfig(temperature=0.0).sample_token(self.LOGITS, None).item() == 4


def test_dropout_is_off_and_training_goes_on():
    model = model_of({}, dropout=0.5, feed_forward="gelu").train()
    frozen = model.blocks[0].eval()
    prompt = torch.tensor([[1, 2]])
    assert torch.equal(model.generate(prompt, 9, temperature=0.0), model.generate(prompt, 9, temperature=0.0))
    assert [model.training, frozen.training, model.blocks[1].training] == [True, False, True]
    assert math.isfinite(model.loss(prompt, prompt).item())


def test_padding_on_both_sides_is_refused_and_on_the_right_counts():
    """key_lengths with a cache hide keys, token by token too."""
    torch.manual_seed(0)
    layer = Attention(24, 4, attention_bias=-2.0, activation="sigmoid")
    x, lengths = torch.randn(2, 6, 24), torch.tensor([6, 3])
    with torch.no_grad():
        whole = layer(x, key_lengths=lengths)
        cache = KVCache(8)
        steps = torch.cat(
            [layer(x[:, i : i + 1], key_lengths=lengths.clamp(max=i + 1), cache=cache) for i in range(6)], 1
        )
        torch.testing.assert_close(steps[0], whole[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(steps[1], whole[1], rtol=1e-4, atol=1e-5)
        with pytest.raises(ValueError, match="does not support key_lengths"):
            layer(x, key_lengths=lengths, cache=KVCache(8, torch.tensor([1, 0])))


def test_an_output_that_was_replaced():
    """As LoRA and quantisation do, whose layers need not have the attributes of the layer that they replace."""
    model = LanguageModel(LanguageModelConfig(**SMALL, tie_embeddings=False))
    tokens = torch.randint(11, (3, 16))
    logits = model(tokens)
    model.output = torch.nn.Sequential(model.output, torch.nn.Threshold(math.inf, 1.0))
    assert (model(tokens) == 1).all()
    assert not (logits == 1).any()


def test_generation_is_repeated_by_its_generator():
    model, prompt = LanguageModel(LanguageModelConfig(**SMALL)), torch.tensor([[1, 2, 3]])
    drawn = [model.generate(prompt, 20, generator=torch.Generator().manual_seed(s)) for s in (0, 0, 1)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_statistics_of_documents_are_those_of_fewer_keys():
    model, tokens = LanguageModel(LanguageModelConfig(**SMALL)).eval(), torch.tensor([[5, 3, 0, 7, 7, 9, 0, 0, 4, 8]])
    report = model.attention_report(tokens, documents=Documents.from_end_token(tokens, 0))
    assert (report[0].row_mass_mean < model.attention_report(tokens)[0].row_mass_mean).all()
