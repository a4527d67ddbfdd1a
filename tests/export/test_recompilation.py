"""Graphs that torch.compile makes of packed attention: their number does not grow with the numbers of sequences."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from sigattn import flash, sigmoid_varlen_attention
from sigattn.models import LanguageModel, LanguageModelConfig
from sigattn.nn.documents import Documents
from tests.ops.cases import COMPILER_NOISE

pytestmark = [pytest.mark.usefixtures("unchecked"), *(pytest.mark.filterwarnings(w) for w in COMPILER_NOISE)]
SIZES = range(2, 16)  # numbers of sequences; more than the 8 graphs after which torch.compile gives up
LONGEST = 20


def packed(sequences):
    lengths = torch.arange(3, 3 + sequences) % LONGEST + 1
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    return torch.randn(int(lengths.sum()), 2, 8), cu_seqlens


def varlen(q, starts):
    return sigmoid_varlen_attention(q, q, q, starts, starts, LONGEST, LONGEST, is_causal=True)


def flash_varlen_qkvpacked(q, starts):
    qkv = torch.stack((q, q, q), 1)
    return flash.flash_attn_varlen_qkvpacked_func(qkv, starts, LONGEST, causal=True, sigmoid_bias=-2.0)


@pytest.mark.parametrize("function", [varlen, flash_varlen_qkvpacked])
def test_one_graph_serves_all_numbers_of_packed_sequences(function):
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(function, backend=counter, fullgraph=True)
    for sequences in SIZES:
        arguments = packed(sequences)
        torch.testing.assert_close(compiled(*arguments), function(*arguments))
    assert counter.frame_count <= 2, "one for the first sizes, one for all others"


def test_one_graph_serves_all_numbers_of_packed_documents_in_training():
    torch._dynamo.reset()
    counter = CompileCounter()
    config = LanguageModelConfig(vocab_size=50, max_seq_len=64, num_layers=1, embed_dim=16, num_heads=2)
    model = torch.compile(LanguageModel(config), backend=counter)
    for documents in SIZES:
        tokens = torch.randint(1, 50, (2, 40))
        tokens[:, 4 : 4 + 2 * documents : 2] = 0
        loss = model(tokens, documents=Documents.from_end_token(tokens, 0)).square().mean()
        loss.backward()
    assert counter.frame_count <= 2, "one for the first sizes, one for all others"


def test_one_graph_for_lengths_read_inside_it():
    """The longest length is then unknown to the tracer."""

    def attend(q, starts):
        longest = starts.diff().max().item()
        return flash.flash_attn_varlen_func(q, q, q, starts, starts, longest, longest, causal=True)

    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
        for sequences in (2, 3):
            q, starts = packed(sequences)
            outs = [function(q.requires_grad_(), starts) for function in (compiled, attend)]
            torch.testing.assert_close(*outs)
            torch.testing.assert_close(*(torch.autograd.grad(out.square().sum(), q) for out in outs))
