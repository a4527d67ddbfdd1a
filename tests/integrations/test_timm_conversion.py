"""``sigattn.convert`` on vision transformers of timm and torchvision."""

import pytest
import torch

timm = pytest.importorskip("timm")
torchvision = pytest.importorskip("torchvision")

from sigattn.conversion import convert, restore  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
SMALL = {"num_classes": 5, "img_size": 32, "embed_dim": 32}
MODELS = {
    "vit": lambda: timm.create_model("vit_tiny_patch16_224", patch_size=8, depth=2, num_heads=2, **SMALL),
    "pool": lambda: timm.create_model("vit_base_patch16_siglip_224", patch_size=8, depth=1, num_heads=2, **SMALL),
    "swin": lambda: timm.create_model(
        "swin_tiny_patch4_window7_224", depths=(2,), num_heads=(2,), window_size=4, **{**SMALL, "img_size": 64}
    ),
    "torchvision": lambda: torchvision.models.VisionTransformer(32, 8, 2, 2, 32, 64, num_classes=5),
}


@pytest.mark.parametrize("name", MODELS)
def test_vision_transformers(name):
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    images = torch.randn(4, 2, 3, *(2 * (64 if name == "swin" else 32,)))
    if name == "torchvision":
        torch.nn.init.normal_(model.heads.head.weight)  # it starts as zeros
    before = model(images[0])
    report = convert(model, list(images), loss=lambda m, x: m(x).square().mean())
    assert all(layer.error < 0.3 for layer in report.layers), report
    if name == "swin":  # the windows' masks of -100 count: softmax's denominators follow the visible keys
        assert min(head.r2 for head in report.layers[1].heads) > 0.9
    after = model(images[0])
    assert 0 < (after - before).norm() / before.norm() < 0.2
    new = MODELS[name]().eval()
    restore(new, model.state_dict())
    torch.testing.assert_close(new(images[0]), after)


def test_xcit_is_converted_for_every_size_of_image():
    """Its queries are channels, so that its bias has to do without their features, which are positions."""

    def make():
        return timm.create_model("xcit_nano_12_p16_224", depth=1, embed_dim=32, num_heads=2, num_classes=5).eval()

    model, images = make(), torch.randn(3, 2, 3, 96, 96)
    convert(model, list(images))
    new, larger = make(), torch.randn(2, 3, 128, 128)
    restore(new, model.state_dict())
    torch.testing.assert_close(new(larger), model(larger))
