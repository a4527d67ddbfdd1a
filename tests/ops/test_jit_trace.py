"""torch.jit.trace records the operator, and models record what they count, not the sizes of the traced call."""

import io

import pytest
import torch

import sigattn
from sigattn import sigmoid_attention
from sigattn.flash import flash_attn_with_kvcache
from sigattn.models import LanguageModel, LanguageModelConfig
from tests.ops.truth import assert_as_good_as_formula

pytestmark = [
    pytest.mark.usefixtures("unchecked"),
    pytest.mark.filterwarnings("ignore"),  # the tracer's own: the checks compare sizes
]


def operands(n, m, shape=(2, 4), key_heads=None, dtype=torch.float32):
    return torch.randn(*shape, n, 8, dtype=dtype), torch.randn(*shape[:-1], key_heads or shape[-1], m, 8, dtype=dtype)


CASES = {
    "-log M, three dimensions": ({}, {"shape": (4,)}),
    "slopes, three dimensions": ({"alibi_slopes": torch.rand(4)}, {"shape": (4,)}),
    "window and slopes": ({"window": (2, 1), "alibi_slopes": torch.rand(4)}, {}),
    "grouped heads": ({"enable_gqa": True, "is_causal": True, "bias": -1.0}, {"key_heads": 2}),
}


@pytest.mark.parametrize(
    ("backend", "grad", "dtype"),
    [(None, False, torch.float32), (None, True, torch.float32), ("reference", False, torch.float64)],
)
@pytest.mark.parametrize(("options", "shapes"), CASES.values(), ids=CASES)
def test_other_lengths(options, shapes, backend, grad, dtype):
    query, key = operands(7, 9, **shapes, dtype=dtype)
    traced = torch.jit.trace(
        lambda query, key: sigmoid_attention(query, key, key, backend=backend, **options),
        (query.requires_grad_(grad), key),
    )
    assert ("sigattn::" in str(traced.graph)) == (backend is None)  # the formula is recorded in PyTorch's operators
    for n, m in ((5, 30), (300, 700)):
        query, key = operands(n, m, **shapes, dtype=dtype)
        truth = sigmoid_attention(query.double(), key.double(), key.double(), backend="reference", **options)
        plain = sigmoid_attention(query, key, key, backend="reference", **options)
        assert_as_good_as_formula(traced(query, key), truth, plain, 2.0)


def test_exporters_of_traces_take_the_formula():
    """The older exporter to ONNX does, as OpenVINO's converter of modules; neither has a translation of the op."""
    runtime = pytest.importorskip("onnxruntime")

    class Layer(torch.nn.Module):
        def forward(self, query, key, value):
            return sigmoid_attention(query, key, value, is_causal=True, normalize=True)

    attention, (query, key) = Layer(), operands(7, 9)
    with pytest.raises(torch.onnx.errors.UnsupportedOperatorError, match="sigattn::dense_forward"):
        torch.onnx.export(attention, (query, key, key), io.BytesIO(), dynamo=False)
    file, lengths = io.BytesIO(), {"query": {2: "n"}, "key": {2: "m"}, "value": {2: "m"}}
    with sigattn.backend("reference"):
        torch.onnx.export(
            attention, (query, key, key + 1), file, dynamo=False, input_names=[*lengths], dynamic_axes=lengths
        )
    session = runtime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])
    query, key = operands(5, 30)
    out = session.run(None, {"query": query.numpy(), "key": key.numpy(), "value": key.numpy()})[0]
    truth = attention(query.double(), key.double(), key.double())
    assert_as_good_as_formula(torch.from_numpy(out), truth, attention(query, key, key), 2.0)


def test_a_cache_is_traced_for_any_length():
    """A token is written at the lengths of each call, not at those of the traced call."""

    def decode(q, key_cache, value_cache, k, v, lengths):
        out = flash_attn_with_kvcache(q, key_cache, value_cache, k, v, cache_seqlens=lengths, sigmoid_bias=-1.0)
        return out, key_cache, value_cache

    def arguments(length):
        torch.manual_seed(length)
        token, cache = (1, 1, 2, 4), (1, 16, 2, 4)
        tensors = [torch.randn(shape) for shape in (token, cache, cache, token, token)]
        return *tensors, torch.tensor([length], dtype=torch.int32)

    traced = torch.jit.trace(decode, arguments(3), check_trace=False)
    torch.testing.assert_close(traced(*arguments(7)), decode(*arguments(7)))


@pytest.mark.parametrize(
    "settings", [{"length_power": 0.5}, {"attention_bias": "log_visible", "learn_bias": "head"}], ids=str
)
def test_a_model_counts_the_visible_keys_of_each_call(settings):
    sizes = {"vocab_size": 50, "max_seq_len": 64, "num_layers": 1, "embed_dim": 32, "num_heads": 4}
    model = LanguageModel(LanguageModelConfig(**sizes, **settings)).eval()
    traced = torch.jit.trace(model, (torch.randint(50, (2, 20)),), check_trace=False)
    for b, n in ((1, 61), (3, 5)):
        tokens = torch.randint(50, (b, n))
        torch.testing.assert_close(traced(tokens), model(tokens), rtol=1e-4, atol=1e-5)
