"""StripedHyena 2 at the shapes of Evo 2 1B (Ku et al. 2025, arXiv 2503.01868), a model of DNA as bytes.

    hyena-jax train striped_hyena2 --workdir runs/striped_hyena2 --data.path genomes/

Three kinds of gated convolutions, of 7 taps, of 128 decaying taps, and of 16 real modes, and attention in
every seventh layer. The shapes are those of the published `evo2-1b-8k.yml`; the parameter count,
1,107,989,760, was taken from Zymrael/vortex (`vortex/model/model.py`, the package vtx 1.1.0) with these
shapes. The filters start as in Zymrael/savanna: `implicit_modal.py`, and `explicit_filter.py` with the decay
`weak`, which Evo 2 40B has. Our own choices: the initialisation of all else, data, optimizer, length of
training. Made for accelerators; time and loss of this code: not measured yet.
"""

from hyena_jax.config import (
    HYENA_GROUPS,
    AdamWConfig,
    AttentionConfig,
    CosineConfig,
    Experiment,
    FilterConfig,
    HyenaConfig,
    LanguageModelConfig,
    RealModalFilterConfig,
    ShortFilterConfig,
    TextConfig,
    TrainingConfig,
)

D_MODEL, MAX_LEN = 1920, 8192


def hyena(long_filter: FilterConfig, **options) -> HyenaConfig:
    """One gated convolution, without biases but the output's."""
    return HyenaConfig(filter=long_filter, in_bias=False, short_bias=False, **options)


SHORT = hyena(ShortFilterConfig(7), filter_groups=128, skip=False)
MEDIUM = hyena(ShortFilterConfig(128, decay=(0.01, 100.0), deviation=1e-5 * MAX_LEN**-0.5), filter_groups=128)
LONG = hyena(RealModalFilterConfig(16))
ATTENTION = AttentionConfig(n_heads=15, rotary_fraction=1.0, qkv_bias=False)
THREE = (SHORT, MEDIUM, LONG)


def get_config() -> Experiment:
    """The experiment."""
    return Experiment(
        model=LanguageModelConfig(
            pattern=(*THREE, ATTENTION, *3 * (*THREE, *THREE, ATTENTION)),
            n_layers=25,
            d_model=D_MODEL,
            ffn="bilinear",
            first_ffn="geglu_erf",
            ffn_bias=False,
            d_ff=5120,
            norm="rms_eps_outside",
            final_norm="rms_eps_outside",
            max_len=MAX_LEN,
            vocab_size=512,
            dtype="bfloat16",
            remat="block",
        ),
        data=TextConfig(path="data/genomes", seq_len=MAX_LEN, batch_size=256),
        optimizer=AdamWConfig(
            learning_rate=3e-4,
            schedule=CosineConfig(warmup_steps=1000),
            b2=0.95,
            weight_decay=0.1,
            clip_norm=1.0,
            groups=HYENA_GROUPS,
        ),
        training=TrainingConfig(steps=100_000, eval_every=1000, checkpoint_every=1000, eval_windows=1000),
    )
