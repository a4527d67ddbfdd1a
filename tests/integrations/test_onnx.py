"""Converted models through torch.export, torch.jit.trace and torch.onnx.export, at other sizes than traced.

``examples/export_model.py`` exports a language model.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.export import Dim

pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("transformers")

from transformers.masking_utils import sliding_window_causal_mask_function  # noqa: E402

from sigattn import convert  # noqa: E402
from sigattn.integrations import transformers as sigmoid  # noqa: E402
from sigattn.integrations.transformers.mask import sigmoid_mask  # noqa: E402
from sigattn.nn.bias import VisibleKeysLinearBias  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("unchecked"),
    pytest.mark.filterwarnings("ignore"),  # PyTorch's exporter's own, and transformers'
]


class Layers(nn.Module):
    """A converted ``nn.MultiheadAttention`` with its weights, and mask and attention of a decoder of transformers.

    The decoder has shared key heads and a window, and attends to other keys without a mask.
    """

    def __init__(self, bias):
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        convert(self.attention)
        self.sigmoid_bias, self.config = bias, SimpleNamespace(sigmoid_bias=None if bias is None else {})

    def forward(self, x, padding, mask, other):
        b, n, _ = x.shape
        query, key = (t.unflatten(-1, (-1, 8)).transpose(1, 2) for t in (x, x[..., :16]))
        window = {"mask_function": sliding_window_causal_mask_function(30), "local_size": 30}
        mask = sigmoid_mask(b, n, n, attention_mask=mask, allow_is_causal_skip=True, **window)
        windowed = sigmoid.attention(self, query, key, key, mask, sliding_window=30)[0]
        across = sigmoid.attention(self, query, other, other, None, is_causal=False)[0]
        return *self.attention(x, x, x, padding), windowed, across


def inputs_of(b, n):
    """Return inputs that are padded on the right, of PyTorch's layer, and on the left, of the decoder."""
    padding, mask = torch.arange(n).expand(b, n) > n // 2, torch.ones(b, n, dtype=torch.bool)
    mask[-1, :2] = False
    return {"x": torch.randn(b, n, 32), "padding": padding, "mask": mask, "other": torch.randn(b, 2, 3 * n, 8)}


@torch.no_grad()
@pytest.mark.parametrize("bias", [None, VisibleKeysLinearBias(4)], ids=["rule", "fitted"])
def test_outputs_at_other_sizes(bias):
    """At lengths within the window and beyond it. ONNX's exporter takes long for a symbolic number of samples."""
    model, inputs = Layers(bias).eval(), inputs_of(2, 20)
    b, n = Dim.STATIC if bias is None else Dim("b", max=9), Dim("n", min=3, max=60)
    shapes = {"x": {0: b, 1: n}, "padding": {0: b, 1: n}, "mask": {0: b, 1: n}, "other": {0: b, 2: Dim("m", max=200)}}
    exported = torch.export.export(model, (), inputs, dynamic_shapes=shapes)
    traced = torch.jit.trace(model, tuple(inputs.values()), check_trace=False)
    runs = [exported.module(), lambda **inputs: traced(*inputs.values())]
    if bias is None:
        content = torch.onnx.export(exported, verbose=False, optimize=False).model_proto.SerializeToString()
        session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
        runs.append(lambda **inputs: session.run(None, {name: t.numpy() for name, t in inputs.items()}))
    for b, n in ((2, 5), (2, 60)) if bias is None else ((3, 5), (1, 60)):
        inputs = inputs_of(b, n)
        expected = model(**inputs)
        for run in runs:
            for ours, theirs in zip(run(**inputs), expected, strict=True):
                torch.testing.assert_close(torch.as_tensor(ours), theirs, rtol=1e-4, atol=1e-5)
