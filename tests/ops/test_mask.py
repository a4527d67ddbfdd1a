"""Masks that are no plain tensors: Tensor subclasses, of which PyTorch's CausalBias is supported, and BlockMasks."""

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, create_mask, or_masks
from torch.testing._internal.two_tensor import TwoTensor

from sigattn import attention_statistics, convert, sigmoid_attention
from sigattn.flash import flash_attn_func
from sigattn.ops import block_mask
from sigattn.ops.attention import DENSE
from sigattn.ops.problem import Problem
from tests.ops.cases import COMPILER_NOISE, device_of, operands, path
from tests.ops.truth import formula

pytestmark = [pytest.mark.filterwarnings(w) for w in (*COMPILER_NOISE, "ignore:Lower right causal bias")]
MADE = {
    "upper left": (causal_upper_left, lambda n, m: torch.ones(n, m, dtype=torch.bool).tril()),
    "lower right": (causal_lower_right, lambda n, m: torch.ones(n, m, dtype=torch.bool).tril(m - n)),
}
CAUSAL = pytest.mark.parametrize("kind", MADE)


def expected_of(q, k, v, visible, bias):
    return formula(q, k, v, visible, bias=bias, dtype=torch.float32)


@CAUSAL
@pytest.mark.parametrize(("n", "m"), [(5, 5), (5, 9), (9, 5)])
def test_a_causal_bias_is_its_triangle(kind, n, m):
    """In the operator and in statistics."""
    make, triangle = MADE[kind]
    q, k, v = operands(n, m)
    left = torch.ones(n, m, dtype=torch.bool).triu(-2)
    for window, visible in ((None, triangle(n, m)), ((2, -1), triangle(n, m) & left)):
        out = sigmoid_attention(q, k, v, make(n, m), bias=-1.0, window=window)
        assert type(out) is torch.Tensor
        torch.testing.assert_close(out, expected_of(q, k, v, visible, -1.0))
    found, expected = (attention_statistics(q, k, v, mask).row_mass_mean for mask in (make(n, m), triangle(n, m)))
    torch.testing.assert_close(found, expected)


@CAUSAL
def test_a_causal_bias_in_a_compiled_graph_and_in_a_converted_layer(kind):
    class Layer(torch.nn.Module):
        def forward(self, q, k, v):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, make(5, 9))

    make, triangle = MADE[kind]
    q, k, v = operands(5, 9)
    call = torch.compile(sigmoid_attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(call(q, k, v, make(5, 9), bias=-1.0), expected_of(q, k, v, triangle(5, 9), -1.0))
    model = torch.nn.Sequential(Layer())
    convert(model, normalize=False)
    seen = torch.tensor(float(triangle(5, 9).any(0).sum()))
    torch.testing.assert_close(model[0](q, k, v), expected_of(q, k, v, triangle(5, 9), -seen.log()))


def test_a_converted_layer_refuses_it_by_name():
    model = torch.nn.Sequential(torch.nn.MultiheadAttention(4, 2))
    convert(model)
    with pytest.raises(TypeError, match=r"attn_mask is a .*CausalBias"):
        model[0](*torch.randn(3, 2, 3, 4).unbind(), attn_mask=causal_lower_right(3, 3))


def test_subclasses_that_trace_or_wrap_are_served():
    q, k, v = operands(5, 5)
    mask = torch.randn(5, 5)
    expected = sigmoid_attention(q, k, v, mask)
    parameter = torch.nn.Parameter(mask)
    torch.testing.assert_close(sigmoid_attention(q, k, v, parameter), expected)
    double = sigmoid_attention(q, k, v, TwoTensor(mask, mask + 1))
    torch.testing.assert_close(double.a, expected)
    torch.testing.assert_close(double.b, sigmoid_attention(q, k, v, mask + 1))
    torch.testing.assert_close(torch.vmap(lambda m: sigmoid_attention(q, k, v, m))(mask[None])[0], expected)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = [mode.from_tensor(t) for t in (q, k, v, mask)]
        assert sigmoid_attention(*fake).shape == expected.shape


DOCUMENTS = torch.tensor([0] * 37 + [1] * 30 + [2] * 60 + [3] * 33)
STARTS = torch.tensor([5, 90])


def causal(b, h, i, j):
    return j <= i


def documents(b, h, i, j):
    of_token = DOCUMENTS.to(i.device)
    return (of_token[i] == of_token[j]) & (j <= i)


def window_by_head(b, h, i, j):
    return (i - j).abs() <= 8 * h


def prefix_by_sample(b, h, i, j):
    return (j < STARTS.to(b.device)[b]) | (i == j)


MASKS = {
    "causal": (causal, (None, None)),
    "documents": (documents, (None, None)),
    "each head its own": (window_by_head, (None, 4)),
    "each sample its own": (prefix_by_sample, (2, None)),
    "each sample and head its own": (or_masks(window_by_head, prefix_by_sample), (2, 2)),
}


def make(name, n, m, size):
    mod, (batch, heads) = MASKS[name]
    block = create_block_mask(mod, batch, heads, n, m, device="cpu", BLOCK_SIZE=size)
    return block, create_mask(mod, batch, heads, n, m, device="cpu")


def leaves_of(n, m, kv=2, d=16, batch=2, heads=4, device="cpu"):
    g = torch.Generator().manual_seed(n + m)
    shapes = {"query": (batch, heads, n, d), "key": (batch, kv, m, d), "value": (batch, kv, m, 8)}
    return {name: torch.randn(s, generator=g).to(device).requires_grad_() for name, s in shapes.items()}


BLOCK_MASKS = [  # and whether with every other option
    (("causal", 160, 160, 32), False),
    (("documents", 150, 130, (16, 48)), True),
    (("each head its own", 150, 130, (16, 48)), True),
    (("each sample its own", 140, 130, 128), False),
    (("each sample and head its own", 150, 130, 128), True),
]
PLAIN, SMALL = "as users meet it", "small tiles"
CALLS = [("reference", PLAIN, *case) for case in BLOCK_MASKS[1::3]] + [
    ("blocked", PLAIN, *case) for case in BLOCK_MASKS
]
CALLS += [("blocked", SMALL, ("documents", 44, 40, (16, 24)), True)]
CALLS += [("triton", "large tiles", ("each sample and head its own", 100, 140, 128), True)]


@pytest.mark.parametrize(("backend", "way", "case", "everything"), CALLS)
def test_a_block_mask_is_its_dense_mask(backend, way, case, everything):
    """Output and gradients are those of the bool mask, which other tests compare with the formula."""
    name, n, m, size = case
    masks, device = make(name, n, m, size), device_of(backend)
    leaves = leaves_of(n, m, device=device, **({"heads": 2, "kv": 1} if way != PLAIN or "and head" in name else {}))
    options = {}
    if everything:
        heads = leaves["query"].shape[1]
        more = {"alibi_slopes": torch.rand(heads), "bias": torch.randn(heads, n, 1)}
        leaves |= {key: t.to(device).requires_grad_() for key, t in more.items()}
        options = {"window": (n // 2, -1), "is_causal": True, "softcap": 2.0, "dropout_p": 0.3}
        options |= {"key_lengths": torch.tensor([m // 2 + 3, m], device=device)}
    results = []
    for mask in masks:
        torch.manual_seed(5)
        with path(way):
            out = sigmoid_attention(**leaves, attn_mask=mask.to(device), enable_gqa=True, backend=backend, **options)
            results.append((out, *torch.autograd.grad(out.square().sum(), list(leaves.values()))))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("backend", "way", "size", "first"),
    [("blocked", PLAIN, 16, 128), ("blocked", SMALL, 16, 32), ("triton", "large tiles", 128, 128)],
)
def test_hidden_blocks_are_not_visited(backend, way, size, first):
    """Keys and values of blocks that no query sees, and queries of blocks that see no key, are NaN."""
    n, end, m, device = first + 6, 2 * first, 2 * first + 14, device_of(backend)

    def islands(b, h, i, j):
        return ((j < first - 8) | (j >= end)) & (i < first - 10)

    block = create_block_mask(islands, None, None, n, m, device=device, BLOCK_SIZE=size)
    leaves = leaves_of(n, m, kv=1, batch=1, heads=2, device=device)
    with torch.no_grad():
        leaves["key"][:, :, first - 7] = torch.nan  # hidden, in a block that is visible in part: its weight is 0
        for name, hidden in (("key", slice(first, end)), ("value", slice(first, end)), ("query", slice(first, n))):
            leaves[name][:, :, hidden] = torch.nan
    with path(way):
        out = sigmoid_attention(**leaves, attn_mask=block, enable_gqa=True, bias=-2.0, backend=backend)
        gradients = torch.autograd.grad(out.square().sum(), list(leaves.values()))
    assert out.isfinite().all()
    assert not out[:, :, first:].any()
    assert all(g.isfinite().all() for g in gradients[1:])  # that of the query is a product with the key that is NaN
    assert not gradients[1][:, :, first - 8 : end].any()
    assert gradients[1][:, :, : first - 8].any()


def lists_of_blocks():
    """Return a mask from_kv_blocks without mask_mod, whose listed blocks are visible as a whole, and its dense mask."""
    counts, indices = torch.tensor([[[1, 2]]], dtype=torch.int32), torch.tensor([[[[1, 0], [0, 2]]]], dtype=torch.int32)
    dense = torch.zeros(30, 40, dtype=torch.bool)
    dense[:16, 16:32] = dense[16:, :16] = dense[16:, 32:] = True
    return BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=16, seq_lengths=(30, 40)), dense


OTHER_CALLS = {
    "one query for all samples": (
        make("each sample its own", 64, 64, 32),
        lambda q, k, v, mask: sigmoid_attention(q[:1], k, v, mask),
    ),
    "one query for all heads": (
        make("each head its own", 64, 64, 32),
        lambda q, k, v, mask: sigmoid_attention(q[:, :1], k, v, mask),
    ),
    "lists of blocks": (lists_of_blocks(), sigmoid_attention),
    "flash_attn_func": (
        make("documents", 64, 96, 32),
        lambda q, k, v, mask: flash_attn_func(*(t.transpose(1, 2) for t in (q, k, v)), attn_mask=mask),
    ),
    "gradient mapped by torch.func": (
        make("each sample its own", 32, 32, 16),
        lambda q, k, v, mask: torch.vmap(torch.func.grad(lambda q: sigmoid_attention(q, k, v, mask).square().sum()))(
            torch.stack([q, 2 * q])
        ),
    ),
}


@pytest.mark.parametrize(("masks", "call"), OTHER_CALLS.values(), ids=OTHER_CALLS)
def test_a_block_mask_in_other_calls(masks, call):
    operands = [t.detach() for t in leaves_of(*masks[1].shape[-2:], kv=4).values()]
    torch.testing.assert_close(*(call(*operands, mask) for mask in masks), rtol=1e-4, atol=1e-5)


class Limits:
    end = 40


def test_a_block_mask_is_converted_once():
    """Again if its lists or something that mask_mod refers to changed, or if that cannot be known."""
    ends = torch.tensor([40, 64])

    def from_tensor(b, h, i, j):
        return j < ends[b]

    def from_class(b, h, i, j):
        return j < Limits.end

    def resolved(block):
        q = torch.empty(2, 1, 64, 8)
        return block_mask.resolve(block, q, q, q)["mask_tiles"]

    block = create_block_mask(and_masks(from_tensor, causal), 2, None, 64, 64, device="cpu", BLOCK_SIZE=16)
    with torch.inference_mode():
        assert resolved(block).is_inference()
    first = resolved(block)
    assert first.shape == (2 + 2 * 4, 16, 16)  # the memory is that of the blocks that are seen in part
    assert not first.is_inference()  # autograd must be able to save it
    assert resolved(block) is first
    ends -= 1
    second = resolved(block)
    assert second is not first
    assert second.sum() < first.sum()
    block.kv_num_blocks.zero_()
    assert len(resolved(block)) == 2
    block = create_block_mask(from_class, None, None, 64, 64, device="cpu", BLOCK_SIZE=32)
    first, Limits.end = resolved(block), 39
    assert resolved(block).sum() < first.sum()


def test_other_sizes_of_blocks_and_compiled_graphs(unchecked):
    q, k, v = leaves_of(32, 48, kv=4).values()
    fits = make("causal", 32, 48, 16)[0]
    assert DENSE.choose(Problem(q, k, v, **block_mask.resolve(fits, q, k, k)), None) == "blocked"
    compiled = torch.compile(lambda q: sigmoid_attention(q, k, v, fits), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"BlockMask, which is not supported inside torch\.compile"):
        compiled(q)
