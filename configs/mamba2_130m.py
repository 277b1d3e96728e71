"""Mamba-2 130M (Dao and Gu 2024, arXiv 2405.21060): 24 mixers, no feed-forward layers.

    hyena-jax train mamba2_130m --workdir runs/mamba2_130m --data.path pile/ \\
        --data.tokenizer-path neox/tokenizer.json

The shapes are those of state-spaces/mamba (`mamba_ssm/modules/mamba2.py`) at this size: heads of 64 channels,
each with a state of 128, and a table of 50,288 rows for GPT-NeoX's 50,277 pieces. The parameter count,
128,989,632, was taken from huggingface/transformers (`models/mamba2`, version 4.57) with these shapes. Our
own choices: data, learning rate, length of training. Made for accelerators; time and loss of this code: not
measured yet.
"""

from hyena_jax.config import (
    NO_DECAY,
    AdamWConfig,
    CosineConfig,
    Experiment,
    LanguageModelConfig,
    Mamba2Config,
    ParameterGroup,
    TextConfig,
    TrainingConfig,
)


def get_config() -> Experiment:
    """The experiment."""
    return Experiment(
        model=LanguageModelConfig(
            pattern=(Mamba2Config(n_heads=24, d_state=128),),
            n_layers=24,
            d_model=768,
            ffn="none",
            d_ff=None,
            norm="rms",
            final_norm="rms",
            norm_eps=1e-5,
            max_len=2048,
            vocab_size=50_277,
            vocab_multiple=16,
            dtype="bfloat16",
            remat="block",
        ),
        data=TextConfig(
            path="data/pile",
            tokenizer="bpe",
            tokenizer_path="data/neox/tokenizer.json",
            seq_len=2048,
            batch_size=256,
        ),
        optimizer=AdamWConfig(
            learning_rate=6e-4,
            schedule=CosineConfig(warmup_steps=1000),
            b2=0.95,
            weight_decay=0.1,
            clip_norm=1.0,
            groups=(ParameterGroup(r"/(a_log|dt_bias)$", weight_decay=0.0), NO_DECAY),
        ),
        training=TrainingConfig(steps=100_000, eval_every=1000, checkpoint_every=1000, eval_windows=1000),
    )
