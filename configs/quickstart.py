"""A small Hyena on the text of Python's own standard library, as bytes: real data without a download.

hyena-jax train quickstart --workdir runs/quickstart
"""

from hyena_jax.config import (
    HYENA_GROUPS,
    AdamWConfig,
    CosineConfig,
    Experiment,
    HyenaConfig,
    LanguageModelConfig,
    LoggingConfig,
    TextConfig,
    TrainingConfig,
)


def get_config() -> Experiment:
    """The experiment; it has no variants."""
    return Experiment(
        model=LanguageModelConfig(pattern=(HyenaConfig(),), n_layers=3, d_model=128, d_ff=512, max_len=128),
        data=TextConfig(name="python_stdlib", tokenizer="bytes", seq_len=128, batch_size=16),
        optimizer=AdamWConfig(
            learning_rate=2e-3,
            schedule=CosineConfig(warmup_steps=50),
            groups=HYENA_GROUPS,
        ),
        training=TrainingConfig(steps=600, eval_every=100, eval_windows=200, checkpoint_every=200),
        logging=LoggingConfig(sample_prompt="def ", sample_tokens=300),
    )
