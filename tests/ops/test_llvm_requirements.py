"""Backend "llvm" where llvmlite is missing, too old or broken: the next backend computes, and ``info`` says why."""

import re
import sys

import pytest
import torch

from sigattn import info, sigmoid_attention
from sigattn.ops import llvm

STAND_INS = {  # modules of llvmlite, and the reason why it is not used
    "old": ({"__init__": '__version__ = "0.43.0"'}, r"it needs llvmlite 0\.45 or later, not 0\.43\.0 \(pip install"),
    "no memory for LLVM": (
        {"__init__": '__version__ = "0.99.1"', "binding": 'raise OSError("cannot map segment")'},
        r"llvmlite cannot be imported: OSError: cannot map segment",
    ),
    "broken": ({"__init__": "import missing_module"}, r"llvmlite cannot be imported: ModuleNotFoundError: .*'missing_"),
    "not installed": (None, r"it needs llvmlite, which is not installed \(pip install llvmlite\)"),
}


@pytest.fixture(params=STAND_INS)
def reason(request, monkeypatch, tmp_path):
    """Replace llvmlite on a processor where "llvm" is the default; return the reason why it is not used."""
    files, reason = STAND_INS[request.param]
    for module in [module for module in sys.modules if module.split(".")[0] == "llvmlite"]:
        monkeypatch.delitem(sys.modules, module)
    if files is None:
        monkeypatch.setitem(sys.modules, "llvmlite", None)
    else:
        (tmp_path / "llvmlite").mkdir()
        for file, text in files.items():
            (tmp_path / "llvmlite" / f"{file}.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(llvm, "_FAST", {torch.float32: True})
    llvm._machine_unavailable.cache_clear()
    yield reason
    llvm._machine_unavailable.cache_clear()
    sys.modules.pop("llvmlite", None)  # that of the folder; the fixtures restore the others


def test_the_next_backend_is_the_default_and_info_says_why(reason):
    q = torch.randn(1, 2, 256, 64, requires_grad=True)
    out = sigmoid_attention(q, q, q)
    assert torch.equal(out, sigmoid_attention(q, q, q, backend="blocked"))
    out.sum().backward()
    with pytest.raises(ValueError, match=f"backend 'llvm' does not support this call: {reason}"):
        sigmoid_attention(q, q, q, backend="llvm")
    assert re.search(f"not float32: {reason}", info.describe())
