"""Associative recall by mixer, over vocabularies of 10 to 40.

python experiments/recall_by_mixer/run.py [--workdir runs/recall_by_mixer] [--jobs 2] [--quick]
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from study import Study, budget, main, task_runs

from hyena_jax.config import Experiment

VOCABULARIES = (10, 20, 30, 40)
PUBLISHED = {
    "hyena": (1.00, 1.00, 0.98, 0.85),
    "h3": (0.92, 0.60, 0.13, 0.10),
    "attention": (1.00, 1.00, 0.92, 0.82),
    "aft_conv": (0.55, 0.21, 0.12, 0.10),
    "fir": (0.32, 0.11, 0.10, 0.08),
}
"""Accuracy at 2,048 tokens by vocabulary; AFT-conv as `AFT`, FIR as `Conv1d`."""
MIXERS = tuple(PUBLISHED)
STEPS = {"attention": 5000}
"""Steps of training, if not 2,000: attention starts later."""
ROTARY = {"attention": ("--no-model.learned-positions", "--model.pattern.0.rotary-fraction", "1.0")}
"""Attention with learned positions recalled in one seed of three within 5,000 steps, with these in two."""
SEEDS = {10: (0, 1, 2)}
"""Seeds by vocabulary, if not a single one: three where the ordering is decided."""


def make_runs() -> dict[str, Experiment]:
    """Every mixer on every vocabulary; a run stops once it has solved its task."""
    runs: dict[str, Experiment] = {}
    for vocab_size in VOCABULARIES:
        for mixer in MIXERS:
            group, seeds = f"pattern={mixer},vocab_size={vocab_size}", SEEDS.get(vocab_size, (0,))
            flags = budget(STEPS.get(mixer, 2000), 100, "accuracy=0.995")
            flags += ["--data.vocab-size", str(vocab_size), *ROTARY.get(mixer, ())]
            runs |= task_runs(group, "recall", mixer, seeds, flags)
    return runs


def at(mixers: tuple[str, ...], vocab_size: int) -> tuple[str, ...]:
    """The groups of these mixers at a vocabulary."""
    return tuple(f"pattern={mixer},vocab_size={vocab_size}" for mixer in mixers)


def searched_at(group: str) -> str:
    """Learning rates are searched at vocabulary 20, once for each mixer."""
    return re.sub(r"vocab_size=\d+", "vocab_size=20", group)


STUDY = Study(
    folder=Path(__file__).parent,
    title="Associative recall by mixer and vocabulary",
    source="Hyena Hierarchy (Poli et al. 2023, 2302.10866), table of recall at 2,048 tokens",
    claim="""Pairs of a key and its value, then a key whose value is asked for. In the paper Hyena and
attention recall at every vocabulary, H3 at the smallest, AFT and a short convolution at none. There the rows
have 2,048 tokens, and 2,000 of them are shown 200 times; here 64 tokens, so that a key comes up less often as
the vocabulary grows, and at most 64,000 new rows (attention 160,000), as a run stops once it has solved the
task. Two layers of width 64 both times. One of the values at random: 1/4, 1/9, 1/14 and 1/19.""",
    runs=make_runs(),
    paper_rows="2,000 rows, 200 times each",
    searched_at=searched_at,
    metric="accuracy",
    solved=0.99,
    published={
        f"pattern={mixer},vocab_size={vocab_size}": value
        for mixer, values in PUBLISHED.items()
        for vocab_size, value in zip(VOCABULARIES, values, strict=True)
    },
    above=[(at(("hyena", "h3", "attention"), v), at(("aft_conv", "fir"), v)) for v in VOCABULARIES],
    x="vocab_size",
    findings="""Every point that was solved is drawn full; the others are where training stopped. With 4 and 9
keys Hyena, H3 and attention are far above the other two, which is the paper's ordering as far as training
went. With 14 and 19 keys all are unfinished, at 0.07 to 0.22: a row of 64 tokens shows a key about twice or
less, so that these two vocabularies are not reproduced. Attention finds the solution suddenly; one seed of
three at vocabulary 10 is unfinished, at 0.49 after 5,000 steps. With learned positions instead of rotary ones
two of three were (an earlier run, not kept).""",
)

if __name__ == "__main__":
    main(STUDY)
