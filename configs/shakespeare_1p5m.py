"""A 1.5M-parameter Hyena on Tiny Shakespeare by characters, after irhum/hyena, and as published there.

    hyena-jax train shakespeare_1p5m --workdir runs/shakespeare_1p5m
    hyena-jax train shakespeare_1p5m:published --workdir runs/shakespeare_published

Two long filters and four projections: `gate_first` of order 3. The cosine schedule takes 5000 steps;
`after` overfits before, so the best checkpoint is kept. Published: 1.4474 nats on random windows of the
validation part, at step 2000. Of `published`: 1.4580 and 1.4502 on these windows at that step, and 1.4389 at
step 2250 of another seed; on all of it 1.451 there, and 1.485 of `after`. experiments/shakespeare_cpu has
the commands and the runs. Made for a GPU or TPU, on which time and loss are not measured; a step takes 1.1 s
on two cores of an AMD EPYC.

`published` has the 1,510,016 parameters that the published notebook counts, its model, its optimizer and its
number of steps. Not as there: dropout masks differ from step to step (there all steps have the same), and the
training windows are drawn in our order.
"""

from dataclasses import replace

from hyena_jax.config import (
    HYENA_GROUPS,
    AdamWConfig,
    CosineConfig,
    Experiment,
    HyenaConfig,
    LanguageModelConfig,
    ParameterGroup,
    SirenFilterConfig,
    TextConfig,
    TrainingConfig,
)
from hyena_jax.system.errors import choose

AFTER = Experiment(
    model=LanguageModelConfig(
        pattern=(HyenaConfig(order=3),), n_layers=6, d_model=128, d_ff=512, max_len=256, dropout=0.2
    ),
    data=TextConfig(name="tiny_shakespeare", tokenizer="characters", seq_len=256, batch_size=64),
    optimizer=AdamWConfig(
        learning_rate=1e-3,
        schedule=CosineConfig(warmup_steps=100, decay_steps=5000),
        b2=0.99,
        weight_decay=0.1,
        clip_norm=1.0,
        groups=HYENA_GROUPS,
    ),
    training=TrainingConfig(steps=5000, eval_every=250, checkpoint_every=500),
)
PUBLISHED = replace(
    AFTER,
    model=replace(
        AFTER.model,
        pattern=(
            HyenaConfig(order=3, short_init="lecun_normal", out_dropout=0.2, filter=SirenFilterConfig()),
        ),
        max_len=512,  # the filters' time and window span twice the sequences
        norm_eps=1e-6,
        logit_scale=128**-0.5,
    ),
    optimizer=replace(
        AFTER.optimizer,
        schedule=CosineConfig(warmup_steps=100, initial_fraction=0.1, decay_steps=5000),
        # All kernels are decayed, those of the filters and the taps of the FIR too.
        groups=(ParameterGroup(r"/(bias|scale|skip|short_bias|embedding)$", weight_decay=0.0),),
    ),
    training=replace(AFTER.training, steps=2451, checkpoint_every=250),
)
VARIANTS = {"after": AFTER, "published": PUBLISHED}


def get_config(variant: str = "after") -> Experiment:
    """The experiment that `variant` names."""
    return choose("variant", variant, VARIANTS)
