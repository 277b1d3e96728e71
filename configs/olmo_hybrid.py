"""Olmo Hybrid 7B: three layers of gated delta rule to one of attention.

    hyena-jax train olmo_hybrid --workdir runs/olmo_hybrid --data.path text/ \\
        --data.tokenizer-path olmo/tokenizer.json

The shapes are the defaults of huggingface/transformers (`models/olmo_hybrid`, version 5.23). Gated delta
layers have their norms before the mixer and the MLP, layers of attention after them, and queries and keys are
normalised over all heads at once; there are no rotary positions. The parameter count, 7,430,870,688, was
taken from that code: 24 x 88,750,332 + 8 x 58,990,080 + 32 (126,812,160 + 2 x 3840) + 3840 + 2 x 100,352 x
3840. Our own choices: the initialisation, data, optimizer, length of training. Made for accelerators; time
and loss of this code: not measured yet.
"""

from hyena_jax.config import (
    NO_DECAY,
    AdamWConfig,
    AttentionConfig,
    CosineConfig,
    Experiment,
    GatedDeltaConfig,
    LanguageModelConfig,
    ParallelConfig,
    ParameterGroup,
    TextConfig,
    TrainingConfig,
)

DELTA = GatedDeltaConfig(n_heads=30, key_dim=96, value_dim=192, negative_eigenvalues=True)
ATTENTION = AttentionConfig(n_heads=30, qk_norm_eps=1e-6, qk_norm="all", qkv_bias=False, out_bias=False)


def get_config() -> Experiment:
    """The experiment."""
    return Experiment(
        model=LanguageModelConfig(
            pattern=(DELTA, DELTA, DELTA, ATTENTION),
            n_layers=32,
            d_model=3840,
            ffn="swiglu",
            ffn_bias=False,
            d_ff=11_008,
            norm="rms",
            norm_places=("before", "before", "before", "after"),
            final_norm="rms",
            norm_eps=1e-6,
            max_len=4096,
            vocab_size=100_352,
            tied_head=False,
            dtype="bfloat16",
            remat="block",
        ),
        data=TextConfig(
            path="data/text",
            tokenizer="bpe",
            tokenizer_path="data/olmo/tokenizer.json",
            seq_len=4096,
            batch_size=512,
        ),
        optimizer=AdamWConfig(
            learning_rate=3e-4,
            schedule=CosineConfig(warmup_steps=2000),
            b2=0.95,
            weight_decay=0.1,
            clip_norm=1.0,
            groups=(ParameterGroup(r"/(a_log|dt_bias)$", weight_decay=0.0), NO_DECAY),
        ),
        training=TrainingConfig(steps=100_000, eval_every=1000, checkpoint_every=1000, eval_windows=1000),
        parallel=ParallelConfig(strategy="sharded", fsdp=16),
    )
