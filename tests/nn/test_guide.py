"""recommend: the practitioner's table."""

import pytest

from sigattn.nn import recommend


@pytest.mark.parametrize(
    ("arguments", "position", "layer_scale", "bias", "structure"),
    [
        (("vision", "supervised"), "learnable", True, 0.0, "pre"),
        (("vision", "byol"), "learnable", True, 0.0, "pre"),
        (("vision", "simclr"), "sincos", True, 0.0, "pre"),
        (("vision", "mae"), "learnable", True, "log_batch", "pre"),
        (("speech",), "alibi", True, "log_sample", "pre"),
        (("language", None, 2048), "alibi", False, "log_context", "pre"),
        (("language", "next-token", 2049), "alibi", False, 0.0, "hybrid"),
    ],
)
def test_the_table(arguments, position, layer_scale, bias, structure):
    r = recommend(*arguments)
    found = r.position, r.qk_norm, r.layer_scale, r.attention_bias, r.norm_placement
    assert found == (position, True, layer_scale, bias, structure)
    assert any(word in r.reason for word in ("Sect.", "App.", "Table", "Fig."))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: recommend("audio"), "domain must be one of vision, speech, language, got 'audio'"),
        (lambda: recommend("vision", "ctc"), r"one of \('supervised', 'byol', 'simclr', 'mae'\), got 'ctc'"),
        (lambda: recommend("language"), "needs sequence_length"),
        (lambda: recommend("language", None, 0), "at least 1, got 0"),
        (lambda: recommend("vision", "mae", small=True), "objective='supervised' only, got 'mae'"),
    ],
)
def test_what_the_guide_does_not_have(call, message):
    with pytest.raises(ValueError, match=message):
        call()
