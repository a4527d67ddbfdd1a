"""Language models through torch.jit.trace, and through AOTInductor into a package that runs by itself."""

import shutil

import pytest
import torch

from sigattn.models.language import LanguageModel, LanguageModelConfig
from tests.ops.cases import COMPILER_NOISE

pytestmark = [pytest.mark.usefixtures("unchecked"), *(pytest.mark.filterwarnings(w) for w in COMPILER_NOISE)]
LANGUAGE = {"vocab_size": 50, "max_seq_len": 64, "num_layers": 2, "embed_dim": 32, "num_heads": 4}


@pytest.mark.filterwarnings("ignore")  # the tracer's own: the checks compare sizes
@pytest.mark.parametrize(
    "settings", [{"length_power": 0.5}, {"attention_bias": "log_visible", "learn_bias": "quadratic"}], ids=str
)
def test_a_traced_model_counts_the_visible_keys_of_each_call(settings):
    torch.manual_seed(0)
    model = LanguageModel(LanguageModelConfig(**{**LANGUAGE, **settings, "num_layers": 1})).eval()
    traced = torch.jit.trace(model, (torch.randint(50, (2, 20)),), check_trace=False)
    for b, n in ((1, 61), (3, 5)):
        tokens = torch.randint(50, (b, n))
        torch.testing.assert_close(traced(tokens), model(tokens), rtol=1e-4, atol=1e-5)


FAST = {"aot_inductor.compile_wrapper_opt_level": "O0"}  # of the C++ around the kernels


@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor compiles C++")
def test_ahead_of_time(tmp_path):
    config = {**LANGUAGE, "num_layers": 1}  # each kernel takes two seconds to compile
    model = LanguageModel(LanguageModelConfig(**config, position="alibi")).eval()
    lengths = {1: torch.export.Dim("n", min=2, max=64)}
    exported = torch.export.export(model, (torch.randint(50, (2, 20)),), dynamic_shapes=(lengths,))
    path = torch._inductor.aoti_compile_and_package(
        exported, package_path=str(tmp_path / "model.pt2"), inductor_configs=FAST
    )
    package = torch._inductor.aoti_load_package(path)
    for n in (5, 33):
        tokens = torch.randint(50, (2, n))
        torch.testing.assert_close(package(tokens), model(tokens), rtol=1e-4, atol=1e-5)
