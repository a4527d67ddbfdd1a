"""Multi-head attention: a sigmoid, a softmax or what else the paper compares, and what makes it train (Sect. 5)."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from sigattn.nn import mechanism
from sigattn.nn.bias import AttentionBias, LearnableBias, QueryBias, SampleLengthBias, VisibleKeysBias, as_bias
from sigattn.nn.cache import LayerCache
from sigattn.nn.documents import Documents
from sigattn.nn.mechanism import ELEMENTWISE, Activation, Compute, Pattern
from sigattn.nn.norm import Norm, make_norm
from sigattn.nn.performer import PerformerFeatures
from sigattn.nn.position import Alibi, RotaryEmbedding
from sigattn.nn.share import SequenceShare
from sigattn.nn.stability import warn_once
from sigattn.ops.problem import log_length_bias
from sigattn.ops.statistics import AttentionStatistics
from sigattn.shapes import Float, Int

Watch = Literal["nothing", "norm", "everything"]


class Attention(nn.Module):
    """Self- or cross-attention, ``activation(e^t Q Kᵀ / √d + b) V / n^α``, between an input and an output projection.

    Args:
        width: features of the input and the output; a multiple of heads.
        heads: number of query heads.
        activation: "sigmoid" (this library's operator), "softmax" (PyTorch's), "performer" (softmax by positive
            orthogonal random features), or "relu", "relu2", "gelu", "tanh", "identity", which hold all weights in
            memory.
        bias: b, a number or one of ``sigattn.nn.bias``: needed by a sigmoid (0.0 for none), None for a softmax and a
            performer, and optional for the others.
        kv_heads: number of key and value heads, of which heads is a multiple; None for as many.
        qk_norm: over each head of Q and of K, before positions: "rms", "layer" (both with a learned scale) or "none".
        position: ``RotaryEmbedding`` of width / heads, ``Alibi`` of heads, or None.
        causal: whether a query sees no later key.
        window: how many keys before itself a query sees at most, and as many after it where not causal; None for all.
        temperature: where the learned scalar t starts, by e^t of which the logits are multiplied (App. "LayerScale Free
            Sigmoid Attention": 10); None for none.
        length_power: α of the factor n^(-α) on the output, n being the keys that a query sees (App. "The Effect of
            Multiplicative Sequence Length Normalization").
        output_norm: over the heads' outputs together, before the output projection: "rms", "layer" or "none". (The
            hybrid-norm of the paper's language models comes after the projection: ``Block``.)
        output_norm_affine: whether that norm has a learned scale.
        dropout: of weights, while training.
        source_width: features of the source of keys and values, for cross-attention; None for width.
        linear_bias: whether the projections have offsets.
        performer_features: number of random features; None for head_dim · log(head_dim), rounded up.

    Attributes:
        watch: what the next forwards leave in ``attention_norm`` and ``statistics``: "nothing", "norm", "everything".
        attention_norm: (B,), the Frobenius norm of the last forward's attention output, before output norm and
            projection: its mean over the batch is what the paper's Figs. 4-7 plot.
        statistics: ``sigattn.attention_statistics`` of the last forward, in memory linear in the length.
        share: where several processes share each sequence, this one's part (``sigattn.distributed``); else None.
        compute: makes the output of queries, keys and values, for all but Performer; ``mechanism.attend``, unless one
            who studies other ways puts his own there.

    Raises:
        ValueError: if width, heads and kv_heads do not divide, or arguments do not suit one another.
    """

    # how processes may share the layers: by outputs or by inputs
    SPLIT: ClassVar[dict[str, str]] = {"query": "columns", "key": "columns", "value": "columns", "output": "rows"}

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
        self.share: SequenceShare | None = None
        self.compute: Compute = mechanism.attend
        self.watch: Watch = "nothing"
        self.attention_norm: Tensor | None = None
        self.statistics: AttentionStatistics | None = None

    def keep_heads(self, rank: int, ranks: int) -> None:
        """Compute one part of the heads only, for tensor parallelism: the rank-th of so many.

        The projections are split by whoever calls this.

        Raises:
            ValueError: if heads do not divide, or something goes across heads.
        """
        if self.heads % ranks or self.kv_heads % ranks:
            raise ValueError(f"{ranks} processes cannot share {self.heads} heads and {self.kv_heads} key heads evenly")
        learned = isinstance(self.bias, LearnableBias) and self.bias.value.numel() > 1
        if learned or not isinstance(self.output_norm, nn.Identity) or self.activation == "performer":
            raise ValueError("processes cannot share a bias learned for each head, an output norm or a performer")
        self.heads, self.kv_heads = self.heads // ranks, self.kv_heads // ranks
        if isinstance(self.position, Alibi):
            self.position.keep_heads(rank * self.heads, self.heads)

    def reset_parameters(self) -> None:
        """Put the temperature back to where it starts; projections and norms have their own."""
        if self.temperature is not None:
            nn.init.constant_(self.temperature, float(self.initial_temperature or 0.0))

    def _check(self, performer_features: int | None) -> None:
        """What does not go together, and what the paper found not to train."""
        name = self.activation
        if name not in (*ELEMENTWISE, "softmax", "performer"):
            raise ValueError(f"activation must be one of {(*ELEMENTWISE, 'softmax', 'performer')}, got {name!r}")
        if name == "sigmoid" and self.bias is None:
            raise ValueError("a sigmoid needs a bias (0.0 for none), got bias=None")
        if name in ("softmax", "performer") and (self.bias is not None or self.length_power):
            raise ValueError(
                f"a softmax is normalised already: activation={name!r} takes bias=None and length_power=0, got "
                f"{self.bias} and {self.length_power}"
            )
        if self.bias is not None and self.bias.needs_causal and not self.causal:
            raise ValueError(f"{type(self.bias).__name__} counts the keys before a query: it needs causal=True")
        if name != "performer" and performer_features is not None:
            raise ValueError(f"performer_features belongs to activation='performer', got {name!r}")
        if name == "performer" and (self.window is not None or isinstance(self.position, Alibi) or self.dropout):
            raise ValueError(
                "a performer never has its weights: it cannot take window, ALiBi or dropout; got "
                f"window={self.window}, position={type(self.position).__name__}, dropout={self.dropout}"
            )
        if isinstance(self.bias, QueryBias) and isinstance(self.position, RotaryEmbedding):
            warn_once(
                'a learnable bias added to Q is unstable with RoPE (Table "asr-results"): prefer -log n, or a '
                "learnable bias on the logits"
            )

    def forward(
        self,
        x: Float[Tensor, "batch length width"],
        source: Float[Tensor, "batch keys source_width"] | None = None,
        key_lengths: Int[Tensor, " batch"] | None = None,
        cache: LayerCache | None = None,
        documents: Documents | None = None,
    ) -> Float[Tensor, "batch length width"]:
        """Attend.

        Args:
            x: where queries come from, and keys and values if there is no source.
            source: where keys and values come from, in cross-attention.
            key_lengths: how many keys each padded sample has.
            cache: keys and values of what came before x, to which those of x are added. There is no dropout then.
            documents: several in a row of x, none of which may look into another.
        """
        if cache is not None and (not self.causal or self.activation == "performer"):
            raise ValueError(
                f"a cache needs causal attention, and keys that stay what they were: got causal={self.causal}, "
                f"activation={self.activation!r}"
            )
        if cache is not None and cache.first is not None and key_lengths is not None:
            raise ValueError("a cache of prompts padded on the left cannot have padding on the right (key_lengths) too")
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
            half = (self.temperature / 2).exp()  # on each side, so that 16 bits hold e^10 times a query
            query, key = query * half.to(query.dtype), key * half.to(key.dtype)
        if cache is not None:
            key, value = cache.append(key, value)
        out = self._attend(query, key, value, key_lengths, first, documents, cache)
        result: Tensor = self.output(self.output_norm(out.transpose(1, 2).flatten(2)))
        return result

    def _positions(self, x: Tensor) -> Tensor | None:
        """Of this process's part, where others have the rest of the sequence."""
        return None if self.share is None else self.share.positions(x.device)

    def _attend_shared(
        self, query: Tensor, key: Tensor, value: Tensor, pattern: Pattern, share: SequenceShare
    ) -> Tensor:  # (B, Hq, n, D)
        bias = pattern.bias
        if isinstance(bias, Tensor) and bias.dim() > 1 and bias.shape[-2] == share.length > 1:
            bias = bias.index_select(-2, share.positions(bias.device))  # one for each query
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
                "processes share sequences in sigmoid self-attention without padding, cache, documents or dropout: got "
                f"one of those, or activation={self.activation!r}, or dropout={self.dropout}"
            )

    def _check_documents(self, *, alone: bool) -> None:
        if not alone or not self.causal or self.activation == "performer":
            raise ValueError(
                "documents are for causal self-attention of whole rows: got one of source, key_lengths or cache too, "
                f"or causal={self.causal}, or activation={self.activation!r}"
            )
        if isinstance(self.bias, (SampleLengthBias, VisibleKeysBias)):
            raise ValueError(
                f"{type(self.bias).__name__} differs from row to row, which document masks cannot have: take "
                '"log_context" or a number'
            )

    def _keys_and_values(self, source: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """(B, Hkv, M, D) each; normed, and turned by their positions, which start at ``first``."""
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
        begin = None if cache is None else cache.first
        pattern = Pattern(self.causal, self.window, key_lengths, slopes, bias, dropout, first, documents, begin)
        if begin is not None and isinstance(self.bias, VisibleKeysBias):
            seen = pattern._replace(window=self.bias.window)
            own = mechanism.visible_keys(queries, keys, seen, query.device).clamp(min=1)
            pattern = pattern._replace(bias=log_length_bias(own))
        if self.share is not None:
            out: Tensor = self._attend_shared(query, key, value, pattern, self.share)
        elif self.activation == "performer":
            out = self.performer(query, key, value, causal=self.causal, key_lengths=key_lengths)
        else:
            out = self.compute(self.activation, query, key, value, pattern)
        if self.length_power:
            n = mechanism.visible_keys(queries, keys, pattern, query.device).clamp(min=1)
            if self.share is not None:
                n = n[:, :, self.share.positions(n.device)]
            out = out * (n**-self.length_power).to(out.dtype)
        if self.watch != "nothing":
            self.attention_norm = torch.linalg.vector_norm(out.detach().float(), dim=(1, 2, 3))
        if self.watch == "everything" and self.share is None:
            self.statistics = mechanism.statistics(self.activation, query, key, value, pattern)
        return out


def _check_heads(width: int, heads: int, kv_heads: int) -> None:
    if heads < 1 or width % heads:
        raise ValueError(f"width must be a multiple of heads, got width={width}, heads={heads}")
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"heads must be a multiple of kv_heads, got heads={heads}, kv_heads={kv_heads}")
