"""Positional encodings against independent formulas."""

import math

import pytest
import torch

from sigattn.nn.cape import Cape, ImageCape
from sigattn.nn.position import Alibi, RotaryEmbedding, SinusoidalEmbedding, image_sinusoids


class TestCape:
    def test_without_training_it_is_sines_of_seconds(self):
        layer = Cape(4, step=0.03, frequency_scale=30.0).eval()
        out = layer(torch.zeros(1, 3, 4))[0]
        for i in range(3):
            for k in range(2):
                angle = 30 * 10_000 ** (-2 * k / 4) * 0.03 * i
                torch.testing.assert_close(out[i, 2 * k : 2 * k + 2], torch.tensor([math.cos(angle), math.sin(angle)]))

    @staticmethod
    def times(layer, samples, length):
        """Recover t from the slowest pair of features, which turns less than once."""
        out = layer(torch.zeros(samples, length, 8))
        return torch.atan2(out[..., 7], out[..., 6]) / layer.frequencies[3]

    def test_augmentations_stay_within_their_limits_and_in_order(self):
        slow = {"step": 0.03, "frequency_scale": 1.0}
        still = {"max_global_shift": 0.0, "max_local_shift": 0.0, "max_scale": 1.0}
        plain = 0.03 * torch.arange(20)
        shifted = self.times(Cape(8, **slow, **{**still, "max_global_shift": 5.0}), 500, 20)
        shift = (shifted - plain).mean(1)
        assert (shifted - plain - shift[:, None]).abs().max() < 1e-3  # one shift for all positions of a sample
        assert -5.001 < shift.min() < -4.5
        assert 4.5 < shift.max() < 5.001
        jittered = self.times(Cape(8, **slow, **{**still, "max_local_shift": 0.5}), 200, 20)
        assert (jittered - plain).abs().max() <= 0.5 * 0.03 + 1e-3
        assert (jittered - plain).abs().max() > 0.45 * 0.03
        assert (jittered.diff() > -1e-3).all()
        scaled = self.times(Cape(8, **slow, **{**still, "max_scale": 2.0}), 500, 20)[:, -1] / plain[-1]
        assert 0.49 < scaled.min() < 0.55
        assert 1.8 < scaled.max() < 2.01

    def test_shifts_of_speech_cover_a_minute_and_nothing_is_scaled(self):
        """As in flashlight's cape/plugin/ctc_str3_tl_main_sinpos_trick_dp01_gl60s_nopad.cpp: 60 * 30, 1."""
        times = self.times(Cape(8, frequency_scale=0.01, max_local_shift=0.0), 500, 20)
        assert (times.diff() - 0.03).abs().max() < 2e-2
        assert -30.1 < times[:, 0].min() < -28
        assert 28 < times[:, 0].max() < 30.1

    def test_images(self):
        layer = ImageCape(8, 2, 3).eval()
        out = layer(torch.zeros(2, 6, 8))
        places = [(x, y) for y in (-1, 1) for x in (-1, 0, 1)]
        for i, (x, y) in enumerate(places):
            for k in range(4):
                angle = math.pi * 10 ** (2 * k / 8) * (math.cos(k) * x + math.sin(k) * y)
                expected = torch.tensor([math.cos(angle), math.sin(angle)])
                torch.testing.assert_close(out[1, i, 2 * k : 2 * k + 2], expected, atol=1e-4, rtol=0)
        layer.train()
        moved = layer(torch.zeros(2, 6, 8))
        assert not torch.allclose(moved[0], moved[1])
        assert torch.isfinite(ImageCape(8, 1, 1)(torch.zeros(1, 1, 8))).all()


def test_image_sinusoids():
    table = image_sinusoids(8, 2, 3)
    for row in range(2):
        for column in range(3):
            angles = [column, column / 100, row, row / 100]
            halves = [f(a) for pair in (angles[:2], angles[2:]) for f in (math.sin, math.cos) for a in pair]
            torch.testing.assert_close(table[3 * row + column], torch.tensor(halves))


LAYERS = (RotaryEmbedding, lambda _: Alibi(6, "split"), SinusoidalEmbedding, Cape, lambda dim: ImageCape(dim, 2, 2))


@pytest.mark.parametrize("make", LAYERS)
def test_buffers_can_be_filled_after_the_meta_device(make):
    there = make(8)
    with torch.device("meta"):
        empty = make(8)
    filled = empty.to_empty(device="cpu")
    for buffer in filled.buffers():
        buffer.fill_(torch.nan)
    filled.reset_parameters()
    for a, b in zip(there.buffers(), filled.buffers(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("make", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_16_bits_do_not_round_the_angles(make, dtype):
    exact, cast = make(8).eval(), make(8).eval().to(dtype)
    for a, b in zip(exact.buffers(), cast.buffers(), strict=True):
        assert b.dtype == torch.promote_types(dtype, torch.float32)
        assert torch.equal(a, b.float())
    assert all(b.dtype == torch.float32 and b.is_meta for b in make(8).to("meta", torch.bfloat16).buffers())
    if not isinstance(cast, Alibi):
        x = torch.zeros(1, 2, 4, 8) + 1 if isinstance(cast, RotaryEmbedding) else torch.zeros(1, 4, 8)
        assert cast(x.to(dtype)).dtype == dtype
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(cast(x), exact(x))
