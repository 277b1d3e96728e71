"""How many pairs one block keeps: multi-query recall behind a gated convolution that binds value to key.

python experiments/recall/run.py [--workdir runs/recall] [--jobs 2] [--quick]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from protocol import SEARCH_SEED
from study import GATED_TAPS, Study, budget, main, task_runs

from hyena_jax.config import Experiment

WIDTH, VOCAB_SIZE = 32, 256
STEPS = {8: 1000, 16: 3000, 32: 3000, 64: 3000}
"""By number of pairs P, in rows of 4 P tokens."""
QUERIES = 1024
"""Of a step, which has QUERIES / P rows."""
DECISIVE = (
    *("attention", "rwkv7", "gated_delta", "gated_delta_8", "mamba2", "mamba2_8", "hawk", "hyena"),
    *("attention_alone", "attention_after_fir"),
)
"""Mixers with three seeds at 8 pairs, where orderings rest; the others have one."""
ONE_HEAD = ("--model.pattern.1.n-heads", "1")
WINDOW = ("--model.pattern.1.window", "16")
DELTA = (*ONE_HEAD, "--model.pattern.1.value-dim", "32", "--model.pattern.1.key-dim")
STATE = "--model.pattern.1.d-state"
FIR = ("--model.pattern.0.filter.n-taps", "4")
TWO_LAYERS = ("--model.pattern.0.n-heads", "1", *ONE_HEAD, "--model.learned-positions")
MIXERS = {
    "attention": ("hyena,attention", *ONE_HEAD),
    "attention_after_fir": ("fir,attention", *FIR, *ONE_HEAD),
    "attention_alone": ("attention,attention", *TWO_LAYERS),
    "local_attention": ("hyena,local_attention", *ONE_HEAD, *WINDOW),
    "gated_delta": ("hyena,gated_delta", *DELTA, "32"),
    "gated_delta_8": ("hyena,gated_delta", *DELTA, "8"),
    "gated_delta_at_0.013": ("hyena,gated_delta", *DELTA, "32"),
    "kda": ("hyena,kda", *DELTA, "32"),
    "rwkv7": ("hyena,rwkv7", *ONE_HEAD),
    "mamba2": ("hyena,mamba2", STATE, "32"),
    "mamba2_8": ("hyena,mamba2", STATE, "8"),
    "mamba3": ("hyena,mamba3", STATE, "32"),
    "hawk": ("hyena,hawk",),
    "h3": ("hyena,h3",),
    "hyena": ("hyena,hyena",),
    "hyena_real_modal": ("hyena,hyena", "--model.pattern.1.filter", "real_modal"),
}
"""The two blocks, and flags of theirs. 8 in a name is the number of states a channel, else 32; 0.013 is the
rate that was found at 16 pairs."""
AT_ALL = ("attention", "rwkv7", "gated_delta", "mamba2")
"""The mixers that are trained at every number of pairs, with three seeds."""
PAIRS = {**dict.fromkeys(MIXERS, (8,)), **dict.fromkeys(AT_ALL, tuple(STEPS)), "gated_delta_at_0.013": (16,)}
"""The numbers of pairs by mixer."""


def make_runs() -> dict[str, Experiment]:
    """Every mixer at every number of pairs; a run stops once it has solved its task.

    The first of those at 8 pairs has the seed and the rows of the search, whose best run it is.
    """
    runs: dict[str, Experiment] = {}
    for mixer, (pattern, *own) in MIXERS.items():
        taps = GATED_TAPS if pattern.startswith("hyena,") else ()
        for pairs in PAIRS[mixer]:
            row = ["--data.n-pairs", str(pairs), "--data.seq-len", str(4 * pairs)]
            row += ["--model.max-len", str(4 * pairs), "--data.batch-size", str(QUERIES // pairs)]
            row += ["--data.vocab-size", str(VOCAB_SIZE), "--model.d-model", str(WIDTH)]
            flags = [*taps, *own, *row, *budget(STEPS[pairs], 100, "accuracy=0.99")]
            flags += ["--optimizer.learning-rate", "0.01" if mixer == "hawk" else "0.004"]
            first = 0
            if pairs == 8:
                first, flags = SEARCH_SEED, [*flags, "--data.test-seed", str(SEARCH_SEED)]
            seeds = (first, 1, 2) if pairs != 8 or mixer in DECISIVE else (first,)
            runs |= task_runs(f"pattern={mixer},pairs={pairs}", "mqar", pattern, seeds, flags)
    return runs


def searched_at(group: str) -> str:
    """Its own settings; but three rates nearly solved 16 pairs, and no seed learned at the best of them."""
    return "pattern=gated_delta,pairs=32" if group == "pattern=gated_delta,pairs=16" else group


def at(pairs: int, *mixers: str) -> tuple[str, ...]:
    """The groups of these mixers at a number of pairs."""
    return tuple(f"pattern={mixer},pairs={pairs}" for mixer in mixers)


STUDY = Study(
    folder=Path(__file__).parent,
    title="Pairs that one block keeps",
    source="Zoology (2312.04927), Based (2402.18668), and figures of multi-query recall in the papers of"
    " DeltaNet (2406.06484) and Mamba-2 (2405.21060)",
    message="Of four mixers RWKV-7 alone learns 32 pairs in every seed",
    claim="""In Zoology attention keeps all pairs, and others need a width or a state that grows with what
they keep; vocabulary 8,192, up to hundreds of tokens. Here a gated convolution of four taps, which binds a
value to its key, and then one block of the mixer: width 32, ids up to 256, P pairs in 4 P tokens, 1,024
queries a step, 1,000 steps at 8 pairs and 3,000 above. Before `attention_after_fir` that convolution has
no gate; `attention_alone` is two layers of attention with learned positions. The numbers in names are
states a channel, 32 elsewhere. At 16 pairs the delta rule has the rate found at 32: at the best of its own
search, 0.013, no seed learned. Guessing one of a row's values scores 1/P.""",
    runs=make_runs(),
    paper_rows="100,000 rows, 64 times each",
    search_part=1,
    searched_at=searched_at,
    metric="accuracy",
    solved=0.99,
    above=[
        (at(32, "attention"), at(32, "mamba2")),
        (at(32, "rwkv7"), at(32, "mamba2")),
        (at(32, "gated_delta"), at(32, "mamba2")),
        (at(32, "attention"), at(32, "rwkv7", "gated_delta")),
        (at(8, "mamba2"), at(8, "hawk", "hyena")),
        (at(8, "gated_delta"), at(8, "gated_delta_8")),
        (at(8, "mamba2"), at(8, "mamba2_8")),
        (at(8, "attention", "attention_after_fir"), at(8, "attention_alone")),
    ],
    x="pairs",
    drawn=["rwkv7", "attention", "gated_delta", "mamba2", "hawk", "hyena"],
    shown=[
        *at(64, "rwkv7", "attention", "gated_delta", "mamba2"),
        *at(32, "rwkv7", "attention", "gated_delta", "mamba2"),
        *at(16, "gated_delta", "mamba2"),
    ],
    findings="""Of 32 pairs RWKV-7 recalls 0.90 to 0.94 in every seed, of 64 pairs 0.34 to 0.54, from a
state of 4.5 KiB. Attention recalls 16 pairs in every seed and 32 in two of three, and at most 0.28 of 64. The
gated delta rule and Mamba-2 learn 16 pairs in two seeds of three each, and 32 in one seed of the delta rule
(0.90): with the same settings one seed learns while another stays at a guess. All four learn 8 pairs; Hawk,
whose state is a vector, and Hyena score less there than a guess among the row's values. With 8 states a
channel in place of 32 the median at 8 pairs falls from 0.99 to 0.09 with the gated delta rule, and from 0.94
to 0.41 with Mamba-2. Two layers of attention alone reach 0.17 to 0.18, one layer behind four taps without a
gate 0.97 to 0.98: in 1,000 steps the convolution is what helps.""",
    limits="""A low accuracy means that the model has not learned to recall in these steps; how many
pairs its state could hold is not shown. At 16 and 32 pairs Mamba-2's rates were chosen among runs that
barely learned. Twelve of the sixteen models have results at one number of pairs, and other widths were not
run.""",
)

if __name__ == "__main__":
    main(STUDY)
