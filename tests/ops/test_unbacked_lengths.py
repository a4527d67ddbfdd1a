"""Packed sequences whose longest length is computed inside a compiled graph and unknown to the tracer."""

import pytest
import torch

from sigattn import flash
from tests.ops.cases import COMPILER_NOISE

pytestmark = [pytest.mark.filterwarnings(w) for w in COMPILER_NOISE]


def attend(q, starts):
    longest = starts.diff().max().item()
    return flash.flash_attn_varlen_func(q, q, q, starts, starts, longest, longest, causal=True)


def values_and_gradients(function, q, starts):
    q = q.detach().requires_grad_()
    out = function(q, starts)
    return out, *torch.autograd.grad(out.square().sum(), q)


def batches():
    for lengths in ([3, 7], [5, 7], [1, 29]):
        starts = torch.tensor([0, *lengths]).cumsum(0).int()
        yield torch.randn(int(starts[-1]), 2, 4), starts


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_one_graph_for_lengths_read_inside_it(compiler):
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(attend, fullgraph=True, backend=compiler)
        for q, starts in batches():
            found = values_and_gradients(compiled, q, starts)
            for a, b in zip(found, values_and_gradients(attend, q, starts), strict=True):
                torch.testing.assert_close(a, b)


def test_exported_with_lengths_read_inside():
    class Model(torch.nn.Module):
        def forward(self, q, starts):
            return attend(q, starts)

    (example, *others) = batches()
    dynamic = {0: torch.export.Dim("total", min=2, max=4096)}
    program = torch.export.export(Model(), example, dynamic_shapes=(dynamic, None)).module()
    for q, starts in others:
        torch.testing.assert_close(program(q, starts), attend(q, starts))
