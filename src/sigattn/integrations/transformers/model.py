"""This library's language model as a model of transformers: ``AutoModelForCausalLM.from_pretrained`` loads it.

    import sigattn.integrations.transformers                  # once: registers the classes
    sigattn.integrations.transformers.model.export(model, folder, tokenizer)   # or: sigattn export RUN FOLDER
    model = AutoModelForCausalLM.from_pretrained(folder)

``generate`` works with dynamic, static and no cache, with beams, and with prompts padded on the left. Without a mask,
``position_ids`` that start again at 0 separate several documents in a row.
"""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers import PreTrainedTokenizerFast as FastTokenizer
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from sigattn.models.language import LanguageModel, LanguageModelConfig
from sigattn.nn.documents import Documents
from sigattn.nn.kv_cache import KVCache


class SigattnConfig(PretrainedConfig):
    """``LanguageModelConfig`` as a configuration of transformers.

    Args:
        model: fields of the ``LanguageModelConfig``.
    """

    model_type = "sigattn"

    def __init__(self, model: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self.model: dict[str, Any] = dict(model or {})
        language_model = self.language_model
        self.vocab_size: int = language_model.vocab_size
        self.hidden_size: int = language_model.embed_dim
        self.num_hidden_layers: int = language_model.num_layers
        self.num_attention_heads: int = language_model.num_heads
        self.num_key_value_heads: int = language_model.num_kv_heads or language_model.num_heads
        self.head_dim: int = language_model.head_dim
        self.max_position_embeddings: int = language_model.max_seq_len
        super().__init__(**{**kwargs, "tie_word_embeddings": language_model.tie_embeddings})

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "tie_word_embeddings":  # also set by from_pretrained's argument, and by peft when it unties
            self.model["tie_embeddings"] = bool(value)

    @property
    def language_model(self) -> LanguageModelConfig:
        return LanguageModelConfig(**self.model)


class SigattnForCausalLM(PreTrainedModel, GenerationMixin):
    """``LanguageModel`` with transformers' interface.

    The output is a module also where its weights are tied, as in transformers' models, so that peft can adapt both.
    """

    config_class = SigattnConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    gradient_checkpointing = False
    _input_embed_layer = "embedding"  # of self.model
    _supports_sdpa = True
    _can_compile_fullgraph = False
    _tied_weights_keys = {"model.output.weight": "model.embedding.weight"}  # noqa: RUF012 (transformers' attribute)
    _no_split_modules = ["Block"]  # noqa: RUF012 (transformers' attribute, for device_map="auto")

    def __init__(self, config: SigattnConfig) -> None:
        super().__init__(config)
        self.model: LanguageModel = LanguageModel(config.language_model)
        if self.model.output is None:
            self.model.output = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Compute buffers that are not saved (frequencies, slopes), and parameters that a checkpoint lacks.

        Without a checkpoint, constructors have initialised the parameters.
        """
        reset = getattr(module, "reset_parameters", None)
        if reset is None:
            return
        if list(module.parameters(recurse=False)):
            missing = any(getattr(p, "_is_hf_initialized", False) for p in self.parameters())
        else:
            missing = bool(module._non_persistent_buffers_set)
        if missing:
            reset()  # with torch.nn.init, whose functions transformers lets skip loaded parameters

    def get_output_embeddings(self) -> nn.Module | None:
        return self.model.output

    def set_output_embeddings(self, value: Any) -> None:
        self.model.output = value

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Change the size of the vocabulary, as transformers describes, also in the model's own configuration.

        A model that ``wrap`` was given keeps its own: transformers would change the shared layers in place.
        """
        self.model.embedding, self.model.output = copy.deepcopy((self.model.embedding, self.model.output))
        embedding: nn.Embedding = super().resize_token_embeddings(*args, **kwargs)
        self.config.model["vocab_size"] = embedding.num_embeddings
        self.model.config = self.config.language_model
        return embedding

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Recompute each block in the backward pass. Raise ValueError for options that change how."""
        supported = {"use_reentrant": False, "every_n_layers": 1, "offload": False}
        for name, value in {**(gradient_checkpointing_kwargs or {}), **kwargs}.items():
            if value != supported.get(name):
                raise ValueError(
                    f"SigattnForCausalLM does not support {name}={value!r}: use {name}={supported.get(name)}"
                )
        self.gradient_checkpointing = self.model.checkpoint_activations = True

    def set_attn_implementation(self, *args: Any, **kwargs: Any) -> None:
        """Raise ValueError: the attention is that of the model's configuration."""
        raise ValueError(
            f"SigattnForCausalLM computes {self.model.config.activation} attention by its own layers, whatever "
            "attn_implementation says: leave set_attn_implementation out"
        )

    def gradient_checkpointing_disable(self) -> None:
        self.gradient_checkpointing = self.model.checkpoint_activations = False

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
        past_key_values: Cache | None = None, labels: Tensor | None = None, use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0, cache: Cache | None = None, **kwargs: Any,
    ) -> CausalLMOutputWithPast:  # fmt: skip
        """Return the logits, (B, N, vocabulary), and the loss if there are labels.

        ``cache`` is the name of ``past_key_values`` from transformers 5.24 on.

        Raises:
            ValueError: for a mask that hides tokens between others; positions other than those of the documents, or of
                the cache and the padding; or options that are not supported.
        """
        asked = {name: getattr(self.config, name) for name in ("output_hidden_states", "output_attentions")} | kwargs
        if unsupported := [n for n, v in asked.items() if v is not None and v is not False and n not in _PASSED]:
            raise ValueError(f"SigattnForCausalLM does not support {', '.join(unsupported)}: leave them out")
        if input_ids is None:
            raise ValueError("SigattnForCausalLM needs input_ids: the tokens, (B, N)")
        past_key_values = past_key_values if cache is None else cache
        use_cache = use_cache if use_cache is not None else past_key_values is not None
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        past = past_key_values.get_seq_length() if past_key_values is not None else 0
        first = _left_padding(attention_mask, int(past) + input_ids.shape[1])
        layers: list[Any] | None = None
        documents = None
        if past_key_values is not None:
            layers = [_CacheAdapter(past_key_values, i, int(past), first) for i in range(len(self.model.blocks))]
        elif first is not None:  # a causal model does not see padding on the right
            order = torch.arange(input_ids.shape[1], device=input_ids.device) + first[:, None]
            input_ids = input_ids.gather(1, order % input_ids.shape[1])
        elif attention_mask is None and position_ids is not None:
            documents = _documents(position_ids.expand(input_ids.shape))
        if position_ids is not None:
            expected = torch.arange(int(past), int(past) + input_ids.shape[1], device=input_ids.device)
            expected = expected if first is None else expected - first[:, None]
            expected = expected if documents is None else documents.positions
            _check_positions(position_ids, expected, attention_mask, int(past))
        logits = self.model(input_ids, layers, documents)
        if first is not None and layers is None:
            order = torch.arange(logits.shape[1], device=logits.device) - first[:, None]
            logits = logits[torch.arange(len(first), device=first.device)[:, None], order % logits.shape[1]]
        if isinstance(logits_to_keep, Tensor) or logits_to_keep:
            logits = logits[:, -logits_to_keep:] if isinstance(logits_to_keep, int) else logits[:, logits_to_keep]
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        # by position, because the name of the third field is deprecated from transformers 5.24 on
        return CausalLMOutputWithPast(loss, logits, past_key_values)


# options of the loss, one of generation with which transformers counts cached tokens, and one that its server passes
_PASSED = {"num_items_in_batch", "ignore_index", "shift_labels", "cache_position", "tokenizer"}


def _visible(mask: Tensor, length: int) -> Tensor:
    """Return (B, length) bool, True for tokens and False for padding."""
    if mask.dim() == 4 and mask.dtype is torch.bool:  # the mask of a static cache, (B, 1, N, capacity)
        mask = mask[:, 0, -1]
    if mask.dim() != 2:
        raise ValueError(f"attention_mask must be (B, N), 1 for tokens and 0 for padding; got {tuple(mask.shape)}")
    return mask[:, :length].bool()


def _check_positions(position_ids: Tensor, expected: Tensor, mask: Tensor | None, past: int) -> None:
    """Raise ValueError if positions, (B or 1, N), differ from the model's own where there is no padding."""
    differs = position_ids != expected
    if mask is not None:
        differs = differs & _visible(mask, past + differs.shape[1])[:, past:]
    if differs.any():
        raise ValueError(
            "position_ids must count from 0 in each row, after its padding and with the tokens in the cache, or, "
            f"without mask and cache, from 0 in each document; got {position_ids.tolist()}"
        )


def _left_padding(mask: Tensor | None, length: int) -> Tensor | None:
    """Return the first position of each sample, (B,); None if all are 0. Padding on the right needs no mask."""
    if mask is None:
        return None
    visible = _visible(mask, length)
    if (visible[:, 1:].long() - visible[:, :-1].long()).abs().sum(1).gt(1 + (~visible[:, 0]).long()).any():
        raise ValueError("attention_mask may hide only padding on the left and on the right, not tokens between others")
    first = visible.long().argmax(1)
    return first if first.any() else None


def _documents(position_ids: Tensor) -> Documents | None:
    """Return the documents that start where positions are 0; None if each row is one document."""
    is_start = position_ids == 0
    is_start[:, 0] = True
    if is_start.sum() == len(is_start):
        return None
    return Documents.from_starts(is_start)


class _CacheAdapter(KVCache):
    """Adapter of one layer of transformers' cache to ``KVCache``."""

    def __init__(self, cache: Cache, layer: int, length: int, first: Tensor | None) -> None:
        super().__init__(1 << 62, first)
        self.cache, self.layer, self.length = cache, layer, length

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values and return all of them, without the unused end of a static cache."""
        self.length += key.shape[2]
        key, value = self.cache.update(key, value, self.layer)
        return key[:, :, : self.length], value[:, :, : self.length]


AutoConfig.register("sigattn", SigattnConfig, exist_ok=True)
AutoModelForCausalLM.register(SigattnConfig, SigattnForCausalLM, exist_ok=True)


def wrap(model: LanguageModel) -> SigattnForCausalLM:
    """Return a language model with transformers' interface, which shares its layers and weights."""
    wrapped = SigattnForCausalLM(SigattnConfig(dataclasses.asdict(model.config)))
    for name, layer in model.named_children():
        setattr(wrapped.model, name, layer)
    wrapped.tie_weights()
    return wrapped


def export(model: LanguageModel, folder: Path, tokenizer: Any = None, end: str | None = None) -> None:
    """Write a language model to a folder that transformers loads.

    Args:
        model: the model. folder: the folder, created if missing.
        tokenizer: tokenizer of Hugging Face's tokenizers, to be saved with the model, or its JSON file.
        end: its end-of-document token.

    Raises:
        OSError: if the folder cannot be created; ``save_pretrained`` would only log that it is a file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wrapped = wrap(model)
    if tokenizer is not None:
        source = {"tokenizer_file": str(tokenizer)} if isinstance(tokenizer, Path) else {"tokenizer_object": tokenizer}
        fast = FastTokenizer(**source, eos_token=end, pad_token=end, padding_side="left")
        fast.save_pretrained(str(folder))
        wrapped.generation_config.eos_token_id = wrapped.config.eos_token_id = fast.eos_token_id
        wrapped.generation_config.pad_token_id = wrapped.config.pad_token_id = fast.pad_token_id
    wrapped.save_pretrained(str(folder))
