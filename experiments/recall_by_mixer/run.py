"""Associative recall by mixer, at vocabularies of 10 and 20.

python experiments/recall_by_mixer/run.py [--workdir runs/recall_by_mixer] [--jobs 2] [--quick]
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from study import Study, budget, main, task_runs

from hyena_jax.config import Experiment

LENGTHS = {10: 64, 20: 64}
"""Tokens of a row by vocabulary; of the 14 keys of the next one would come up about twice or less."""
PUBLISHED = {
    "hyena": (1.00, 1.00, 0.98, 0.85),
    "h3": (0.92, 0.60, 0.13, 0.10),
    "attention": (1.00, 1.00, 0.92, 0.82),
    "aft_conv": (0.55, 0.21, 0.12, 0.10),
    "fir": (0.32, 0.11, 0.10, 0.08),
}
"""Accuracy at 2,048 tokens and vocabularies of 10, 20, 30, 40; AFT-conv as `AFT`, FIR as `Conv1d`."""
RECIPE = (
    *("--model.ffn", "gelu", "--model.d-ff", "256", "--optimizer.learning-rate", "0.0005"),
    *("--optimizer.schedule.warmup-steps", "625", *budget(12_500, 625, "accuracy=0.995")),
)
"""200 epochs of 2,000 rows, of which 10 are warm-up."""
STEPS = {"attention": 5000}
"""Steps of training, if not 4,000: attention starts later."""
ROTARY = {"attention": ("--no-model.learned-positions", "--model.pattern.0.rotary-fraction", "1.0")}
SEEDS = (0, 1, 2)


def make_runs() -> dict[str, Experiment]:
    """Every mixer on every vocabulary; a run stops once it has solved its task."""
    runs: dict[str, Experiment] = {}
    for vocab_size, length in LENGTHS.items():
        row = ["--data.seq-len", str(length), "--model.max-len", str(length + 2)]
        for mixer in PUBLISHED:
            flags = [*row, "--data.vocab-size", str(vocab_size), *ROTARY.get(mixer, ())]
            flags += budget(STEPS.get(mixer, 4000), 100, "accuracy=0.995")
            runs |= task_runs(f"pattern={mixer},vocab_size={vocab_size}", "recall", mixer, SEEDS, flags)
    return runs


def paper_runs() -> dict[str, Experiment]:
    """Every mixer on every vocabulary, as published."""
    runs: dict[str, Experiment] = {}
    for vocab_size in (10, 20, 30, 40):
        for mixer in PUBLISHED:
            group, task = f"pattern={mixer},vocab_size={vocab_size}", f"recall/v{vocab_size}_l2048"
            runs |= task_runs(group, task, mixer, SEEDS, RECIPE)
    return runs


def published(vocab_sizes: Sequence[int]) -> dict[str, float]:
    """The published values at these of the first vocabularies, by group."""
    return {
        f"pattern={mixer},vocab_size={vocab_size}": value
        for mixer, values in PUBLISHED.items()
        for vocab_size, value in zip(vocab_sizes, values, strict=False)
    }


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
attention recall at vocabularies of 10 to 40, H3 at the smallest, AFT and a short convolution at none. There
the rows have 2,048 tokens, and 2,000 of them are shown 200 times; here 64 tokens, and at most 128,000 new
rows (attention 160,000), as a run stops once it has solved the task. Two layers of width 64 both times, here
without the paper's feed-forward layers; attention has rotary positions. One of the values at random: 1/4 and
1/9. Vocabularies of 30 and 40 are not reproduced: in 64 tokens a key comes up about twice or less there, and
longer rows were not tried.""",
    runs=make_runs(),
    paper_rows="2,000 rows, 200 times each",
    searched_at=searched_at,
    metric="accuracy",
    solved=0.99,
    published=published([*LENGTHS]),
    above=[
        *((at(("hyena", "h3", "attention"), v), at(("aft_conv", "fir"), v)) for v in (10, 20)),
        (at(("hyena", "attention"), 20), at(("h3",), 20)),
    ],
    x="vocab_size",
    findings="""At a vocabulary of 20 Hyena, H3 and attention are far above AFT with a window and the short
convolution, at 0.98 to 1.00 against 0.28, and at 10 Hyena and H3 are. The paper's gap between H3 (0.60) and
the first two is not reproduced: H3 solves the task in every seed, and Hyena ends at 0.91 to 0.98. The rate
and the steps matter as much: at 0.002 instead of 0.0063, and in half the steps, H3 got to 0.51, and Hyena at
the same rate to 0.77 (an earlier run, one seed, not kept). Whether rows of 2,048 tokens bring the gap back
was not tried.

Attention finds the solution suddenly, and not always in time: at a vocabulary of 10 one seed is at 0.97 after
5,000 steps, two are at 0.53 and 0.54, and one of these two solves the task at step 6,000 of a schedule of
10,000. That is not because its rate was searched at the other vocabulary: a search at 10 chose the same one
(not kept).""",
    paper={
        "claim": """Vocabularies of 10 to 40 in 2,048 tokens; two layers of width 64 with feed-forward layers,
200 epochs of 2,000 rows. One head and learned positions of attention, and the network of Hyena's filters (64
wide, 16 frequencies, sine 14) are ours.""",
        "runs": paper_runs,
        "published": published((10, 20, 30, 40)),
        "above": [(at(("hyena", "attention"), v), at(("h3", "aft_conv", "fir"), v)) for v in (20, 30, 40)],
    },
)

if __name__ == "__main__":
    main(STUDY)
