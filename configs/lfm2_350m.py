"""LFM2 350M (Liquid AI 2025, arXiv 2511.23404): gated short convolutions, and attention in six of 16 layers.

    hyena-jax train lfm2_350m --workdir runs/lfm2_350m --data.path text/ \\
        --data.tokenizer-path lfm2/tokenizer.json

The shapes are those of the published model's config.json; the parameter count, 354,483,968, was taken from
huggingface/transformers (`models/lfm2`, version 5.23) with these shapes. Our own choices: the initialisation,
data, optimizer, length of training. Made for accelerators; time and loss of this code: not measured yet.
"""

from hyena_jax.config import (
    HYENA_GROUPS,
    AdamWConfig,
    AttentionConfig,
    CosineConfig,
    Experiment,
    HyenaConfig,
    LanguageModelConfig,
    ShortFilterConfig,
    TextConfig,
    TrainingConfig,
)

# y = W_o (C ⊙ FIR_3(B ⊙ v)), with C, B, v the columns of the input projection.
CONVOLUTION = HyenaConfig(
    filter=ShortFilterConfig(3), short_filter_len=0, skip=False, in_bias=False, out_bias=False
)
ATTENTION = AttentionConfig(
    n_heads=16,
    n_kv_heads=8,
    rotary_fraction=1.0,
    rotary_base=1e6,
    qk_norm_eps=1e-5,
    qkv_bias=False,
    out_bias=False,
)
ATTENTION_LAYERS = (2, 5, 8, 10, 12, 14)


def get_config() -> Experiment:
    """The experiment."""
    return Experiment(
        model=LanguageModelConfig(
            pattern=tuple(ATTENTION if i in ATTENTION_LAYERS else CONVOLUTION for i in range(16)),
            n_layers=16,
            d_model=1024,
            ffn="swiglu",
            ffn_bias=False,
            d_ff=4608,
            norm="rms",
            final_norm="rms",
            norm_eps=1e-5,
            max_len=32_768,
            vocab_size=65_536,
            dtype="bfloat16",
            remat="block",
        ),
        data=TextConfig(
            path="data/text",
            tokenizer="bpe",
            tokenizer_path="data/lfm2/tokenizer.json",
            seq_len=4096,
            batch_size=256,
        ),
        optimizer=AdamWConfig(
            learning_rate=6e-4,
            schedule=CosineConfig(warmup_steps=1000),
            b2=0.95,
            weight_decay=0.1,
            clip_norm=1.0,
            groups=HYENA_GROUPS,
        ),
        training=TrainingConfig(steps=100_000, eval_every=1000, checkpoint_every=1000, eval_windows=1000),
    )
