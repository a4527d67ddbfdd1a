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
LAYERS = r"(num|n)_(\w+_)?(layers|blocks)$|\w*_layers$|^n_layer$|^depth$|\w+_depth$|^num_self_attends_per_block$"
LAYER_KINDS = r"\w*layer_types$|^layers_block_type$"
KV_HEADS = r"\w*(key_value|kv)_heads$"
HEAD_COUNTS = r"(\w+_)?(attention_)?heads$|^n_heads?$"
WIDTHS = (
    r"(\w+_)?hidden_(size|dim)$|^d_model$|^n_embd$|(\w+_)?embed(ding)?_(dim|size)$|^dim$|^emb_dim$|^projection_dim$"
    r"|\w+_width$|^decoder_dim$|^fpn_feature_size$|^d_latents$|^adapter_(in|out)(put_size|_dim)$"
    r"|^(base|latent)_channels$|^upsample_initial_channel$"
)
HEAD_DIMS = r"(\w*_)?head_dim$|^d_kv$|^d_head$|^attention_head_size$|^dim_head$"
INNER = r"\w*intermediate_(size|dim)$|\w*ffn_dim\w*$|\w*mlp_dim$|^d_ff$|^ffn_hidden_size$|\w*feedforward\w*$"
SMALL = {
    r"\w*vocab_size(_per_layer_input)?$": 128,
    r"^max_(position_embeddings|target_positions|source_positions|seq_len|sequence_length)$"
    r"|^(n_positions|context_length|n_ctx)$|^encoder_hash_byte_group_vocab$|^num_embeddings$": 64,
    r"\w*image_size$|^input_size$|^(upsample_groups|conv_groups)$|^conv_dim$|^codebook_size$": 32,
    r"^num_mel_bins$|^feature_size$|^(kv|q|o)_lora_rank$|^context_size$|^(index|qk)_head_dim$": 16,
    r"\w*patch_size$|^index_topk$|^num_conv_pos_embeddings$|^relative_attention_num_buckets$|^visual_prompt_size$": 8,
    r"^(sliding_window|attention_chunk_size|attention_window|local_attention)$|^num_(queries|query_tokens|latents)$": 6,
    r"(num|n)_(local_|routed_)?experts$|^moe_num_experts$|^rotary_dim$"
    r"|^num_conv_pos_embedding_groups$|^num_filters$": 4,
    r"^(num_experts_per_tok|moe_k|moe_top_?k|top_k|num_selected_experts|moe_topk|index_kpool)$": 2,
    r"^(n_groups?|topk_group|num_expert_group)$": 1,
}


REQUIRED = {  # instead of None
    "head_dim": HEAD_DIM, "prediction_length": 4, "num_experts_per_tok": 2, "n_routed_experts": 4, "vocab_size": 128,
    "num_key_value_heads": HEADS, "pad_token_id": 0, "layer_types": ["full_attention", "full_attention"],
    "n_shared_experts": 1, "top_k_experts": 2, "moe_intermediate_size": WIDTH, "default_language": "en_XX",
    "mlp_layer_types": ["dense", "sparse"], "indexer_n_heads": HEADS,
    "indexer_kv_heads": 1, "indexer_head_dim": 2 * HEAD_DIM, "indexer_budget": 8, "indexer_compress_ratio": 2,
    "vocabulary_map": {"<image>": 100, "<|extra_200|>": 101, "IMGIMGAZ": 102, "<|visual token 000000|>": 103},
}  # fmt: skip
CHOSEN = {  # instead of any default, so that there are attention layers
    "attention_types": [[["global", "local"], 1]], "num_kv_shared_layers": 0, "attn_layer_period": 2,
    "attn_layer_offset": 1, "attn_layer_indices": [1], "self_attn": True, "width_coefficient": 1.0,
    "depth_coefficient": 0.3,
}  # fmt: skip
RESNET = {"model_type": "resnet", "embedding_size": 16, "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1]}
RESNET |= {"out_features": ["stage2", "stage3", "stage4"]}
TIMM_RESNET = {"architecture": "resnet10t"}
TIMM_VIT = {"architecture": "vit_pe_core_tiny_patch16_384", "model_args": {"embed_dim": 192, "img_size": 32}}
FITTED: dict[str, dict[str, Any]] = {  # by model type: sizes bound to one another, and attributes without a default
    # blocks of which a length of 12 has enough for sparse attention
    "big_bird": {"block_size": 1, "num_random_blocks": 1}, "bigbird_pegasus": {"block_size": 1, "num_random_blocks": 1},
    "bridgetower": {"hidden_size": 64}, "bridgetower_vision_model": {"hidden_size": 64},
    "bridgetower_text_model": {"hidden_size": 64},
    "zamba": {"attention_hidden_size": 2 * WIDTH, "attention_head_dim": 2 * HEAD_DIM},
    "mamba2": {"head_dim": 2 * HEAD_DIM},
    "moonshine_streaming": {"num_key_value_heads": HEADS},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": WIDTH},
    "upernet": {"backbone_config": {**RESNET, "out_features": ["stage1", "stage2", "stage3", "stage4"]}},
    "d_fine": {"backbone_config": RESNET, "encoder_in_channels": [16, 32, 32], "decoder_in_channels": [WIDTH] * 3},
    "timm_backbone": {"backbone": "resnet10t"},
    "granite4_vision": {
        "vision_config": {"hidden_size": 64}, "downsample_rate": "1/2", "deepstack_layer_map": [[-1, 0]],
        "spatial_target_layers": [1],
    },
    "diffusion_gemma_text": {"num_experts": 4},
    "FunAsrNanoAdaptorConfig": {"intermediate_size": WIDTH // 4},
    "DbrxAttentionConfig": {"rope_theta": 1e4, "clip_qkv": 8.0}, "Qwen3OmniMoeTalkerConfig": {"spatial_merge_size": 2},
    "t5gemma2_encoder": {"text_config": {"dropout_rate": 0.0}},
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
        }
    },
    "dots3_note_text": {"num_attention_heads": 128, "num_key_value_heads": 128},
    "perception_lm": {"vision_config": TIMM_VIT}, "fast_vlm": {"vision_config": {"hidden_size": 512, **TIMM_RESNET}},
    "pe_video_encoder": {"vision_config": TIMM_VIT}, "pe_audio_video_encoder": {"vision_config": TIMM_VIT},
    "glm4v_moe_text": {"head_dim": 2 * HEAD_DIM},
    "seggpt": {"image_size": [64, 32]},
    "tvp": {"num_frames": 2, "max_img_size": 128},
    "inkling_vision": {"num_hidden_layers": 4},
    "edgetam_vision_model": {"backbone_config": {"num_classes": 2}},
    "sam2_hiera_det_model": {"embed_dim_per_stage": [WIDTH, 2 * WIDTH, 4 * WIDTH, 8 * WIDTH]},
    "vits": {"speaking_rate": 1e9},  # durations are exponentials of what random weights predict
}  # fmt: skip


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
        elif re.match(LAYER_KINDS, name) and isinstance(value, list):
            found[name] = _kinds(value)[:layers] + [value[-1]] * max(0, layers - len(_kinds(value)))
        elif re.match(KV_HEADS, name) and equal_heads and only is None:
            found[name] = HEADS
        elif (new := _value(name, value, layers, only, within_other)) is not None:
            found[name] = new
    if only is None:
        for name, value in FITTED.get(config.model_type or type(config).__name__, {}).items():
            found[name] = {**found.get(name, {}), **value} if name.endswith("_config") else value
    return found


def _get(config: PretrainedConfig, name: str) -> Any:
    """Return an attribute, or None where it is missing or differs from layer to layer."""
    try:
        return getattr(config, name, None)
    except Exception:  # transformers' own for attributes of heterogeneous layers
        return None


def _kinds(values: list[str]) -> list[str]:
    kinds = list(dict.fromkeys(values))
    if "hybrid" in kinds and "linear_attention" in kinds:
        return [*kinds, "hybrid"]  # Zamba shares weights between at least two of them
    return [*kinds, "full_attention"] if kinds == ["linear_attention"] else kinds


def _layer_count(config: PretrainedConfig) -> int:
    kinds = [v for n, v in vars(config).items() if re.match(LAYER_KINDS, n) and isinstance(v, list)]
    stages = [len(_get(config, name) or ()) for name in ("block_types", "depths")]
    return max([2, *stages, *(len(_kinds(v)) for v in kinds)])


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
    if re.match(r"^depths$|^num_block_repeats$|\w*num_blocks$", name):
        return kind(min(v, 1) for v in value)
    if re.match(r"\w*(hidden_sizes|embed_dims?|widths|dims)$", name):
        return kind(WIDTH * 2 ** min(i, 2) for i in range(len(value)))
    if re.match(r"^num_(attention_)?heads$", name):
        return kind(min(v, HEADS) for v in value)
    if re.match(r"^conv_dim$|^tdnn_dim$", name):
        return kind(WIDTH for _ in value)
    if re.match(r"^vision_feature_layer", name):
        return kind(range(len(value)))
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


def _auto_class(config: PretrainedConfig) -> Any:
    """Return the first auto class whose model takes this configuration, not that of a part of it."""
    classes = _auto_classes(config.model_type)
    config.architectures = config.architectures or []
    for auto in classes:
        try:
            model = auto._model_mapping[type(config)]
        except (KeyError, ValueError):  # names in the registry that have no class
            continue
        model = model[0] if isinstance(model, tuple) else model
        if model.config_class is None or isinstance(config, model.config_class):
            return auto
    return classes[0]


def build(config: PretrainedConfig, implementation: str, seed: int = 0) -> PreTrainedModel:
    """Return a model with random weights, drawn so that attention changes its output noticeably."""
    auto = _auto_class(config)
    torch.manual_seed(seed)
    model: PreTrainedModel = auto.from_config(config, attn_implementation=implementation).eval()
    if implementation != "sigmoid":  # also for parts whose configuration the model has made
        model.set_attn_implementation(implementation)
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
        return sum(p.numel() for p in _auto_class(config).from_config(config).parameters())


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
        for signal in _signals(model, accepted, generator)
        for extra in _with_companions(signal, model.config, accepted, generator)
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


def _with_companions(
    signal: dict[str, Any], config: PretrainedConfig, accepted: Any, generator: torch.Generator
) -> Iterator[dict[str, Any]]:
    """Yield an input alone, and with those whose shapes follow from it."""
    yield signal
    first = next(iter(signal.values()))
    steps, side = first.shape[-1 if first.dim() == 2 else -2], 4
    values = torch.randn(BATCH, getattr(config, "prediction_length", None) or 1, generator=generator)
    features = getattr(config, "num_time_features", 0)
    made = {
        "past_time_features": torch.randn(BATCH, steps, features, generator=generator),
        "past_observed_mask": torch.ones_like(first),
        "past_values_padding": torch.zeros(first.shape, dtype=torch.long),
        "freq": torch.zeros(BATCH, 1, dtype=torch.long),
        "future_values": values,
        "future_time_features": torch.randn(*values.shape, features, generator=generator),
        "prompt_pixel_values": first.flip(0),
        "prompt_masks": first.roll(1),
        "pixel_position_ids": torch.cartesian_prod(torch.arange(side), torch.arange(side)).expand(BATCH, -1, -1),
        "target_sizes": torch.full((BATCH, 2), side, dtype=torch.int32),
        "image_attention_mask": torch.ones(BATCH, LENGTH, first.shape[1] if first.dim() > 1 else 1),
        "merge_sizes": torch.ones(BATCH, dtype=torch.long),
        "audio_mel_mask": torch.zeros(BATCH, steps, dtype=torch.bool),
        "encoder_hidden_states": torch.randn(BATCH, 5, WIDTH, generator=generator),
    }
    found = {name: made[name] for name in accepted if name in made}
    if found:
        yield {**signal, **found}
    for length in first.shape[:0:-1] if "input_features_mask" in accepted else ():
        yield {**signal, **found, "input_features_mask": torch.ones(BATCH, length, dtype=torch.long)}


def _signals(model: PreTrainedModel, accepted: Any, generator: torch.Generator) -> Iterator[dict[str, Any]]:
    config: Any = model.config
    vision = getattr(config, "vision_config", config)
    side = getattr(vision, "image_size", getattr(vision, "max_img_size", 32))
    side = side if isinstance(side, int) else (side[-1] if isinstance(side, (list, tuple)) else 32)
    channels: Any = getattr(vision, "num_channels", 3)
    frames = getattr(vision, "num_frames", 4)
    mel, longest = getattr(config, "num_mel_bins", 16), getattr(config, "max_length", 64)
    grid = next((name for name in accepted if name.startswith(("grid_thw", "image_grid"))), None)
    if grid and "input_ids" not in accepted:
        patch, time = getattr(config, "patch_size", 8), getattr(config, "temporal_patch_size", 1)
        patch = patch if isinstance(patch, int) else patch[-1]
        channels = getattr(config, "in_channels", None) or getattr(config, "num_channels", 3)
        first = next(name for name in accepted if name not in ("self", grid))
        sizes = torch.tensor([[1, 4, 4], [1, 8, 4]])
        flat = [(48, channels * frames * patch * patch) for frames in (time, 2)]
        for shape in (flat[0], (48, channels, patch, patch), flat[1], (48, 2 * patch, 2 * patch, channels)):
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
    shapes: dict[str, list[Any]] = {
        "query_embeds": [(BATCH, 6, WIDTH)],
        "audio_mel": [(BATCH, 128, getattr(config, "input_feat_size", mel))],
        "latents": [(BATCH, getattr(config, "hidden_size", WIDTH), LENGTH)],
        "pixel_values": [
            (BATCH, channels, side, side), (BATCH, frames, channels, side, side), (BATCH, 1, side, side),
            (BATCH, 2, channels, side, side),
            *([(BATCH, 16, channels * 8 * 8)] if "pixel_position_ids" in accepted else []),
            *([(1, channels, 8, 8 * 32)] if "target_sizes" in accepted else []),
        ],
        "pixel_values_videos": [(BATCH, frames, channels, side, side)],
        "input_values": [(BATCH, 1, 1280), (BATCH, 1280), (BATCH, 1, 7680), (BATCH, longest, mel)],
        "input_features": [
            (BATCH, mel, 128), (BATCH, mel, 200), (BATCH, 128, mel), (BATCH, 1, 128, mel), (BATCH, 40, 160),
            (BATCH, 40, 4 * mel), (BATCH, 40, 7 * mel),
        ],
        "inputs": [(BATCH, LENGTH, getattr(config, "d_model", WIDTH))],
        "past_values": [(BATCH, getattr(config, "context_length", 32) or 32, 1), (BATCH, 32), (BATCH, 11)],
    }  # fmt: skip
    for name, candidates in shapes.items():
        if name in accepted:
            for shape in candidates:
                yield {name: torch.randn(shape, generator=generator)}


def parts(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """Yield the model and the models inside it, with their names."""
    for name, module in model.named_modules():
        if isinstance(module, PreTrainedModel):
            yield name, module
