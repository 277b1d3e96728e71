"""Tiny Shakespeare by characters on a CPU: the budget of nanoGPT's CPU recipe (loss 1.886 there).

    hyena-jax train shakespeare_cpu --workdir runs/shakespeare
    hyena-jax train shakespeare_cpu:attention --workdir runs/shakespeare_attention

The text comes from TensorFlow Datasets (`pip install 'hyena_jax[tfds]'`); where it cannot be downloaded, add
`--data.path input.txt` or `--data.manual-dir FOLDER`. See the README for times and losses.
"""

from hyena_jax.config import (
    HYENA_GROUPS,
    NO_DECAY,
    AttentionConfig,
    Experiment,
    HyenaConfig,
    LanguageModelConfig,
    LoggingConfig,
    OptimizerConfig,
    ParameterGroup,
    TextConfig,
    TrainingConfig,
    choose,
)

EMBEDDINGS = ParameterGroup(r"^(embedding/|positions$)", weight_decay=0.0)

# name: (mixer, parameter groups, learned positions)
VARIANTS = {
    "hyena": (HyenaConfig(order=2, gating="gate_first"), (*HYENA_GROUPS, EMBEDDINGS), False),
    "attention": (AttentionConfig(n_heads=4), (NO_DECAY, EMBEDDINGS), True),
}


def get_config(variant: str = "hyena") -> Experiment:
    """The experiment with the mixer that `variant` names."""
    mixer, groups, learned_positions = choose("variant", variant, VARIANTS)
    return Experiment(
        model=LanguageModelConfig(
            pattern=(mixer,),
            n_layers=4,
            d_model=128,
            d_ff=512,
            max_len=64,
            learned_positions=learned_positions,
        ),
        data=TextConfig(name="tiny_shakespeare", tokenizer="characters", seq_len=64, batch_size=12),
        optimizer=OptimizerConfig(
            learning_rate=2e-3,
            final_learning_rate=2e-4,
            warmup_steps=100,
            b2=0.99,
            weight_decay=0.1,
            clip_norm=1.0,
            groups=groups,
        ),
        training=TrainingConfig(steps=2000, eval_every=250, checkpoint_every=500),
        logging=LoggingConfig(sample_prompt="\n", sample_tokens=400),
    )
