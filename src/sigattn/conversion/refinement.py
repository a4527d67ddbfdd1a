"""Refinement of fitted biases and output scales: Adam on the error of each layer's output.

The fits are least squares of -lse and of the log of the scale. What matters is the error of the output, which is not
linear in the parameters, but has a gradient: 64 steps lower the loss of converted language models by up to 2.6 % of
softmax's, most where attention is peaked (docs/log.md).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sigattn.conversion.row_statistics import is_padding
from sigattn.nn.bias import AttentionBias
from sigattn.nn.observer import Attend, AttentionCall

_LEARNING_RATE = 1e-2  # at the first step; it decays linearly


def refine(
    run: Sequence[Callable[[Attend], object]],
    run_held_out: Callable[[Attend], object],
    biases: Mapping[str, AttentionBias],
    steps: int,
) -> dict[str, AttentionBias]:
    """Return biases with refined parameters, of each layer those with the smaller error on held-out batches.

    The layers are independent: the inputs of each are those of the softmax model. Parameters that are 0, of terms that
    a layer does not use, stay 0.

    Args:
        run: for each batch of the fit, a function that runs the model on it, with one that answers its attention calls;
            they are taken in turns.
        run_held_out: runs the model on the held-out batches.
        biases: fitted bias of each layer.
        steps: number of steps, of one batch each.
    """
    refined = {name: copy.deepcopy(bias) for name, bias in biases.items()}
    used = {name: [p for p in bias.parameters() if p.any()] for name, bias in refined.items()}
    optimizer = torch.optim.Adam([p for of in used.values() for p in of], lr=_LEARNING_RATE)

    def add_gradients(call: AttentionCall) -> Any:
        result, parameters = call.softmax(), used[call.name]
        with torch.enable_grad():
            missed, square = squared_error(call, refined[call.name], result)
            error = missed / square.clamp(min=torch.finfo(square.dtype).tiny)
        # not backward(), which would leave gradients in the model's own parameters
        for p, gradient in zip(parameters, torch.autograd.grad(error, parameters), strict=True):
            p.grad = gradient if p.grad is None else p.grad + gradient
        return result

    for step in range(steps):
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = _LEARNING_RATE * (1 - step / steps)
        run[step % len(run)](add_gradients)
        optimizer.step()
    optimizer.zero_grad()
    errors = {name: [0.0, 0.0] for name in biases}

    def compare(call: AttentionCall) -> Any:
        result = call.softmax()
        for i, candidates in enumerate((biases, refined)):
            errors[call.name][i] += float(squared_error(call, candidates[call.name], result)[0])
        return result

    run_held_out(compare)
    return {name: refined[name] if after < before else biases[name] for name, (before, after) in errors.items()}


def squared_error(call: AttentionCall, bias: AttentionBias, softmax: Any) -> tuple[Tensor, Tensor]:
    """Return ‖O_sigmoid - O_softmax‖² and ‖O_softmax‖² of a layer's output, without the rows of padding.

    Args:
        softmax: the layer's result with softmax.
    """
    exact, converted = (first_tensor(result).float() for result in (softmax, call.sigmoid(bias)))
    padding = is_padding(call.problem)
    if padding is not None and exact.shape[:-1] == call.problem.query.shape[:-1]:
        exact, converted = (t.masked_fill(padding.unsqueeze(-1), 0) for t in (exact, converted))
    return (converted - exact).square().sum(), exact.square().sum()


def first_tensor(result: Any) -> Tensor:
    """Return the output of a layer that may return more, such as its weights."""
    out: Tensor = result if isinstance(result, Tensor) else result[0]
    return out
