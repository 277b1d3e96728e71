"""Hyena with a gate between a long and a short convolution, at its published size, on quickstart's text.

    hyena-jax train gated_hyena --workdir runs/gated

The model is as published except for its vocabulary, the 256 bytes (with 1000 symbols it has 286,952
parameters), and its short filter, which is causal here, while the source's reads one step ahead. There is no
published result; the recipe is quickstart's. Time and loss of this code: not measured yet.
"""

from hyena_jax.config import (
    NO_DECAY,
    AdamWConfig,
    CosineConfig,
    Experiment,
    GatedHyenaConfig,
    LanguageModelConfig,
    LoggingConfig,
    ParameterGroup,
    TextConfig,
    TrainingConfig,
)


def get_config() -> Experiment:
    """The experiment; it has no variants."""
    return Experiment(
        model=LanguageModelConfig(
            pattern=(GatedHyenaConfig(),),
            n_layers=2,
            d_model=64,
            ffn="gelu",
            d_ff=4 * 64,
            final_norm="none",
            max_len=256,
            learned_positions=True,
            tied_head=False,
            head_bias=True,
            init="torch",
        ),
        data=TextConfig(name="python_stdlib", tokenizer="bytes", seq_len=256, batch_size=16),
        optimizer=AdamWConfig(
            learning_rate=2e-3,
            schedule=CosineConfig(warmup_steps=50),
            groups=(ParameterGroup(r"/filter/", weight_decay=0.0, optional=True), NO_DECAY),
        ),
        training=TrainingConfig(steps=600, eval_every=100, eval_windows=200, checkpoint_every=200),
        logging=LoggingConfig(sample_prompt="def ", sample_tokens=300),
    )
