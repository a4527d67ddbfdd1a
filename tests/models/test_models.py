"""Vision and speech models, parameter counts, reports, and models on disk."""

import math
import os
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sigattn.models.autoencoder import MaskedAutoencoder, MaskedAutoencoderConfig
from sigattn.models.language import LanguageModel, LanguageModelConfig
from sigattn.models.saving import MODELS, ModelError, build, load, save
from sigattn.models.speech import SpeechModel, SpeechModelConfig
from sigattn.models.transformer import recording
from sigattn.models.vision import SIZES, ViT, ViTConfig
from sigattn.nn.attention import Attention
from sigattn.tasks.ctc import CTC
from sigattn.tasks.mae import reconstruction_error

VISION = ViTConfig(num_layers=2, embed_dim=16, num_heads=2, image_size=8, patch_size=4, channels=1, num_classes=5)
SPEECH = SpeechModelConfig(num_layers=2, embed_dim=16, num_heads=2, num_mel_bins=6)
CONFORMER = replace(SPEECH, block_kind="conformer", position="rope", conformer_kernel_size=5)
MAE = MaskedAutoencoderConfig(
    encoder=replace(VISION, attention_bias="log_batch"), decoder_num_layers=1, decoder_embed_dim=16, decoder_num_heads=2
)
LANGUAGE = LanguageModelConfig(vocab_size=11, max_seq_len=16, num_layers=2, embed_dim=16, num_heads=2)
TINY = {name: kind().tiny() for name, kind in MODELS.items()}


def kappa(k):
    sizes = {"num_layers": 2 * k, "num_heads": k, "embed_dim": 64 * k, "mlp_dim": 256 * k}
    return LanguageModelConfig(vocab_size=32_100, max_seq_len=512, feed_forward="gelu", **sizes)


@pytest.mark.parametrize(
    ("config", "stated", "tolerance"),
    [
        (ViTConfig(), 87, 0.5),
        (ViTConfig(**SIZES["L"]), 304, 0.5),
        *((SpeechModelConfig(num_layers=layers), stated, 1) for layers, stated in ((36, 255), (24, 170), (12, 85))),
        # with the front end of the paper's text; its table has 104M
        (
            SpeechModelConfig(num_layers=16, embed_dim=512, mlp_dim=2048, block_kind="conformer", position="rope"),
            97.3,
            0.1,
        ),
        *((kappa(k), stated, 0.035 * stated) for k, stated in ((1, 2.2), (2, 4.9), (4, 15.0), (8, 67.0), (16, 440.0))),
    ],
)
def test_parameter_counts_are_those_that_the_paper_states(config, stated, tolerance):
    millions = sum(p.numel() for p in build(config, "meta").parameters()) / 1e6
    assert millions == pytest.approx(stated, abs=tolerance)


class TestVision:
    def test_patches_are_taken_in_rows(self):
        model = ViT(replace(VISION, position="none"))
        images = torch.randn(2, 1, 8, 8)
        first_of_second_row = images[:, :, 4:, :4].flatten(1)
        expected = first_of_second_row @ model.patch_embed.weight.flatten(1).T + model.patch_embed.bias
        torch.testing.assert_close(model.embed(images)[:, 2], expected)

    @pytest.mark.parametrize("position", ["learnable", "sincos", "cape", "none"])
    @pytest.mark.parametrize("pool", ["cls", "average"])
    def test_positions_tell_moved_patches_apart(self, position, pool):
        model = ViT(replace(VISION, position=position, pool=pool)).eval()
        images = torch.randn(3, 1, 8, 8)
        assert model(images).shape == (3, 5)
        assert model.features(images).shape == (3, 16)
        with torch.no_grad():
            for block in model.blocks:
                block.attention_branch[0].weight.fill_(1.0)
            same = torch.allclose(model(images), model(images.roll(4, -1)), atol=1e-5)
        assert same == (position == "none")
        assert model.config.num_tokens == 4 + (pool == "cls")

    def test_frozen_patches_do_not_learn_and_stochastic_depth_grows(self):
        model = ViT(replace(VISION, freeze_patch_embed=True, initialization="moco_v3", num_layers=3, drop_path=0.2))
        assert not model.patch_embed.weight.requires_grad
        assert model.patch_embed.weight.abs().max() == pytest.approx((6 / (3 * 16 + 16)) ** 0.5, rel=0.05)
        dropped = [[m.drop_prob for m in b.attention_branch if hasattr(m, "drop_prob")] for b in model.blocks]
        assert dropped == [[], [0.1], [0.2]]

    @pytest.mark.parametrize("position", ["learnable", "sincos", "cape", "none"])
    def test_other_sizes(self, position):
        model = ViT(replace(VISION, position=position, dynamic_img_size=True)).eval()
        assert model(torch.randn(2, 1, 12, 4)).shape == (2, 5)
        if position == "learnable":  # a constant encoding is interpolated to itself
            with torch.no_grad():
                model.position.weight.fill_(3.0)
            images = torch.randn(1, 1, 12, 4)
            patches = model.patch_embed(images).flatten(2).mT
            torch.testing.assert_close(model.embed(images), patches + 3)
        with pytest.raises(ValueError, match="other multiples of patch_size=4"):
            model(torch.zeros(2, 1, 10, 4))

    def test_context_bias(self):
        model = build(ViTConfig(**{**SIZES["Ti"], "num_layers": 1}, attention_bias="log_context"), "meta")
        assert model.blocks[0].attention.attention_bias.value == -math.log(197)


class TestMaskedAutoencoder:
    def test_it_sees_a_quarter_and_answers_in_place(self):
        torch.manual_seed(1)
        config = replace(MAE, encoder=replace(MAE.encoder, image_size=16))
        model = MaskedAutoencoder(config)
        images = torch.randn(2, 1, 16, 16)
        seed = torch.get_rng_state()
        predicted, hidden = model(images)
        assert predicted.shape == (2, 16, 16)
        assert (hidden.sum(1) == 12).all()
        torch.set_rng_state(seed)
        changed = images.clone()
        patches = F.unfold(changed, 4, stride=4)
        patches += 5 * hidden[:, None]  # what is hidden must not matter
        again, _ = model(F.fold(patches, (16, 16), 4, stride=4))
        torch.testing.assert_close(again, predicted)

    def test_the_loss_is_of_hidden_normalised_patches(self):
        images = torch.randn(3, 1, 8, 8)
        predicted, hidden = MaskedAutoencoder(MAE)(images)
        patches = F.unfold(images, 4, stride=4).mT
        targets = (patches - patches.mean(-1, keepdim=True)) / (patches.var(-1, keepdim=True) + 1e-6).sqrt()
        expected = (predicted - targets).square().mean(-1)[hidden.bool()].mean()
        torch.testing.assert_close(reconstruction_error(images, predicted, hidden), expected)

    def test_ratio(self):
        with pytest.raises(ValueError, match="between 0 and 1, got 1"):
            MaskedAutoencoder(replace(MAE, mask_ratio=1.0))
        for ratio, hidden in ((0.01, 1), (0.5, 2), (0.99, 3)):  # of four patches
            model, images = MaskedAutoencoder(replace(MAE, mask_ratio=ratio)), torch.randn(2, 1, 8, 8)
            assert model(images)[1].sum(1).tolist() == [hidden, hidden]
            assert reconstruction_error(images, *model(images)).isfinite()
        with pytest.raises(ValueError, match="at least two, got 1"):
            MaskedAutoencoder(replace(MAE, encoder=replace(MAE.encoder, image_size=4)))(torch.randn(2, 1, 4, 4))


class TestSpeech:
    @pytest.mark.parametrize("config", [SPEECH, CONFORMER, replace(SPEECH, position="alibi"),
                                        replace(SPEECH, position="rope", norm_placement="hybrid_attention",
                                                attention_bias=0.0),
                                        replace(SPEECH, position="sincos", activation="softmax")],
                             ids=["cape", "conformer", "alibi", "hybrid", "softmax"])  # fmt: skip
    def test_padding_changes_nothing(self, config):
        model = SpeechModel(config).eval()
        frames, lengths = torch.randn(2, 20, 6), torch.tensor([20, 11])
        out, steps = model(frames, lengths)
        assert steps.tolist() == [7, 4]  # a third, rounded up
        noisy = frames.clone()
        noisy[1, 11:] = 1e3
        again, _ = model(torch.cat([noisy, 1e3 * torch.ones(2, 9, 6)], 1), lengths)
        alone, _ = model(frames[1:, :11])
        for b, n in enumerate(steps):
            torch.testing.assert_close(again[b, :n], out[b, :n], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(alone[0], out[1, :4], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(out.exp().sum(-1), torch.ones(2, 7))

    def test_loss_is_ctc_s(self):
        model = SpeechModel(SPEECH).eval()
        frames, lengths = torch.randn(2, 20, 6), torch.tensor([20, 11])
        targets, counts = torch.tensor([[3, 4, 4], [5, 0, 0]]), torch.tensor([3, 1])
        out, steps = model(frames, lengths)
        expected = F.ctc_loss(out.transpose(0, 1), targets, steps, counts)
        torch.testing.assert_close(CTC().loss(model, (frames, lengths, targets, counts)), expected)
        impossible = CTC().loss(model, (frames, lengths, torch.full((2, 9), 3), torch.tensor([9, 9])))
        assert impossible == 0  # 9 times the same letter needs 17 steps

    @pytest.mark.filterwarnings("ignore:sigmoid speech models without LayerScale")
    def test_layer_drop(self):
        options = {"position": "none", "init_values": None, "qk_norm": "layer", "attention_bias": -1.0}
        model = SpeechModel(replace(SPEECH, layer_drop=0.5, **options))
        frames = torch.randn(1, 20, 6)
        kinds = {tuple(model(frames)[0].flatten()[:5].tolist()) for _ in range(40)}
        assert len(kinds) == 4  # each of two layers is there or not
        model.eval()
        assert torch.equal(model(frames)[0], model(frames)[0])

    @pytest.mark.parametrize("lengths", [None, torch.tensor([20, 11])], ids=["whole", "padded"])
    def test_recomputed_blocks_count_a_batch_once(self, lengths):
        plain, recomputed = (SpeechModel(replace(CONFORMER, attention_bias=-1.0)) for _ in range(2))
        recomputed.load_state_dict(plain.state_dict())
        recomputed.checkpoint_activations = True
        x = torch.randn(2, 20, 16)
        for model in (plain, recomputed):
            for _ in range(3):
                model.run_block(model.blocks[0], x, key_lengths=lengths).square().sum().backward()
        assert recomputed.blocks[0].convolution.norm.num_batches_tracked == 3
        for a, b in zip(plain.blocks[0].buffers(), recomputed.blocks[0].buffers(), strict=True):
            assert torch.equal(a, b)
        for a, b in zip(plain.blocks[0].parameters(), recomputed.blocks[0].parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (replace(LANGUAGE, attention_bias=0.0), "far too large"),
        (replace(LANGUAGE, max_seq_len=4096), "beyond 2048 tokens"),
        (replace(LANGUAGE, qk_norm="none"), "sensitive to the learning rate"),
        (replace(SPEECH, attention_bias=0.0), "gradient and loss spikes"),
        (replace(SPEECH, qk_norm="none"), "CAPE and without QK-norm"),
        (replace(SPEECH, init_values=None), "generalise worse"),
        (replace(VISION, norm_placement="post"), "post-norm"),
    ],
)
def test_what_the_paper_found_unstable_is_warned_of_once(config, message):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build(replace(config, activation="softmax", attention_bias=None))
        build(replace(config, normalize=True, attention_bias=None))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        build(config)
    assert [w for w in caught if message in str(w.message)]
    assert len(caught) == 1
    assert "2025" in str(caught[0].message)


class TestSaving:
    @pytest.mark.parametrize("name", MODELS)
    def test_a_model_comes_back_without_its_class_being_named(self, name, tmp_path):
        model = build(TINY[name]).eval()
        save(model, tmp_path / "new" / "folder")
        again = load(str(tmp_path / "new" / "folder"))
        assert type(again) is type(model)
        assert again.config == model.config
        for of in (nn.Module.state_dict, lambda m: dict(m.named_buffers())):  # buffers that are not saved too
            assert of(again).keys() == of(model).keys()
            assert all(torch.equal(of(again)[n], tensor) for n, tensor in of(model).items())
        assert not again.training

    @pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
    @pytest.mark.parametrize("mask", [0o022, 0o077])
    def test_files_have_the_permissions_of_new_files(self, mask, tmp_path):
        before = os.umask(mask)
        try:
            save(LanguageModel(LANGUAGE), tmp_path)
            save(LanguageModel(LANGUAGE), tmp_path)  # over an older one, too
        finally:
            os.umask(before)
        assert {f.name: f.stat().st_mode & 0o777 for f in tmp_path.iterdir()} == dict.fromkeys(
            ("config.json", "model.safetensors", "SHA256SUMS"), 0o666 & ~mask
        )

    def test_what_cannot_be_saved(self, tmp_path):
        """Nor loaded: also tests/test_mistakes.py."""
        with pytest.raises(ModelError, match="FileNotFoundError"):
            load(tmp_path)
        (tmp_path / "file").touch()
        with pytest.raises(TypeError, match="got Linear"):
            save(torch.nn.Linear(1, 1), tmp_path)
        with pytest.raises(NotADirectoryError, match=r"save writes a folder, not a file: .*file'"):
            save(LanguageModel(LANGUAGE), tmp_path / "file")


@pytest.mark.parametrize("name", MODELS)
def test_reports_and_recording(name):
    model = build(TINY[name]).train()
    inputs = TINY[name].example_inputs()
    report = model.attention_report(*inputs)
    assert len(report) == sum(isinstance(module, Attention) for module in model.modules())
    for statistics in report:
        assert statistics.row_mass_mean.shape == (2, 4)
        assert (statistics.row_mass_mean > 0).all()
        assert statistics.max_logit.isfinite().all()
    assert model.training
    with recording(model) as recorded:
        model(*inputs)
        assert all((layer.output_frobenius_norm > 0).all() for layer in recorded)
        assert all(layer.statistics is None for layer in recorded)


@pytest.mark.parametrize("name", MODELS)
def test_with_normalize_alone_a_model_computes_nearly_what_softmax_does(name):
    """The default b is low then, also where it is 0 without normalize."""
    config = TINY[name].with_transformer(attention_bias=None, learn_bias="no")
    softmax = build(config.with_transformer(activation="softmax")).eval()
    normalized = build(config.with_transformer(normalize=True)).eval()
    normalized.load_state_dict(softmax.state_dict())
    inputs, outputs = config.example_inputs(), []
    for model in (softmax, normalized):
        torch.manual_seed(0)  # of the autoencoder's mask
        outputs.append(model(*inputs))
    torch.testing.assert_close(*outputs, rtol=0.01, atol=0.01)


@pytest.mark.parametrize(
    "config", [*TINY.values(), CONFORMER, replace(VISION, position="sincos")], ids=[*TINY, "conformer", "sincos"]
)
def test_under_autocast_the_residual_stream_keeps_float32(config):
    """bfloat16 has 8 bits: what a LayerScale of 1e-4 adds would be lost."""
    model = build(config).train()
    seen = []
    for name, module in model.named_modules():
        if name.endswith(("attention_norm", "feed_forward_norm")) or ".norms." in name:
            module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        model(*config.example_inputs())
    assert seen
    assert set(seen) == {torch.float32}
