"""Sigmoid attention in timm's vision transformers."""

import pickle

import pytest
import torch

timm = pytest.importorskip("timm")

from sigattn import convert  # noqa: E402
from sigattn.integrations.timm import attention_layer  # noqa: E402
from tests.integrations.timm_outcomes import SoftmaxOperators, formula_instead_of_softmax  # noqa: E402

pytestmark = [pytest.mark.torchvision, pytest.mark.filterwarnings("ignore")]
SMALL = {"img_size": 32, "num_classes": 5, "embed_dim": 48, "depth": 2, "num_heads": 3}
MODELS = {
    "vit_tiny_patch16_224": {**SMALL, "patch_size": 8, "qk_norm": True, "init_values": 1e-4},
    "deit3_small_patch16_224": {**SMALL, "patch_size": 8},
    "naflexvit_base_patch16_gap": {"num_classes": 5, "embed_dim": 48, "depth": 2, "num_heads": 3, "patch_size": 8},
}
IGNORING = {  # timm ignores attn_layer in blocks of these, or in the pool
    "vit_base_patch16_xp_224": {**SMALL, "patch_size": 8},
    "vit_pwee_patch16_reg1_gap_256": {**SMALL, "patch_size": 8},
    "vit_dpwee_patch16_reg1_gap_256": {**SMALL, "patch_size": 8},
    "vit_base_patch16_siglip_224": {**SMALL, "patch_size": 8},
    "naflexvit_base_patch16_map": MODELS["naflexvit_base_patch16_gap"],
    "naflexvit_base_patch16_gap": {**MODELS["naflexvit_base_patch16_gap"], "rope_type": "axial"},
}


def answered(model, x, bias="log_visible"):
    """Return the output with timm's own layers and the formula in place of its softmax."""
    with formula_instead_of_softmax(None if bias == "log_visible" else bias):
        return model(x)


def test_normalized_far_below_zero_it_is_timms_own_attention():
    name, options = "vit_tiny_patch16_224", MODELS["vit_tiny_patch16_224"]
    ours = timm.create_model(name, attn_layer=attention_layer(-60.0, normalize=True), **options).eval()
    plain = timm.create_model(name, **options).eval()
    plain.load_state_dict(ours.state_dict())
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(ours(x), plain(x), rtol=1e-4, atol=1e-5)
    again = pickle.loads(pickle.dumps(ours))
    assert torch.equal(again(x), ours(x))


@pytest.mark.parametrize(("name", "bias"), [*((n, "log_visible") for n in MODELS), ("vit_tiny_patch16_224", -2.0)])
def test_models(name, bias):
    torch.manual_seed(0)
    options = MODELS[name]
    ours = timm.create_model(name, attn_layer=attention_layer(bias), **options).eval()
    plain = timm.create_model(name, **options).eval()
    plain.load_state_dict(ours.state_dict())  # the same names
    x = torch.randn(2, 3, 32, 32)
    expected = answered(plain, x, bias)
    with SoftmaxOperators() as seen:
        torch.testing.assert_close(ours(x), expected, rtol=1e-4, atol=1e-5)
    assert not seen.count
    ours(x).square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in ours.parameters())


@pytest.mark.parametrize(("name", "options"), IGNORING.items(), ids=str)
def test_models_that_ignore_the_class_are_refused_and_convert_replaces_their_attention(name, options):
    layer = r"'(blocks\.0(\.\w+)?|attn_pool)' "
    with pytest.raises(ValueError, match=rf"ignores attn_layer in {layer}.*call sigattn\.convert\(model\)"):
        timm.create_model(name, attn_layer=attention_layer(), **options)
    model = timm.create_model(name, **options).eval()
    x = torch.randn(2, 3, 32, 32)
    expected = answered(model, x, "log_visible")
    convert(model, normalize=False)
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)


def test_other_classes_stay_as_they_are():
    attention_layer()
    model = timm.create_model("vit_base_patch16_siglip_224", **SMALL, patch_size=8)
    with SoftmaxOperators() as seen:
        model(torch.randn(1, 3, 32, 32))
    assert seen.count == 3


def test_hybrid_norm_is_on_the_branch():
    torch.manual_seed(0)
    layer = attention_layer(0.0, "hybrid")(48, num_heads=3)
    out = layer(torch.randn(2, 7, 48))
    torch.testing.assert_close(out.mean(-1), torch.zeros(2, 7), rtol=0, atol=1e-5)
    torch.testing.assert_close(out.std(-1, unbiased=False), torch.ones(2, 7), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("causal", [False, True])
def test_masks(causal):
    """Bool and added masks hide keys and are not counted in -log n."""
    torch.manual_seed(0)
    layer = attention_layer()(48, num_heads=3).eval()
    x = torch.randn(2, 7, 48)
    seen = torch.ones(2, 1, 1, 7, dtype=torch.bool)
    seen[1, ..., 4:] = False
    added = torch.zeros(2, 1, 1, 7).masked_fill(~seen, torch.finfo(torch.float32).min)
    for mask in (seen.expand(2, 1, 7, 7), added.expand(2, 1, 7, 7)):
        out = layer(x, mask, causal)
        torch.testing.assert_close(out[1:, :4], layer(x[1:, :4], is_causal=causal), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(out[:1], layer(x[:1], is_causal=causal), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("arguments", [("-log n",), (True,), (0.0, "post")], ids=str)
def test_refused(arguments):
    with pytest.raises((ValueError, TypeError), match="attention_layer"):
        attention_layer(*arguments)
