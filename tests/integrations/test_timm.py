"""Models of timm and torchvision: converted with batches; and without, exact or refused as docs/compatibility.md says.

A sample of timm runs here, and with ``SIGATTN_SWEEP=all`` every group of model names, as in ``sweep_timm``.
"""

import os

import pytest
import torch

timm = pytest.importorskip("timm")
torchvision = pytest.importorskip("torchvision")

from benchmarks.compatibility import page, sweep_timm  # noqa: E402
from benchmarks.compatibility.sweep_timm import outcome  # noqa: E402
from sigattn import sigmoid_attention  # noqa: E402
from sigattn.conversion import convert, modules, restore  # noqa: E402
from sigattn.nn import sigmoid_layer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
SMALL = {"num_classes": 5, "img_size": 32, "embed_dim": 32}
SWIN = "swin_tiny_patch4_window7_224"
MODELS = {
    "vit": lambda: timm.create_model("vit_tiny_patch16_224", patch_size=8, depth=2, num_heads=2, **SMALL),
    "pool": lambda: timm.create_model("vit_base_patch16_siglip_224", patch_size=8, depth=1, num_heads=2, **SMALL),
    "swin": lambda: timm.create_model(SWIN, depths=(2,), num_heads=(2,), window_size=4, **{**SMALL, "img_size": 64}),
    "torchvision": lambda: torchvision.models.VisionTransformer(32, 8, 2, 2, 32, 64, num_classes=5),
    # its queries are channels, so that its bias has to do without their features, which are positions
    "xcit": lambda: timm.create_model("xcit_nano_12_p16_224", depth=1, embed_dim=32, num_heads=2, num_classes=5),
}


@pytest.mark.parametrize("name", MODELS)
def test_vision_transformers(name):
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    side = {"swin": 64, "xcit": 96}.get(name, 32)
    images = torch.randn(4, 2, 3, side, side)
    if name == "torchvision":
        torch.nn.init.normal_(model.heads.head.weight)  # it starts as zeros
    before = model(images[0])
    report = convert(model, list(images), loss=lambda m, x: m(x).square().mean())
    assert all(layer.error < 0.3 for layer in report.layers), report
    if name == "swin":  # the windows' masks of -100 count: softmax's denominators follow the visible keys
        assert min(head.r2 for head in report.layers[1].heads) > 0.9
    assert 0 < (model(images[0]) - before).norm() / before.norm() < 0.2
    new = MODELS[name]().eval()
    restore(new, model.state_dict())
    image = torch.randn(2, 3, 128, 128) if name == "xcit" else images[0]
    torch.testing.assert_close(new(image), model(image))


SAMPLE = {  # name: options, verdict, layers
    "test_vit3": ({"img_size": 48, "size": (3, 48, 48)}, "exact", "Attention, AttentionPoolLatent"),
    "vit_pwee_patch16_reg1_gap_256": ({"depth": 2, "embed_dim": 64, "num_heads": 2}, "exact", "ParallelScalingBlock"),
    "xcit_nano_12_p16_224": ({"depth": 2, "cls_attn_layers": 1}, "exact", "ClassAttn, XCA"),
    SWIN: ({"depths": (1, 2), "num_heads": (1, 2), "embed_dim": 16}, "exact", "WindowAttention"),
    "hiera_tiny_224": ({"embed_dim": 16, "stages": (1, 1, 1, 1)}, "exact", "MaskUnitAttention"),
    "cait_xxs24_224": ({"depth": 2}, "exact", "ClassAttn, TalkingHeadAttn"),
    "levit_128s": ({"img_size": 32, "size": (3, 32, 32)}, "exact", "Attention, AttentionDownsample"),
    # adds weights of positions to those of products
    "convit_tiny": ({"depth": 2, "local_up_to_layer": 1, "img_size": 32, "size": (3, 32, 32)}, "exact", "GPSA, MHSA"),
    "skresnet18": ({"size": (3, 64, 64)}, "refused", "SelectiveKernelAttn"),
    "resnest14d": ({"size": (3, 64, 64)}, "no attention", ""),
}


@pytest.mark.parametrize("name", SAMPLE)
def test_sample(name):
    options, verdict, layers = SAMPLE[name]
    assert outcome(name, **options)[:2] == (verdict, layers)
    assert page.results("timm").get(name, {"status": verdict})["status"] == verdict


@pytest.mark.skipif(os.environ.get("SIGATTN_SWEEP") != "all", reason="half an hour: SIGATTN_SWEEP=all")
def test_every_model_name():
    rows = {row["architecture"]: row["status"] for row in sweep_timm.rows(sweep_timm.names())}
    assert rows == {name: row["status"] for name, row in page.results("timm").items()}


def test_the_page_is_current_and_no_model_is_wrong():
    assert page.section_of_page("timm") == page.table("timm")
    assert {r["status"] for r in page.results("timm").values()} <= {"exact", "refused", "no attention"}


def test_the_sweep_finds_a_layer_that_is_missed_and_another_bias(monkeypatch):
    find = modules.find_softmax
    with monkeypatch.context() as patched:
        patched.setattr(modules, "find_softmax", lambda *arguments: find(*arguments)[:-1])
        with pytest.raises(AssertionError, match="1 softmaxes are not listed"):
            outcome("test_vit3", **SAMPLE["test_vit3"][0])
    wrong = lambda *arguments, bias=None, **options: sigmoid_attention(*arguments, bias=0.0, **options)  # noqa: E731
    monkeypatch.setattr(sigmoid_layer, "sigmoid_attention", wrong)
    with pytest.raises(AssertionError, match="error"):
        outcome("test_vit3", **SAMPLE["test_vit3"][0])
