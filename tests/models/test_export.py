"""Language models through torch.jit.trace. (Exported and compiled ahead of time: examples/export_model.py.)"""

import pytest
import torch

from sigattn.models.language import LanguageModel, LanguageModelConfig
from tests.ops.cases import COMPILER_NOISE

pytestmark = [pytest.mark.usefixtures("unchecked"), *(pytest.mark.filterwarnings(w) for w in COMPILER_NOISE)]
LANGUAGE = {"vocab_size": 50, "max_seq_len": 64, "num_layers": 1, "embed_dim": 32, "num_heads": 4}


@pytest.mark.filterwarnings("ignore")  # the tracer's own: the checks compare sizes
@pytest.mark.parametrize(
    "settings", [{"length_power": 0.5}, {"attention_bias": "log_visible", "learn_bias": "quadratic"}], ids=str
)
def test_a_traced_model_counts_the_visible_keys_of_each_call(settings):
    torch.manual_seed(0)
    model = LanguageModel(LanguageModelConfig(**LANGUAGE, **settings)).eval()
    traced = torch.jit.trace(model, (torch.randint(50, (2, 20)),), check_trace=False)
    for b, n in ((1, 61), (3, 5)):
        tokens = torch.randint(50, (b, n))
        torch.testing.assert_close(traced(tokens), model(tokens), rtol=1e-4, atol=1e-5)
