"""Recipes of language models (Tables "lm_training_details", "lm_results"; configurations as in the authors' code).

The code and the paper's table differ: batches of 1M tokens and 300k steps in the code, 4M tokens in the table, 300B
tokens in both. The recipes use the code's numbers. Their weight decay of 1e-4 is "decoupled, following Loshchilov &
Hutter": it is multiplied by the schedule only (``TrainConfig.independent_decay``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from sigattn.models.language import LanguageModelConfig
from sigattn.recipes.datasets import TextSource
from sigattn.recipes.recipe import Recipe
from sigattn.tasks.language import LanguageModelling
from sigattn.train.config import TrainConfig

MILLION = 1 << 20  # tokens
TINY = {"max_steps": 600, "batch_size": 16, "learning_rate": 4e-3}


def lm_85m_2k() -> Recipe:
    """85M parameters without the embedding, 2048 tokens, ALiBi, b = -log n.

    sigattn train lm-85m-2k --data REDPAJAMA            (--tiny: CPython's documentation, about a minute on 2 cores)

    Hardware: 8 GPUs of 80 GB. Paper: training loss equals softmax's (Fig. "85m_4k_nll", at 4096 tokens).
    """
    return _language("lm-85m-2k", num_layers=12, embed_dim=768, num_heads=12, max_seq_len=2048,
                     batch_tokens=MILLION, steps=400_000)  # fmt: skip


def lm_1b_2k() -> Recipe:
    """1B parameters, 2048 tokens, ALiBi, b = -log n, pre-norm: the first language row of the practitioner's guide.

    sigattn train lm-1b-2k --data REDPAJAMA             (--tiny: CPython's documentation, about a minute on 2 cores)

    Hardware: 64 GPUs of 80 GB. Time: 0.34 s per step in the paper (softmax 0.38). Paper: average of nine evaluations
    49.5, softmax 49.4.
    """
    return _language("lm-1b-2k", num_layers=24, embed_dim=2048, num_heads=32, max_seq_len=2048,
                     batch_tokens=MILLION, steps=300_000)  # fmt: skip


def lm_1b_2k_hybrid() -> Recipe:
    """1B parameters, 2048 tokens, ALiBi, hybrid-norm instead of a bias.

    sigattn train lm-1b-2k-hybrid --data REDPAJAMA      (--tiny: CPython's documentation, about a minute on 2 cores)

    Hardware: 64 GPUs of 80 GB. Paper: average of nine evaluations 49.4 (Table "lm_norm_ablations"), softmax with
    hybrid-norm 50.9.
    """
    return _language("lm-1b-2k-hybrid", num_layers=24, embed_dim=2048, num_heads=32, max_seq_len=2048,
                     batch_tokens=MILLION, steps=300_000,
                     norm_placement="hybrid", attention_bias=0.0)  # fmt: skip


def lm_1b_4k() -> Recipe:
    """1B parameters, 4096 tokens, ALiBi, hybrid-norm instead of a bias: the guide's choice beyond 2048 tokens.

    sigattn train lm-1b-4k --data REDPAJAMA             (--tiny: CPython's documentation, about a minute on 2 cores)

    Hardware: 64 GPUs of 80 GB. Time: 0.67 s per step in the paper (pre-norm; softmax 0.84). Paper: average of nine
    evaluations 50.0 without a bias (this recipe) and 50.2 with one (``--model.attention-bias log_context``: the row of
    Table "lm_results"), softmax with hybrid-norm 49.4; pre-norm sigmoid 48.2.
    """
    return _language("lm-1b-4k", num_layers=24, embed_dim=2048, num_heads=32, max_seq_len=4096,
                     batch_tokens=MILLION, steps=300_000,
                     norm_placement="hybrid", attention_bias=0.0)  # fmt: skip


def lm_7b_4k() -> Recipe:
    """7B parameters, 4096 tokens, ALiBi, hybrid-norm and b = -log n.

    sigattn train lm-7b-4k --data REDPAJAMA             (--tiny: CPython's documentation, about a minute on 2 cores)

    The paper does not say if its 7B model has the bias. The authors' configuration subtracts the logarithm of the
    length by default, and the 1B model in the row above it has it. Without: ``--model.attention-bias 0``.

    Hardware: 256 GPUs of 80 GB. Time: 3.4 s per step in the paper (softmax 3.85). Paper: average of nine evaluations
    59.6, softmax 59.0.
    """
    return _language("lm-7b-4k", num_layers=32, embed_dim=4096, num_heads=32, max_seq_len=4096,
                     batch_tokens=4 * MILLION, steps=250_000,
                     norm_placement="hybrid")  # fmt: skip


def _language(name: str, *, embed_dim: int, max_seq_len: int, batch_tokens: int, steps: int, **model: Any) -> Recipe:
    length = "<=2k" if max_seq_len <= 2048 else ">2k"
    return Recipe(
        name=name,
        domain="AR Language",
        objective=f"Next-token ({length} seq len)",
        model=LanguageModelConfig(
            vocab_size=32_768,
            max_seq_len=max_seq_len,
            embed_dim=embed_dim,
            mlp_dim=256 * math.ceil(8 * embed_dim / 3 / 256),
            position="alibi",
            qk_norm="rms",
            **model,
        ),
        task=LanguageModelling(),
        training=TrainConfig(
            max_steps=steps,
            batch_size=batch_tokens // max_seq_len,
            precision="bfloat16",
            learning_rate=1e-2,
            mup_simple=True,
            warmup_steps=5000,
            betas=(0.9, 0.95),
            weight_decay=1e-4,
            independent_decay=True,
            max_grad_norm=1.0,
            parallel="fsdp",
            checkpoint_activations=embed_dim >= 2048,
            validate_every=5000,
            eval_batch_size=8,
            checkpoint_every=1000,
            log_attention_every=100,
        ),
        tiny_training=TINY,
        data=TextSource(name="RedPajama"),
    )


def _lm_kappa(k: int, parameters: str) -> Callable[[], Recipe]:
    """Return the recipe function of a model of the learning-rate sensitivity figures: κ heads (Sect. "Ablations")."""

    def recipe() -> Recipe:
        return Recipe(
            name=f"lm-kappa-{k}",
            domain="AR Language",
            objective="LR sensitivity",
            model=LanguageModelConfig(
                vocab_size=32_100,
                max_seq_len=512,
                num_layers=2 * k,
                embed_dim=64 * k,
                num_heads=k,
                mlp_dim=256 * k,
                feed_forward="gelu",
                norm="layer",
                qk_norm="layer",
                position="rope",
                init_values=1e-4,
                initialization="trunc_normal",
            ),
            task=LanguageModelling(),
            training=TrainConfig(
                max_steps=1 << 14,
                batch_size=24,
                precision="bfloat16",
                learning_rate=1e-3,
                warmup_steps=1 << 10,
                final_learning_rate=0.0,
                weight_decay=0.0,
                max_grad_norm=None,
                validate_every=1 << 10,
                checkpoint_every=1 << 10,
            ),
            tiny_training=TINY,
            data=TextSource(name="C4, realnews split, T5 tokens"),
        )

    recipe.__name__ = f"lm_kappa_{k}"
    recipe.__doc__ = f"""{parameters} parameters: {2 * k} layers of {64 * k}, heads of 64, 512 tokens.

    sigattn train lm-kappa-{k} --data C4                 (--tiny: CPython's documentation, about a minute on 2 cores)

    Hardware: 1 GPU. Paper: Figs. "layerscale_ablation", "qk_norm_ablation".
    """
    return recipe


def lm_realnews() -> Recipe:
    """One block of width 3072, for the position ablation (Figs. "rope_vs_sincos" to "rope_vs_rope_b-10").

    sigattn train lm-realnews --data C4                 (--tiny: CPython's documentation, about a minute on 2 cores)

    Hardware: 1 GPU of 80 GB. Paper: sigmoid equals softmax with ALiBi, and with RoPE and b = -10; with SinCos or RoPE
    and no bias its loss is higher.
    """
    return Recipe(
        name="lm-realnews",
        domain="AR Language",
        objective="Position ablation",
        model=LanguageModelConfig(
            vocab_size=32_100,
            max_seq_len=4096,
            num_layers=1,
            embed_dim=3072,
            num_heads=12,
            mlp_dim=12_288,
            feed_forward="gelu",
            norm="layer",
            qk_norm="layer",
            position="rope",
            attention_bias=-10.0,
            tie_embeddings=False,
            initialization="trunc_normal",
        ),
        task=LanguageModelling(),
        training=TrainConfig(
            max_steps=1 << 16,
            batch_size=6,
            precision="bfloat16",
            learning_rate=3e-4,
            final_learning_rate=1 / 30,
            warmup_steps=4096,
            weight_decay=0.0,
            max_grad_norm=None,
            validate_every=4096,
            eval_batch_size=8,
            checkpoint_every=4096,
        ),
        tiny_training=TINY,
        data=TextSource(name="C4, realnews split, T5 tokens"),
    )


RECIPES = (
    lm_85m_2k,
    lm_1b_2k,
    lm_1b_2k_hybrid,
    lm_1b_4k,
    lm_7b_4k,
    _lm_kappa(1, "2.2M"),
    _lm_kappa(2, "4.9M"),
    _lm_kappa(4, "15M"),
    _lm_kappa(8, "67M"),
    _lm_kappa(16, "440M"),
    lm_realnews,
)
