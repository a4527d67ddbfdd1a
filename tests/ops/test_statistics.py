"""attention_statistics against the materialised weights, and its memory."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sigattn import attention_statistics, log_length_bias
from sigattn.ops import reference
from sigattn.ops.reference import ACTIVATIONS
from tests.ops.truth import formula


def hoyer(c):
    n = len(c)
    return (n**0.5 - c.abs().sum() / c.square().sum().sqrt()) / (n**0.5 - 1)


@pytest.mark.parametrize(("block_bytes", "default"), [(1, torch.float32), (8 << 20, torch.bfloat16)])
def test_against_the_materialised_weights(request, monkeypatch, block_bytes, default):
    """In blocks of one row and in one block; no statistic follows the default dtype."""
    monkeypatch.setattr(reference, "_BLOCK_BYTES", block_bytes)
    request.addfinalizer(lambda: torch.set_default_dtype(torch.float32))
    q, k, v = torch.randn(3, 2, 3, 11, 6, dtype=torch.float64).unbind()
    bias, slopes = torch.randn(2, 3, 11, 1, dtype=torch.float64), torch.rand(3, dtype=torch.float64)
    torch.set_default_dtype(default)
    stats = attention_statistics(q, k, v, is_causal=True, bias=bias, alibi_slopes=slopes, softcap=0.7)
    torch.set_default_dtype(torch.float32)
    p = formula(q, k, v, causal=True, weights=True, softcap=0.7, bias=bias, slopes=slopes)
    out = p @ v
    mass = p.sum(-1)
    logits = torch.logit(p).masked_fill(~torch.ones(11, 11, dtype=torch.bool).tril(), -torch.inf)
    of_rows = [[float(hoyer(row[: i + 1])) for i, row in enumerate(head) if i] for head in p.flatten(0, 1)]
    sparsity = torch.tensor(of_rows, dtype=torch.float64).mean(-1).view(2, 3)
    expected = (mass.mean(-1), mass.amin(-1), mass.amax(-1), out.norm(dim=(-2, -1)), logits.amax((-2, -1)), sparsity)
    truth = {name: t.float() for name, t in zip(stats._fields, expected, strict=True)}
    torch.testing.assert_close(stats._asdict(), truth, rtol=1e-5, atol=1e-6)  # also of this shape and dtype


def test_every_activation():
    q, k, v = torch.randn(3, 1, 2, 9, 8, dtype=torch.float64).unbind()
    for name, activation in ACTIVATIONS.items():
        stats = attention_statistics(q, k, v, activation=name)
        mass = activation(q @ k.mT / 8**0.5 + (log_length_bias(9) if name == "sigmoid" else 0.0)).sum(-1)
        torch.testing.assert_close(stats.row_mass_mean.double(), mass.mean(-1), rtol=1e-5, atol=1e-5)
        if name == "softmax":
            torch.testing.assert_close(stats.row_mass_min, torch.ones(1, 2))


def test_undefined_statistics():
    """Under a causal mask the first query sees one key; with one key in total, no query remains."""
    q, k, v = torch.randn(3, 1, 1, 1, 4).unbind()
    assert attention_statistics(q, k, v).hoyer_sparsity.isnan().all()
    assert attention_statistics(q, k, v, key_lengths=torch.tensor([0])).max_logit == -torch.inf
    assert attention_statistics(q, k[:, :, :0], v[:, :, :0]).row_mass_max == 0


def test_memory_is_linear_in_the_length():
    """No intermediate tensor exceeds a block of rows; the weights of one head alone would not fit."""
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            for t in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(t, torch.Tensor):
                    largest = max(largest, t.numel() * t.element_size())
            return result

    q, k, v = torch.randn(3, 1, 2, 2304, 4).unbind()
    with Watch():
        attention_statistics(q, k, v, is_causal=True)
    assert largest <= 2 * reference._BLOCK_BYTES
