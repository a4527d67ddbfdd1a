"""Configuration of training: the loop, the optimiser and the schedule; and what of it identifies a run."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from sigattn import validation
from sigattn.validation import SettingsError

# settings that may change when a run is resumed: they change rounding, and what is drawn at random within a step
CHANGEABLE_SETTINGS = {
    *("parallel", "tensor_parallel", "context_parallel", "grad_accum_steps", "compile", "checkpoint_activations"),
    *("wandb", "keep_checkpoints", "validate_every", "eval_batch_size", "checkpoint_every", "log_attention_every"),
    "statistics_every",
}


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Configuration of a training run; SettingsError, a ValueError, for a number out of its range.

    Attributes:
        max_steps: number of updates.
        batch_size: samples per update, over all processes and micro-batches: sequences or images; for speech, seconds.
        grad_accum_steps: number of micro-batches into which each process splits its part of a batch; 1 for SimCLR and
            BYOL, whose losses need the whole batch.
        precision: dtype of matrix products; weights and optimiser state stay in float32.
        optimizer: "adamw" (decoupled weight decay), "adam" or "adagrad".
        learning_rate: the peak learning rate.
        betas: decay rates of the moment estimates of Adam and AdamW.
        eps: term added to the denominator of Adam and AdamW.
        weight_decay: for matrices; biases, norms and other vectors have none.
        independent_decay: multiply the weight decay of AdamW by the schedule only, and not, as PyTorch does, by the
            learning rate and μP's factor: p -= schedule · weight_decay · p (Loshchilov & Hutter, 2019, Algorithm 2).
        mup_simple: multiply the learning rate of matrices within blocks by min(768 / embed_dim, 1)
            (``sigattn.nn.initialization``).
        max_grad_norm: the largest norm of the whole gradient; None for no limit.
        schedule: after the warm-up, "cosine" until the last step, "steps" (see decay_start), or "constant".
        warmup_steps: steps of linear increase up to the peak.
        final_learning_rate: learning rate at the end of "cosine", as a fraction of the peak.
        decay_start: the first step at which "steps" halves the learning rate.
        decay_every: steps between halvings.
        ema: decay of an exponential moving average of the weights, which is then evaluated and saved instead of the
            weights; None for no average.
        checkpoint_activations: recompute each block in the backward pass instead of storing its activations.
        compile: compile the module with torch.compile.
        parallel: "ddp" (each process holds a copy of the model) or "fsdp" (each holds a shard of it).
        tensor_parallel: number of processes that share each layer of a language model; ``parallel`` applies across the
            groups of so many processes.
        context_parallel: number of processes that share each sequence of a sigmoid language model, for contexts that do
            not fit into one. (Validation uses whole sequences.)
        validate_every: steps between validations; the last step always validates.
        eval_batch_size: samples (seconds of speech) that each process evaluates at a time.
        checkpoint_every: steps between checkpoints.
        keep_checkpoints: number of newest checkpoints to keep.
        log_attention_every: steps between measurements of the norm of the attention layers' outputs; 0 for none.
        statistics_every: steps between measurements of the row mass of the weights, the largest logit and the Hoyer
            sparsity (``sigattn.attention_statistics``; computes the attention a second time); 0 for none.
        wandb: project of Weights & Biases that metrics are also sent to; None for none.
        seed: seed of the initial weights, the order of the data and everything random in a step.
    """

    max_steps: int = 300
    batch_size: int = 16
    grad_accum_steps: int = 1
    precision: Literal["float32", "bfloat16"] = "float32"
    optimizer: Literal["adamw", "adam", "adagrad"] = "adamw"
    learning_rate: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    independent_decay: bool = False
    mup_simple: bool = False
    max_grad_norm: float | None = 1.0
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
    validate_every: int = 50
    eval_batch_size: int = 64
    checkpoint_every: int = 50
    keep_checkpoints: int = 2
    log_attention_every: int = 1
    statistics_every: int = 0
    wandb: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        every = ("validate_every", "checkpoint_every", "decay_every")
        sizes = ("max_steps", "batch_size", "grad_accum_steps", "eval_batch_size", "keep_checkpoints")
        validation.check_at_least(1, self, *every, *sizes, "tensor_parallel", "context_parallel")
        validation.check_at_least(0, self, "warmup_steps", "decay_start", "log_attention_every", "statistics_every")
        validation.check_not_negative(self, "learning_rate", "final_learning_rate", "weight_decay")
        validation.check_positive(self, "eps", "max_grad_norm")
        validation.check_probability(self, "betas")
        validation.check_fraction(self, "ema")
        validation.check_seed(self, "seed")
        validation.check_among(("adamw", "adam", "adagrad"), self, "optimizer")
        validation.check_among(("float32", "bfloat16"), self, "precision")
        validation.check_among(("cosine", "steps", "constant"), self, "schedule")
        validation.check_bool(self, "independent_decay", "mup_simple", "checkpoint_activations", "compile")
        if self.independent_decay and (self.optimizer != "adamw" or not self.learning_rate):
            raise SettingsError(
                'independent_decay=True needs optimizer="adamw" and a learning_rate above 0; got '
                f"optimizer={self.optimizer!r}, learning_rate={self.learning_rate}"
            )


def settings_to_resume(task: Any, model: Any, training: TrainConfig, data: str) -> dict[str, Any]:
    """Return the settings, with the fingerprint of the data, that must be the same when a run is resumed."""
    fixed = {name: value for name, value in asdict(training).items() if name not in CHANGEABLE_SETTINGS}
    settings = {f"task.{name}": value for name, value in asdict(task).items()}
    return {**asdict(model), **fixed, **settings, "task": type(task).__name__, "data": data}
