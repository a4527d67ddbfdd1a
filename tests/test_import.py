"""``import sigattn`` needs torch alone, packages are imported at first use, and commands do not wait for others."""

import graphlib
import importlib.util
import subprocess
import sys

import pytest

import sigattn

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
