"""The language model: sizes, causality, bias, generation."""

import math

import pytest
import torch

from sigattn.models.language import LanguageModel, LanguageModelConfig

SMALL = {"vocabulary": 50, "context": 16, "layers": 2, "width": 24, "heads": 3}


@pytest.mark.parametrize("activation", ["sigmoid", "softmax"])
def test_forward_and_backward(activation):
    model = LanguageModel(LanguageModelConfig(**SMALL, activation=activation))
    tokens = torch.randint(50, (3, 16))
    logits = model(tokens)
    assert logits.shape == (3, 16, 50)
    loss = model.loss(tokens, tokens)
    assert abs(loss.item() - math.log(50)) < 3
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_number_of_parameters():
    """Embedding (tied), and per layer q, k, v, output, SwiGLU and four norms."""
    model = LanguageModel(LanguageModelConfig(**SMALL))
    hidden = 64
    layer = 4 * 24 * 24 + 3 * 24 * hidden + 2 * 24 + 2 * 8
    assert sum(p.numel() for p in model.parameters()) == 50 * 24 + 2 * layer + 24


@pytest.mark.filterwarnings("ignore:sigmoid attention without a bias")
def test_the_bias_of_every_layer():
    def of(**settings):
        config = LanguageModelConfig(**SMALL, **settings)
        biases = [block.attention.bias for block in LanguageModel(config).blocks]
        (bias,) = {None if b is None else b.value for b in biases}
        return bias

    assert of() == -math.log(16)
    assert of(bias=-3.0) == -3.0
    assert of(bias=0.0) == 0.0
    assert of(activation="softmax") is None


def test_short_prompts_see_what_long_ones_saw():
    """b is the context's, not the prompt's: so a prefix gives the same logits whatever follows it."""
    model = LanguageModel(LanguageModelConfig(**SMALL))
    tokens = torch.randint(50, (1, 16))
    torch.testing.assert_close(model(tokens)[:, :7], model(tokens[:, :7]))


def test_generation():
    model = LanguageModel(LanguageModelConfig(**SMALL))
    prompt = torch.tensor([[1, 2, 3]])
    greedy = model.generate(prompt, 20, temperature=0.0)
    assert greedy.shape == (1, 23)
    assert torch.equal(greedy[:, :3], prompt)
    assert greedy[0, 3] == model(prompt)[0, -1].argmax()
    drawn = [model.generate(prompt, 20, generator=torch.Generator().manual_seed(s)) for s in (0, 0, 1)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    with pytest.raises(ValueError, match="temperature"):
        model.generate(prompt, 1, temperature=-1.0)
    with pytest.raises(ValueError, match="prompt"):
        model.generate(prompt[:, :0], 1)


def test_too_many_tokens():
    with pytest.raises(ValueError, match="17 tokens do not fit in a context of 16"):
        LanguageModel(LanguageModelConfig(**SMALL))(torch.zeros(1, 17, dtype=torch.long))


def test_watching_is_over_when_it_is_over():
    model = LanguageModel(LanguageModelConfig(**SMALL))
    with model.watching() as layers:
        model(torch.zeros(1, 4, dtype=torch.long))
        assert len(layers) == 2
        assert all(layer.attention_norm.min() > 0 for layer in layers)
    assert not any(layer.watch != "nothing" for layer in layers)


@pytest.mark.filterwarnings("ignore:sigmoid attention without a bias")
def test_without_a_bias_the_attention_starts_orders_of_magnitude_larger():
    """Sect. 5: high initial attention norms are what b = -log n removes."""
    norms = {}
    for bias in ("log_context", 0.0):
        torch.manual_seed(0)
        model = LanguageModel(LanguageModelConfig(context=256, layers=1, width=64, heads=4, bias=bias))
        with model.watching() as (layer,):
            model(torch.randint(256, (2, 256)))
            norms[bias] = layer.attention_norm.mean().item()
    assert norms[0.0] > 20 * norms["log_context"]


@pytest.mark.parametrize("activation", ["sigmoid", "softmax"])
@pytest.mark.parametrize(
    "settings",
    [{"position": "alibi"}, {"position": "none"}, {"kv_heads": 1}, {"structure": "hybrid"}, {"qk_norm": "rms"}],
    ids=str,
)
def test_every_kind_learns(activation, settings):
    model = LanguageModel(LanguageModelConfig(**SMALL, activation=activation, **settings))
    tokens = torch.arange(17).repeat(4, 1) % 5
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(12):
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
