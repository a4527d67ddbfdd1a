"""Recipes of language models (Tables "lm_training_details", "lm_results"; configurations as in the authors' code).

The code and the paper's table differ: batches of 1M tokens and 300k steps in the code, 4M tokens in the table, 300B
tokens in both. The recipes use the code's numbers. Their weight decay of 1e-4 is "decoupled, following Loshchilov &
Hutter": it is multiplied by the schedule only (``TrainConfig.independent_decay``).

The paper does not say if its 7B model has the bias. The authors' configuration subtracts the logarithm of the length by
default, and the 1B model in the row above it has it.
"""

import math
from dataclasses import replace
from typing import Any

from sigattn.models.language import LanguageModelConfig
from sigattn.recipes.datasets import TextSource
from sigattn.recipes.recipe import Recipe
from sigattn.tasks.language import LanguageModelling
from sigattn.train.config import TrainConfig

MILLION = 1 << 20  # tokens
SIZE_1B: dict[str, Any] = {"num_layers": 24, "embed_dim": 2048, "num_heads": 32}
WITHOUT_BIAS: dict[str, Any] = {"norm_placement": "hybrid", "attention_bias": 0.0}
C4 = TextSource(name="C4, realnews split, T5 tokens")
ABLATED = LanguageModelConfig(
    vocab_size=32_100, feed_forward="gelu", norm="layer", qk_norm="layer", position="rope",
    initialization="trunc_normal",
)  # fmt: skip
ABLATION = TrainConfig(precision="bfloat16", weight_decay=0.0, max_grad_norm=None)


def _language(
    name: str, objective: str, model: LanguageModelConfig, training: TrainConfig, data: TextSource, *texts: str
) -> Recipe:
    """Return a recipe; ``texts`` are what it is, its hardware and the paper's result."""
    return Recipe(
        name,
        *texts,
        domain="AR Language",
        objective=objective,
        model=model,
        task=LanguageModelling(),
        training=training,
        tiny_training={"max_steps": 600, "batch_size": 16, "learning_rate": 4e-3},
        data=data,
    )


def _of_table(
    name: str, *texts: str, max_seq_len: int, steps: int, batch_tokens: int = MILLION, embed_dim: int, **model: Any
) -> Recipe:
    config = LanguageModelConfig(
        vocab_size=32_768, max_seq_len=max_seq_len, embed_dim=embed_dim,
        mlp_dim=256 * math.ceil(8 * embed_dim / 3 / 256), position="alibi", **model,
    )  # fmt: skip
    training = TrainConfig(
        max_steps=steps, batch_size=batch_tokens // max_seq_len, precision="bfloat16", learning_rate=1e-2,
        mup_simple=True, warmup_steps=5000, weight_decay=1e-4, independent_decay=True, parallel="fsdp",
        checkpoint_activations=embed_dim >= 2048, validate_every=5000, eval_batch_size=8, checkpoint_every=1000,
        log_attention_every=100,
    )  # fmt: skip
    objective = f"Next-token ({'<=' if max_seq_len <= 2048 else '>'}2k seq len)"
    return _language(name, objective, config, training, TextSource(name="RedPajama"), *texts)


def _of_sensitivity(k: int, parameters: str) -> Recipe:
    """Return the recipe of the model with κ heads of the figures of learning-rate sensitivity (Sect. "Ablations")."""
    sizes: dict[str, Any] = {"num_layers": 2 * k, "embed_dim": 64 * k, "num_heads": k, "mlp_dim": 256 * k}
    return _language(
        f"lm-kappa-{k}",
        "LR sensitivity",
        replace(ABLATED, max_seq_len=512, init_values=1e-4, **sizes),
        replace(ABLATION, max_steps=1 << 14, batch_size=24, learning_rate=1e-3, final_learning_rate=0.0,
                warmup_steps=1 << 10, validate_every=1 << 10, checkpoint_every=1 << 10),
        C4,
        f"{parameters} parameters: {2 * k} layers of {64 * k}, heads of 64, 512 tokens",
        "1 GPU",
        'Figs. "layerscale_ablation", "qk_norm_ablation"',
    )  # fmt: skip


RECIPES = (
    _of_table(
        "lm-85m-2k",
        "85M parameters without the embedding, 2048 tokens, ALiBi, b = -log n",
        "8 GPUs of 80 GB",
        'training loss equals softmax\'s (Fig. "85m_4k_nll", at 4096 tokens)',
        max_seq_len=2048, steps=400_000, num_layers=12, embed_dim=768, num_heads=12,
    ),
    _of_table(
        "lm-1b-2k",
        "1B parameters, 2048 tokens, ALiBi, b = -log n, pre-norm: the first language row of the practitioner's guide",
        "64 GPUs of 80 GB, 0.34 s per step in the paper (softmax 0.38)",
        "average of nine evaluations 49.5, softmax 49.4",
        max_seq_len=2048, steps=300_000, **SIZE_1B,
    ),
    _of_table(
        "lm-1b-2k-hybrid",
        "1B parameters, 2048 tokens, ALiBi, hybrid-norm instead of a bias",
        "64 GPUs of 80 GB",
        'average of nine evaluations 49.4 (Table "lm_norm_ablations"), softmax with hybrid-norm 50.9',
        max_seq_len=2048, steps=300_000, **SIZE_1B, **WITHOUT_BIAS,
    ),
    _of_table(
        "lm-1b-4k",
        "1B parameters, 4096 tokens, ALiBi, hybrid-norm instead of a bias: the guide's choice beyond 2048 tokens",
        "64 GPUs of 80 GB, 0.67 s per step in the paper (pre-norm; softmax 0.84)",
        "average of nine evaluations 50.0 without a bias (this recipe) and 50.2 with one (--model.attention-bias "
        'log_context: the row of Table "lm_results"), softmax with hybrid-norm 49.4; pre-norm sigmoid 48.2',
        max_seq_len=4096, steps=300_000, **SIZE_1B, **WITHOUT_BIAS,
    ),
    _of_table(
        "lm-7b-4k",
        "7B parameters, 4096 tokens, ALiBi, hybrid-norm and b = -log n; without the bias: --model.attention-bias 0",
        "256 GPUs of 80 GB, 3.4 s per step in the paper (softmax 3.85)",
        "average of nine evaluations 59.6, softmax 59.0",
        max_seq_len=4096, steps=250_000, batch_tokens=4 * MILLION,
        num_layers=32, embed_dim=4096, num_heads=32, norm_placement="hybrid",
    ),
    *(_of_sensitivity(k, size) for k, size in ((1, "2.2M"), (2, "4.9M"), (4, "15M"), (8, "67M"), (16, "440M"))),
    _language(
        "lm-realnews",
        "Position ablation",
        replace(ABLATED, max_seq_len=4096, num_layers=1, embed_dim=3072, num_heads=12, mlp_dim=12_288,
                attention_bias=-10.0, tie_embeddings=False),
        replace(ABLATION, max_steps=1 << 16, batch_size=6, learning_rate=3e-4, final_learning_rate=1 / 30,
                warmup_steps=4096, validate_every=4096, eval_batch_size=8, checkpoint_every=4096),
        C4,
        'One block of width 3072, for the position ablation (Figs. "rope_vs_sincos" to "rope_vs_rope_b-10")',
        "1 GPU of 80 GB",
        "sigmoid equals softmax with ALiBi, and with RoPE and b = -10; with SinCos or RoPE and no bias its loss is "
        "higher",
    ),
)  # fmt: skip
