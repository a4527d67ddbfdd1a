"""Names of biases in configurations."""

from typing import Literal, get_args

from sigattn.nn import bias
from sigattn.ops.problem import NORMALIZED_MARGIN, log_length_bias

Rule = Literal["log_context", "log_batch", "log_sample", "log_visible", "log_alibi"]
Learn = Literal["no", "layer", "head", "query"]
_RULES: dict[str, type[bias.AttentionBias]] = {
    "log_batch": bias.BatchLengthBias,
    "log_sample": bias.SampleLengthBias,
    "log_visible": bias.VisibleKeysBias,
    "log_alibi": bias.AlibiKeysBias,
}


def make_bias(
    rule: float | Rule,
    *,
    learn: Learn = "no",
    max_seq_len: int | None = None,
    num_heads: int,
    normalize: bool = False,
) -> bias.AttentionBias:
    """Create the bias that a configuration names.

    Args:
        rule: a number, or "log_context" (-log of ``max_seq_len``), "log_batch" (of the keys of a call), "log_sample"
            (of each sample's own length), "log_visible" (of the keys a query sees) or "log_alibi" (of these keys,
            each counted by ALiBi's weight, exp(-slope · distance)).
        learn: "no"; for a number or "log_context" also "layer" (one parameter), "head" (one per head) or "query" (one
            added to Q); for "log_visible" also "head" (``VisibleKeysLinearBias``).
        max_seq_len: length of the longest sequence, needed for "log_context".
        num_heads: number of query heads.
        normalize: True if the weights are divided by their sum: what is learned of a rule starts 6 lower.

    Raises:
        ValueError: for another rule or learn, or if the two exclude each other.
    """
    if learn not in get_args(Learn):
        raise ValueError(f"learn must be one of {get_args(Learn)}, got {learn!r}")
    shift = -NORMALIZED_MARGIN if normalize else 0.0
    if rule == "log_context":
        if max_seq_len is None:
            raise ValueError('attention_bias="log_context" needs a longest sequence, which this model does not have')
        if learn == "no":
            return bias.ContextLengthBias(max_seq_len)
        rule = log_length_bias(max_seq_len) + shift
    if not isinstance(rule, str):
        if learn in ("layer", "head"):
            return bias.LearnableBias(rule, num_heads if learn == "head" else None)
        return bias.ConstantBias(rule) if learn == "no" else bias.QueryBias(rule)
    if rule not in get_args(Rule):
        raise ValueError(f"attention_bias must be a number or one of {get_args(Rule)}, got {rule!r}")
    if learn == "no":
        return _RULES[rule]()
    if rule != "log_visible" or learn != "head":
        raise ValueError(
            'a learned bias needs attention_bias to be a number or "log_context", or "log_visible" with learn="head", '
            f"got {rule!r} with learn={learn!r}"
        )
    return bias.VisibleKeysLinearBias(num_heads, shift)
