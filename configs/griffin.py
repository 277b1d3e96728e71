"""Hawk and Griffin at their published sizes (De et al. 2024, arXiv 2402.19427), and RecurrentGemma 2B.

    hyena-jax train griffin:griffin_1b --workdir runs/griffin_1b --data.path text/ \\
        --data.tokenizer-path sentence_pieces/tokenizer.json

Variants: hawk_1b, griffin_1b, griffin_3b, recurrentgemma_2b. Published average accuracy after 300B tokens:
Hawk 1B 53.6, Griffin 1B 57.2, Griffin 3B 60.7. Window and initialisation follow the paper, and all sizes of
RecurrentGemma the released code. Widths, depths and heads of the paper's models follow its appendix C (a
recurrence is about 4/3 as wide as the model), but were not checked against its table. Our own choices: the
16 diagonal blocks of the gates, data, optimizer, length of training, and the paper models' vocabulary of
32,000 pieces. Made for accelerators; time and loss of this code: not measured yet.
"""

from hyena_jax.config import (
    NO_DECAY,
    AdamWConfig,
    CosineConfig,
    Experiment,
    HawkConfig,
    LanguageModelConfig,
    LocalAttentionConfig,
    ParameterGroup,
    TextConfig,
    TrainingConfig,
)
from hyena_jax.system.errors import choose


def recurrent(width: int, gate_blocks: int) -> HawkConfig:
    """The recurrent block of Griffin."""
    return HawkConfig(
        width=width,
        gate_blocks=gate_blocks,
        projection_bias=True,
        gate_bias=True,
        reset_at_start=True,
        gelu="tanh",
    )


def model(d_model: int, n_layers: int, pattern: tuple, **options) -> LanguageModelConfig:
    """A model with the shared options: RMSNorm, gated feed-forward layers of width 3 D, a tied head."""
    return LanguageModelConfig(
        pattern=pattern,
        n_layers=n_layers,
        d_model=d_model,
        ffn="geglu",
        d_ff=3 * d_model,
        norm="rms",
        final_norm="rms",
        init="griffin",
        dtype="bfloat16",
        remat="block",
        **options,
    )


def griffin(recurrence: HawkConfig, n_heads: int, window: int) -> tuple:
    """The pattern of two recurrent blocks, then local attention."""
    return (recurrence, recurrence, LocalAttentionConfig(n_heads=n_heads, window=window))


PAPER = {"max_len": 2048, "vocab_size": 32_000}
VARIANTS = {
    "hawk_1b": model(2048, 24, (recurrent(2560, 16),), **PAPER),
    "griffin_1b": model(2048, 24, griffin(recurrent(2560, 16), 16, 1024), **PAPER),
    "griffin_3b": model(3072, 24, griffin(recurrent(4096, 16), 24, 1024), **PAPER),
    "recurrentgemma_2b": model(
        2560,
        26,
        griffin(recurrent(2560, 10), 10, 2048),
        max_len=8192,
        vocab_size=256_000,
        scale_embedding=True,
        soft_cap=30.0,
    ),
}


def get_config(variant: str = "griffin_1b") -> Experiment:
    """The experiment that `variant` names."""
    config = choose("variant", variant, VARIANTS)
    return Experiment(
        model=config,
        data=TextConfig(
            path="data/text",
            tokenizer="bpe",
            tokenizer_path="data/sentence_pieces/tokenizer.json",
            seq_len=config.max_len,
            batch_size=256,
        ),
        optimizer=AdamWConfig(
            learning_rate=4e-4,
            schedule=CosineConfig(warmup_steps=1000),
            b2=0.95,
            weight_decay=0.1,
            clip_norm=1.0,
            groups=(ParameterGroup(r"/rate$", weight_decay=0.0, optional=True), NO_DECAY),
        ),
        training=TrainingConfig(steps=100_000, eval_every=1000, checkpoint_every=1000, eval_windows=2000),
    )
