"""Kimi Delta Attention in three layers, plain attention in the fourth, after Kimi Linear (arXiv 2510.26692).

    hyena-jax train kimi_linear_hybrid --workdir runs/kimi_linear_hybrid --data.path text/ \\
        --data.tokenizer-path kimi/tokenizer.json

Not Kimi Linear: its attention is latent, and its MLPs are mixtures of experts, which we do not have. Here
attention is plain, 18 heads of 128 channels, without positions as in Kimi Linear, at every fourth layer, and
MLPs are dense, with the width of Kimi Linear's first. Width, depth, vocabulary and the KDA layers, 32 heads
of 128 with bias-free gates, are those of moonshotai/Kimi-Linear-48B-A3B. The parameter count, 3,432,229,920,
is 21 x 39,514,272 + 6 x 21,233,664 + 27 (63,700,992 + 2 x 2304) + 2304 + 2 x 163,840 x 2304. Our own choices:
data, optimizer, length of training. Made for accelerators; time and loss of this code: not measured yet.
"""

from hyena_jax.config import (
    NO_DECAY,
    AdamWConfig,
    AttentionConfig,
    CosineConfig,
    Experiment,
    KDAConfig,
    LanguageModelConfig,
    ParallelConfig,
    ParameterGroup,
    TextConfig,
    TrainingConfig,
)

DELTA = KDAConfig(n_heads=32, key_dim=128, gate_bias=False)
ATTENTION = AttentionConfig(n_heads=18, qkv_bias=False, out_bias=False)


def get_config() -> Experiment:
    """The experiment."""
    return Experiment(
        model=LanguageModelConfig(
            pattern=(DELTA, DELTA, DELTA, ATTENTION),
            n_layers=27,
            d_model=2304,
            ffn="swiglu",
            ffn_bias=False,
            d_ff=9216,
            norm="rms",
            final_norm="rms",
            norm_eps=1e-5,
            max_len=4096,
            vocab_size=163_840,
            tied_head=False,
            dtype="bfloat16",
            remat="block",
        ),
        data=TextConfig(
            path="data/text",
            tokenizer="bpe",
            tokenizer_path="data/kimi/tokenizer.json",
            seq_len=4096,
            batch_size=512,
        ),
        optimizer=AdamWConfig(
            learning_rate=4e-4,
            schedule=CosineConfig(warmup_steps=2000),
            b2=0.95,
            weight_decay=0.1,
            clip_norm=1.0,
            groups=(ParameterGroup(r"/(a_log|dt_bias)$", weight_decay=0.0), NO_DECAY),
        ),
        training=TrainingConfig(steps=100_000, eval_every=1000, checkpoint_every=1000, eval_windows=1000),
        parallel=ParallelConfig(strategy="sharded", fsdp=16),
    )
