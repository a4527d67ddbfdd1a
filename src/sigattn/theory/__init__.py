"""The paper's theory as code: contextual mappings (App. C), regularity (App. D), and the bias (App. E).

``sigattn theory`` checks every statement numerically (``check_all``).
"""

from sigattn.theory.bias import bias_bounds, normalizing_bias
from sigattn.theory.contextual_mapping import ContextualMapping, Verification
from sigattn.theory.regularity import Head, jacobian_norm, jacobian_norm_matrix_free, sigmoid_bound, softmax_bound
from sigattn.theory.statements import Statement, check_all

__all__ = [
    "ContextualMapping", "Head", "Statement", "Verification", "bias_bounds", "check_all", "jacobian_norm",
    "jacobian_norm_matrix_free", "normalizing_bias", "sigmoid_bound", "softmax_bound",
]  # fmt: skip
