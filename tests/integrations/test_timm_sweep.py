"""Models of timm, converted without batches: exact, or refused by name, as docs/compatibility.md says.

A sample runs here, and with ``SIGATTN_SWEEP=all`` every group of model names, as in ``sweep_timm.py``.
"""

import os

import pytest

timm = pytest.importorskip("timm")

from sigattn import sigmoid_attention  # noqa: E402
from sigattn.conversion import modules  # noqa: E402
from sigattn.nn import sigmoid_layer  # noqa: E402
from tests.integrations import compatibility_page as page  # noqa: E402
from tests.integrations import sweep_timm  # noqa: E402
from tests.integrations.sweep_timm import outcome  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
WHOLE = os.environ.get("SIGATTN_SWEEP") == "all"
SWIN = {"depths": (1, 2), "num_heads": (1, 2), "embed_dim": 16}
SAMPLE = {  # name: options, verdict, layers
    "test_vit3": ({}, "exact", "Attention, AttentionPoolLatent"),
    "vit_pwee_patch16_reg1_gap_256": ({"depth": 2, "embed_dim": 64, "num_heads": 2}, "exact", "ParallelScalingBlock"),
    "xcit_nano_12_p16_224": ({"depth": 2, "cls_attn_layers": 1}, "exact", "ClassAttn, XCA"),
    "swin_tiny_patch4_window7_224": (SWIN, "exact", "WindowAttention"),
    "hiera_tiny_224": ({"embed_dim": 16, "stages": (1, 1, 1, 1)}, "exact", "MaskUnitAttention"),
    "nest_tiny": ({"img_size": 32, "size": (3, 32, 32)}, "exact", "Attention"),
    "mobilenetv4_hybrid_medium_075": ({"size": (3, 64, 64)}, "exact", "MultiQueryAttention2d"),
    "cait_xxs24_224": ({"depth": 2}, "exact", "ClassAttn, TalkingHeadAttn"),
    "levit_128s": ({}, "exact", "Attention, AttentionDownsample"),
    "skresnet18": ({"size": (3, 64, 64)}, "refused", "SelectiveKernelAttn"),
    "resnest14d": ({"size": (3, 64, 64)}, "no attention", ""),
}


@pytest.mark.parametrize("name", SAMPLE)
def test_sample(name):
    options, verdict, layers = SAMPLE[name]
    assert outcome(name, **options)[:2] == (verdict, layers)


@pytest.mark.skipif(not WHOLE, reason="half an hour: SIGATTN_SWEEP=all")
def test_every_model_name():
    rows = [sweep_timm.row(members) for members in sweep_timm.groups(timm.list_models()).values()]
    recorded = page.results("timm")
    assert {r["architecture"]: r["status"] for r in rows} == {n: r["status"] for n, r in recorded.items()}


def test_no_model_is_wrong():
    recorded = page.results("timm")
    assert {r["status"] for r in recorded.values()} <= {"exact", "refused", "no attention"}
    for name, (_, verdict, _) in SAMPLE.items():
        assert name not in recorded or recorded[name]["status"] == verdict


def test_the_page_is_current():
    assert page.section_of_page("timm") == page.table("timm")


class TestTheSweepFinds:
    def test_a_layer_that_is_missed(self, monkeypatch):
        find = modules.find_softmax
        monkeypatch.setattr(modules, "find_softmax", lambda *arguments: find(*arguments)[:-1])
        with pytest.raises(AssertionError, match="1 softmaxes are not listed"):
            outcome("test_vit3")

    def test_another_bias(self, monkeypatch):
        def wrong(*arguments, bias=None, **options):
            return sigmoid_attention(*arguments, bias=0.0, **options)

        monkeypatch.setattr(sigmoid_layer, "sigmoid_attention", wrong)
        with pytest.raises(AssertionError, match="error"):
            outcome("test_vit3")
