"""Hyena at 153M parameters on the Pile (Poli et al. 2023, table 4.4).

    hyena-jax train pile_hyena_153m --workdir runs/pile_153m --data.path pile/ \\
        --data.tokenizer-path gpt2/tokenizer.json

Published perplexity after 5 / 10 / 15B tokens: 13.3 / 11.8 / 11.1. Width, depth and vocabulary are the
paper's (18 layers, 864, 1728, GPT-2 pieces), 15B tokens at 2048 tokens a sequence; the learning rate is ours.
The corpus is held in memory, two bytes a token, so train on a part of the Pile that fits. Made for
accelerators; time and perplexity of this code: not measured yet.
"""

from hyena_jax.config import (
    HYENA_GROUPS,
    Experiment,
    HyenaConfig,
    LanguageModelConfig,
    OptimizerConfig,
    TextConfig,
    TrainingConfig,
)


def get_config() -> Experiment:
    """The experiment; it has no variants."""
    return Experiment(
        model=LanguageModelConfig(
            pattern=(HyenaConfig(order=2),),
            n_layers=18,
            d_model=864,
            d_ff=1728,
            max_len=2048,
            vocab_size=50257,
            dtype="bfloat16",
        ),
        data=TextConfig(
            path="data/pile",
            tokenizer="bpe",
            tokenizer_path="data/gpt2/tokenizer.json",
            seq_len=2048,
            batch_size=256,
        ),
        optimizer=OptimizerConfig(
            learning_rate=6e-4,
            final_learning_rate=6e-5,
            warmup_steps=300,
            b2=0.98,
            weight_decay=0.1,
            clip_norm=1.0,
            groups=HYENA_GROUPS,
        ),
        training=TrainingConfig(steps=28_700, eval_every=1000, checkpoint_every=1000, eval_windows=2000),
    )
