"""Positional encodings against independent formulas."""

import math

import pytest
import torch

from sigattn.nn import position
from sigattn.nn.cape import Cape, ImageCape


def interleaved(*features):
    return torch.stack(features, -1).flatten(-2)


def test_rope_is_a_rotation_by_position_times_frequency():
    x = torch.randn(1, 1, 5, 6)
    turned = position.RotaryEmbedding(6, base=100.0)(x)
    angles = torch.arange(5)[:, None] * 100.0 ** (-torch.arange(3) / 3)
    expected = torch.complex(x[..., :3], x[..., 3:]) * torch.polar(torch.ones(5, 3), angles)
    torch.testing.assert_close(turned, torch.cat((expected.real, expected.imag), -1))


def test_alibi_slopes_are_the_paper_s():
    assert position.alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    twelve = position.alibi_slopes(12).tolist()  # the eight of 8 heads, then every other one of 16
    assert twelve[:8] == [2.0**-i for i in range(1, 9)]
    assert twelve[8:] == pytest.approx([2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5])
    before, after = position.Alibi(4, "split", steepness=4.0)().unbind(-1)
    assert (after[0, ::2] == 4 * before[0, ::2]).all()
    assert (before[0, 1::2] == 4 * after[0, 1::2]).all()


def test_encodings_that_are_added_to_the_input():
    sinusoidal = torch.arange(2, 5)[:, None] / torch.tensor([1.0, 10.0])
    seconds = 0.03 * torch.arange(3)[:, None] * 30 * 10_000 ** (-torch.arange(2) / 2)
    x, y = torch.tensor([(x, y) for y in (-1.0, 1.0) for x in (-1.0, 0.0, 1.0)]).split(1, 1)
    k = torch.arange(4)
    plane = math.pi * 10 ** (2 * k / 8) * (k.cos() * x + k.sin() * y)
    sines, learned = position.SinusoidalEmbedding(4, base=100.0), position.LearnableEmbedding(5, 4)
    for out, expected in (
        (sines(torch.zeros(1, 3, 4), 2), interleaved(sinusoidal.sin(), sinusoidal.cos())),
        (Cape(4).eval()(torch.zeros(1, 3, 4)), interleaved(seconds.cos(), seconds.sin())),
        (ImageCape(8, 2, 3).eval()(torch.zeros(1, 6, 8)), interleaved(plane.cos(), plane.sin())),
        (learned(torch.zeros(1, 3, 4), 2), learned.weight[2:]),
    ):
        torch.testing.assert_close(out[0], expected, atol=1e-4, rtol=0)


def test_image_sinusoids():
    table = position.ImageSinusoids(8, 2, 3).encoding
    for row in range(2):
        for column in range(3):
            angles = [column, column / 100, row, row / 100]
            halves = [f(a) for pair in (angles[:2], angles[2:]) for f in (math.sin, math.cos) for a in pair]
            torch.testing.assert_close(table[3 * row + column], torch.tensor(halves))


class TestAugmentationOfCape:
    @staticmethod
    def times(layer, length=20):
        """Recover t of 500 samples from the slowest pair of features, which turns less than once."""
        out = layer(torch.zeros(500, length, 8))
        return torch.atan2(out[..., 7], out[..., 6]) / layer.frequencies[3]

    def test_it_stays_within_its_limits_and_in_order(self):
        slow = {"step": 0.03, "frequency_scale": 1.0}
        still = {"max_global_shift": 0.0, "max_local_shift": 0.0, "max_scale": 1.0}
        plain = 0.03 * torch.arange(20)
        shifted = self.times(Cape(8, **slow, **{**still, "max_global_shift": 5.0}))
        shift = (shifted - plain).mean(1)
        assert (shifted - plain - shift[:, None]).abs().max() < 1e-3  # one shift for all positions of a sample
        assert -5.001 < shift.min() < -4.5
        assert 4.5 < shift.max() < 5.001
        jittered = self.times(Cape(8, **slow, **{**still, "max_local_shift": 0.5}))
        assert 0.45 * 0.03 < (jittered - plain).abs().max() <= 0.5 * 0.03 + 1e-3
        assert (jittered.diff() > -1e-3).all()
        scaled = self.times(Cape(8, **slow, **{**still, "max_scale": 2.0}))[:, -1] / plain[-1]
        assert 0.49 < scaled.min() < 0.55
        assert 1.8 < scaled.max() < 2.01

    def test_shifts_of_speech_cover_a_minute_and_nothing_is_scaled(self):
        """As in flashlight's cape/plugin/ctc_str3_tl_main_sinpos_trick_dp01_gl60s_nopad.cpp: 60 * 30, 1."""
        times = self.times(Cape(8, frequency_scale=0.01, max_local_shift=0.0))
        assert (times.diff() - 0.03).abs().max() < 2e-2
        assert -30.1 < times[:, 0].min() < -28
        assert 28 < times[:, 0].max() < 30.1

    def test_images_move_apart(self):
        moved = ImageCape(8, 2, 3)(torch.zeros(2, 6, 8))
        assert not torch.allclose(moved[0], moved[1])
        assert torch.isfinite(ImageCape(8, 1, 1)(torch.zeros(1, 1, 8))).all()


LAYERS = (
    position.RotaryEmbedding, lambda _: position.Alibi(6, "split"), position.SinusoidalEmbedding, Cape,
    lambda dim: ImageCape(dim, 2, 2),
)  # fmt: skip


@pytest.mark.parametrize("make", LAYERS)
def test_buffers_can_be_filled_after_the_meta_device(make):
    with torch.device("meta"):
        filled = make(8)
    filled.to_empty(device="cpu")
    for buffer in filled.buffers():
        buffer.fill_(torch.nan)
    filled.reset_parameters()
    for a, b in zip(make(8).buffers(), filled.buffers(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("make", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_16_bits_do_not_round_the_angles(make, dtype):
    exact, cast = make(8).eval(), make(8).eval().to(dtype)
    for a, b in zip(exact.buffers(), cast.buffers(), strict=True):
        assert b.dtype == torch.promote_types(dtype, torch.float32)
        assert torch.equal(a, b.float())
    assert all(b.dtype == torch.float32 and b.is_meta for b in make(8).to("meta", torch.bfloat16).buffers())
    if not isinstance(cast, position.Alibi):
        x = torch.zeros(1, 2, 4, 8) + 1 if isinstance(cast, position.RotaryEmbedding) else torch.zeros(1, 4, 8)
        assert cast(x.to(dtype)).dtype == dtype
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(cast(x), exact(x))
