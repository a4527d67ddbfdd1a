"""Imports of the integrations in plain interpreters, where nothing of these tests has been set up."""

import importlib.util
import subprocess
import sys

import pytest

MODULES = ["transformers", "transformers.model", "lm_eval", "timm"]
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


@pytest.mark.parametrize("module", MODULES)
def test_integrations_are_imported_or_say_what_they_need(module):
    package = module.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    done = run(f"import sigattn.integrations.{module}")
    if package == "timm" and importlib.util.find_spec("torchvision") is None:
        assert done.stderr.splitlines()[-1] == f"{ERROR}: this needs torchvision: pip install 'sigattn[timm]'"
    else:
        assert done.returncode == 0, done.stderr


def test_exported_models_are_known_after_the_import():
    pytest.importorskip("transformers")
    done = run("import sigattn.integrations.transformers, transformers; transformers.AutoConfig.for_model('sigattn')")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", ["transformers", "timm"])
def test_torchvision_that_does_not_fit_is_named(module, broken_torchvision):
    pytest.importorskip("transformers")
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed")
    done = run(f"import sigattn.integrations.{module}", broken_torchvision)
    last = done.stderr.splitlines()[-1]
    assert last.startswith(
        "sigattn.optional.MissingPackageError: torchvision 0.99.0 cannot be imported next to torch "
    ), done.stderr
    assert "uninstall torchvision" in last


def test_command_line_names_torchvision_that_does_not_fit(broken_torchvision):
    pytest.importorskip("transformers")
    code = "from sigattn.cli import main; main(['export', 'nothing', 'nowhere'])"
    done = run(code, broken_torchvision)
    assert done.returncode == 1, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("sigattn: torchvision 0.99.0 cannot be imported next to torch ")


def test_missing_package_is_named():
    done = run("sys.modules['transformers'] = None\nimport sigattn.integrations.transformers")
    assert done.stderr.splitlines()[-1] == (f"{ERROR}: this needs transformers: pip install 'sigattn[transformers]'")
