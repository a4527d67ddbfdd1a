"""torch.onnx.export of the operator, run by onnxruntime at other lengths than traced, against the float64 formula."""

import functools
import re
from unittest import mock

import pytest
import torch
from torch.export import Dim

pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")

from torch.onnx._internal.exporter import _registration  # noqa: E402

from sigattn import flash, sigmoid_attention  # noqa: E402
from tests.ops.cases import operands  # noqa: E402
from tests.ops.truth import assert_as_good_as_formula  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("unchecked"),
    pytest.mark.filterwarnings("ignore"),  # PyTorch's exporter's own
]
B, N, M = Dim("b", max=9), Dim("n", max=99), Dim("m", max=99)
LENGTHS = ((2, 7, 9), (3, 1, 33), (1, 20, 13))
CALLS = {
    "normalize": {"normalize": True, "is_causal": True},
    "normalize far below 0": {"normalize": True, "attn_mask": "visible", "bias": -200.0},
    "float mask": {"attn_mask": "additive", "bias": "bias", "window": (2, 1), "scale": 0.5, "softcap": 2.0},
    "lengths": {"key_lengths": "lengths", "alibi_slopes": "slopes"},
}


@pytest.fixture(autouse=True, scope="module")
def one_registry():
    """Collect the translations of PyTorch's operators once, not for every export."""
    registry = _registration.ONNXRegistry
    with mock.patch.object(registry, "from_torchlib", staticmethod(functools.cache(registry.from_torchlib))):
        yield


class Calls(torch.nn.Module):
    """Several calls of the operator with the same query, key and value; options name their tensors."""

    def __init__(self, *calls):
        super().__init__()
        self.calls = calls

    def forward(self, query, key, value, tensors, backend=None):
        named = [{k: tensors[v] if isinstance(v, str) else v for k, v in options.items()} for options in self.calls]
        return [sigmoid_attention(query, key, value, enable_gqa=True, backend=backend, **n) for n in named]


def arguments(b, n, m):
    """Return arguments where some queries see no key, and keys beyond the lengths are NaN."""
    visible = torch.rand(b, 1, n, m) > 0.4
    visible[0, :, 0] = False
    additive = torch.randn(b, 1, n, m).masked_fill(~visible, -torch.inf)
    lengths = torch.arange(m, m - b, -1)
    tensors = {"visible": visible, "additive": additive, "lengths": lengths}
    return *operands(n, m, b), {**tensors, "bias": torch.randn(1, 4, 1, 1), "slopes": torch.rand(4)}


def dynamic(tensors):
    shapes = {"visible": {0: B, 2: N, 3: M}, "additive": {0: B, 2: N, 3: M}, "lengths": {0: B}}
    return {0: B, 2: N}, {0: B, 2: M}, {0: B, 2: M}, {name: shapes.get(name, {}) for name in tensors}


def double(arguments):
    return torch.utils._pytree.tree_map(lambda t: t.double() if t.is_floating_point() else t, arguments)


def assert_equal_to_formula(program, calls, arguments):
    """Run a program in onnxruntime, and compare each call with the formula in float64."""
    model = program.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    reference = Calls(*calls.values())
    for args in arguments:
        given = (t.numpy() for t in torch.utils._pytree.tree_leaves(args))
        outs = session.run(None, dict(zip((i.name for i in session.get_inputs()), given, strict=True)))
        plain, exact = (reference(*a, backend="reference") for a in (args, double(args)))
        for name, out, same, truth in zip(calls, outs, plain, exact, strict=True):
            assert_as_good_as_formula(torch.from_numpy(out), truth, same, 2.0, name)


def test_options():
    """-log M, causality, windows, masks and lengths are those of the call, not of the traced one."""
    args = [arguments(*lengths) for lengths in LENGTHS]
    named = dict(zip(("query", "key", "value", "tensors"), args[0], strict=True))
    shapes = dict(zip(named, dynamic(args[0][3]), strict=True))
    module = Calls(*CALLS.values())
    program = torch.onnx.export(module, kwargs=named, dynamic_shapes=shapes, dynamo=True, verbose=False)
    assert_equal_to_formula(program, CALLS, args)


def test_exported_first():
    """A torch.export program, which contains the op, is translated too; half precision, grouped heads."""
    calls = {"causal": {"is_causal": True}}
    args = [(*(t.half() for t in operands(n, m, b, key_heads=2)), {}) for b, n, m in LENGTHS]
    program = torch.export.export(Calls(*calls.values()), args[0], dynamic_shapes=dynamic({})).run_decompositions()
    assert any(node.target is torch.ops.sigattn.dense_forward.default for node in program.graph.nodes)
    assert_equal_to_formula(torch.onnx.export(program, dynamo=True, verbose=False), calls, args)


class Packed(torch.nn.Module):
    def forward(self, query, offsets):
        return flash.flash_attn_varlen_func(query, query, query, offsets, offsets, 5, 5)


REFUSED = {
    "dropout": (Calls({"dropout_p": 0.5}), (*operands(), {}), r"dropout cannot be exported to ONNX: call eval"),
    "packed": (Packed(), (torch.randn(9, 4, 8), torch.tensor([0, 4, 9])), r"cannot be exported to ONNX.*key_lengths"),
}


@pytest.mark.parametrize(("module", "args", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(module, args, message):
    program = torch.export.export(module, args)
    with pytest.raises(torch.onnx.errors.OnnxExporterError) as caught:
        torch.onnx.export(program, dynamo=True, verbose=False)
    assert re.search(message, str(caught.value.__cause__)), caught.value.__cause__
