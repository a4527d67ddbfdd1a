"""Imports of the integrations in a plain interpreter, where nothing of these tests has been set up."""

import importlib.util
import subprocess
import sys

import pytest

CODE = """
import importlib, sys
from sigattn.cli import main
from sigattn.optional import MissingPackageError

def attempt(module):
    try:
        importlib.import_module(f"sigattn.integrations.{module}")
    except MissingPackageError as error:
        print(error)

sys.modules["transformers"] = None
attempt("transformers")
del sys.modules["transformers"]
sys.path.insert(0, sys.argv[1])
try:
    main(["export", "nothing", "nowhere"])
except SystemExit as stop:
    print(stop.code)
attempt("transformers")
"""


def test_a_missing_package_and_a_torchvision_that_does_not_fit_are_named(tmp_path):
    """Such a torchvision is what pip installs next to a PyTorch for CPUs."""
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision/__init__.py").write_text('raise RuntimeError("operator torchvision::nms does not exist")')
    information = tmp_path / "torchvision-0.99.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.99.0\n")
    done = subprocess.run([sys.executable, "-c", CODE, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    no_transformers, code, error = done.stdout.splitlines()
    assert no_transformers == "this needs transformers: pip install 'sigattn[transformers]'"
    expected = "torchvision 0.99.0 cannot be imported next to torch "
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"sigattn: {expected}")
    assert code == "1"
    assert error.startswith(expected)
    assert "uninstall torchvision" in error
