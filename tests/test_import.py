"""``import sigattn`` needs torch alone."""

import graphlib
import subprocess
import sys

import pytest


def test_import_brings_in_nothing_but_torch():
    code = (
        "import sys, torch; before = set(sys.modules); import sigattn;"
        "new = {m.partition('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names);"
        "print(sorted(new)); sigattn.sigmoid_attention(*torch.randn(3, 1, 2, 8, 4).unbind());"
        "print([m for m in ('triton', 'matplotlib', 'tyro', 'transformers', 'rich', 'jaxtyping',"
        " 'safetensors', 'tensorboard') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert set(eval(out[0])) <= {"sigattn", "torch"}, out[0]
    assert out[1] == "[]"


def test_import_works_where_only_torch_is_installed():
    """Whatever is not torch, or needed by it, is made impossible to import."""
    forbidden = ["triton", "matplotlib", "tyro", "transformers", "rich", "jaxtyping", "beartype", "safetensors", "timm"]
    forbidden += ["tensorboard", "sklearn", "torchvision", "soundfile", "jiwer", "tokenizers"]
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({forbidden!r}))\n"
        "import sigattn\n"
        "for name in sigattn.__all__: getattr(sigattn, name)\n"
        "from sigattn.models import autoencoder, language, saving, speech, vision\n"
        "from sigattn.recipes import registry\n"
        "saving.build(registry.find_recipe('lm-kappa-1-tiny').model)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_file_imports_itself_through_others():
    """Imports inside functions count too: they hide a cycle, they do not remove it. Those of type checkers do not."""
    grimp = pytest.importorskip("grimp")
    graph = grimp.build_graph(
        "sigattn", "experiments", "benchmarks", exclude_type_checking_imports=True, cache_dir=None
    )
    imported = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    graphlib.TopologicalSorter(imported).prepare()  # raises CycleError, which names the files
