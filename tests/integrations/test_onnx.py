"""Converted models through torch.onnx.export, run by onnxruntime at other batch sizes and lengths than traced.

``examples/export_model.py`` exports a language model.
"""

import pytest
import torch
from torch import nn
from torch.export import Dim

pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")
transformers = pytest.importorskip("transformers")

from sigattn import convert  # noqa: E402
from sigattn.integrations import transformers as sigmoid  # noqa: E402
from sigattn.integrations.transformers.mask import sigmoid_mask  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("unchecked"),
    pytest.mark.filterwarnings("ignore"),  # PyTorch's exporter's own, and transformers'
]


class Layers(nn.Module):
    """A converted ``nn.MultiheadAttention`` with its weights, and mask and attention of a decoder of transformers."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        convert(self.attention)

    def forward(self, x, padding, mask):
        (b, n, _), heads = x.shape, x.unflatten(-1, (4, 8)).transpose(1, 2)
        mask = sigmoid_mask(b, n, n, attention_mask=mask, allow_is_causal_skip=True)
        return *self.attention(x, x, x, padding), sigmoid.attention(self, heads, heads, heads, mask)[0]


def inputs_of(b, n):
    """Return inputs that are padded on the right, of PyTorch's layer, and on the left, of the decoder."""
    padding, mask = torch.arange(n).expand(b, n) > n // 2, torch.ones(b, n, dtype=torch.bool)
    mask[-1, :2] = False
    return {"x": torch.randn(b, n, 32), "padding": padding, "mask": mask}


def test_outputs_at_other_sizes():
    model, inputs = Layers().eval(), inputs_of(2, 20)
    shapes = {name: {0: Dim("b", max=9), 1: Dim("n", min=2, max=60)} for name in inputs}
    program = torch.onnx.export(model, kwargs=inputs, dynamic_shapes=shapes, dynamo=True, verbose=False)
    running = onnxruntime.InferenceSession(program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])
    for size in ((3, 7), (1, 60)):
        inputs = inputs_of(*size)
        with torch.no_grad():
            expected = model(**inputs)
        for found, wanted in zip(running.run(None, {n: t.numpy() for n, t in inputs.items()}), expected, strict=True):
            torch.testing.assert_close(torch.from_numpy(found), wanted, rtol=1e-4, atol=1e-5)
