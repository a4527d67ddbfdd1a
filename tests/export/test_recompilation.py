"""Graphs that torch.compile makes of packed attention: their number does not grow with the numbers of sequences."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from sigattn import sigmoid_varlen_attention
from sigattn.models import LanguageModel, LanguageModelConfig
from sigattn.nn.documents import Documents
from tests.ops.cases import COMPILER_NOISE

pytestmark = [pytest.mark.usefixtures("unchecked"), *(pytest.mark.filterwarnings(w) for w in COMPILER_NOISE)]
SIZES = range(2, 12)  # numbers of sequences; more than the 8 graphs after which torch.compile gives up
LONGEST = 20


def varlen(q, starts):
    return sigmoid_varlen_attention(q, q, q, starts, starts, LONGEST, LONGEST, is_causal=True)


@pytest.fixture
def graphs():
    torch._dynamo.reset()
    counter = CompileCounter()
    yield counter
    assert counter.frame_count <= 2, "one for the first sizes, one for all others"


def test_one_graph_serves_all_numbers_of_packed_sequences(graphs):
    compiled = torch.compile(varlen, backend=graphs, fullgraph=True)
    for sequences in SIZES:
        lengths = torch.arange(3, 3 + sequences) % LONGEST + 1
        starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        q = torch.randn(int(lengths.sum()), 2, 8)
        torch.testing.assert_close(compiled(q, starts), varlen(q, starts))


def test_one_graph_serves_all_numbers_of_packed_documents_in_training(graphs):
    config = LanguageModelConfig(vocab_size=50, max_seq_len=64, num_layers=1, embed_dim=16, num_heads=2)
    model = torch.compile(LanguageModel(config), backend=graphs)
    for documents in SIZES:
        tokens = torch.randint(1, 50, (2, 40))
        tokens[:, 4 : 4 + 2 * documents : 2] = 0
        model(tokens, documents=Documents.from_end_token(tokens, 0)).square().mean().backward()
