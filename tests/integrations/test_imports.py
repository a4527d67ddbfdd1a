"""Errors of packages that are missing, or do not fit, and the command that the integration's module runs."""

import importlib
import runpy
import sys

import pytest

from sigattn.models import LanguageModelConfig, load, save
from sigattn.optional import MissingPackageError, explain_import_errors


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
