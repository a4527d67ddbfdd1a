"""Multi-head attention layer with sigmoid, softmax or another activation that the paper compares (Sect. 5)."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from sigattn.nn import functional
from sigattn.nn.bias import AttentionBias, LearnableBias, QueryBias, SampleLengthBias, VisibleKeysBias, as_bias
from sigattn.nn.documents import Documents
from sigattn.nn.functional import ELEMENTWISE, Activation, Compute, Pattern
from sigattn.nn.kv_cache import LayerCache
from sigattn.nn.norm import Norm, make_norm
from sigattn.nn.performer import PerformerFeatures
from sigattn.nn.position import Alibi, RotaryEmbedding
from sigattn.nn.sequence_shard import SequenceShard
from sigattn.nn.stability import warn_once
from sigattn.ops.problem import log_length_bias
from sigattn.ops.statistics import AttentionStatistics
from sigattn.shapes import Float, Int

Watch = Literal["nothing", "norm", "everything"]


class Attention(nn.Module):
    """Multi-head self- or cross-attention, ``activation(e^t Q Kᵀ / √d + b) V / n^α``, with its linear projections.

    Args:
        width: number of input and output features; a multiple of heads.
        heads: number of query heads.
        activation: "sigmoid" (this library's operator), "softmax" (PyTorch's), "performer" (softmax approximated by
            positive orthogonal random features), or "relu", "relu2", "gelu", "tanh", "identity", which materialise the
            attention weights.
        bias: b, a number or a module of ``sigattn.nn.bias``: required for "sigmoid" (0.0 for none), None for "softmax"
            and "performer", optional for the others.
        kv_heads: number of key and value heads, a divisor of heads; None for heads.
        qk_norm: norm of each head of Q and of K, before the position encoding: "rms", "layer" (both with a learned
            scale) or "none".
        position: ``RotaryEmbedding`` of width / heads, ``Alibi`` of heads, or None.
        causal: True to mask the keys after a query.
        window: number of keys before itself that a query sees, and as many after it if not causal; None for all.
        temperature: initial value of the learned scalar t; the logits are multiplied by e^t (App. "LayerScale Free
            Sigmoid Attention": 10). None for no temperature.
        length_power: α of the output's factor n^(-α), where n is the number of keys that a query sees (App. "The Effect
            of Multiplicative Sequence Length Normalization").
        output_norm: norm of the concatenated heads, before the output projection: "rms", "layer" or "none". (The
            hybrid-norm of the paper's language models comes after the projection: ``Block``.)
        output_norm_affine: True for a learned scale in that norm.
        dropout: probability of dropping an attention weight, while training.
        source_width: number of features of the keys' and values' input, in cross-attention; None for width.
        linear_bias: True for biases in the linear projections.
        performer_features: number of random features; None for head_dim · log(head_dim + 1), rounded up.

    Attributes:
        watch: measurements of the next forwards: "nothing", "norm" (sets ``attention_norm``) or "everything" (sets
            ``statistics`` too).
        attention_norm: (B,), Frobenius norm of the last forward's attention output, before output norm and projection;
            Figs. 4-7 of the paper plot its mean over the batch.
        statistics: ``sigattn.attention_statistics`` of the last forward, in memory linear in the length.
        share: this process's part of each sequence under context parallelism (``sigattn.distributed``); else None.
        compute: function that computes the output of queries, keys and values, except for "performer"; by default
            ``mechanism.attend``, and replaceable for experiments.

    Raises:
        ValueError: if heads does not divide width, kv_heads does not divide heads, or two arguments exclude each other.
    """

    # tensor parallelism splits a projection by output features ("columns") or by input features ("rows")
    tp_plan: ClassVar[dict[str, str]] = {"query": "columns", "key": "columns", "value": "columns", "output": "rows"}

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        activation: Activation,
        bias: AttentionBias | float | None,
        kv_heads: int | None = None,
        qk_norm: Norm = "rms",
        position: RotaryEmbedding | Alibi | None = None,
        causal: bool = True,
        window: int | None = None,
        temperature: float | None = None,
        length_power: float = 0.0,
        output_norm: Norm = "none",
        output_norm_affine: bool = False,
        dropout: float = 0.0,
        source_width: int | None = None,
        linear_bias: bool = False,
        performer_features: int | None = None,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        _check_heads(width, heads, kv_heads)
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, width // heads
        self.activation, self.causal, self.window, self.dropout = activation, causal, window, dropout
        self.length_power = length_power
        self.bias = None if bias is None else as_bias(bias)
        self.position = position
        self._check(performer_features)
        source_width = width if source_width is None else source_width
        self.query = nn.Linear(width, width, bias=linear_bias)
        self.key = nn.Linear(source_width, kv_heads * self.head_dim, bias=linear_bias)
        self.value = nn.Linear(source_width, kv_heads * self.head_dim, bias=linear_bias)
        self.output = nn.Linear(width, width, bias=linear_bias)
        self.query_norm = make_norm(qk_norm, self.head_dim, bias=False)
        self.key_norm = make_norm(qk_norm, self.head_dim, bias=False)
        self.output_norm = make_norm(output_norm, width, affine=output_norm_affine)
        self.initial_temperature = temperature
        self.temperature = None if temperature is None else nn.Parameter(torch.empty(1))
        self.reset_parameters()
        if activation == "performer":
            count = math.ceil(self.head_dim * math.log(self.head_dim + 1))
            self.performer = PerformerFeatures(self.head_dim, performer_features or count)
        self.share: SequenceShard | None = None
        self.compute: Compute = functional.attend
        self.watch: Watch = "nothing"
        self.attention_norm: Tensor | None = None
        self.statistics: AttentionStatistics | None = None

    def shard_heads(self, rank: int, ranks: int) -> None:
        """Keep part ``rank`` of ``ranks`` equal parts of the heads, for tensor parallelism.

        The projections are not changed: the caller splits them.

        Raises:
            ValueError: if ranks does not divide the heads, or a part of the layer mixes heads.
        """
        if self.heads % ranks or self.kv_heads % ranks:
            raise ValueError(f"{self.heads} heads and {self.kv_heads} key heads do not divide among {ranks} processes")
        learned = isinstance(self.bias, LearnableBias) and self.bias.value.numel() > 1
        if learned or not isinstance(self.output_norm, nn.Identity) or self.activation == "performer":
            raise ValueError(
                "tensor parallelism does not support a learned bias for each head, an output norm or a performer"
            )
        self.heads, self.kv_heads = self.heads // ranks, self.kv_heads // ranks
        if isinstance(self.position, Alibi):
            self.position.shard_heads(rank * self.heads, self.heads)

    def reset_parameters(self) -> None:
        """Set the temperature to its initial value; projections and norms have methods of their own."""
        if self.temperature is not None:
            nn.init.constant_(self.temperature, float(self.initial_temperature or 0.0))

    def _check(self, performer_features: int | None) -> None:
        """Raise for arguments that exclude each other, and warn of what the paper found not to train."""
        name = self.activation
        if name not in (*ELEMENTWISE, "softmax", "performer"):
            raise ValueError(f"activation must be one of {(*ELEMENTWISE, 'softmax', 'performer')}, got {name!r}")
        if name == "sigmoid" and self.bias is None:
            raise ValueError("activation='sigmoid' needs a bias (0.0 for none), got bias=None")
        if name in ("softmax", "performer") and (self.bias is not None or self.length_power):
            raise ValueError(
                f"activation={name!r} is normalised and takes only bias=None and length_power=0, got {self.bias} and "
                f"{self.length_power}"
            )
        if self.bias is not None and self.bias.needs_causal and not self.causal:
            raise ValueError(f"{type(self.bias).__name__} counts the keys before a query and needs causal=True")
        if name != "performer" and performer_features is not None:
            raise ValueError(f"performer_features needs activation='performer', got {name!r}")
        if name == "performer" and (self.window is not None or isinstance(self.position, Alibi) or self.dropout):
            raise ValueError(
                "activation='performer' has no explicit weights and does not support window, ALiBi or dropout; got "
                f"window={self.window}, position={type(self.position).__name__}, dropout={self.dropout}"
            )
        if isinstance(self.bias, QueryBias) and isinstance(self.position, RotaryEmbedding):
            warn_once(
                'a learnable bias added to Q is unstable with RoPE (Table "asr-results"): use -log n, or a learnable '
                "bias on the logits"
            )

    def forward(
        self,
        x: Float[Tensor, "batch length width"],
        source: Float[Tensor, "batch keys source_width"] | None = None,
        key_lengths: Int[Tensor, " batch"] | None = None,
        cache: LayerCache | None = None,
        documents: Documents | None = None,
    ) -> Float[Tensor, "batch length width"]:
        """Return the attention output.

        Args:
            x: input of the queries, and of the keys and values if source is None.
            source: input of the keys and values, in cross-attention.
            key_lengths: number of keys of each sample padded on the right.
            cache: keys and values of the positions before x, to which those of x are appended; disables dropout.
            documents: boundaries of the documents that a row of x packs; attention stays within a document.

        Raises:
            ValueError: if the arguments, or an argument and the layer's options, exclude each other.
        """
        if cache is not None and (not self.causal or self.activation == "performer"):
            raise ValueError(
                f"a cache needs causal=True and an activation other than 'performer', got causal={self.causal} and "
                f"activation={self.activation!r}"
            )
        if cache is not None and cache.first is not None and key_lengths is not None:
            raise ValueError("a cache of prompts padded on the left does not support key_lengths (right padding)")
        if self.share is not None:
            self._check_share(alone=source is None and key_lengths is None and cache is None and documents is None)
        if documents is not None:
            self._check_documents(alone=source is None and key_lengths is None and cache is None)
        first = 0 if cache is None else cache.length
        query = self._by_head(self.query(x))  # (B, Hq, N, D)
        key, value = self._keys_and_values(x if source is None else source, first)
        query = self.query_norm(query)
        if isinstance(self.bias, QueryBias):
            query = self.bias.added_to(query)
        if isinstance(self.position, RotaryEmbedding):
            query = self.position(query, first, self._positions(query))
        if self.temperature is not None:
            half = (self.temperature / 2).exp()  # on Q and on K, because Q · e^10 may overflow in float16
            query, key = query * half.to(query.dtype), key * half.to(key.dtype)
        if cache is not None:
            key, value = cache.append(key, value)
        out = self._attend(query, key, value, key_lengths, first, documents, cache)
        result: Tensor = self.output(self.output_norm(out.transpose(1, 2).flatten(2)))
        return result

    def _positions(self, x: Tensor) -> Tensor | None:
        """Return the positions of this process's part of the sequence under context parallelism, else None."""
        return None if self.share is None else self.share.positions(x.device)

    def _attend_shared(
        self, query: Tensor, key: Tensor, value: Tensor, pattern: Pattern, share: SequenceShard
    ) -> Tensor:  # (B, Hq, n, D)
        bias = pattern.bias
        if isinstance(bias, Tensor) and bias.dim() > 1 and bias.shape[-2] == share.length > 1:
            bias = bias.index_select(-2, share.positions(bias.device))
        return share.attend(
            query,
            key,
            value,
            is_causal=pattern.causal,
            window=pattern.sides,
            bias=bias,
            alibi_slopes=pattern.slopes,
        )

    def _check_share(self, *, alone: bool) -> None:
        if not alone or self.activation != "sigmoid" or (self.dropout and self.training):
            raise ValueError(
                "context parallelism needs sigmoid self-attention without padding, cache, documents or dropout: got "
                f"one of those, or activation={self.activation!r}, or dropout={self.dropout}"
            )

    def _check_documents(self, *, alone: bool) -> None:
        if not alone or not self.causal or self.activation == "performer":
            raise ValueError(
                "documents need causal self-attention of whole rows: got source, key_lengths or a cache too, or "
                f"causal={self.causal}, or activation={self.activation!r}"
            )
        if isinstance(self.bias, (SampleLengthBias, VisibleKeysBias)):
            raise ValueError(
                f"{type(self.bias).__name__} differs between rows, which documents do not support: use "
                "ContextLengthBias or a number"
            )

    def _keys_and_values(self, source: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Return keys and values, (B, Hkv, M, D); keys are normalised and encode their positions, from ``first`` on."""
        key, value = self._by_head(self.key(source)), self._by_head(self.value(source))
        key = self.key_norm(key)
        if isinstance(self.position, RotaryEmbedding):
            key = self.position(key, first, self._positions(key))
        return key, value

    def _by_head(self, x: Tensor) -> Tensor:  # (B, N, H · D) → (B, H, N, D)
        return x.unflatten(-1, (x.shape[-1] // self.head_dim, self.head_dim)).transpose(1, 2)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_lengths: Tensor | None,
        first: int,
        documents: Documents | None,
        cache: LayerCache | None,
    ) -> Tensor:  # (B, Hq, N, D)
        queries, keys = query.shape[2], key.shape[2]
        bias: float | Tensor = 0.0
        if self.share is not None:
            queries = keys = self.share.length
        if self.bias is not None and not isinstance(self.bias, QueryBias):
            bias = self.bias(queries, keys, first_query=first, lengths=key_lengths, device=query.device)
        slopes = self.position() if isinstance(self.position, Alibi) else None
        dropout = self.dropout if self.training and cache is None else 0.0
        first_key = None if cache is None else cache.first
        pattern = Pattern(self.causal, self.window, key_lengths, slopes, bias, dropout, first, documents, first_key)
        if first_key is not None and isinstance(self.bias, VisibleKeysBias):
            without_padding = pattern._replace(window=self.bias.window)
            n = functional.visible_keys(queries, keys, without_padding, query.device).clamp(min=1)
            pattern = pattern._replace(bias=log_length_bias(n))
        if self.share is not None:
            out: Tensor = self._attend_shared(query, key, value, pattern, self.share)
        elif self.activation == "performer":
            out = self.performer(query, key, value, causal=self.causal, key_lengths=key_lengths)
        else:
            out = self.compute(self.activation, query, key, value, pattern)
        if self.length_power:
            n = functional.visible_keys(queries, keys, pattern, query.device).clamp(min=1)
            if self.share is not None:
                n = n[:, :, self.share.positions(n.device)]
            out = out * (n**-self.length_power).to(out.dtype)
        if self.watch != "nothing":
            self.attention_norm = torch.linalg.vector_norm(out.detach().float(), dim=(1, 2, 3))
        if self.watch == "everything" and self.share is None:
            self.statistics = functional.statistics(self.activation, query, key, value, pattern)
        return out


def _check_heads(width: int, heads: int, kv_heads: int) -> None:
    if heads < 1 or width % heads:
        raise ValueError(f"width must be a multiple of heads, got width={width}, heads={heads}")
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"heads must be a multiple of kv_heads, got heads={heads}, kv_heads={kv_heads}")
