"""Imports of the integrations in plain interpreters, where nothing of these tests has been set up."""

import importlib.util
import subprocess
import sys

import pytest

PACKAGES = ["lm_eval", "timm"]  # transformers: below
ERROR = "sigattn.optional.MissingPackageError"
BROKEN = 'raise RuntimeError("operator torchvision::nms does not exist")\n'


def run(code, *paths):
    before = f"import sys; sys.path[:0] = {[str(p) for p in paths]!r}\n"
    return subprocess.run([sys.executable, "-c", before + code], capture_output=True, text=True)


@pytest.fixture
def broken_torchvision(tmp_path):
    """A torchvision whose build does not fit torch, as pip installs it next to a PyTorch for CPUs."""
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text(BROKEN)
    information = tmp_path / "torchvision-0.99.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.99.0\n")
    return tmp_path


@pytest.mark.parametrize("package", PACKAGES)
def test_integrations_are_imported_or_say_what_they_need(package):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    done = run(f"import sigattn.integrations.{package}")
    if package == "timm" and importlib.util.find_spec("torchvision") is None:
        assert done.stderr.splitlines()[-1] == f"{ERROR}: this needs torchvision: pip install 'sigattn[timm]'"
    else:
        assert done.returncode == 0, done.stderr


def test_exported_models_are_known_after_the_import():
    """And the module of their classes is imported, or says what it needs."""
    pytest.importorskip("transformers")
    code = "import sigattn.integrations.transformers, transformers; transformers.AutoConfig.for_model('sigattn')\n"
    done = run(code + "import sigattn.integrations.transformers.model")
    assert done.returncode == 0, done.stderr


def test_torchvision_that_does_not_fit_is_named(broken_torchvision):
    """By the command line, in one line, and by each integration."""
    pytest.importorskip("transformers")
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed")
    code = """
import importlib
from sigattn.cli import main
from sigattn.optional import MissingPackageError
try:
    main(['export', 'nothing', 'nowhere'])
except SystemExit as stop:
    print(stop.code)
for module in ("transformers", "timm"):
    try:
        importlib.import_module(f"sigattn.integrations.{module}")
    except MissingPackageError as error:
        print(error)
"""
    done = run(code, broken_torchvision)
    assert done.returncode == 0, done.stderr
    expected = "torchvision 0.99.0 cannot be imported next to torch "
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"sigattn: {expected}")
    code, *errors = done.stdout.splitlines()
    assert code == "1"
    assert len(errors) == 2
    for error in errors:
        assert error.startswith(expected)
        assert "uninstall torchvision" in error


def test_missing_package_is_named():
    done = run("sys.modules['transformers'] = None\nimport sigattn.integrations.transformers")
    assert done.stderr.splitlines()[-1] == (f"{ERROR}: this needs transformers: pip install 'sigattn[transformers]'")
