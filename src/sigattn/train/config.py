"""How a model is trained: every setting of the loop, the optimiser and the schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sigattn.validation import (
    check_at_least,
    check_fraction,
    check_not_negative,
    check_positive,
    check_probability,
    check_seed,
)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How a model is trained.

    Attributes:
        steps: number of updates.
        batch: samples of each, over all processes and micro-batches: sequences or images; for speech, seconds.
        accumulate: micro-batches that each process splits its part of a batch into.
        precision: of matrix products; weights and optimiser stay in float32.
        optimizer: "adamw" (decoupled decay), "adam" or "adagrad".
        learning_rate: the peak.
        betas: Adam's.
        epsilon: Adam's.
        weight_decay: of matrices; biases, norms and other vectors have none.
        mup_simple: give matrices within blocks min(768 / width, 1) of the rate (``sigattn.nn.initialization``).
        clip: the largest norm of the whole gradient; None for no limit.
        schedule: after the warm-up, "cosine" to the end, "steps" (see decay_start), or "constant".
        warmup_steps: to reach the peak, linearly.
        final_learning_rate: the cosine's end, as a part of the peak.
        decay_start: the step at which "steps" halves the rate first.
        decay_every: steps from one halving to the next.
        ema: how much of itself an average of the weights keeps at each step; it is then what is evaluated and kept at
            the end. None for no average.
        checkpoint_activations: compute each block again in the backward pass instead of keeping what it made.
        compile: the module, with torch.compile.
        parallel: how many processes share the work: "ddp" (a copy of the model each) or "fsdp" (each a part of it).
        tensor_parallel: processes that share each layer of a language model; what is left of the processes is shared
            out as ``parallel`` says.
        context_parallel: processes that share each sequence of a sigmoid language model, for contexts that one cannot
            hold. (Validation has whole sequences.)
        context_strategy: how they do: "ring", "gather" or "reduce" (``sigattn.distributed.context_parallel``).
        validate_every: steps between validations; the last step always validates.
        validation_batch: samples (seconds of speech) that each process judges at a time.
        checkpoint_every: steps between checkpoints.
        keep: how many checkpoints are kept, the newest.
        watch_every: steps between looks at the attention layers (norm of their outputs); 0 for none.
        statistics_every: steps between closer looks, at the mass of the rows of weights, the largest logit and the
            Hoyer sparsity (``sigattn.attention_statistics``; a second pass of the attention); 0 for none.
        wandb: a project of Weights & Biases to send metrics to as well; None for none.
        seed: of the initial weights, of the order of the data and of all that is drawn.

    Raises:
        SettingsError: a ValueError, if a number is out of its range.
    """

    steps: int = 300
    batch: int = 16
    accumulate: int = 1
    precision: Literal["float32", "bfloat16"] = "float32"
    optimizer: Literal["adamw", "adam", "adagrad"] = "adamw"
    learning_rate: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    mup_simple: bool = False
    clip: float | None = 1.0
    schedule: Literal["cosine", "steps", "constant"] = "cosine"
    warmup_steps: int = 30
    final_learning_rate: float = 0.1
    decay_start: int = 0
    decay_every: int = 1
    ema: float | None = None
    checkpoint_activations: bool = False
    compile: bool = False
    parallel: Literal["ddp", "fsdp"] = "ddp"
    tensor_parallel: int = 1
    context_parallel: int = 1
    context_strategy: Literal["ring", "gather", "reduce"] = "ring"
    validate_every: int = 50
    validation_batch: int = 64
    checkpoint_every: int = 50
    keep: int = 2
    watch_every: int = 1
    statistics_every: int = 0
    wandb: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_at_least(1, self, "steps", "batch", "accumulate", "validate_every", "validation_batch")
        check_at_least(1, self, "checkpoint_every", "keep", "tensor_parallel", "context_parallel", "decay_every")
        check_at_least(0, self, "warmup_steps", "decay_start", "watch_every", "statistics_every")
        check_not_negative(self, "learning_rate", "final_learning_rate", "weight_decay")
        check_positive(self, "epsilon", "clip")
        check_probability(self, "betas")
        check_fraction(self, "ema")
        check_seed(self, "seed")


def linear_scaling(rate: float, batch: int, base: int = 256) -> float:
    """The learning rate for a batch, from that for one of ``base``: the paper's "optimizer scaling rule: linear"."""
    return rate * batch / base


def steps_of_epochs(epochs: int, batch: int, samples: int = 1_281_167) -> int:
    """Updates of so many passes over a data set (by default ImageNet-1k), the last partial batch being left out."""
    return epochs * (samples // batch)
