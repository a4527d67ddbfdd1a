"""Names of biases in configurations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

from sigattn.nn.bias import (
    AlibiKeysBias,
    AttentionBias,
    BatchLengthBias,
    ConstantBias,
    ContextLengthBias,
    LearnableBias,
    QueryBias,
    SampleLengthBias,
    VisibleKeysBias,
)
from sigattn.nn.fitted_bias import AlibiLinearBias, AlibiQuadraticBias, QuadraticBias, VisibleKeysLinearBias
from sigattn.ops.problem import log_length_bias

Rule = Literal["log_context", "log_batch", "log_sample", "log_visible", "log_alibi"]
Learn = Literal["no", "layer", "head", "query", "quadratic"]


def make_bias(
    rule: float | Rule,
    *,
    learn: Learn = "no",
    max_seq_len: int | None = None,
    num_heads: int,
    head_dim: int | None = None,
) -> AttentionBias:
    """Create the bias that a configuration names.

    Args:
        rule: a number, or "log_context" (-log of ``max_seq_len``), "log_batch" (of the keys of a call), "log_sample"
            (of each sample's own length), "log_visible" (of the keys a query sees) or "log_alibi" (of these keys,
            each counted by ALiBi's weight, exp(-slope · distance)).
        learn: "no", or, for a rule that is a number or "log_context": "layer" (one parameter), "head" (one per head) or
            "query" (one added to Q). For "log_visible" also "head": a ``VisibleKeysLinearBias``; and "quadratic": a
            ``QuadraticBias``. For "log_alibi" "head" and "quadratic", too.
        max_seq_len: length of the longest sequence, needed for "log_context".
        num_heads: number of query heads.
        head_dim: number of features of a head, needed for "quadratic".

    Raises:
        ValueError: for another rule or learn, or if the two exclude each other.
    """
    if rule == "log_context":
        if max_seq_len is None:
            raise ValueError('attention_bias="log_context" needs a longest sequence, which this model does not have')
        if learn == "no":
            return ContextLengthBias(max_seq_len)
        rule = log_length_bias(max_seq_len)
    if rule in ("log_visible", "log_alibi") and learn == "head":
        return (VisibleKeysLinearBias if rule == "log_visible" else AlibiLinearBias)(num_heads)
    if rule in ("log_visible", "log_alibi") and learn == "quadratic":
        if head_dim is None:
            raise ValueError('learn="quadratic" needs head_dim, the number of features of a head; got None')
        return (QuadraticBias if rule == "log_visible" else AlibiQuadraticBias)(num_heads, head_dim, head_dim)
    if isinstance(rule, str):
        if learn != "no":
            raise ValueError(
                'a learned bias needs attention_bias to be a number or "log_context", or "log_visible" or "log_alibi" '
                f'with learn="head" or "quadratic", got {rule!r} with learn={learn!r}'
            )
        rules: dict[str, Callable[[], AttentionBias]] = {
            "log_batch": BatchLengthBias,
            "log_sample": SampleLengthBias,
            "log_visible": VisibleKeysBias,
            "log_alibi": AlibiKeysBias,
        }
        if rule not in rules:
            raise ValueError(f"attention_bias must be a number or one of {get_args(Rule)}, got {rule!r}")
        return rules[rule]()
    if learn == "no":
        return ConstantBias(rule)
    if learn == "query":
        return QueryBias(rule)
    if learn not in get_args(Learn):
        raise ValueError(f"learn must be one of {get_args(Learn)}, got {learn!r}")
    return LearnableBias(rule, num_heads if learn == "head" else None)
