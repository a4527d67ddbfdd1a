"""Recommendations of the practitioner's guide (App. "Practitioner's Guide", Table "practioners").

Also warnings of combinations that the paper found hard to train.
"""

import functools
import warnings
from typing import NamedTuple

from sigattn.ops import scalars


class Recommendation(NamedTuple):
    """Configuration that the guide recommends for a domain and an objective.

    The strings are values of the fields of ``sigattn.models``' configurations. For ``sigattn.nn.Attention``, "rope" is
    ``RotaryEmbedding(embed_dim // num_heads)``, "alibi" is ``Alibi(num_heads)``, and a rule of b is a module that
    ``sigattn.nn.make_bias`` creates; other position encodings are added to the input.

    Attributes:
        position: position encoding: "learnable", "sincos", "cape", "rope" or "alibi".
        qk_norm, layer_scale: True if they are recommended.
        attention_bias: rule of b, as in ``sigattn.nn.bias_rules.make_bias``; 0.0 for none.
        norm_placement: "pre" or "hybrid" (for speech, "hybrid_attention").
        reason: reason, with the section or table of the paper.
        recipe: name of the recipe with this configuration; for speech it has CAPE.
    """

    position: str
    qk_norm: bool
    layer_scale: bool
    attention_bias: float | str
    norm_placement: str
    reason: str
    recipe: str


_LAYER_SCALE = (
    "without LayerScale ViT-B/16 loses 1 % (Fig. imagenet_top_1_ablations), while QK-norm has little effect; learned "
    'temperature and bias (t = 10, b = -10) can replace both (App. "LayerScale Free Sigmoid Attention")'
)
_NO_BIAS = f"no bias is needed; {_LAYER_SCALE}"
_GUIDE = {
    ("vision", "supervised"): Recommendation("learnable", True, True, 0.0, "pre", _NO_BIAS, "vit-supervised"),
    ("vision", "byol"): Recommendation("learnable", True, True, 0.0, "pre", _NO_BIAS, "vit-byol"),
    ("vision", "simclr"): Recommendation("sincos", True, True, 0.0, "pre", _NO_BIAS, "vit-simclr"),
    ("vision", "mae"): Recommendation(
        "learnable", True, True, "log_batch", "pre",
        f"MAE is the only vision recipe that needs b = -log n; {_LAYER_SCALE}",
        "vit-mae",
    ),
    ("speech", "ctc"): Recommendation(
        "alibi", True, True, "log_sample", "pre",
        "without a bias, or without QK-norm, gradient norms and losses spike; -log of each sample's own length is "
        "the most stable bias, and -log of the longest length in the batch is as good; LayerScale is needed to "
        'generalise; of the position encodings ALiBi has the lowest error and CAPE is the least stable (Sect. '
        '"Automatic Speech Recognition", Tables "asr-results" and "asr-results-ext"). Alternative: hybrid-norm on '
        'the attention with RoPE, without QK-norm and bias: norm_placement="hybrid_attention", recipe asr-ls960-hybrid',
        "asr-ls960",
    ),
    ("language", "next-token"): Recommendation(
        "alibi", True, False, "log_context", "pre",
        'up to 2048 tokens b = -log n and pre-norm match softmax (Sect. "Autoregressive Large Language Modeling", '
        'Table "lm_results"); hybrid-norm without a bias does too',
        "lm-1b-2k",
    ),
}  # fmt: skip
_LONG_LANGUAGE = Recommendation(
    "alibi", True, False, 0.0, "hybrid",
    "beyond 2048 tokens pre-norm is slightly worse (48.2 against 49.2 at 4096); hybrid-norm without parameters is "
    'not, with or without a bias (Table "lm_norm_ablations", App. "Practitioner\'s Guide")',
    "lm-1b-4k",
)  # fmt: skip
OBJECTIVES = {domain: tuple(o for d, o in _GUIDE if d == domain) for domain, _ in _GUIDE}


def recommend(domain: str, objective: str | None = None, sequence_length: int | None = None) -> Recommendation:
    """Return the layers and the bias that the practitioner's guide recommends with sigmoid attention.

    Args:
        domain: "vision", "speech" or "language".
        objective: for vision "supervised", "byol", "simclr" or "mae"; for speech "ctc"; for language "next-token".
            None for the first of the domain.
        sequence_length: length of the longest sequence; needed for language, where the advice changes at 2048.

    Raises:
        ValueError: for a case that the guide does not contain.
        TypeError: if sequence_length is not an integer.

    >>> recommend("language", sequence_length=4096).norm_placement
    'hybrid'
    """
    if domain not in OBJECTIVES:
        raise ValueError(f"recommend: domain must be one of {', '.join(OBJECTIVES)}, got {domain!r}")
    objective = OBJECTIVES[domain][0] if objective is None else objective
    if objective not in OBJECTIVES[domain]:
        raise ValueError(f"recommend: for {domain} objective must be one of {OBJECTIVES[domain]}, got {objective!r}")
    if sequence_length is not None and scalars.integer("recommend", "sequence_length", sequence_length) < 1:
        raise ValueError(f"recommend: sequence_length must be at least 1, got {sequence_length}")
    if domain == "language" and sequence_length is None:
        raise ValueError("recommend: language needs sequence_length, the length of the longest sequence")
    is_long = domain == "language" and sequence_length is not None and sequence_length > 2048
    return _LONG_LANGUAGE if is_long else _GUIDE[domain, objective]


@functools.cache  # once for each message
def warn_once(message: str) -> None:
    """Warn unless this process has given the same warning, so that a model of many layers warns once."""
    warnings.warn(f"{message} (Ramapuram et al., 2025)", stacklevel=3)
