"""A sample of the sweep over transformers' architectures; all of them with SIGATTN_SWEEP=all."""

import os

import pytest

transformers = pytest.importorskip("transformers")

from benchmarks.compatibility import page, sweep_transformers, tiny_transformers  # noqa: E402
from sigattn.integrations.transformers import interface  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
SAMPLE = (
    "bloom",  # writes its softmax out, with ALiBi
    "clip",  # composite
    "convbert",  # a convolution's kernel keeps its softmax
    "deberta-v2",  # writes its softmax out, and its mask after it
    "deepseek_v4",  # appends numbers to its masks
    "deepseek_v32",  # selected keys
    "gemma2",  # softcap, windows
    "git",  # a table of attention classes
    "gpt_oss",  # sinks
    "longt5",  # local attention of its own
    "nystromformer",  # refused
    "patchtsmixer",  # a gate
    "sew-d",  # a softmax with a backward pass of its own
    "siglip",  # nn.MultiheadAttention
    "splinter",  # supports no SDPA, and has a wrong is_causal
    "squeezebert",  # a module multiplies its weights
    "whisper",  # cross-attention
)
# others, such as Gemma 3, are in test_transformers.py
CONVERTED = "bloom", "gemma3_text", "gpt_oss", "siglip", "whisper"
ALL = os.environ.get("SIGATTN_SWEEP") == "all"
CHOSEN = tiny_transformers.architectures() if ALL else SAMPLE

RECORDED = page.table("transformers").startswith(f"transformers {transformers.__version__}:")


@pytest.mark.parametrize("architecture", CHOSEN)
def test_exact_or_refused(architecture):
    """As docs/compatibility.md says."""
    result = sweep_transformers.judge(architecture)
    assert result.status not in ("wrong", "failed"), result
    if result.status == "not built" and "ImportError" in result.why:
        pytest.skip(result.why)  # a package that was there when the page was made
    if RECORDED:
        assert result.status == page.results("transformers")[architecture]["status"], result


@pytest.mark.parametrize("architecture", tiny_transformers.architectures() if ALL else CONVERTED)
def test_converted_or_refused(architecture):
    """Exact with a learned bias in each layer, with gradients, and kept when saved; or refused and unchanged."""
    result = sweep_transformers.judge_conversion(architecture)
    assert result.status not in ("wrong", "failed"), result
    if not ALL:  # compared as a whole: parts are named otherwise
        assert (result.status, result.why[-7:]) == ("exact", "Model: "), result


@pytest.mark.skipif(not RECORDED, reason="the page is about another version of transformers")
def test_no_architecture_is_wrong():
    statuses = {row["status"] for row in page.results("transformers").values()}
    assert statuses <= {"exact", "refused", "no attention", "not built"}
    assert set(page.results("transformers")) == set(tiny_transformers.architectures())


def test_the_page_is_current():
    assert page.section_of_page("transformers") == page.table("transformers")


def test_the_sweep_finds_selected_keys_that_are_ignored(monkeypatch):
    """An error of an earlier version."""
    monkeypatch.setattr(interface, "_visible_by_kwargs", lambda *_: None)
    assert sweep_transformers.judge("deepseek_v32").status == "wrong"
