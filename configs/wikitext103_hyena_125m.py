"""Hyena of order 3 at 125M parameters on WikiText-103 (Poli et al. 2023, table 4.3).

    hyena-jax prepare wiki.train.tokens --output shards/train --held-out 0 --tokenizer-path tokenizer.json
    hyena-jax prepare wiki.valid.tokens --output shards/valid --held-out 0 --tokenizer-path tokenizer.json
    hyena-jax train wikitext103_hyena_125m --workdir runs/wikitext103 --data shards \\
        --data.sources shards/train --data.validation-sources shards/valid

or, tokenised at every start and held in memory with two bytes per token:

    hyena-jax train wikitext103_hyena_125m --workdir runs/wikitext103 --data.path wiki.train.tokens \\
        --data.validation-path wiki.valid.tokens --data.tokenizer-path gpt2/tokenizer.json

Published perplexity: 18.6, and 18.5 for the deeper model with narrow feed-forward layers (`:slim`). Widths,
depths and vocabulary are the paper's (12 layers, 768, 3072; slim 18, 768, 1536; GPT-2 pieces); learning rate,
batch and length of training are ours. Made for accelerators; time and perplexity of this code: not measured
yet.
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

# name: (layers, hidden width of the feed-forward layers)
VARIANTS = {"standard": (12, 3072), "slim": (18, 1536)}


def get_config(variant: str = "standard") -> Experiment:
    """The experiment with the shape that `variant` names."""
    n_layers, d_ff = choose("variant", variant, VARIANTS)
    return Experiment(
        model=LanguageModelConfig(
            pattern=(HyenaConfig(order=3),),
            n_layers=n_layers,
            d_model=768,
            d_ff=d_ff,
            max_len=1024,
            vocab_size=50257,
            dropout=0.1,
            dtype="bfloat16",
        ),
        data=TextConfig(
            path="data/wikitext-103/wiki.train.tokens",
            validation_path="data/wikitext-103/wiki.valid.tokens",
            tokenizer="bpe",
            tokenizer_path="data/gpt2/tokenizer.json",
            seq_len=1024,
            batch_size=256,
        ),
        optimizer=AdamWConfig(
            learning_rate=6e-4,
            schedule=CosineConfig(warmup_steps=500),
            b2=0.98,
            weight_decay=0.1,
            clip_norm=1.0,
            groups=HYENA_GROUPS,
        ),
        training=TrainingConfig(steps=40_000, eval_every=1000, checkpoint_every=1000),
    )
