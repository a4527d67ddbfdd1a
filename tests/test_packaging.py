"""The wheel and the source distribution: built, installed with torch alone, tested from where they were unpacked."""

import itertools
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

pytest.importorskip("hatchling")
pytest.importorskip("hatch_fancy_pypi_readme")

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", folder], cwd=ROOT, check=True, capture_output=True
    )
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


def test_the_oldest_versions_that_are_declared_are_tested():
    declared = dict(re.findall(r'"([\w-]+)>=([\d.]+)', (ROOT / "pyproject.toml").read_text()))
    constraints = [(ROOT / f"constraints-minimum{name}.txt").read_text() for name in ("", "-integrations")]
    tested = dict(re.findall(r"^([\w-]+)==([\d.]+)$", "\n".join(constraints), re.MULTILINE))
    for package in ("torch", "triton", "transformers", "timm", "llvmlite"):
        assert Version(declared[package]) == Version(tested[package]), package


def test_wheel_works_with_torch_alone(built, tmp_path):
    """Where no other package that the library imports anywhere can be imported."""
    with zipfile.ZipFile(built[0]) as wheel:
        wheel.extractall(tmp_path)
    source = "\n".join(f.read_text() for f in (ROOT / "src").rglob("*.py"))
    imported = set(re.findall(r"^ *(?:from|import) (\w+)", source, re.MULTILINE))
    assert {"llvmlite", "safetensors", "tyro"} <= imported
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        f"sys.modules.update(dict.fromkeys({imported - {'torch', 'sigattn'} - sys.stdlib_module_names}))\n"
        "import torch, sigattn, sigattn.flash, sigattn.nn\n"
        f"assert sigattn.__file__.startswith({str(tmp_path)!r}), sigattn.__file__\n"
        "q, k, v = torch.randn(3, 1, 2, 5, 4, dtype=torch.float64).requires_grad_().unbind()\n"
        "out = sigattn.sigmoid_attention(q, k, v, bias=-1.0)\n"
        "torch.testing.assert_close(out, torch.sigmoid(q @ k.mT / 2 - 1) @ v)\n"
        "out.sum().backward()\n"
        "print(sigattn.__version__)"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"-{done.stdout.strip()}-" in built[0].name


def metadata(wheel):
    """Return the lines of the fields, and the description."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        fields, _, description = archive.read(name).decode().partition("\n\n")
    return fields.splitlines(), description


def test_llvmlite_is_required_where_it_has_wheels(built):
    lines = metadata(built[0])[0]
    (required,) = [Requirement(line.partition(": ")[2]) for line in lines if line.startswith("Requires-Dist: llvmlite")]
    names = ("platform_system", "platform_machine", "implementation_name")
    machines = itertools.product(
        ("Linux", "Darwin", "Windows"), ("x86_64", "aarch64", "arm64", "AMD64", "ppc64le"), ("cpython", "pypy")
    )
    with_wheels = [m for m in machines if required.marker.evaluate({**dict(zip(names, m, strict=True)), "extra": ""})]
    assert with_wheels == [("Linux", "x86_64", "cpython"), ("Linux", "aarch64", "cpython")]


def test_description_has_no_relative_links(built):
    description = metadata(built[0])[1]
    assert "# sigattn" in description
    targets = re.findall(r"\]\(([^)]+)\)|src=\"([^\"]+)\"", description)
    assert all("".join(target).startswith("https://") for target in targets), targets


def test_wheel_has_the_package_and_nothing_else(built):
    with zipfile.ZipFile(built[0]) as wheel:
        names = set(wheel.namelist())
    package = ROOT / "src/sigattn"
    source = {f.relative_to(ROOT / "src").as_posix() for f in package.rglob("*") if f.suffix == ".py"}
    assert {name for name in names if ".dist-info/" not in name} == source | {"sigattn/py.typed"}
    others = {name.partition(".dist-info/")[2] for name in names if ".dist-info/" in name}
    assert others == {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"}


def test_sdist_has_the_tracked_files_and_nothing_else(built):
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not in a git checkout")
    with tarfile.open(built[1]) as archive:
        inside = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    tracked = {f for f in listed.stdout.splitlines() if not f.startswith(".ci/") and (ROOT / f).exists()}
    assert inside - tracked == {"PKG-INFO"}
    assert tracked - inside == set()
