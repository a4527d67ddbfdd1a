"""Decoder-only language model."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sigattn.models.config import TransformerConfig
from sigattn.models.generation import SamplingConfig, sample
from sigattn.models.transformer import Transformer, residual_stream
from sigattn.nn.attention import SequenceShard, positions_of
from sigattn.nn.bias_rules import Rule
from sigattn.nn.block import Block
from sigattn.nn.documents import Documents
from sigattn.nn.evaluation import evaluation_mode
from sigattn.nn.feedforward import FeedForward
from sigattn.nn.guide import warn_once
from sigattn.nn.initialization import Initialization
from sigattn.nn.kv_cache import KVCache
from sigattn.nn.norm import Norm, make_norm
from sigattn.nn.position import SinusoidalEmbedding
from sigattn.ops import validation
from sigattn.shapes import Float, Int
from sigattn.validation import SettingsError, check_at_least, check_bool

Position = Literal["rope", "alibi", "sincos", "none"]


@dataclass(frozen=True, kw_only=True)
class LanguageModelConfig(TransformerConfig):
    """Configuration of a language model: by default Llama's (RMSNorm, SwiGLU, no linear biases) with QK-norm.

    Attributes:
        vocab_size: number of tokens; 256 for bytes.
        max_seq_len: length of the longest sequence. Without ``attention_bias``, the bias of "sigmoid" is -log of it.
        position: "rope", "alibi", "sincos" (added to the input) or "none".
        tie_embeddings: True if the output shares the embedding's weights.
    """

    vocab_size: int = 256
    max_seq_len: int = 256
    position: Position = "rope"
    tie_embeddings: bool = True
    qk_norm: Norm = "rms"
    norm: Norm = "rms"
    feed_forward: FeedForward = "swiglu"
    use_bias: bool = False
    initialization: Initialization = "fan_in"

    DEFAULT_BIAS: ClassVar[float | Rule] = "log_context"
    supports_context_parallel: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(1, self, "vocab_size", "max_seq_len")
        check_bool(self, "tie_embeddings")

    def build(self) -> "LanguageModel":
        return LanguageModel(self)

    def tiny(self) -> "LanguageModelConfig":
        return replace(super().tiny(), vocab_size=256, max_seq_len=256)

    def example_inputs(self, batch_size: int = 2) -> tuple[Tensor, ...]:
        return (torch.randint(self.vocab_size, (batch_size, self.max_seq_len)),)

    def make_block(self, layer: int) -> Block:
        position = self.make_position(self.position, get_args(Position))
        return self.make_transformer_block(layer, position, causal=True, max_seq_len=self.max_seq_len)


class LanguageModel(Transformer):
    """Language model: token embedding, blocks of causal attention, a norm, and a linear output."""

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__()
        self.config = config
        _warn_of_unstable_options(config)
        self.embedding: nn.Embedding = nn.Embedding(config.vocab_size, config.embed_dim)
        self.position: SinusoidalEmbedding | None = (
            SinusoidalEmbedding(config.embed_dim) if config.position == "sincos" else None
        )
        self.blocks: nn.ModuleList = nn.ModuleList(config.make_block(layer) for layer in range(config.num_layers))
        self.norm: nn.Module = make_norm(config.norm, config.embed_dim)
        self.sequence_shard: SequenceShard | None = None  # as in ``Attention``
        self.output: nn.Linear | None = (
            None if config.tie_embeddings else nn.Linear(config.embed_dim, config.vocab_size, bias=False)
        )
        self.reset_parameters()

    def forward(
        self,
        tokens: Int[Tensor, "batch length"],
        cache: Sequence[KVCache] | None = None,
        documents: Documents | None = None,
    ) -> Float[Tensor, "batch length vocab"]:
        """Return the logits of each next token.

        Args:
            tokens: all tokens, or with a cache only the new ones.
            cache: from ``new_kv_cache``; the keys and values of the tokens are appended to it.
            documents: boundaries of the documents that a row packs; attention stays within a document.

        Raises:
            ValueError: if tokens is not (B, N), or there are more tokens than the context.
            TypeError: if tokens are not integers.
            IndexError: if a token is not in the vocabulary, on a CPU.
            RuntimeError: if the embedding's weights, tied to the output, were offloaded.
        """
        validation.integers("LanguageModel", "tokens", tokens, (None, None), "(batch, length)")
        first = cache[0].length if cache else 0
        if first + tokens.shape[1] > self.config.max_seq_len:
            raise ValueError(
                f"LanguageModel: {first + tokens.shape[1]} tokens do not fit in a context of "
                f"{self.config.max_seq_len} (max_seq_len)"
            )
        try:
            embedded = self.embedding(tokens)
        except IndexError as error:  # on a CPU; a GPU stops at an assertion
            raise IndexError(
                f"LanguageModel: tokens must be at least 0 and below vocab_size={self.config.vocab_size}, got "
                f"{int(tokens.min())} … {int(tokens.max())}"
            ) from error
        x = residual_stream(embedded)  # (B, N, embed_dim)
        if self.position is not None:
            x = self.position(x, first, positions_of(x, self.sequence_shard, cache[0] if cache else None, documents))
        for i, block in enumerate(self.blocks):
            x = self.run_block(block, x, cache=cache[i] if cache else None, documents=documents)
        x = self.norm(x)
        if self.output is not None:
            return self.output(x)  # a module, which may have been replaced (LoRA, quantisation)
        if self.embedding.weight.is_meta and not x.is_meta:  # F.linear would return uninitialised memory
            raise RuntimeError(
                "tie_embeddings=True needs the embedding's weights for the output, too, and they were offloaded: keep "
                "the embedding on its device"
            )
        return F.linear(x, self.embedding.weight)

    def new_kv_cache(self, left_padding: Int[Tensor, " batch"] | None = None) -> list[KVCache]:
        """Create an empty cache for each layer; ``left_padding`` is the first position of each sample's prompt."""
        return [KVCache(self.config.max_seq_len, left_padding) for _ in self.blocks]

    def loss(self, tokens: Int[Tensor, "batch length"], targets: Int[Tensor, "batch length"]) -> Float[Tensor, ""]:
        """Return the mean cross-entropy of the next tokens, in nats; ``targets[:, i]`` follows ``tokens[:, i]``."""
        logits = self(tokens)
        validation.integers("LanguageModel.loss", "targets", targets, tuple(logits.shape[:2]), "(batch, length)")
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    @torch.no_grad()
    def generate(
        self,
        prompts: Int[Tensor, "batch length"] | Sequence[Tensor],
        max_new_tokens: int,
        *,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        stop_tokens: Sequence[int] = (),
        generator: torch.Generator | None = None,
    ) -> Int[Tensor, "batch total"] | list[Tensor]:
        """Continue prompts of at least one token each.

        Keys and values are cached, and dropout is off. When a sequence exceeds the context, it starts again from the
        last half of the context.

        Args:
            prompts: (B, N), or a list of prompts of any lengths, (N,) each.
            max_new_tokens: largest number of tokens to add to each prompt.
            temperature, top_k, top_p, stop_tokens: as in ``SamplingConfig``.
            generator: random number generator for sampling.

        Returns:
            Prompts with their continuations: a list for a list, each ending with its stop token if it has one; (B,
            total) for a tensor, where sequences that stopped early are padded with their last token.

        Raises:
            ValueError: for an empty prompt, a token outside the vocabulary, or numbers out of range.
            TypeError: if prompts are not tensors of integers, or max_new_tokens is not an integer.
        """
        if isinstance(stop_tokens, (int, str)):
            raise TypeError(f"generate: stop_tokens must be a sequence of tokens, such as [0], got {stop_tokens!r}")
        config = SamplingConfig(temperature=temperature, top_k=top_k, top_p=top_p, stop_tokens=tuple(stop_tokens))
        max_new_tokens = validation.count("generate", "max_new_tokens", max_new_tokens)
        if isinstance(prompts, Tensor) and prompts.dim() != 2:
            validation.raise_error(
                "generate", ValueError, "prompts must be (batch, length), or a list of (length,)", prompts=prompts
            )
        rows = list(prompts)
        self._check_generate(rows, config)
        with evaluation_mode(self):
            results = sample(self, rows, max_new_tokens, config, generator)
        if not isinstance(prompts, Tensor):
            return results
        longest = max(map(len, results))
        return torch.stack([torch.cat((t, t[-1:].expand(longest - len(t)))) for t in results])

    def _check_generate(self, prompts: list[Tensor], config: SamplingConfig) -> None:
        last = self.config.vocab_size - 1
        if config.stop_tokens and max(config.stop_tokens) > last:
            raise SettingsError(
                f"stop_tokens must contain tokens of the vocabulary, 0 … {last}, got {max(config.stop_tokens)}"
            )
        for i, prompt in enumerate(prompts):
            validation.integers("generate", f"prompts[{i}]", prompt, (None,), "(length,)")
        if not prompts or not all(map(len, prompts)):
            raise ValueError(
                f"generate needs prompts of at least one token, got the shapes {[tuple(p.shape) for p in prompts]}"
            )
        if any(int(p.min()) < 0 or int(p.max()) > last for p in prompts):
            raise SettingsError(f"prompts must contain tokens of the vocabulary, 0 … {last}")


def _warn_of_unstable_options(c: LanguageModelConfig) -> None:
    """Warn of options that the paper found not to train (Sect. "Autoregressive Large Language Modeling", G.3)."""
    sigmoid = c.activation == "sigmoid" and not c.normalize
    if sigmoid and not c.bounds_output and c.position != "alibi":
        warn_once(
            'the outputs of sigmoid attention without a bias are at first far too large (Sect. "Ablations"): set '
            'attention_bias="log_context", use ALiBi, or norm_placement="hybrid"'
        )
    if sigmoid and c.max_seq_len > 2048 and not c.norm_placement.startswith("hybrid"):
        warn_once(
            "pre-norm sigmoid language models are worse than softmax beyond 2048 tokens (App. G.3, norm placement): "
            'use norm_placement="hybrid"'
        )
    if sigmoid and c.qk_norm == "none":
        warn_once(
            'without QK-norm language models are sensitive to the learning rate (Sect. "Ablations"): set qk_norm="rms"'
        )
