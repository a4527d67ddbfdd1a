"""Names of the calls that compute a softmax, shared by the search in code and the search in a run."""

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

SDPA = F.scaled_dot_product_attention
MHA = F.multi_head_attention_forward
_ATEN_SDPA = torch.ops.aten.scaled_dot_product_attention
SDPA_CALLS = (SDPA, _ATEN_SDPA, _ATEN_SDPA.default)

SDPA_NAME = "scaled_dot_product_attention"
MHA_NAME = "multi_head_attention_forward"
SOFTMAX_NAME = "softmax"
SOFTMAX_NAMES = frozenset(
    {"softmax", "Softmax", "_softmax", "_safe_softmax", "softmin", "gumbel_softmax", "special_softmax"}
)
SOFTMAX_MODULES = (nn.Softmax, nn.Softmax2d, nn.Softmin)
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
OPAQUE_NAMES = frozenset({
    "flex_attention", "memory_efficient_attention", "flash_attn_func", "flash_attn_qkvpacked_func",
    "flash_attn_kvpacked_func", "flash_attn_varlen_func", "flash_attn_varlen_qkvpacked_func",
    "_native_multi_head_attention", "_transformer_encoder_layer_fwd", "_scaled_dot_product_attention_math",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention", "_flash_attention_forward",
    "_efficient_attention_forward",
})  # fmt: skip
ATTENTION_NAMES = OPAQUE_NAMES | {SDPA_NAME, MHA_NAME}
INTERFACE_NAME = "ALL_ATTENTION_FUNCTIONS"  # attention functions of transformers
PRODUCT_NAMES = frozenset({"matmul", "bmm", "mm", "baddbmm", "einsum", "tensordot", "chain_matmul", "multi_dot"})

# ways of running functions in other threads, where the mode of a layer that becomes sigmoid attention is not active
THREAD_NAMES = frozenset({
    "Executor", "Pool", "Thread", "ThreadPool", "ThreadPoolExecutor", "apply_async", "map_async", "parallel_apply",
    "run_in_executor", "start_new_thread", "starmap_async", "submit", "to_thread",
})  # fmt: skip

_SOFTMAX_OPERATOR = re.compile(r"(?<!log_)softmax")
_ATTENTION_OPERATOR = re.compile(r"attention|attn|fmha|transformer_encoder_layer")


class Finding(NamedTuple):
    """One softmax of a model."""

    name: str  # of the layer within the model
    module: nn.Module
    call: str  # name of the function or operator that computes the softmax
    replaceable: bool  # True if sigmoid attention can replace the call
    attention: bool  # True if the softmax is, or may be, that of an attention
    called: bool = True  # False if the run of the example did not come to it, although it ran the layer


def listed(findings: Iterable[Finding]) -> str:
    """Return names, classes and calls of findings for a message."""
    return ", ".join(f"{f.name!r} ({type(f.module).__name__}: {f.call})" for f in findings)


def is_sdpa(func: Any) -> bool:
    """Return True for ``F.scaled_dot_product_attention`` and its operator."""
    return any(func is call for call in SDPA_CALLS)


def named_as_attention(module: nn.Module) -> bool:
    """Return True if the class of a layer has "att" in its name, or is known as one, and not for another softmax."""
    kind = type(module).__name__
    return kind in _OTHER_NAMES or ("att" in kind.lower() and not known_for_another_softmax(module))


def known_for_another_softmax(module: nn.Module) -> bool:
    """Return True for a layer whose softmax is no attention's, although its product looks like it.

    It is a layer of transformers, or one with sigmoid attention and a second softmax that stays.
    """
    return type(module).__name__ in _NO_ATTENTION or getattr(type(module), "softmax_allowed", False)


_OTHER_NAMES = {"MgpstrA3Module", "GlobalContext"}  # attention of learned queries
_NO_ATTENTION = {
    "DeepseekV4HyperConnection",  # mixtures of residual streams
    "Glm5NextTextHyperConnection",
    "PatchTSMixerGatedAttention",  # a gate over features
    "AttentiveStatisticsPooling",  # statistics over time
    "Sam2MultiScaleAttention",  # uses transformers' attention interface; computes a softmax before, and discards it
}


def operator_kind(name: str) -> str | None:
    """Return "softmax" or "attention" for the qualified name of such an operator ("aten::_softmax"), else None."""
    namespace, _, base = name.rpartition("::")
    if namespace == "sigattn" or "backward" in base:
        return None
    if _ATTENTION_OPERATOR.search(base) or "flash_attn" in namespace or "xformers" in namespace:
        return "attention"
    return "softmax" if _SOFTMAX_OPERATOR.search(base) else None
