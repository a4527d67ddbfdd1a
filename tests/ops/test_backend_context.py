"""``sigattn.backend`` chooses the backend of calls that do not choose one, in eager, compiled and exported code."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.export import Dim

import sigattn
from sigattn import sigmoid_attention, sigmoid_kvcache_attention
from sigattn.flash import flash_attn_func
from tests.ops.cases import COMPILER_NOISE, operands

pytestmark = [pytest.mark.usefixtures("unchecked"), *(pytest.mark.filterwarnings(w) for w in COMPILER_NOISE)]
CAPPED = {"softcap": 2.0}  # "llvm" does not support it: a call that it serves fails
REFUSED = "backend 'llvm' does not support this call"
IS_OLD = torch.__version__ < "2.13"  # whose non-strict export refuses dynamic lengths of grouped heads, by a guard


class Model(nn.Module):
    """A call with options whose defaults depend on sizes, as layers make it."""

    def forward(self, query, key, value, lengths, mask):
        options = {"is_causal": True, "softcap": 2.0, "normalize": True, "enable_gqa": True}
        return sigmoid_attention(query, key, value, mask, key_lengths=lengths, **options)


def test_calls_within_the_context_and_after_it():
    with sigattn.backend("llvm"):
        with pytest.raises(ValueError, match=REFUSED):
            sigmoid_attention(*operands(), **CAPPED)
        sigmoid_attention(*operands(), backend="blocked", **CAPPED)  # the call's choice comes first
        with sigattn.backend("blocked"):
            sigmoid_attention(*operands(), **CAPPED)
        with pytest.raises(ValueError, match=REFUSED):
            sigmoid_attention(*operands(), **CAPPED)
        cache = torch.zeros(2, 1, 8, 2, 8).unbind()
        with pytest.raises(ValueError, match=REFUSED):
            sigmoid_kvcache_attention(torch.randn(1, 1, 2, 8), *cache, bias=-2.0, softcap=2.0)
    with pytest.raises(KeyError), sigattn.backend("llvm"):
        raise KeyError
    with pytest.raises(ValueError, match="unknown backend 'math'"), sigattn.backend("math"):
        pass
    sigmoid_attention(*operands(), **CAPPED)


def in_a_thread(function, *args):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result()


def test_threads():
    """Other threads are not affected; threads may leave in another order than they entered."""
    first, second = contextlib.ExitStack(), contextlib.ExitStack()
    with sigattn.backend("llvm"):
        in_a_thread(lambda: sigmoid_attention(*operands(), **CAPPED))
    compiled = torch.compile(lambda *args: sigmoid_attention(*args, **CAPPED), backend="eager")
    args = operands()
    first.enter_context(sigattn.backend("llvm"))
    in_a_thread(second.enter_context, sigattn.backend("llvm"))
    first.close()
    in_a_thread(second.close)
    torch.testing.assert_close(compiled(*args), sigmoid_attention(*args, **CAPPED))


def ops_of(graph):
    return [node.target for node in graph.nodes if "sigattn" in str(node.target)]


def test_programs_of_pytorchs_operators_alone():
    """Exported with "reference", a program has none of our ops, and is right at other sizes."""

    def arguments(b, n, m):
        return *operands(n, m, b, key_heads=2), torch.arange(b) % m + 1, torch.rand(b, 1, n, m) > 0.3

    b, n, m = Dim("b"), Dim("n"), Dim("m")
    shapes = ({0: b, 2: n}, {0: b, 2: m}, {0: b, 2: m}, {0: b}, {0: b, 2: n, 3: m})
    with sigattn.backend("reference"):
        program = torch.export.export(Model(), arguments(3, 11, 7), dynamic_shapes=shapes, strict=IS_OLD)
    assert not ops_of(program.graph)
    args = arguments(5, 29, 13)
    doubles = (t.double() if t.is_floating_point() else t for t in args)
    torch.testing.assert_close(program.module()(*args).double(), Model()(*doubles), rtol=1e-5, atol=1e-6)


def test_compiled_functions_follow_the_context():
    """A graph made under "reference" consists of PyTorch's operators, and can be differentiated."""
    graphs = []

    def recorder(module, _):
        graphs.append(len(ops_of(module.graph)))
        return module.forward

    compiled = torch.compile(lambda *args: sigmoid_attention(*args, is_causal=True, normalize=True), backend=recorder)
    args = [t.requires_grad_() for t in operands()]
    truth = sigmoid_attention(*args, is_causal=True, normalize=True)
    expected = torch.autograd.grad(truth.square().sum(), args)
    for context in (contextlib.nullcontext(), sigattn.backend("reference"), contextlib.nullcontext()):
        with context:
            out = compiled(*args)
        torch.testing.assert_close(out, truth)
        torch.testing.assert_close(torch.autograd.grad(out.square().sum(), args), expected)
    assert graphs == [1, 0]


@pytest.mark.parametrize("attend", [sigmoid_attention, flash_attn_func])
def test_a_context_within_a_compiled_function(attend):
    def call(*args):
        with sigattn.backend("reference"):
            return attend(*args, normalize=True)

    args, graphs = operands(7), []
    compiled = torch.compile(call, backend=lambda module, _: graphs.append(module) or module.forward, fullgraph=True)
    torch.testing.assert_close(compiled(*args), attend(*args, normalize=True))
    assert [ops_of(module.graph) for module in graphs] == [[]]
