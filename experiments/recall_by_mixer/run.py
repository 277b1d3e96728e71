"""Associative recall by mixer, at vocabularies of 20 and 30.

python experiments/recall_by_mixer/run.py [--workdir runs/recall_by_mixer] [--jobs 2] [--quick]
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from study import Study, budget, main, task_runs

from hyena_jax.config import Experiment

LENGTHS = {20: 64, 30: 256}
"""Tokens of a row by vocabulary: of the 14 keys of the last one comes up about 9 times, and in 64 twice."""
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
ROTARY = {"attention": ("--no-model.learned-positions", "--model.pattern.0.rotary-fraction", "1.0")}
SEEDS = (0, 1, 2)


def make_runs() -> dict[str, Experiment]:
    """Every mixer on every vocabulary; a run stops once it has solved its task."""
    runs: dict[str, Experiment] = {}
    for vocab_size, length in LENGTHS.items():
        row = ["--data.seq-len", str(length), "--model.max-len", str(length + 2)]
        for mixer in PUBLISHED:
            flags = [*row, "--data.vocab-size", str(vocab_size), *ROTARY.get(mixer, ())]
            steps = 5000 if (mixer, vocab_size) == ("attention", 30) else 4000  # it starts late
            flags += budget(steps, 100, "accuracy=0.995")
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
    title="Recall of one pair, by mixer and vocabulary",
    source="Hyena Hierarchy (Poli et al. 2023, 2302.10866), table of recall at 2,048 tokens",
    message="Hyena recalls among 30 symbols where H3 does not; among 20 both do",
    claim="""Pairs of a key and its value, then a key whose value is asked for. In the paper Hyena and
attention recall at vocabularies of 10 to 40, H3 at the smallest, AFT and a convolution without gates at
none (`Conv1d` there; here `fir`, with a tap for each token). There the rows have 2,048 tokens, and
2,000 of them are shown 200 times; here 64 tokens, 256 at a vocabulary of 30, and new rows. Two layers of
width 64 both times, here without feed-forward layers; attention has rotary positions. Chance is 1/9 and
1/14. Rates are found at vocabulary 20.""",
    runs=make_runs(),
    paper_rows="2,000 rows, 200 times each",
    searched_at=searched_at,
    metric="accuracy",
    solved=0.99,
    published={name: value for name, value in published((10, 20, 30)).items() if "=10" not in name},
    published_at="published, at 2,048 tokens",
    above=[
        (at(("hyena", "h3", "attention"), 20), at(("aft_conv", "fir"), 20)),
        (at(("hyena",), 30), at(("aft_conv", "fir"), 30)),
        (at(("hyena",), 20), at(("h3",), 20)),
        (at(("hyena",), 30), at(("h3",), 30)),
    ],
    findings="""At vocabulary 20 H3 solves the task in every seed and Hyena nearly does (0.91 to 0.98); the
paper's gap shows only with 30 symbols in 256 tokens: there H3's best seed has 0.39, and 0.48 after twice the
rows. AFT and the convolution without gates stay below 0.29. Attention is the first to solve
vocabulary 20, by step 1,300; at 30 one seed of three stays at 0.27.""",
    limits="""Longer rows and more symbols change together from 20 to 30, and rates were found at 20.
Attention has 160,000 rows at 30 and all others 128,000, so it is in no ordering there.""",
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
