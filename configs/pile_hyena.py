"""Hyena on the Pile at 153M, 355M and 1.3B parameters (Poli et al. 2023, table 4.4).

    hyena-jax prepare pile/ --output shards/pile --tokenizer-path gpt2/tokenizer.json --eos '<|endoftext|>'
    hyena-jax train pile_hyena:153m --workdir runs/pile_153m --data shards --data.sources shards/pile

Published perplexity after 5 / 10 / 15B tokens: `153m` 13.3 / 11.8 / 11.1, `355m` 11.3 / 9.8 / 9.2. Widths,
depths and vocabulary (GPT-2 pieces) are the paper's; 15B tokens, sequences of 2048; learning rates are ours.
`prepare` reads the Pile's .jsonl.zst files; a part of it that fits into memory needs no shards: --data.path
TEXT --data.tokenizer-path gpt2/tokenizer.json. Made for accelerators; time and perplexity of this code: not
measured yet.
"""

from hyena_jax.config import (
    HYENA_GROUPS,
    AdamWConfig,
    CosineConfig,
    Experiment,
    HyenaConfig,
    LanguageModelConfig,
    TextConfig,
    TrainingConfig,
)
from hyena_jax.system.errors import choose

# name: (layers, width, hidden width of the feed-forward layers, learning rate, remat)
VARIANTS = {
    "153m": (18, 864, 1728, 6e-4, "none"),
    "355m": (36, 1024, 2048, 3e-4, "none"),
    "1p3b": (36, 2048, 4096, 2e-4, "block"),
}


def get_config(variant: str = "153m") -> Experiment:
    """The experiment at the size that `variant` names."""
    n_layers, d_model, d_ff, learning_rate, remat = choose("variant", variant, VARIANTS)
    return Experiment(
        model=LanguageModelConfig(
            pattern=(HyenaConfig(order=2),),
            n_layers=n_layers,
            d_model=d_model,
            d_ff=d_ff,
            max_len=2048,
            vocab_size=50257,
            dtype="bfloat16",
            remat=remat,
        ),
        data=TextConfig(
            path="data/pile",
            tokenizer="bpe",
            tokenizer_path="data/gpt2/tokenizer.json",
            seq_len=2048,
            batch_size=256,
        ),
        optimizer=AdamWConfig(
            learning_rate=learning_rate,
            schedule=CosineConfig(warmup_steps=300),
            b2=0.98,
            weight_decay=0.1,
            clip_norm=1.0,
            groups=HYENA_GROUPS,
        ),
        training=TrainingConfig(steps=28_700, eval_every=1000, checkpoint_every=1000, eval_windows=2000),
    )
