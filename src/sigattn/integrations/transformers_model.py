"""This library's language model as one of transformers': ``AutoModelForCausalLM.from_pretrained`` loads it.

    from sigattn.integrations import transformers_model      # once: makes the classes known
    transformers_model.export(model, folder, tokenizer)       # or: sigattn export RUN FOLDER
    model = AutoModelForCausalLM.from_pretrained(folder)

``generate`` works with dynamic, static and no cache, with beams, and with prompts padded on the left. Rows that hold
several documents one after another are kept apart where ``position_ids`` start again at 0 and there is no mask.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sigattn.models.language import LanguageModel, LanguageModelConfig
from sigattn.nn.cache import LayerCache
from sigattn.nn.documents import Documents
from sigattn.optional import needs

with needs("transformers"):
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PretrainedConfig, PreTrainedModel
    from transformers import PreTrainedTokenizerFast as FastTokenizer
    from transformers.cache_utils import Cache, DynamicCache
    from transformers.modeling_outputs import CausalLMOutputWithPast


class SigattnConfig(PretrainedConfig):
    """``sigattn.models.LanguageModelConfig`` as transformers keeps a configuration.

    Args:
        model: its fields.
    """

    model_type = "sigattn"

    def __init__(self, model: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self.model = dict(model or {})
        own = self.language_model
        self.vocab_size, self.hidden_size, self.num_hidden_layers = own.vocabulary, own.width, own.layers
        self.num_attention_heads, self.num_key_value_heads = own.heads, own.kv_heads or own.heads
        self.head_dim, self.max_position_embeddings = own.head_dim, own.context
        kwargs.setdefault("tie_word_embeddings", False)  # the model itself shares its embedding
        super().__init__(**kwargs)

    @property
    def language_model(self) -> LanguageModelConfig:
        """The configuration itself."""
        return LanguageModelConfig(**self.model)


class SigattnForCausalLM(PreTrainedModel, GenerationMixin):
    """``sigattn.models.LanguageModel`` behind transformers' interface."""

    config_class = SigattnConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _can_compile_fullgraph = False

    def __init__(self, config: SigattnConfig) -> None:
        super().__init__(config)
        self.model = LanguageModel(config.language_model)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Frequencies and slopes are not saved; everything else was drawn when it was made, or is loaded."""
        reset = getattr(module, "reset_parameters", None)
        if reset is not None and module._non_persistent_buffers_set and not list(module.parameters(recurse=False)):
            reset()

    def get_input_embeddings(self) -> nn.Module:
        """The embedding."""
        return self.model.embedding

    def set_input_embeddings(self, value: Any) -> None:
        """Another embedding."""
        self.model.embedding = value

    def get_output_embeddings(self) -> nn.Module | None:
        """The output layer; None where it is the embedding."""
        return self.model.output

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Compute each block again in the backward pass."""
        if (gradient_checkpointing_kwargs or {}).get("use_reentrant"):
            raise ValueError("sigattn's blocks are checkpointed without re-entering: say use_reentrant=False")
        self.model.checkpoint_activations = True

    def gradient_checkpointing_disable(self) -> None:
        """Keep activations."""
        self.model.checkpoint_activations = False

    @property
    def is_gradient_checkpointing(self) -> bool:
        """Whether blocks are computed again."""
        return self.model.checkpoint_activations

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits (B, N, vocabulary), and the loss of labels where they are given.

        Raises:
            ValueError: for a mask that hides something else than padding on one side, or padding on the left while
                gradients are wanted.
        """
        use_cache = use_cache if use_cache is not None else past_key_values is not None
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        past = past_key_values.get_seq_length() if past_key_values is not None else 0
        first = _first(attention_mask, int(past) + input_ids.shape[1])
        cache: list[Any] | None = None
        documents = None
        if past_key_values is not None:
            cache = [_Borrowed(past_key_values, i, int(past), first) for i in range(len(self.model.blocks))]
        elif first is not None:
            if torch.is_grad_enabled() and self.training:
                raise ValueError("pad on the right to train: padding on the left is for generation")
            cache = self.model.new_cache(first)
        elif attention_mask is None and position_ids is not None:
            documents = _documents(position_ids.expand(input_ids.shape))
        logits = self.model(input_ids, cache, documents)
        if isinstance(logits_to_keep, Tensor) or logits_to_keep:
            logits = logits[:, -logits_to_keep:] if isinstance(logits_to_keep, int) else logits[:, logits_to_keep]
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)


def _first(mask: Tensor | None, length: int) -> Tensor | None:
    """(B,), where each sample begins; None where all do at 0. Padding on the right hides nothing from what precedes."""
    if mask is None:
        return None
    if mask.dim() == 4 and mask.dtype is torch.bool:  # with a static cache: what each query sees of all places
        mask = mask[:, 0, -1]
    if mask.dim() != 2:
        raise ValueError(f"attention_mask must be (B, N), 1 where a token is and 0 where padding is; got {mask.shape}")
    seen = mask[:, :length].bool()
    if (seen[:, 1:].long() - seen[:, :-1].long()).abs().sum(1).gt(1 + (~seen[:, 0]).long()).any():
        raise ValueError("attention_mask may hide padding on the left and on the right, and nothing in between")
    first = seen.long().argmax(1)
    return first if first.any() else None


def _documents(position_ids: Tensor) -> Documents | None:
    """Rows in which positions start again at 0 hold several documents."""
    begins = position_ids == 0
    begins[:, 0] = True
    if begins.sum() == len(begins):
        return None
    number = begins.long().cumsum(1) - 1
    last = torch.tensor([begins.numel()], device=begins.device)
    starts = torch.cat((begins.flatten().nonzero().squeeze(1), last)).int()
    at = torch.arange(begins.shape[1], device=begins.device).expand_as(begins)
    position = at - torch.where(begins, at, 0).cummax(1).values
    return Documents(number, position, starts)


class _Borrowed(LayerCache):
    """A layer of transformers' cache, as this library's attention asks for one."""

    def __init__(self, cache: Cache, layer: int, length: int, first: Tensor | None) -> None:
        super().__init__(1 << 62, first)
        self.cache, self.layer, self.length = cache, layer, length

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add keys and values; a static cache gives memory beyond them, which is left out."""
        self.length += key.shape[2]
        key, value = self.cache.update(key, value, self.layer)
        return key[:, :, : self.length], value[:, :, : self.length]


AutoConfig.register("sigattn", SigattnConfig, exist_ok=True)
AutoModelForCausalLM.register(SigattnConfig, SigattnForCausalLM, exist_ok=True)


def wrap(model: LanguageModel) -> SigattnForCausalLM:
    """A language model behind transformers' interface; the weights are the same tensors."""
    wrapped = SigattnForCausalLM(SigattnConfig(dataclasses.asdict(model.config)))
    wrapped.model = model
    return wrapped


def export(model: LanguageModel, folder: Path, tokenizer: Path | None = None, end: str | None = None) -> None:
    """Write a language model into a folder that transformers loads.

    Args:
        model: any. folder: made if missing.
        tokenizer: JSON of Hugging Face's tokenizers, to be kept beside it. end: its token that ends a document.
    """
    wrapped = wrap(model)
    if tokenizer is not None:
        fast = FastTokenizer(tokenizer_file=str(tokenizer), eos_token=end, pad_token=end, padding_side="left")
        fast.save_pretrained(str(folder))
        wrapped.generation_config.eos_token_id = wrapped.config.eos_token_id = fast.eos_token_id
        wrapped.generation_config.pad_token_id = wrapped.config.pad_token_id = fast.pad_token_id
    wrapped.save_pretrained(str(folder))
