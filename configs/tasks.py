"""Synthetic tasks at a size for two CPU cores, one variant for each task; each paper is named in its layout.

    hyena-jax task mqar                                      # one example, and the published settings
    hyena-jax train tasks:mqar --workdir runs/mqar
    hyena-jax train tasks:recall --workdir runs/recall_h3 --model.pattern h3
    hyena-jax train tasks:mqar/l64 --workdir runs/mqar_l64   # a preset's data, with this small model
    hyena-jax train tasks:sort --plugin sort.py --workdir runs/sort   # a task of your own, with Hyena

Two blocks x + mixer(norm(x)) of width 64, without feed-forward layers but for MAD's tasks and the addition
(VARIANTS has the other exceptions); AdamW (0.9, 0.98), decay 0.1, clipping at 1, warm-up over a tenth of the
steps, cosine to 0. New rows at every step, but for mad_memorisation; 512 test rows. Attention alone gets
learned positions: with `--model.pattern attention`, add `--model.learned-positions`.

Test accuracy after the last step and CPU seconds with compilation, one seed, of runs that were not kept,
on two shared cores of an AMD EPYC (JAX 0.10.1, float32; wall time was 0.9 to 2.1 times that):

    recall 0.998, 38 s             mqar 1.000, 34 s               induction 1.000, 51 s
    selective_copying 0.996, 55 s  memorisation 1.000, 32 s       majority 1.000, 42 s
    counting 0.994, 57 s           addition 0.956, 37 s           modular_addition 0.707, 33 s
    permutation_words 0.315, 36 s  parity 0.562, 18 s             modular_arithmetic 0.178, 52 s

Macro accuracy of MAD's tasks:

    mad_recall 0.959, 111 s        mad_noisy_recall 0.833, 116 s  mad_fuzzy_recall 0.200, 115 s
    mad_memorisation 1.000, 78 s   mad_compression 0.264, 65 s    mad_selective_copying 0.950, 93 s

Whole answers: copying 0.697, 66 s; prefix_ngram 0.691, 69 s.

modular_addition and permutation_words are tested at twice their training length, parity and
modular_arithmetic at 40 to 64 tokens after training on at most 40. Hawk, whose recurrence has no negative
eigenvalues, is expected to fail at parity and modular_arithmetic (2411.12537), where chance is 0.5 and 0.2.
"""

from typing import NamedTuple

from hyena_jax.config import (
    HYENA_GROUPS,
    TASK_CONFIGS,
    AdamWConfig,
    AttentionConfig,
    AutoencoderConfig,
    CosineConfig,
    Experiment,
    HawkConfig,
    HyenaConfig,
    LanguageModelConfig,
    MixerConfig,
    ParameterGroup,
    TrainingConfig,
)
from hyena_jax.config.registry import OWN_NAMES
from hyena_jax.data.dataset import load
from hyena_jax.system.errors import choose

EMBEDDINGS = ParameterGroup(r"^(embedding/|positions$)", weight_decay=0.0)
DECAYS = ParameterGroup(r"/(rate|a_log|dt_bias)$", weight_decay=0.0, optional=True)


class Variant(NamedTuple):
    """The options that differ between tasks."""

    mixer: MixerConfig
    steps: int
    n_layers: int = 2
    d_model: int = 64
    d_ff: int | None = None
    learning_rate: float = 2e-3
    weight_decay: float = 0.1
    batch_size: int | None = None
    """None takes the task's own."""


HYENA, HAWK, ATTENTION = HyenaConfig(), HawkConfig(), AttentionConfig(n_heads=1)
# Of all mixers, so that another one can be chosen on the command line.
GROUPS = (*HYENA_GROUPS, DECAYS, EMBEDDINGS)
VARIANTS = {
    "recall": Variant(HYENA, 800, batch_size=32),
    "mqar": Variant(ATTENTION, 800),
    "induction": Variant(HYENA, 1000),
    "selective_copying": Variant(HAWK, 1500),
    "copying": Variant(ATTENTION, 2000),
    "prefix_ngram": Variant(ATTENTION, 2000),
    "memorisation": Variant(HYENA, 400),
    "mad_recall": Variant(HYENA, 1000, d_ff=128, learning_rate=1e-3),
    "mad_noisy_recall": Variant(HYENA, 1000, d_ff=128, learning_rate=1e-3),
    "mad_fuzzy_recall": Variant(HYENA, 1000, d_ff=128, learning_rate=1e-3),
    "mad_selective_copying": Variant(HYENA, 1000, d_ff=128, learning_rate=1e-3),
    "mad_compression": Variant(HYENA, 1000, d_ff=128, learning_rate=1e-3),
    "mad_memorisation": Variant(HYENA, 1000, d_ff=128, learning_rate=1e-3),
    "parity": Variant(HAWK, 800, n_layers=1, d_model=32, learning_rate=5e-3, weight_decay=0.0),
    "modular_arithmetic": Variant(HAWK, 1000),
    "modular_addition": Variant(HAWK, 800),
    "permutation_words": Variant(HAWK, 800),
    "majority": Variant(HYENA, 500),
    "counting": Variant(HAWK, 1000),
    "addition": Variant(HYENA, 1500, n_layers=1, d_ff=256),
}


def get_config(variant: str = "recall") -> Experiment:
    """The experiment of a task at its small setting, or of `TASK/PRESET`; also of a task of your own."""
    name, _, preset = variant.partition("/")
    kind = choose("variant", name, TASK_CONFIGS, OWN_NAMES)
    chosen = VARIANTS.get(name, Variant(HYENA, 1000))
    if preset:
        data = choose("preset", preset, load(kind()).task.all_presets(kind)).config
    else:
        data = kind() if chosen.batch_size is None else kind(batch_size=chosen.batch_size)
    shared = {
        "pattern": (chosen.mixer,),
        "n_layers": chosen.n_layers,
        "d_model": chosen.d_model,
        "ffn": "none" if chosen.d_ff is None else "gelu",
        "d_ff": chosen.d_ff,
        # MAD's rows have one input less than their L tokens.
        "max_len": max(load(data).row_shape[0], getattr(data, "seq_len", 1)),
        "learned_positions": chosen.mixer == ATTENTION,
    }
    reads_tokens = data.input_kind.is_tokens
    return Experiment(
        model=LanguageModelConfig(**shared, tied_head=False) if reads_tokens else AutoencoderConfig(**shared),
        data=data,
        optimizer=AdamWConfig(
            learning_rate=chosen.learning_rate,
            schedule=CosineConfig(warmup_steps=chosen.steps // 10, final_fraction=0.0),
            b2=0.98,
            weight_decay=chosen.weight_decay,
            clip_norm=1.0,
            groups=GROUPS,
        ),
        training=TrainingConfig(
            steps=chosen.steps, eval_every=chosen.steps // 8, checkpoint_every=chosen.steps // 2
        ),
    )
