"""A decoder-only language model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sigattn.models.generation import Choice, Sequences, sample, search
from sigattn.models.transformer import Transformer, TransformerConfig, residual_stream
from sigattn.nn.bias import Rule
from sigattn.nn.block import Block
from sigattn.nn.cache import LayerCache
from sigattn.nn.documents import Documents
from sigattn.nn.feedforward import FeedForward
from sigattn.nn.initialization import Initialization, initialize
from sigattn.nn.norm import Norm, make_norm
from sigattn.nn.position import Alibi, RotaryEmbedding, SinusoidalEmbedding
from sigattn.nn.share import SequenceShare
from sigattn.nn.stability import warn_once
from sigattn.shapes import Float, Int
from sigattn.validation import SettingsError, check_at_least

Position = Literal["rope", "alibi", "sincos", "none"]


@dataclass(frozen=True, kw_only=True)
class LanguageModelConfig(TransformerConfig):
    """Size and kind of a language model: by default Llama's (RMSNorm, SwiGLU, no linear biases) with QK-norm.

    Attributes:
        vocabulary: number of tokens; 256 for bytes.
        context: the longest sequence. A sigmoid's bias is -log of it unless ``bias`` says otherwise.
        position: "rope", "alibi", "sincos" (added to the input) or "none".
        tied: whether the output shares the embedding's weights.
    """

    vocabulary: int = 256
    context: int = 256
    position: Position = "rope"
    tied: bool = True
    qk_norm: Norm = "rms"
    norm: Norm = "rms"
    feed_forward: FeedForward = "swiglu"
    linear_bias: bool = False
    initialization: Initialization = "fan_in"

    USUAL_BIAS: ClassVar[float | Rule] = "log_context"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(1, self, "vocabulary", "context")

    def make_block(self, layer: int) -> Block:
        """The block of a layer.

        Raises:
            ValueError: for settings that do not fit together.
        """
        encodings: dict[str, Callable[[], RotaryEmbedding | Alibi | None]] = {
            "rope": lambda: RotaryEmbedding(self.head_dim),
            "alibi": lambda: Alibi(self.heads),
            "sincos": lambda: None,
            "none": lambda: None,
        }
        if self.position not in encodings:
            raise ValueError(f"position must be one of {', '.join(map(repr, encodings))}, got {self.position!r}")
        return self.block(layer, encodings[self.position](), causal=True, context=self.context)


class LanguageModel(Transformer):
    """Token embedding, blocks of causal attention, a norm, and an output, tied to the embedding or not."""

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__()
        self.config = config
        _warn(config)
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.position = SinusoidalEmbedding(config.width) if config.position == "sincos" else None
        self.blocks = nn.ModuleList(config.make_block(layer) for layer in range(config.layers))
        self.norm = make_norm(config.norm, config.width)
        self.share: SequenceShare | None = None  # as in ``Attention``
        self.output = None if config.tied else nn.Linear(config.width, config.vocabulary, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew."""
        initialize(self, self.config.initialization)

    def forward(
        self,
        tokens: Int[Tensor, "batch length"],
        cache: Sequence[LayerCache] | None = None,
        documents: Documents | None = None,
    ) -> Float[Tensor, "batch length vocabulary"]:
        """Logits of each next token.

        Args:
            tokens: all of them, or with a cache those that are new.
            cache: from ``new_cache``, filled as the model goes along.
            documents: several in a row, none of which may look into another.

        Raises:
            ValueError: if there are more tokens than the context holds.
        """
        first = cache[0].length if cache else 0
        if first + tokens.shape[1] > self.config.context:
            raise ValueError(f"{first + tokens.shape[1]} tokens do not fit in a context of {self.config.context}")
        x = residual_stream(self.embedding(tokens))  # (B, N, width)
        if self.position is not None:
            x = self.position(x, first, self._positions(tokens, first, cache, documents))
        for i, block in enumerate(self.blocks):
            x = self.run_block(block, x, cache=cache[i] if cache else None, documents=documents)
        weight = self.embedding.weight if self.output is None else self.output.weight
        return F.linear(self.norm(x), weight)

    def _positions(
        self, tokens: Tensor, first: int, cache: Sequence[LayerCache] | None, documents: Documents | None
    ) -> Tensor | None:
        """(B, N), where positions do not simply count from ``first``."""
        if self.share is not None:
            return self.share.positions(tokens.device).expand(tokens.shape)
        if documents is not None:
            return documents.position
        if not cache or cache[0].first is None:
            return None
        places = torch.arange(first, first + tokens.shape[1], device=tokens.device)
        return (places - cache[0].first[:, None]).clamp(min=0)

    def new_cache(self, first: Int[Tensor, " batch"] | None = None) -> list[LayerCache]:
        """An empty cache of keys and values for each layer.

        Args:
            first: where each sample begins whose prompt is padded on the left; None where all begin at 0.
        """
        return [LayerCache(self.config.context, first) for _ in self.blocks]

    def loss(self, tokens: Int[Tensor, "batch length"], targets: Int[Tensor, "batch length"]) -> Float[Tensor, ""]:
        """Mean cross-entropy of the next tokens, in nats."""
        return F.cross_entropy(self(tokens).flatten(0, 1).float(), targets.flatten())

    @torch.no_grad()
    def generate(
        self,
        prompts: Int[Tensor, "batch length"] | Sequence[Tensor],
        new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        beams: int = 1,
        length_penalty: float = 1.0,
        stop: Sequence[int] = (),
        generator: torch.Generator | None = None,
    ) -> Int[Tensor, "batch total"] | list[Tensor]:
        """Continue prompts of at least one token each.

        Keys and values are kept from token to token, and dropout is off. Past the context the model starts again from
        the last half of it.

        Args:
            prompts: (B, N), or a list of prompts of any lengths, (N,) each.
            new_tokens: how many more of each, at most.
            temperature: that logits are divided by; 0 for the likeliest token each time.
            top_k: choose among so many of the likeliest tokens only.
            top_p: choose among the likeliest tokens that together have this probability.
            beams: above 1, beam search (with temperature=0): the likeliest of the continuations followed.
            length_penalty: of beam search: the power of the length that log-probabilities are divided by.
            stop: tokens after which a sequence ends.
            generator: to sample with.

        Returns:
            Prompts and continuations: a list for a list, each ending with its stop token where it has one; (B, total)
            for a tensor, where sequences that stopped early are filled up with their last token.

        Raises:
            ValueError: for an empty prompt, or numbers out of range.
        """
        choice = Choice(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            beams=beams,
            length_penalty=length_penalty,
            stop=tuple(stop),
        )
        if choice.stop and max(choice.stop) >= self.config.vocabulary:
            size = self.config.vocabulary
            raise SettingsError(f"stop must hold tokens of the vocabulary of {size}, got {max(choice.stop)}")
        rows = list(prompts)
        if not rows or new_tokens < 0 or any(p.dim() != 1 or not len(p) for p in rows):
            shapes = [tuple(p.shape) for p in rows]
            raise ValueError(
                f"generate needs a prompt of at least one token, and new_tokens ≥ 0: got {shapes} and {new_tokens}"
            )
        size = self.config.vocabulary
        if any(int(p.min()) < 0 or int(p.max()) >= size for p in rows):
            raise SettingsError(f"prompts must hold tokens of the vocabulary of {size}, 0 … {size - 1}")
        training = self.training
        self.eval()
        try:
            sequences = Sequences(self, self.new_cache, rows, self.config.context)
            if beams > 1:
                found = search(sequences, new_tokens, choice)
            else:
                found = sample(sequences, new_tokens, choice, generator)
        finally:
            self.train(training)
        if not isinstance(prompts, Tensor):
            return found
        most = max(map(len, found))
        return torch.stack([torch.cat((t, t[-1:].expand(most - len(t)))) for t in found])


def _warn(c: LanguageModelConfig) -> None:
    """What the paper found not to train in language models (Sect. "Autoregressive Large Language Modeling", G.3)."""
    sigmoid = c.activation == "sigmoid"
    if sigmoid and not c.keeps_its_norm and c.position != "alibi":
        warn_once(
            'sigmoid attention without a bias starts with far too large outputs (Sect. "Ablations"): set bias to '
            '"log_context", use ALiBi, or structure="hybrid"'
        )
    if sigmoid and c.context > 2048 and not c.structure.startswith("hybrid"):
        warn_once(
            "pre-norm sigmoid language models lose to softmax beyond 2048 tokens (App. G.3, norm structure): use "
            'structure="hybrid"'
        )
    if sigmoid and c.qk_norm == "none":
        warn_once(
            'without QK-norm language models are sensitive to the learning rate (Sect. "Ablations"): set qk_norm="rms"'
        )
