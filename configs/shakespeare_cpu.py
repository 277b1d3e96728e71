"""Tiny Shakespeare by characters on a CPU, mixer by mixer, at nanoGPT's CPU budget.

    hyena-jax train shakespeare_cpu --workdir runs/shakespeare
    hyena-jax train shakespeare_cpu:attention --workdir runs/shakespeare_attention

Every registered causal mixer is a variant, by its name; so are mixers with other options (`signed_hawk`,
`rotary_attention`, `stu`) and patterns of several mixers (`griffin`, `striped_hyena2`, `lfm2`). All have
four layers of width 128 in the same residual blocks, and the same recipe; the width of the feed-forward
layers makes up for the size of a mixer, so that every model in VARIANTS has 0.8 to 0.9 million
parameters. A mixer that is not in VARIANTS, such as your own (`--plugin my.py shakespeare_cpu:my_mixer`),
has its default options and no decay of biases and scales.

The text comes from TensorFlow Datasets (`pip install 'hyena_jax[tfds]'`); if it cannot be downloaded, add
`--data.path input.txt` or `--data.manual-dir FOLDER`. A run takes two to three minutes on two idle cores.
Validation loss with the rate of 2e-3: mamba2 1.588, mamba3 1.603, signed_hawk 1.611, gated_delta2 1.615,
gated_hyena 1.616, gated_delta 1.633, hawk 1.644, kda 1.649, striped_hyena2 1.650, lfm2 1.660, griffin
1.672, rwkv7 1.675, annotated_hyena 1.677, hyena 1.678, local_attention 1.692, h3 1.703, stu 1.717, s4d
1.721, aft_conv 1.729, fir 1.732, aft_full 1.734, aft_local 1.737, rotary_attention 1.738, attention 1.802,
aft_simple 1.836, fastmax 1.901; with 6.3e-3: hawk 1.633, s4d 1.644, rwkv7 1.663, h3 1.675,
aft_conv 1.694, attention 1.771.
experiments/shakespeare_cpu has their spread over seeds, their machines, and which rates were searched.
"""

from typing import NamedTuple

from hyena_jax.config import (
    HYENA_GROUPS,
    MIXER_CONFIGS,
    NO_DECAY,
    AdamWConfig,
    AFTConvConfig,
    AFTFullConfig,
    AFTLocalConfig,
    AFTSimpleConfig,
    AnnotatedHyenaConfig,
    AttentionConfig,
    CosineConfig,
    Experiment,
    FastmaxConfig,
    FIRConfig,
    GatedDelta2Config,
    GatedDeltaConfig,
    GatedHyenaConfig,
    H3Config,
    HawkConfig,
    HyenaConfig,
    KDAConfig,
    LanguageModelConfig,
    LocalAttentionConfig,
    LoggingConfig,
    Mamba2Config,
    Mamba3Config,
    MixerConfig,
    ParameterGroup,
    RealModalFilterConfig,
    RWKV7Config,
    S4DConfig,
    ShortFilterConfig,
    STUFilterConfig,
    TextConfig,
    TrainingConfig,
)
from hyena_jax.config.registry import OWN_NAMES
from hyena_jax.system.errors import UserError, choose

EMBEDDINGS = ParameterGroup(r"^(embedding/|positions$)", weight_decay=0.0)
FILTER = ParameterGroup(r"/filter/", weight_decay=0.0, optional=True)
RATE = ParameterGroup(r"/rate$", weight_decay=0.0, optional=True)
DECAY = ParameterGroup(r"/(a_log|dt_bias)$", weight_decay=0.0, optional=True)
RWKV7 = ParameterGroup(r"/(decay|rate|value|gate)/|/(shift_mix|removal|booster|bonus)$", weight_decay=0.0)
POSITION_BIASES = ParameterGroup(r"/position_", weight_decay=0.0, optional=True)
SHIFT = ParameterGroup(r"/shift_", weight_decay=0.0, optional=True)
# The parameters that place the modes of a state space; its output weights c are trained like any others.
STATE_SPACE = ParameterGroup(
    r"/filter/(log_decay|frequency|log_dt|b)$", learning_rate=1e-3, weight_decay=0.0, optional=True
)


class Variant(NamedTuple):
    """The options that differ between mixers."""

    pattern: tuple[MixerConfig, ...]
    groups: tuple[ParameterGroup, ...] = ()
    learned_positions: bool = False
    """For mixers that ignore positions."""
    d_ff: int = 512


HAWK = HawkConfig()
LOCAL_ATTENTION = LocalAttentionConfig(n_heads=4, window=32)
VARIANTS = {
    "hyena": Variant((HyenaConfig(order=2, gating="gate_first"),), HYENA_GROUPS),
    "annotated_hyena": Variant((AnnotatedHyenaConfig(),), (FILTER, NO_DECAY)),
    "gated_hyena": Variant((GatedHyenaConfig(),), (FILTER, NO_DECAY)),
    "hawk": Variant((HAWK,), (RATE, NO_DECAY)),
    "signed_hawk": Variant((HawkConfig(sign="gate"),), (RATE, NO_DECAY), d_ff=448),
    "griffin": Variant((HAWK, HAWK, LOCAL_ATTENTION), (RATE, NO_DECAY)),
    "gated_delta": Variant((GatedDeltaConfig(n_heads=4),), (DECAY, NO_DECAY)),
    "kda": Variant((KDAConfig(n_heads=4),), (DECAY, NO_DECAY)),
    "gated_delta2": Variant((GatedDelta2Config(n_heads=4),), (DECAY, NO_DECAY), d_ff=384),
    "rwkv7": Variant((RWKV7Config(n_heads=4),), (RWKV7, NO_DECAY), d_ff=384),
    "mamba2": Variant((Mamba2Config(n_heads=4, d_state=64),), (DECAY, NO_DECAY), d_ff=384),
    "mamba3": Variant((Mamba3Config(n_heads=4, d_state=64),), (DECAY, NO_DECAY), d_ff=384),
    "attention": Variant((AttentionConfig(n_heads=4),), (NO_DECAY,), learned_positions=True),
    "rotary_attention": Variant((AttentionConfig(n_heads=4, rotary_fraction=1.0),), (NO_DECAY,)),
    "local_attention": Variant((LOCAL_ATTENTION,), (NO_DECAY,), d_ff=608),
    # 64 tokens are fewer than the 561 features of the factorized form.
    "fastmax": Variant((FastmaxConfig(n_heads=4, factorized=False),), (NO_DECAY,), learned_positions=True),
    "aft_full": Variant((AFTFullConfig(rank=32),), (POSITION_BIASES, NO_DECAY)),
    "aft_local": Variant((AFTLocalConfig(rank=32, window=32),), (POSITION_BIASES, NO_DECAY)),
    "aft_simple": Variant((AFTSimpleConfig(),), (NO_DECAY,), learned_positions=True),
    "aft_conv": Variant((AFTConvConfig(n_heads=4, n_taps=32),), (POSITION_BIASES, NO_DECAY), d_ff=608),
    "h3": Variant((H3Config(n_taps=32),), (STATE_SPACE, SHIFT, NO_DECAY), d_ff=448),
    "s4d": Variant((S4DConfig(),), (STATE_SPACE, NO_DECAY), d_ff=576),
    "fir": Variant((FIRConfig(),), (FILTER, NO_DECAY), d_ff=608),
    "stu": Variant((FIRConfig(filter=STUFilterConfig()),), (FILTER, NO_DECAY), d_ff=640),
    # One layer of each kind: 7 taps, 32 taps that decay, real poles, attention.
    "striped_hyena2": Variant(
        (
            HyenaConfig(filter=ShortFilterConfig(7), filter_groups=8, skip=False),
            HyenaConfig(filter=ShortFilterConfig(32, decay=(0.01, 100.0)), filter_groups=8),
            HyenaConfig(filter=RealModalFilterConfig(16)),
            AttentionConfig(n_heads=4, rotary_fraction=1.0),
        ),
        HYENA_GROUPS,
    ),
    # Three gated convolutions of 3 taps, then attention with fewer keys and values than queries.
    "lfm2": Variant(
        (
            *3 * (HyenaConfig(filter=ShortFilterConfig(3), short_filter_len=0, skip=False),),
            AttentionConfig(n_heads=4, n_kv_heads=2, rotary_fraction=1.0, qk_norm_eps=1e-5),
        ),
        HYENA_GROUPS,
        d_ff=544,
    ),
}


def get_config(variant: str = "hyena") -> Experiment:
    """The experiment with the mixer that `variant` names."""
    defaults = {name: Variant((make(),), (NO_DECAY,)) for name, make in MIXER_CONFIGS.items()}
    is_own = variant in MIXER_CONFIGS and MIXER_CONFIGS.parts[variant].plugin is not None
    if is_own and variant in VARIANTS:
        raise UserError(f"variant {variant!r} is this config's own; register your mixer by another name")
    pattern, groups, learned_positions, d_ff = choose("variant", variant, defaults | VARIANTS, OWN_NAMES)
    return Experiment(
        model=LanguageModelConfig(
            pattern=pattern,
            n_layers=4,
            d_model=128,
            d_ff=d_ff,
            max_len=64,
            learned_positions=learned_positions,
        ),
        data=TextConfig(name="tiny_shakespeare", tokenizer="characters", seq_len=64, batch_size=12),
        optimizer=AdamWConfig(
            learning_rate=2e-3,
            schedule=CosineConfig(warmup_steps=100),
            b2=0.99,
            weight_decay=0.1,
            clip_norm=1.0,
            groups=(*groups, EMBEDDINGS),
        ),
        training=TrainingConfig(steps=2000, eval_every=250, checkpoint_every=500),
        logging=LoggingConfig(sample_prompt="\n", sample_tokens=400),
    )
