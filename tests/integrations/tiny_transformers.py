"""Tiny configurations, models and inputs for the architectures of the installed transformers, by rules on names."""

import dataclasses
import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

LENGTH, BATCH, WIDTH, HEADS, HEAD_DIM = 12, 2, 32, 4, 8
LAYERS = r"(num|n)_(\w+_)?(layers|blocks)$|\w*_layers$|^n_layer$|^depth$|\w+_depth$|^num_hidden_layers$"
KV_HEADS = r"\w*(key_value|kv)_heads$|^num_kv_heads$|n_head_kv$"
HEAD_COUNTS = r"(\w+_)?(attention_)?heads$|^n_heads?$|^num_head$|\w+_n_heads$"
WIDTHS = (
    r"(\w+_)?hidden_(size|dim)$|^d_model$|^n_embd$|(\w+_)?embed(ding)?_(dim|size)$|^dim$|^width$|^emb_dim$"
    r"|^projection_dim$|\w+_width$|^dim_model$|^out_hidden_size$|^embed_dim$|^decoder_dim$|^fpn_feature_size$"
)
HEAD_DIMS = r"(\w*_)?head_dim$|^d_kv$|^d_head$|^attention_head_size$|^dim_head$"
INNER = r"\w*intermediate_(size|dim)$|\w*ffn_dim\w*$|\w*mlp_dim$|^d_ff$|^n_inner$|^ffn_hidden_size$|\w*feedforward\w*$"
SMALL = {
    r"\w*vocab_size(_per_layer_input)?$": 128,
    r"^max_(position_embeddings|target_positions|source_positions|seq_len|sequence_length)$": 64,
    r"^(n_positions|context_length|n_ctx)$": 64,
    r"^num_mel_bins$|^num_mel$|^feature_size$": 16,
    r"\w*image_size$|^input_size$|^img_size$": 32,
    r"\w*patch_size$": 8,
    r"(num|n)_(local_|routed_)?experts$|^moe_num_experts$|^num_experts_per_layer$": 4,
    r"^(num_experts_per_tok|moe_k|moe_top_?k|top_k|num_selected_experts|moe_topk)$": 2,
    r"^(kv|q|o)_lora_rank$": 16,
    r"^index_topk$": 8,
    r"^(n_group|topk_group|num_expert_group)$": 1,
    r"^(upsample_groups|conv_groups)$": WIDTH,
    r"^context_size$": 16,
    r"^rotary_dim$": 4,
    r"^(index|qk)_head_dim$": 16,
    r"^num_queries$|^num_query_tokens$|^num_latents$": 6,
    r"^conv_dim$": 32,
    r"^codebook_size$": 32,
    r"^num_conv_pos_embeddings$": 8,
    r"^num_conv_pos_embedding_groups$": 4,
    r"^type_vocab_size$": 2,
    r"^relative_attention_num_buckets$": 8,
    r"^(sliding_window|attention_chunk_size|attention_window|local_attention)$": 6,
}


REQUIRED = {  # instead of None
    "head_dim": HEAD_DIM, "prediction_length": 4, "num_experts_per_tok": 2, "n_routed_experts": 4, "vocab_size": 128,
    "num_key_value_heads": HEADS, "pad_token_id": 0, "layer_types": ["full_attention", "full_attention"],
}  # fmt: skip
CHOSEN = {  # instead of any default, so that there are attention layers
    "attention_types": [[["global", "local"], 1]], "num_kv_shared_layers": 0, "attn_layer_period": 2,
    "attn_layer_offset": 1, "attn_layer_indices": [1], "self_attn": True,
}  # fmt: skip
RESNET = {"model_type": "resnet", "embedding_size": 16, "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1]}
RESNET |= {"out_features": ["stage2", "stage3", "stage4"]}


# -- configurations ---------------------------------------------------------------------------------------------------


def tiny_config(config_class: type[PretrainedConfig], **more: Any) -> PretrainedConfig:
    """Return a small configuration whose sizes fit one another, as far as rules on names can tell."""
    return config_class(**{**_settings(config_class()), **more})


def reduced_config(config_class: type[PretrainedConfig], **more: Any) -> PretrainedConfig:
    """Return the default configuration with few layers and a small vocabulary."""
    keep = LAYERS, r"\w*vocab_size$", r"(num|n)_(local_|routed_)?experts$", INNER
    return config_class(**{**_settings(config_class(), keep), **more})


def _settings(
    config: PretrainedConfig, only: tuple[str, ...] | None = None, within_other: bool = False
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    layers = _layer_count(config)
    skipped = {*config.attribute_map, "transformers_version", "dtype", "architectures", "id2label", "label2id"}
    sections = "mrope_section" in getattr(config, "ignore_keys_at_rope_validation", ())
    if sections and only is None:
        found["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    backbone = _get(config, "backbone_config")
    if getattr(backbone, "model_type", "") == "timm_backbone":
        found["backbone_config"] = RESNET
    equal_heads = _get(config, "num_key_value_heads") == _get(config, "num_attention_heads")
    for field in dataclasses.fields(config):
        name, value = field.name, _get(config, field.name)
        if name in skipped or name in found or name.startswith("_"):
            continue
        if isinstance(value, PretrainedConfig):
            found[name] = {
                "model_type": value.model_type,
                **_settings(value, only, not config.model_type.startswith("siglip")),
            }
        elif name.endswith("layer_types") and isinstance(value, list):
            found[name] = _kinds(value)[:layers] + [value[-1]] * max(0, layers - len(_kinds(value)))
        elif re.match(KV_HEADS, name) and equal_heads and only is None:
            found[name] = HEADS
        elif (new := _value(name, value, layers, only, within_other)) is not None:
            found[name] = new
    return found


def _get(config: PretrainedConfig, name: str) -> Any:
    """Return an attribute, or None where it is missing or differs from layer to layer."""
    try:
        return getattr(config, name, None)
    except Exception:  # transformers' own for attributes of heterogeneous layers
        return None


def _kinds(values: list[str]) -> list[str]:
    kinds = list(dict.fromkeys(values))
    return [*kinds, "full_attention"] if kinds == ["linear_attention"] else kinds


def _layer_count(config: PretrainedConfig) -> int:
    kinds = [v for n, v in vars(config).items() if n.endswith("layer_types") and isinstance(v, list)]
    return max([2, len(_get(config, "block_types") or ()), *(len(_kinds(v)) for v in kinds)])


def _value(name: str, value: Any, layers: int, only: tuple[str, ...] | None, within_other: bool) -> Any:
    """Return a small value for a field, or None to keep the default."""
    if only is not None and not any(re.match(p, name) for p in only) and not _is_token(name, value):
        return None
    if name in CHOSEN:
        return CHOSEN[name]
    if name == "vision_use_head" and within_other:  # as in the checkpoints of models that are not SigLIP
        return False
    if value is None and only is None:
        return REQUIRED.get(name)
    if isinstance(value, bool) or value is None:
        return None
    if _is_token(name, value):
        return 100 + sum(name.encode()) % 27
    if name == "rope_parameters" and isinstance(value, dict):
        return {**value, "mrope_section": [1, 1, 2]} if "mrope_section" in value else None
    if isinstance(value, (list, tuple)):
        return _sequence(name, value)
    if not isinstance(value, int):
        return None
    for pattern, small in SMALL.items():
        if re.match(pattern, name):
            return min(small, value)
    if re.match(LAYERS, name):
        return min(value, layers)
    if re.match(KV_HEADS, name):
        return 1 if value == 1 else 2
    if re.match(HEAD_COUNTS, name):
        return 1 if value == 1 else HEADS
    for pattern, small in {HEAD_DIMS: HEAD_DIM, WIDTHS: WIDTH, INNER: 2 * WIDTH}.items():
        if re.match(pattern, name) and value > small:
            return small
    return None


def _is_token(name: str, value: Any) -> bool:
    return bool(re.search(r"token_(id|index)$|_token$", name)) and isinstance(value, int) and value >= 100


def _sequence(name: str, value: Any) -> Any:
    kind = type(value)
    if not value or not all(isinstance(v, int) for v in value):
        return None
    if re.match(r"^depths$|\w*num_blocks$|^layers$|^stage_depths$", name):
        return kind(min(v, 1) for v in value)
    if re.match(r"\w*(hidden_sizes|embed_dims?|widths|dims)$", name):
        return kind(WIDTH * 2 ** min(i, 2) for i in range(len(value)))
    if re.match(r"^num_(attention_)?heads$", name):
        return kind(min(v, HEADS) for v in value)
    if re.match(r"^conv_dim$|^tdnn_dim$", name):
        return kind(WIDTH for _ in value)
    if re.match(r"^image_size$", name):
        return kind(32 for _ in value)
    return None


# -- models -----------------------------------------------------------------------------------------------------------


def architectures() -> list[str]:
    """Return the model types of the registry that have a model."""
    return sorted(name for name in CONFIG_MAPPING if _auto_classes(name))


def _auto_classes(model_type: str) -> list[Any]:
    order = (
        "AutoModel", "AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForImageTextToText",
        "AutoModelForMaskedLM", "AutoModelForPreTraining", "AutoModelForImageClassification",
        "AutoModelForTextToWaveform", "AutoBackbone", "AutoModelForKeypointMatching", "AutoModelForMaskGeneration",
        "AutoModelForObjectDetection", "AutoModelForTimeSeriesPrediction", "AutoModelForMultimodalLM",
        "AutoModelForSpeechSeq2Seq", "AutoModelForCTC", "AutoModelForUniversalSegmentation",
        "AutoModelForSemanticSegmentation", "AutoModelForDepthEstimation",
    )  # fmt: skip
    mappings = [getattr(modeling_auto, name, None) for name in order]
    return [m for m in mappings if m is not None and model_type in m._model_mapping._model_mapping]


def build(config: PretrainedConfig, implementation: str, seed: int = 0) -> PreTrainedModel:
    """Return a model with random weights, drawn so that attention changes its output noticeably."""
    auto = _auto_classes(config.model_type)[0]
    torch.manual_seed(seed)
    model: PreTrainedModel = auto.from_config(config, attn_implementation=implementation).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.is_floating_point() or not parameter.numel():
                continue
            if parameter.dim() > 1:
                parameter.normal_(0.0, min(1.0, (parameter.numel() / parameter.shape[0]) ** -0.5))
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.1)
    return model


def size(config: PretrainedConfig) -> int:
    """Return the number of parameters of the model of a configuration, without allocating them."""
    with torch.device("meta"):
        return sum(p.numel() for p in _auto_classes(config.model_type)[0].from_config(config).parameters())


# -- inputs -----------------------------------------------------------------------------------------------------------


def inputs(model: PreTrainedModel) -> Iterator[dict[str, Any]]:
    """Yield inputs that the forward of ``model`` may accept, the likeliest first."""
    accepted = inspect.signature(model.forward).parameters
    generator = torch.Generator().manual_seed(1)
    vocabulary = _get(model.config, "vocab_size")
    largest = min(90, vocabulary) if isinstance(vocabulary, int) and vocabulary > 3 else 90
    ids = torch.randint(3, largest, (BATCH, LENGTH), generator=generator)
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[1, :3] = 0
    text = {"input_ids": ids, "attention_mask": mask}
    if "decoder_input_ids" in accepted:
        text["decoder_input_ids"] = ids[:, :7]
    if "bbox" in accepted:
        text["bbox"] = torch.zeros(BATCH, LENGTH, 4, dtype=torch.long)
    text = {name: value for name, value in text.items() if name in accepted}
    others = [
        {**extra, **{n: v for n, v in text.items() if n not in ("input_ids", "attention_mask")}}
        for extra in _signals(model, accepted, generator)
    ]
    if "input_ids" in accepted:
        for extra in others:
            yield {**text, **extra}
        yield text
        yield {name: value for name, value in text.items() if name != "attention_mask"}
    yield from others
    if "inputs_embeds" in accepted or "hidden_states" in accepted:
        name = "inputs_embeds" if "inputs_embeds" in accepted else "hidden_states"
        width = getattr(model.config, "hidden_size", WIDTH)
        yield {name: torch.randn(BATCH, LENGTH, width, generator=generator)}


def _signals(model: PreTrainedModel, accepted: Any, generator: torch.Generator) -> Iterator[dict[str, Any]]:
    config = model.config
    vision = getattr(config, "vision_config", config)
    side = getattr(vision, "image_size", 32)
    side = side if isinstance(side, int) else (side[0] if isinstance(side, (list, tuple)) else 32)
    channels = getattr(vision, "num_channels", 3)
    frames = getattr(vision, "num_frames", 4)
    mel = getattr(config, "num_mel_bins", 16)
    grid = next((name for name in accepted if name.startswith(("grid_thw", "image_grid"))), None)
    if grid and "input_ids" not in accepted:
        patch, time = getattr(config, "patch_size", 8), getattr(config, "temporal_patch_size", 1)
        patch = patch if isinstance(patch, int) else patch[-1]
        channels = getattr(config, "in_channels", None) or getattr(config, "num_channels", 3)
        first = next(name for name in accepted if name not in ("self", grid))
        sizes = torch.tensor([[1, 4, 4], [1, 8, 4]])
        for shape in (
            (48, channels * time * patch * patch),
            (48, channels, patch, patch),
            (48, getattr(config, "hidden_size", WIDTH)),
        ):
            yield {first: torch.randn(shape, generator=generator), grid: sizes}
    if "spatial_shapes" in accepted:  # patches of several images
        patches = channels * getattr(vision, "patch_size", 8) ** 2
        yield {
            "pixel_values": torch.randn(BATCH, 16, patches, generator=generator),
            "pixel_attention_mask": torch.arange(16).expand(BATCH, -1) < torch.tensor([[16], [12]]),
            "spatial_shapes": torch.tensor([[4, 4], [3, 4]]),
        }
    if "visual_feats" in accepted:
        features = torch.randn(BATCH, 6, getattr(config, "visual_feat_dim", 2048), generator=generator)
        yield {"visual_feats": features, "visual_pos": torch.rand(BATCH, 6, 4, generator=generator)}
    shapes = {
        "pixel_values": [
            (BATCH, channels, side, side),
            (BATCH, frames, channels, side, side),
            (BATCH, 1, side, side),
            (BATCH, 2, channels, side, side),
        ],
        "pixel_values_videos": [(BATCH, frames, channels, side, side)],
        "input_values": [(BATCH, 1, 1280), (BATCH, 1280), (BATCH, getattr(config, "max_length", 64), mel)],
        "input_features": [(BATCH, mel, 128), (BATCH, 128, mel), (BATCH, 1, 128, mel), (BATCH, 40, 160)],
        "past_values": [(BATCH, getattr(config, "context_length", 32) or 32, 1), (BATCH, 32)],
    }
    for name, candidates in shapes.items():
        if name in accepted:
            for shape in candidates:
                yield {name: torch.randn(shape, generator=generator)}


def parts(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """Yield the model and the models inside it, with their names."""
    for name, module in model.named_modules():
        if isinstance(module, PreTrainedModel):
            yield name, module
