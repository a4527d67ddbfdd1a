"""The wheel and the source distribution have what they should, and nothing else (test_import.py: torch is enough)."""

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


def test_metadata_of_the_wheel(built):
    """llvmlite is required where it has wheels, and no link of the description is relative."""
    with zipfile.ZipFile(built[0]) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        fields, _, description = archive.read(name).decode().partition("\n\n")
    (required,) = map(Requirement, re.findall("^Requires-Dist: (llvmlite.*)", fields, re.MULTILINE))
    names = ("platform_system", "platform_machine", "implementation_name")
    machines = itertools.product(
        ("Linux", "Darwin", "Windows"), ("x86_64", "aarch64", "arm64", "AMD64", "ppc64le"), ("cpython", "pypy")
    )
    with_wheels = [m for m in machines if required.marker.evaluate({**dict(zip(names, m, strict=True)), "extra": ""})]
    assert with_wheels == [("Linux", "x86_64", "cpython"), ("Linux", "aarch64", "cpython")]
    assert "# sigattn" in description
    targets = map("".join, re.findall(r"\]\(([^)]+)\)|src=\"([^\"]+)\"", description))
    assert [target for target in targets if not target.startswith("https://")] == []


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
