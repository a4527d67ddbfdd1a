"""Command line of transformers, which the module of the integration runs."""

import runpy
import sys

import pytest

transformers = pytest.importorskip("transformers")
pytest.importorskip("typer")


def test_the_module_runs_a_command_of_transformers(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["transformers", "version"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("sigattn.integrations.transformers", run_name="__main__")
    assert not stop.value.code
    assert transformers.__version__ in capsys.readouterr().out
