"""Masks that are Tensor subclasses: PyTorch's CausalBias is supported, others raise an error that names them."""

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.testing._internal.two_tensor import TwoTensor

from sigattn import attention_statistics, convert, sigmoid_attention
from tests.ops.cases import COMPILER_NOISE, operands
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
