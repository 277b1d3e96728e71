"""RWKV-7 0.19B (Peng et al. 2025, arXiv 2503.14456): twelve blocks of its time and channel mixers.

    hyena-jax train rwkv7_190m --workdir runs/rwkv7_190m --data.path world.bin

The shapes are those of RWKV-7 World 0.1B (BlinkDL/RWKV-LM, RWKV-v7): heads of 64 channels, low-rank layers
of 64, 64, 32 and 128, LayerNorms with biases, one of them behind the embedding, and an untied head for 65,536
pieces. The parameter count, 191,034,624, is without the mixing of values in the first layer, which has no
effect there. As in its code, only dense kernels, embedding and head decay, and the biases of the decays learn
at twice the rate. The tokenizer of RWKV World is not read here, so that data are ids. Our own choices: data,
learning rate, length of training. Made for accelerators; time and loss of this code: not measured yet.
"""

from hyena_jax.config import (
    NO_DECAY,
    AdamWConfig,
    CosineConfig,
    Experiment,
    LanguageModelConfig,
    LoggingConfig,
    ParameterGroup,
    RWKV7Config,
    TokensConfig,
    TrainingConfig,
)

LEARNING_RATE = 6e-4


def get_config() -> Experiment:
    """The experiment."""
    return Experiment(
        model=LanguageModelConfig(
            pattern=(RWKV7Config(n_heads=12),),
            n_layers=12,
            d_model=768,
            ffn="squared_relu",
            ffn_shift=True,
            ffn_bias=False,
            d_ff=3072,
            embedding_norm="layer",
            tied_head=False,
            max_len=4096,
            vocab_size=65_536,
            init="rwkv7",
            dtype="bfloat16",
            remat="block",
        ),
        data=TokensConfig(path="data/world.bin", vocab_size=65_536, seq_len=4096, batch_size=128),
        optimizer=AdamWConfig(
            learning_rate=LEARNING_RATE,
            schedule=CosineConfig(warmup_steps=1000),
            b2=0.99,
            weight_decay=0.1,
            clip_norm=1.0,
            groups=(
                ParameterGroup(r"/decay/bias$", learning_rate=2 * LEARNING_RATE, weight_decay=0.0),
                ParameterGroup(r"/(decay|rate|value|gate)/", weight_decay=0.0),
                ParameterGroup(r"/(shift_mix|mu|removal|booster|bonus)$", weight_decay=0.0),
                NO_DECAY,
            ),
        ),
        training=TrainingConfig(steps=100_000, eval_every=1000, checkpoint_every=1000, eval_windows=1000),
        logging=LoggingConfig(sample_prompt=None),
    )
