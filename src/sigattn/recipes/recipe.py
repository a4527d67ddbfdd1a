"""Recipes: complete training configurations with a softmax twin and a tiny form that trains in minutes."""

from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from sigattn.data.dataset import Data
from sigattn.data.task import Task
from sigattn.models.config import ModelConfig, TransformerConfig
from sigattn.models.saving import build
from sigattn.train.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class DataSource(ABC):
    """Data set of a recipe, loaded for its model and task.

    Attributes:
        name: name of the data set.
        takes_tokenizer: True if ``load`` has a use for a tokenizer.
        takes_workers: True if ``load`` has a use for processes that read files.
    """

    name: str
    takes_tokenizer: ClassVar[bool] = False
    takes_workers: ClassVar[bool] = False

    @abstractmethod
    def load(self, recipe: "Recipe", path: Path | None, tokenizer: Path | None, workers: int) -> Data:
        """Load training and held-out data; arguments and errors as in ``load_dataset``."""

    def load_held_out(self, recipe: "Recipe", path: Path | None, tokenizer: Path | None) -> dict[str, Data]:
        """Load named parts of evaluation data, by default one with an empty name."""
        return {"": self.load(recipe, path, tokenizer, 0)}

    def tiny(self) -> "DataSource":
        """Return the data set of the recipe's small form."""
        return self


@dataclass(frozen=True)
class Recipe:
    """Complete training configuration.

    Attributes:
        name: name on the command line.
        about: what is trained, in a line.
        hardware: hardware for which the paper's sizes are made, and time.
        paper: the paper's result.
        domain, objective: columns of the paper's practitioner's guide.
        model: configuration of the model.
        task: training objective.
        training: settings of the training loop.
        data: data set and augmentation.
        tiny_training: settings of training that the tiny form changes: number of steps, batch size, learning rate.
        tiny_minutes: minutes that the tiny form takes on 2 cores.
        softmax_changes: fields of the model that the softmax twin changes in addition to activation and bias.
    """

    name: str
    about: str = field(default="", repr=False)
    hardware: str = field(default="", repr=False)
    paper: str = field(default="", repr=False)
    _: KW_ONLY
    domain: str
    objective: str
    model: ModelConfig
    task: Task
    training: TrainConfig
    data: DataSource
    tiny_training: dict[str, Any]
    tiny_minutes: int = field(default=1, repr=False)
    softmax_changes: dict[str, Any] = field(default_factory=dict)

    def documentation(self) -> str:
        """Return what is trained, on which data and hardware, with which command and result."""
        name = self.name.removesuffix("-softmax").removesuffix("-tiny")
        return (
            f"{self.about}.\n\nsigattn train {name} --data PATH    (PATH: {self.data.name}; with --tiny: "
            f"{self.data.tiny().name}, {self.tiny_minutes} min on 2 cores)\n\n"
            f"Hardware: {self.hardware}. Paper: {self.paper}."
        )

    @property
    def transformer(self) -> TransformerConfig:
        """Configuration of the transformer blocks: the model's, or its encoder's."""
        return self.model.transformer

    def with_transformer(self, **changes: Any) -> "Recipe":
        return replace(self, model=self.model.with_transformer(**changes))

    def with_training(self, **changes: Any) -> "Recipe":
        return replace(self, training=replace(self.training, **changes))

    def softmax(self) -> "Recipe":
        """Return the softmax twin, which differs in the attention only."""
        no_sigmoid = {"attention_bias": None, "learn_bias": "no", "normalize": False}
        twin = self.with_transformer(activation="softmax", **no_sigmoid, **self.softmax_changes)
        return replace(twin, name=f"{self.name}-softmax")

    def parameters(self) -> int:
        return sum(p.numel() for p in build(self.model, "meta").parameters())

    def tiny(self) -> "Recipe":
        """Return a small form that trains in minutes on 2 cores on small data sets.

        Depth, width and length shrink; the guide's choices (positions, norms, QK-norm, LayerScale, bias) stay.
        """
        steps = self.tiny_training["max_steps"]
        intervals = {"warmup_steps": steps // 10, "validate_every": steps // 2, "checkpoint_every": steps // 2}
        return replace(
            self,
            name=f"{self.name}-tiny",
            model=self.model.tiny(),
            task=self.task.tiny(),
            training=replace(self.training, **{**_SMALL_TRAINING, **intervals, **self.tiny_training}),
            data=self.data.tiny(),
        )

    def guide_row(self) -> dict[str, str]:
        """Return the recipe as a row of the practitioner's guide's table, by column."""
        t, millions = self.transformer, self.parameters() / 1e6
        positions = {"learnable": "Learnable", "sincos": "SinCos", "cape": "CAPE", "rope": "RoPE", "alibi": "ALiBi"}
        structures = {"pre": "Pre-Norm", "post": "Post-Norm"}
        bias = t.default_bias if t.attention_bias is None else t.attention_bias
        position = getattr(t, "position", "none")
        return {
            "Domain": self.domain,
            "Objective": self.objective,
            "Model Size": f"{millions / 1e3:.1f}B" if millions >= 1e3 else f"{millions:.{int(millions < 10)}f}M",
            "Pos Embed": positions.get(position, position),
            "QK Norm": "No" if t.qk_norm == "none" else "Yes",
            "LayerScale": "No" if t.init_values is None else "Yes",
            "Sigmoid Bias": "No" if bias == 0.0 else "Yes",
            "Norm Strategy": structures.get(t.norm_placement, "Hybrid-Norm"),
        }


_SMALL_TRAINING: dict[str, Any] = {
    "grad_accum_steps": 1, "precision": "float32", "max_grad_norm": 1.0, "optimizer": "adamw", "weight_decay": 0.05,
    "independent_decay": False, "schedule": "cosine", "final_learning_rate": 0.05, "parallel": "ddp",
    "checkpoint_activations": False, "log_attention_every": 1,
}  # fmt: skip
