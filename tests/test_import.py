"""Imports and public names: ``import sigattn`` needs torch alone; packages are imported at first use, and complete."""

import graphlib
import importlib
import importlib.util
import inspect
import pydoc
import runpy
import subprocess
import sys

import pytest
from torch import nn

import sigattn
from sigattn.models import LanguageModelConfig, load, save
from sigattn.optional import MissingPackageError, explain_import_errors

FORBIDDEN = ["triton", "matplotlib", "tyro", "transformers", "rich", "jaxtyping", "beartype", "safetensors", "timm"]
FORBIDDEN += ["tensorboard", "sklearn", "torchvision", "soundfile", "jiwer", "tokenizers"]
TORCH_ALONE = f"""
import sys, torch
before = set(sys.modules)
import sigattn
new = {{m.partition(".")[0] for m in set(sys.modules) - before}} - set(sys.stdlib_module_names)
assert new == {{"sigattn"}}, new
assert "sigattn.nn" not in sys.modules
sigattn.sigmoid_attention(*torch.randn(3, 1, 2, 8, 4).unbind())
assert not set({FORBIDDEN!r}) & (set(sys.modules) - before)
sys.modules.update(dict.fromkeys({FORBIDDEN!r}))
for name in sigattn.__all__:
    getattr(sigattn, name)
from sigattn.models import autoencoder, language, saving, speech, vision
from sigattn.recipes import find_recipe
saving.build(find_recipe("lm-kappa-1-tiny").model)
"""
SLOW = ("matplotlib", "sympy", "torch.distributed.tensor", "torch.utils.tensorboard", "transformers")
COMMAND_LINE = f"""
import sys
for name in {FORBIDDEN!r}:
    del sys.modules[name]
import sigattn.cli
print([m for m in {SLOW!r} if m in sys.modules])

class Interrupted:
    def find_spec(self, name, *_):
        if name == "tyro":
            raise KeyboardInterrupt

def import_again(package, prepare):
    for name in [m for m in sys.modules if m.startswith("sigattn.cli") or m.partition(".")[0] == package]:
        del sys.modules[name]
    prepare()
    try:
        import sigattn.cli
    except SystemExit as stop:
        print(stop)

for package in ("tyro", "matplotlib"):
    import_again(package, lambda: sys.modules.update({{package: None}}))
    del sys.modules[package]
for command in ("--version", "info"):
    sys.argv = ["sigattn", command]
    import_again("tyro", lambda: sys.modules.update({{"tyro": None}}))
del sys.modules["tyro"]
import_again("tyro", lambda: sys.meta_path.insert(0, Interrupted()))
"""


def test_imports():
    """Without the other packages; then the command line with them, without one that it needs, and with Ctrl-C.

    Without the extra "train" it prints the version and what the machine supports, for which issues ask.
    """
    code = TORCH_ALONE + (COMMAND_LINE if importlib.util.find_spec("tyro") else "")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    missing = "sigattn: the command line needs {}: pip install 'sigattn[train]'"
    expected = ["[]", missing.format("tyro"), missing.format("matplotlib"), f"sigattn {sigattn.__version__}"]
    lines = [line for line in done.stdout.splitlines() if line]
    assert lines[:4] in ([], expected)
    if lines:  # of info, and Ctrl-C
        assert lines[4].startswith(f"{expected[3]}, torch ")
        assert lines[-1] == "130"


def test_no_file_imports_itself_through_others():
    """Imports inside functions count too: they hide a cycle, they do not remove it. Those of type checkers do not."""
    grimp = pytest.importorskip("grimp")
    graph = grimp.build_graph(
        "sigattn", "experiments", "benchmarks", exclude_type_checking_imports=True, cache_dir=None
    )
    imported = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    graphlib.TopologicalSorter(imported).prepare()  # raises CycleError, which names the files


PACKAGES = ["sigattn", "sigattn.models", "sigattn.nn"]


@pytest.mark.parametrize("package", PACKAGES)
def test_all_is_complete_and_resolves(package):
    module = importlib.import_module(package)
    public = {n for n, v in vars(module).items() if not n.startswith("_") and not inspect.ismodule(v)}
    assert public - set(module.__all__) <= {"Any", "import_module", "TYPE_CHECKING"}
    assert all(hasattr(module, name) for name in module.__all__)
    assert set(module.__all__) <= set(dir(module))


@pytest.mark.parametrize("package", PACKAGES)
def test_help_shows_every_public_name_with_its_first_line(package):
    module = importlib.import_module(package)
    page = pydoc.render_doc(module, renderer=pydoc.plaintext)
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.ismodule(value):
            assert f"sigattn.{name} " in page or f"sigattn.{name}," in page, name
        elif callable(value):
            assert inspect.getdoc(value).splitlines()[0] in page, name


def test_an_unknown_name_of_the_package_raises():
    with pytest.raises(AttributeError, match="module 'sigattn' has no attribute 'attention'"):
        sigattn.attention  # noqa: B018


SHOWN = {
    "Attention(8, 2, activation='softmax', attention_bias=None, window=(3, 0))": "'softmax'; window=(3, 0)",
    "Attention(8, 4, num_kv_heads=2, activation='sigmoid', attention_bias=-1.0)": "num_kv_heads=2; ConstantBias(-1)",
    "Attention(8, 4, activation='sigmoid', attention_bias=-1.0)": "causal=True; (attention_bias)",
    "Alibi(2, 'split')": "num_heads=2; 'split'; steepness=4",
    "Block(a, MLP(8, 16), 8, norm_placement='hybrid')": "norm_placement='hybrid'",
    "Cape(8, max_scale=3.0)": "8, step=0.03; max_scale=3",
    "ConformerBlock(a, 8, 16, init_values=0.5)": "(scales); init_values=0.5",
    "ConstantBias(-2.0)": "-2",
    "ContextLengthBias(2048)": "ContextLengthBias(-7.625)",
    "DropPath(0.25)": "DropPath(drop_prob=0.25)",
    "ImageCape(8, 2, 3)": "rows=2, columns=3; max_global_shift=0.5",
    "LayerScale(8, 0.1)": "LayerScale(8, init_values=0.1)",
    "LearnableBias(-3.0, 2)": "initial=-3, num_parameters=2",
    "LearnableEmbedding(5, 8)": "5, 8, std=0.02",
    "MLP(8, 16, activation='relu')": "activation='relu'",
    "PerformerFeatures(8, 3)": "head_dim=8, features=3",
    "QueryBias()": "initial=-5",
    "RotaryEmbedding(8)": "8, base=10000",
    "SinusoidalEmbedding(8)": "8, base=10000",
    "VisibleKeysLinearBias(3)": "num_heads=3",
}
WITHOUT_SETTINGS = {  # no settings, or all of them are shown by submodules, or by the class of PyTorch
    "AlibiKeysBias", "AttentionBias", "BatchLengthBias", "ConvolutionModule", "LayerNorm", "MaskedBatchNorm",
    "RMSNorm", "SampleLengthBias", "SigmoidMultiheadAttention", "SwiGLU", "VisibleKeysBias",
}  # fmt: skip


@pytest.mark.parametrize("code", SHOWN)
def test_printing_a_layer_shows_its_settings(code):
    names = vars(importlib.import_module("sigattn.nn"))
    a = names["Attention"](8, 2, activation="sigmoid", attention_bias=0.0)
    shown = repr(eval(code, dict(names), {"a": a}))
    assert all(text in shown for text in SHOWN[code].split("; ")), shown


def test_every_layer_is_tested_for_its_settings():
    values = {name: getattr(sigattn.nn, name) for name in sigattn.nn.__all__}
    layers = {n for n, v in values.items() if inspect.isclass(v) and issubclass(v, nn.Module)}
    assert layers == {code.partition("(")[0] for code in SHOWN} | WITHOUT_SETTINGS


def test_printing_a_converted_layer_shows_its_bias():
    layers = nn.TransformerEncoderLayer(8, 2), nn.TransformerEncoderLayer(8, 2)
    sigattn.convert(layers[0])
    sigattn.convert(layers[1], bias=-2.0)
    assert "8, num_heads=2, dropout=0.1, sigmoid_bias=None (-log of the visible keys)" in repr(layers[0].self_attn)
    assert "(sigmoid_bias): ConstantBias(-2)" in repr(layers[1])


def test_printing_a_model_shows_what_differs_from_the_defaults():
    models = sigattn.models
    config = models.LanguageModelConfig(num_layers=1, attention_bias=-2.0)
    assert "num_layers=1, attention_bias=-2.0\n" in repr(models.LanguageModel(config))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            ModuleNotFoundError("no module", name="transformers"),
            r"^this needs transformers: pip install 'sigattn\[x\]'$",
        ),
        # what pip installs next to a PyTorch for CPUs
        (RuntimeError("operator torchvision::nms does not exist"), "torchvision .* cannot be imported next to torch"),
        (ImportError("cannot import name"), r"^cannot import name \(installed by pip install 'sigattn\[x\]'\)$"),
    ],
)
def test_the_package_to_install_is_named(error, message):
    with pytest.raises(MissingPackageError, match=message), explain_import_errors("x"):
        raise ImportError("Failed to import transformers.models") from error  # as transformers hides its cause


@pytest.mark.parametrize("missing", ["lm_eval", "transformers"])
def test_lm_eval_names_its_extra(monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, "sigattn.integrations.lm_eval", raising=False)
    with pytest.raises(MissingPackageError, match=r"sigattn\[eval\]"):
        importlib.import_module("sigattn.integrations.lm_eval")


def test_models_are_saved_and_loaded_with_safetensors(monkeypatch, tmp_path):
    model = LanguageModelConfig(num_layers=1, embed_dim=64).build()
    monkeypatch.setitem(sys.modules, "safetensors", None)
    for call in (lambda: save(model, tmp_path / "model"), lambda: load(tmp_path / "model")):
        with pytest.raises(MissingPackageError, match=r"need safetensors: pip install 'sigattn\[train\]'"):
            call()
    assert not (tmp_path / "model").exists()


def test_the_module_runs_a_command_of_transformers_and_its_server_finds_our_class(monkeypatch, capsys):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("typer")
    monkeypatch.setattr(sys, "argv", ["transformers", "version"])
    monkeypatch.delattr(transformers, "SigattnForCausalLM", raising=False)
    try:
        with pytest.raises(SystemExit) as stop:
            runpy.run_module("sigattn.integrations.transformers", run_name="__main__")
    except NameError:
        pytest.skip("the oldest transformers that is supported does not import its server without openai")
    assert not stop.value.code
    assert transformers.__version__ in capsys.readouterr().out
    assert transformers.SigattnForCausalLM.__module__ == "sigattn.integrations.transformers.model"
