"""Multi-head attention layer with sigmoid, softmax or another activation that the paper compares (Sect. 5)."""

import math
from collections.abc import Callable
from types import NoneType
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from sigattn.nn import functional
from sigattn.nn.bias import AttentionBias, QueryBias, SampleLengthBias, as_bias
from sigattn.nn.documents import Documents
from sigattn.nn.functional import ELEMENTWISE, Activation, AttentionFn, MaskSpec
from sigattn.nn.guide import warn_once
from sigattn.nn.kv_cache import KVCache
from sigattn.nn.norm import Norm, make_norm
from sigattn.nn.performer import PerformerFeatures
from sigattn.nn.position import Alibi, RotaryEmbedding
from sigattn.ops import validation
from sigattn.ops.custom_ops import record_module
from sigattn.ops.statistics import AttentionStatistics
from sigattn.shapes import Float, Int
from sigattn.validation import check_at_least, check_bool, check_finite, check_probability

Record = Literal["nothing", "norm", "everything"]


@runtime_checkable
class SequenceShard(Protocol):
    """Part of each sequence that this process holds under context parallelism (``sigattn.distributed``)."""

    length: int  # of the whole sequence

    def positions(self, device: torch.device) -> Tensor:
        """Return the positions that this process holds, (n,) integers."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Return the output (B, Hq, n, Dv) of this process's queries over the whole sequence.

        query is (B, Hq, n, D), key (B, Hkv, n, D) and value (B, Hkv, n, Dv): the parts that this process holds.
        Options are is_causal, window, bias, alibi_slopes and normalize, as in ``sigattn.sigmoid_attention``.
        """


def positions_of(
    x: Tensor, shard: SequenceShard | None, cache: KVCache | None, documents: Documents | None
) -> Tensor | None:
    """Return the positions, (N,) or (B, N), of tokens x (B, N, …) in their sequences; None if they follow the cache."""
    if shard is not None:
        return shard.positions(x.device)
    if documents is not None:
        return documents.positions
    if cache is None or cache.left_padding is None:
        return None
    positions = torch.arange(cache.length, cache.length + x.shape[1], device=x.device)
    return positions - cache.left_padding.to(x.device)[:, None]


class Attention(nn.Module):
    """Multi-head self- or cross-attention, ``activation(e^t Q Kᵀ / √d + b) V / n^α``, with its linear projections.

    Args:
        embed_dim: number of input and output features; a multiple of num_heads.
        num_heads: number of query heads.
        activation: "sigmoid" (this library's operator), "softmax" (PyTorch's), "performer" (softmax approximated by
            head_dim · log(head_dim + 1) positive orthogonal random features, not causal), or "relu", "relu2", "gelu",
            "tanh", "identity", which materialise the attention weights.
        attention_bias: b, a number or a module of ``sigattn.nn.bias``: required for "sigmoid" (0.0 for none), None for
            "softmax" and "performer", optional for the others.
        normalize: True to divide the sigmoid's weights by the sum of each row, as softmax does. ``attention_bias``
            should then be a rule of a number of keys, such as ``VisibleKeysBias()``, not 0.0.
        num_kv_heads: number of key and value heads, a divisor of num_heads; None for num_heads.
        qk_norm: norm of each head of Q and of K, before the position encoding: "rms", "layer" (both with a learned
            scale) or "none".
        position: ``RotaryEmbedding`` of embed_dim / num_heads, ``Alibi`` of num_heads, or None.
        causal: True to mask the keys after a query; None for True in self-attention, and for False if kv_embed_dim is
            given. A layer that is called with kv_input, and has no kv_embed_dim, needs True or False.
        window: (left, right), as in ``sigmoid_attention``; None for no limit.
        temperature: initial value of the learned scalar t; the logits are multiplied by e^t (App. "LayerScale Free
            Sigmoid Attention": 10). None for no temperature.
        length_power: α of the output's factor n^(-α), where n is the number of keys that a query sees (App. "The Effect
            of Multiplicative Sequence Length Normalization").
        output_norm: norm of the concatenated heads, before the output projection and without parameters: "rms", "layer"
            or "none". (The hybrid-norm of the paper's language models comes after the projection: ``Block``.)
        dropout: probability of dropping an attention weight, while training.
        kv_embed_dim: number of features of the keys' and values' input, in cross-attention; None for embed_dim.
        use_bias: True for biases in the linear projections.

    Attributes:
        record: measurements of the next forwards: "nothing", "norm" (sets ``output_frobenius_norm``) or
            "everything" (sets ``statistics`` too).
        output_frobenius_norm: (B,), Frobenius norm of the last forward's attention output, before output norm and
            projection; Figs. 3-6 of the paper plot its mean over the batch.
        statistics: ``sigattn.attention_statistics`` of the last forward, in memory linear in the length.
        sequence_shard: this process's part of each sequence under context parallelism (``sigattn.distributed``), or
            None.
        attention_fn: function that computes the output of queries, keys and values, except for "performer"; by default
            ``functional.attend``, and replaceable for experiments.

    Raises:
        ValueError: if a number is out of its range, num_heads does not divide embed_dim, num_kv_heads does not divide
            num_heads, position is of another head_dim or num_heads, or two arguments exclude each other.
        TypeError: if attention_bias, position or window is of another type.
    """

    # tensor parallelism splits a projection by output features ("columns") or by input features ("rows")
    tp_plan: ClassVar[dict[str, str]] = {"query": "columns", "key": "columns", "value": "columns", "output": "rows"}

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        activation: Activation,
        attention_bias: AttentionBias | float | None,
        normalize: bool = False,
        num_kv_heads: int | None = None,
        qk_norm: Norm = "rms",
        position: RotaryEmbedding | Alibi | None = None,
        causal: bool | None = None,
        window: tuple[int, int] | None = None,
        temperature: float | None = None,
        length_power: float = 0.0,
        output_norm: Norm = "none",
        dropout: float = 0.0,
        kv_embed_dim: int | None = None,
        use_bias: bool = False,
    ) -> None:
        super().__init__()
        sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
        check_at_least(1, sizes | {"kv_embed_dim": kv_embed_dim})
        check_finite({"temperature": temperature, "length_power": length_power})
        check_probability({"dropout": dropout})
        check_bool({"causal": causal is None or causal, "use_bias": use_bias, "normalize": normalize})
        _, _, window, _ = validation.numbers("Attention", 0.0, None, window)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if embed_dim % num_heads or num_heads % num_kv_heads:
            raise ValueError(
                "Attention: num_heads must divide embed_dim, and num_kv_heads num_heads, got "
                f"embed_dim={embed_dim}, num_heads={num_heads}, num_kv_heads={num_kv_heads}"
            )
        self.embed_dim: int = embed_dim
        self.kv_embed_dim: int = embed_dim if kv_embed_dim is None else kv_embed_dim
        self.num_heads: int = num_heads
        self.num_kv_heads: int = num_kv_heads
        self.head_dim: int = embed_dim // num_heads
        self.activation = activation
        self.window: tuple[int, int] | None = window
        self.dropout: float = dropout
        self._is_causal_by_default = causal is None
        self.causal: bool = kv_embed_dim is None if causal is None else causal
        self.length_power, self.normalize = length_power, normalize
        self.attention_bias: AttentionBias | None = (
            None if attention_bias is None else as_bias("attention_bias", attention_bias)
        )
        self.position = position
        self._check()
        self.query: nn.Linear = nn.Linear(embed_dim, embed_dim, bias=use_bias)
        self.key: nn.Linear = nn.Linear(self.kv_embed_dim, num_kv_heads * self.head_dim, bias=use_bias)
        self.value: nn.Linear = nn.Linear(self.kv_embed_dim, num_kv_heads * self.head_dim, bias=use_bias)
        self.output: nn.Linear = nn.Linear(embed_dim, embed_dim, bias=use_bias)
        self.query_norm: nn.Module = make_norm(qk_norm, self.head_dim, bias=False)
        self.key_norm: nn.Module = make_norm(qk_norm, self.head_dim, bias=False)
        self.output_norm: nn.Module = make_norm(output_norm, embed_dim, affine=False)
        self.initial_temperature = temperature
        self.temperature: nn.Parameter | None = None if temperature is None else nn.Parameter(torch.empty(1))
        self.reset_parameters()
        if activation == "performer":
            count = math.ceil(self.head_dim * math.log(self.head_dim + 1))
            self.performer: PerformerFeatures = PerformerFeatures(self.head_dim, count)
        self.sequence_shard: SequenceShard | None = None
        self.attention_fn: AttentionFn = functional.attend
        self.record: Record = "nothing"
        self.output_frobenius_norm: Tensor | None = None
        self.statistics: AttentionStatistics | None = None

    def extra_repr(self) -> str:
        settings = ["num_heads", "num_kv_heads", "activation", "causal", "window", "length_power", "dropout"]
        settings += ["normalize"] if self.normalize else []
        settings += [] if self.temperature is None else ["initial_temperature"]
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in settings)

    def shard_heads(self, rank: int, ranks: int) -> None:
        """Keep part ``rank`` of ``ranks`` equal parts of the heads, for tensor parallelism.

        The projections are not changed: the caller splits them.

        Raises:
            ValueError: if ranks does not divide the heads, or a part of the layer mixes heads.
        """
        if self.num_heads % ranks or self.num_kv_heads % ranks:
            raise ValueError(
                f"{self.num_heads} heads and {self.num_kv_heads} key heads do not divide among {ranks} processes"
            )
        bias = self.attention_bias
        learned = bias is not None and any(p.numel() > 1 for p in bias.parameters())
        if learned or not isinstance(self.output_norm, nn.Identity) or self.activation == "performer":
            raise ValueError(
                "tensor parallelism does not support a learned bias for each head, an output norm or a performer"
            )
        self.num_heads, self.num_kv_heads = self.num_heads // ranks, self.num_kv_heads // ranks
        if isinstance(self.position, Alibi):
            self.position.shard_heads(rank * self.num_heads, self.num_heads)

    def reset_parameters(self) -> None:
        """Set the temperature to its initial value; projections and norms have methods of their own."""
        if self.temperature is not None:
            nn.init.constant_(self.temperature, float(self.initial_temperature or 0.0))

    def _check(self) -> None:
        """Raise for arguments that exclude each other, and warn of what the paper found not to train."""
        position: object = self.position
        if not isinstance(position, (RotaryEmbedding, Alibi, NoneType)):
            raise TypeError(
                f"Attention: position must be a RotaryEmbedding, an Alibi or None, got {position!r}; instead of "
                "position='rope' of a configuration pass RotaryEmbedding(embed_dim // num_heads), instead of 'alibi' "
                "Alibi(num_heads); other encodings, such as SinusoidalEmbedding, are added to the input of the first "
                "layer"
            )
        if isinstance(position, RotaryEmbedding) and 2 * len(position.frequencies) != self.head_dim:
            expected = f"RotaryEmbedding(embed_dim // num_heads) = RotaryEmbedding({self.head_dim})"
            raise ValueError(f"Attention: position must be {expected}, got {position!r}")
        if isinstance(position, Alibi) and position.num_heads != self.num_heads:
            expected = f"Alibi(num_heads) = Alibi({self.num_heads})"
            raise ValueError(f"Attention: position must be {expected}, got {position!r}")
        name = self.activation
        if name not in (*ELEMENTWISE, "softmax", "performer"):
            raise ValueError(f"activation must be one of {(*ELEMENTWISE, 'softmax', 'performer')}, got {name!r}")
        if name == "sigmoid" and self.attention_bias is None:
            advice = "such as VisibleKeysBias()" if self.normalize else "0.0 for none"
            raise ValueError(f"activation='sigmoid' needs a bias ({advice}), got attention_bias=None")
        if name != "sigmoid" and self.normalize:
            raise ValueError(f"normalize=True needs activation='sigmoid', got activation={name!r}")
        if name in ("softmax", "performer") and (self.attention_bias is not None or self.length_power):
            raise ValueError(
                f"activation={name!r} is normalised and takes only attention_bias=None and length_power=0, got "
                f"{self.attention_bias} and {self.length_power}"
            )
        if self.attention_bias is not None and self.attention_bias.needs_alibi and not isinstance(self.position, Alibi):
            raise ValueError(
                f"{type(self.attention_bias).__name__} counts keys by ALiBi's weights and needs position=Alibi("
                f"{self.num_heads}), got position={self.position!r}"
            )
        masked = self.causal or self.window is not None or isinstance(self.position, Alibi)
        if name == "performer" and (masked or self.dropout):
            raise ValueError(
                "activation='performer' has no explicit weights and needs causal=False, without window, ALiBi or "
                f"dropout; got causal={self.causal}, window={self.window}, position={type(self.position).__name__}, "
                f"dropout={self.dropout}"
            )
        if isinstance(self.attention_bias, QueryBias) and isinstance(self.position, RotaryEmbedding):
            warn_once(
                'a learnable bias added to Q is unstable with RoPE (Table "asr-results"): use -log n, or a learnable '
                "bias on the logits"
            )

    def forward(
        self,
        x: Float[Tensor, "batch length embed_dim"],
        kv_input: Float[Tensor, "batch keys kv_embed_dim"] | None = None,
        key_lengths: Int[Tensor, " batch"] | None = None,
        cache: KVCache | None = None,
        documents: Documents | None = None,
    ) -> Float[Tensor, "batch length embed_dim"]:
        """Return the attention output.

        Args:
            x: input of the queries, and of the keys and values if kv_input is None.
            kv_input: input of the keys and values, in cross-attention.
            key_lengths: number of keys of each sample padded on the right.
            cache: keys and values of the positions before x, to which those of x are appended; disables dropout.
            documents: boundaries of the documents that a row of x packs; attention stays within a document.

        Raises:
            ValueError: if the arguments, or an argument and the layer's options, exclude each other.
        """
        node = record_module(self, (x, kv_input, key_lengths, cache, documents), {})
        if node is not None:
            return node
        self._check_call(x, kv_input, key_lengths, cache, documents)
        query_offset = 0 if cache is None else cache.length
        query, key, value = self._project(x, x if kv_input is None else kv_input, cache, documents)
        if cache is not None:
            key, value = cache.append(key, value)
        spec = MaskSpec(
            self.causal, self.window, key_lengths,
            alibi_slopes=self.position() if isinstance(self.position, Alibi) else None,
            dropout=self.dropout if self.training and cache is None else 0.0, query_offset=query_offset,
            documents=documents, cache=cache, normalize=self.normalize,
        )  # fmt: skip
        num_keys = key.shape[2]
        spec = spec._replace(bias=self.evaluate_bias(self.attention_bias, query, num_keys, spec))
        out = self._attend(query, key, value, spec)
        if self.length_power:
            n = self._over_sequence(functional.num_visible_keys, query, num_keys, spec).clamp(min=1)
            out = out * (n**-self.length_power).to(out.dtype)
        if self.record != "nothing":
            self.output_frobenius_norm = torch.linalg.vector_norm(out.detach().float(), dim=(1, 2, 3))
        if self.record == "everything":
            self.statistics = functional.statistics(self.activation, query, key, value, spec)
        return self.output(self.output_norm(out.transpose(1, 2).flatten(2)))

    def _check_call(
        self, x: Tensor, kv_input: Tensor | None, key_lengths: Tensor | None, cache: KVCache | None,
        documents: Documents | None,
    ) -> None:  # fmt: skip
        """Raise ValueError for arguments of ``forward`` of other shapes, or that exclude each other or an option."""
        source = x if kv_input is None else kv_input
        for name, t, features in (("x", x, self.embed_dim), ("kv_input", source, self.kv_embed_dim)):
            if t.dim() != 3 or t.shape[-1] != features:
                raise ValueError(f"Attention: {name} must be (batch, length, {features}), got {tuple(t.shape)}")
        if kv_input is not None and self.causal and self._is_causal_by_default:
            raise ValueError(
                "Attention: with kv_input choose causal when creating the layer: causal=False for cross-attention "
                "(the default, True, is that of self-attention)"
            )
        if cache is not None and not self.causal:
            raise ValueError("a cache needs causal=True, got causal=False")
        if cache is not None and cache.left_padding is not None and key_lengths is not None:
            raise ValueError("a cache of prompts padded on the left does not support key_lengths (right padding)")
        whole_rows = kv_input is None and key_lengths is None and cache is None
        if self.sequence_shard is not None and (
            not whole_rows or documents is not None or self.activation != "sigmoid" or (self.dropout and self.training)
        ):
            raise ValueError(
                "context parallelism needs sigmoid self-attention without padding, cache, documents or dropout: got "
                f"one of those, or activation={self.activation!r}, or dropout={self.dropout}"
            )
        if self.sequence_shard is not None and self.record == "everything":
            raise ValueError('context parallelism does not support statistics, record="everything": set record="norm"')
        if documents is not None and not (whole_rows and self.causal):
            raise ValueError(
                "documents need causal self-attention of whole rows: got kv_input, key_lengths or a cache too, or "
                f"causal={self.causal}"
            )
        if documents is not None and isinstance(self.attention_bias, SampleLengthBias):
            raise ValueError(
                f"{type(self.attention_bias).__name__} differs between rows, which documents do not support: use "
                "ContextLengthBias or a number"
            )

    def _project(
        self, x: Tensor, kv_input: Tensor, cache: KVCache | None, documents: Documents | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries (B, Hq, N, D), keys and values (B, Hkv, M, D), after norms, positions and temperature."""
        query, key, value = self._by_head(self.query(x)), self._by_head(self.key(kv_input)), self.value(kv_input)
        query, key = self.query_norm(query), self.key_norm(key)
        if isinstance(self.attention_bias, QueryBias):
            query = query + self.attention_bias.value.to(query.dtype)
        if isinstance(self.position, RotaryEmbedding):
            # each sequence starts at 0: a bias may depend on the rotated query, not on products with keys alone
            positions = positions_of(x, self.sequence_shard, cache, documents)
            offset = 0 if cache is None else cache.length
            query, key = (self.position(t, offset, positions) for t in (query, key))
        if self.temperature is not None:
            half = (self.temperature / 2).exp()  # on Q and on K, because Q · e^10 may overflow in float16
            query, key = query * half.to(query.dtype), key * half.to(key.dtype)
        return query, key, self._by_head(value)

    def _by_head(self, x: Tensor) -> Tensor:  # (B, N, H · D) → (B, H, N, D)
        return x.unflatten(-1, (x.shape[-1] // self.head_dim, self.head_dim)).transpose(1, 2)

    def evaluate_bias(self, rule: AttentionBias | None, query: Tensor, num_keys: int, spec: MaskSpec) -> float | Tensor:
        """Return b of a bias, None for 0, for a call of this layer; its keys include cached ones.

        Under context parallelism query, (B, Hq, N, D), as multiplied with the keys, and num_keys are this process's.
        """
        if rule is None or isinstance(rule, QueryBias):
            return 0.0
        visible = None
        if rule.needs_alibi:
            visible = self._over_sequence(functional.sum_alibi_weights, query, num_keys, spec)
        elif rule.needs_visible:
            visible = self._over_sequence(functional.num_visible_keys, query, num_keys, spec).clamp(min=1)
        shard = self.sequence_shard
        b: float | Tensor = rule(
            *((query.shape[2], num_keys) if shard is None else (shard.length, shard.length)),
            query_offset=spec.query_offset, key_lengths=spec.key_lengths, device=query.device, visible=visible,
        )  # fmt: skip
        if shard is not None and isinstance(b, Tensor) and b.dim() > 1 and b.shape[-2] == shard.length > 1:
            b = b.index_select(-2, shard.positions(query.device))
        return rule.of_call(b, self.normalize)

    def _over_sequence(
        self, count: Callable[..., Tensor], query: Tensor, num_keys: int, spec: MaskSpec
    ) -> Tensor:  # (B or 1, Hq or 1, N, 1)
        """Return a count over the keys of whole sequences for the queries that this process holds."""
        shard = self.sequence_shard
        if shard is None:
            return count(query.shape[2], num_keys, spec, query.device)
        return count(shard.length, shard.length, spec, query.device)[:, :, shard.positions(query.device)]

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, spec: MaskSpec) -> Tensor:  # (B, Hq, N, D)
        if self.activation == "performer":
            return self.performer(query, key, value, spec.key_lengths)
        if self.sequence_shard is not None:
            return self.sequence_shard.attend(query, key, value, **spec.operator_options())
        return self.attention_fn(self.activation, query, key, value, spec)
