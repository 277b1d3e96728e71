"""Gated DeltaNet 1.3B (Yang et al. 2024, arXiv 2412.06464) at the default sizes of flash-linear-attention.

    hyena-jax train gated_deltanet --workdir runs/gated_deltanet --data.path text/ \\
        --data.tokenizer-path sentence_pieces/tokenizer.json

The shapes are those of fla-org/flash-linear-attention (`fla/models/gated_deltanet`): six heads, 256 channels
for keys and 512 for values, SwiGLU layers 5632 wide. The parameter count, 1,387,348,732, was taken from its
layers: 21 (25,215,500 + 34,603,008 + 2 x 2048) + 2048 + 2 x 32,000 x 2048. Our own choices: data, learning
rate, length of training. Made for accelerators; time and loss of this code: not measured yet.
"""

from hyena_jax.config import (
    NO_DECAY,
    AdamWConfig,
    CosineConfig,
    Experiment,
    GatedDeltaConfig,
    LanguageModelConfig,
    ParameterGroup,
    TextConfig,
    TrainingConfig,
)


def get_config() -> Experiment:
    """The experiment."""
    return Experiment(
        model=LanguageModelConfig(
            pattern=(GatedDeltaConfig(n_heads=6, key_dim=256, value_dim=512, norm_eps=1e-6),),
            n_layers=21,
            d_model=2048,
            ffn="swiglu",
            ffn_bias=False,
            d_ff=5632,
            norm="rms",
            final_norm="rms",
            norm_eps=1e-6,
            max_len=2048,
            vocab_size=32_000,
            tied_head=False,
            dtype="bfloat16",
            remat="block",
        ),
        data=TextConfig(
            path="data/text",
            tokenizer="bpe",
            tokenizer_path="data/sentence_pieces/tokenizer.json",
            seq_len=2048,
            batch_size=256,
        ),
        optimizer=AdamWConfig(
            learning_rate=4e-4,
            schedule=CosineConfig(warmup_steps=1000),
            b2=0.95,
            weight_decay=0.1,
            clip_norm=1.0,
            groups=(ParameterGroup(r"/(a_log|dt_bias)$", weight_decay=0.0), NO_DECAY),
        ),
        training=TrainingConfig(steps=100_000, eval_every=1000, checkpoint_every=1000, eval_windows=1000),
    )
