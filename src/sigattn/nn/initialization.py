"""Initialisation of weights as in the paper's recipes, and the learning rates of μP-simple."""

import functools
from collections.abc import Callable
from typing import Literal

from torch import Tensor, nn
from torch.nn.utils import parametrize

from sigattn.nn.attention import Attention
from sigattn.nn.feedforward import MLP, SwiGLU

Initialization = Literal["fan_in", "trunc_normal", "moco_v3"]
_DRAWN = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d)


def initialize(model: nn.Module, kind: Initialization) -> None:
    """Initialise the parameters of a model's submodules.

    Weights of linear layers, convolutions and embeddings are drawn by ``kind``, their biases are set to zero, and the
    other submodules are reset by ``reset_parameters``. Parameters of the model itself are left to its own
    ``reset_parameters``, which may call this function.

    Args:
        model: any module.
        kind: "fan_in", normal with variance 1 / fan-in, and 1 / embed_dim for embeddings (the paper's language models);
            "trunc_normal", with standard deviation 0.02 (its supervised, BYOL and MAE vision models); "moco_v3",
            Glorot's uniform distribution (its SimCLR).

    Raises:
        ValueError: for another kind.
        TypeError: if a weight is no parameter.
    """
    if kind not in _KINDS:
        raise ValueError(f"initialization must be one of {', '.join(_KINDS)}, got {kind!r}")
    for module in model.modules():
        if isinstance(module, _DRAWN):
            _fill(module, "weight", _KINDS[kind])
            if getattr(module, "bias", None) is not None:
                _fill(module, "bias", nn.init.zeros_)
        elif module is not model and (reset := getattr(module, "reset_parameters", None)) is not None:
            reset()


def _fill(module: nn.Module, name: str, fill: Callable[[Tensor], object]) -> None:
    """Fill a parameter; one that is parametrized, as by weight norm, is computed from others, which get the values."""
    value = getattr(module, name)
    if parametrize.is_parametrized(module, name):
        value = value.detach().clone()
        fill(value)
        setattr(module, name, value)
    elif isinstance(value, nn.Parameter):
        fill(value)
    else:
        raise TypeError(
            f"initialize: {name} of {type(module).__name__} is no parameter but computed from others, as by the older "
            "torch.nn.utils.weight_norm: use torch.nn.utils.parametrizations, or initialize the model before"
        )


def _moco_v3(weight: Tensor) -> None:
    limit = (6 / (len(weight) + weight[0].numel())) ** 0.5
    nn.init.uniform_(weight, -limit, limit)


_KINDS: dict[str, Callable[[Tensor], object]] = {
    # the second axis is the fan-in of a linear layer and the embed_dim of an embedding
    "fan_in": lambda weight: nn.init.normal_(weight, std=weight[0].numel() ** -0.5),
    "trunc_normal": functools.partial(nn.init.trunc_normal_, std=0.02),
    "moco_v3": _moco_v3,
}


def is_matrix(parameter: Tensor) -> bool:
    """Return True for matrices and kernels, which weight decay and μP-simple apply to.

    Vectors that are stored with axes of length 1, such as a bias for each head or a class token, are not matrices.
    """
    return parameter.dim() == 2 or sum(size > 1 for size in parameter.shape) >= 2


def mup_simple(model: nn.Module, embed_dim: int, base_embed_dim: int = 768) -> dict[str, float]:
    """Return μP-simple's factors of the learning rate, by parameter name (Wortsman et al., 2023; App. G.3).

    The factor is min(base_embed_dim / embed_dim, 1) for matrices of attention and feed-forward layers, and 1 for all
    other parameters.
    """
    factor = min(base_embed_dim / embed_dim, 1.0)
    layers = [m for m in model.modules() if isinstance(m, (Attention, SwiGLU, MLP))]
    matrices = {id(p) for layer in layers for p in layer.parameters() if is_matrix(p)}
    return {name: factor if id(p) in matrices else 1.0 for name, p in model.named_parameters()}
