"""Associative recall by the filter of one Hyena operator.

python experiments/recall_by_filter/run.py [--workdir runs/recall_by_filter] [--jobs 2] [--quick]
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from study import Study, budget, main

import hyena_jax
from hyena_jax.config import Experiment

PUBLISHED = {
    "implicit": 0.972,
    "ckconv": 0.143,
    "s4d": 0.006,
    "transfer_function": 0.005,
    "explicit": 0.005,
    "fno": 0.003,
}
"""Accuracy at 131,072 tokens and a vocabulary of 30; the filter of H3 stands for `s4d`."""
FILTERS = tuple(PUBLISHED)
LENGTHS = {2048: (FILTERS, (0, 1, 2)), 8192: (FILTERS[:2], (0,))}
"""Filters and seeds by the tokens of a row; the longer one takes the two that the shorter does not part."""


def make_runs() -> dict[str, Experiment]:
    """Every filter; a run stops once it has solved its task."""
    runs: dict[str, Experiment] = {}
    for length, (filters, seeds) in LENGTHS.items():
        flags = ["--data.seq-len", str(length), "--model.max-len", str(length + 2), "--model.n-layers", "1"]
        flags += ["--data.vocab-size", "30", "--data.batch-size", "8"]
        flags += ["--data.test-rows", "256", "--training.eval-batch-size", "16"]
        flags += budget(2000, 100, "accuracy=0.995", save_every=500)
        runs |= filter_runs("tasks:recall", length, filters, seeds, flags)
    return runs


def paper_runs() -> dict[str, Experiment]:
    """Every filter as published, in eight parts of a batch: its activations take gigabytes."""
    flags = ["--no-model.learned-positions", "--model.ffn", "gelu", "--model.d-ff", "256"]
    flags += ["--optimizer.learning-rate", "0.0005", "--optimizer.schedule.warmup-steps", "625"]
    flags += ["--optimizer.accumulation-steps", "8", "--training.eval-batch-size", "4"]
    flags += budget(12_500, 625, "accuracy=0.995")
    return filter_runs("tasks:recall/l131k", 131_072, FILTERS, (0, 1, 2), flags)


def filter_runs(
    task: str, length: int, filters: Sequence[str], seeds: Sequence[int], flags: Sequence[str]
) -> dict[str, Experiment]:
    """The runs of these filters, named by filter, tokens of a row, and seed."""
    axes = {"model.pattern.0.filter": filters, "seed": seeds}
    runs = hyena_jax.make_runs(task, axes, flags).values()
    names = [f"filter={name},seq_len={length},seed={seed}" for name in filters for seed in seeds]
    return dict(zip(names, runs, strict=True))


def at(filters: Sequence[str], length: int) -> tuple[str, ...]:
    """The groups of these filters at a length."""
    return tuple(f"filter={name},seq_len={length}" for name in filters)


def searched_at(group: str) -> str:
    """Learning rates are searched at 2,048 tokens, once for each filter."""
    return re.sub(r"seq_len=\d+", "seq_len=2048", group)


STUDY = Study(
    folder=Path(__file__).parent,
    title="Associative recall by filter",
    source="Hyena Hierarchy (Poli et al. 2023, 2302.10866), figure of filters at vocabulary 30",
    claim="""One Hyena operator of order 2 whose long filters are parametrised in several ways. The paper
trains two layers at 131,072 tokens, where only its implicit filters recall. Here one layer at 2,048 tokens,
the first two filters also at 8,192, and new rows, at most 16,000. One of the 14 values at random: 0.07. The
published value next to `s4d` is that of H3's state-space filter.""",
    runs=make_runs(),
    searched_at=searched_at,
    paper_rows="2,000 rows, 200 times each",
    metric="accuracy",
    solved=0.99,
    published=dict(zip(at(FILTERS, 2048), PUBLISHED.values(), strict=True)),
    above=[
        (at(["implicit"], 2048), at(FILTERS[2:], 2048)),
        *((at(["implicit"], length), at(["ckconv"], length)) for length in LENGTHS),
    ],
    findings="""No filter has solved the recall of 14 keys within 16,000 rows of 2,048 tokens. The two that a
network makes from the position, `implicit` and `ckconv`, have come furthest; `s4d`, the free taps and `fno`
are behind them, and gain 0.21 to 0.35 from twice the rows. So nothing is decided between these five, and with
more training all of them may solve it: that the paper's others fail, and CKConv with them, is at 64 times the
length. Over the longer schedule `implicit` is at 0.91 and `ckconv` at 0.86, in one seed each, which does not
separate them, nor do rows of 8,192 tokens: there CKConv is ahead, at 0.83 against 0.73, in one seed each at
the rates of 2,048. Twice the rows were not tried at this length. So the two are not separated up to there.
Only the rational transfer function is finished: it stays near a guess. Its rate was chosen by losses of 2.71
to 2.86, above that of a guess (2.64): before anything was learned. Those of `fno`, 2.60 to 2.63, hardly tell
rates apart either.

A smaller vocabulary, 10, was not repeated: at one rate that was not searched four of the filters had solved
it within 400 steps, and `fno` and `transfer_function` had come to 0.98 and 0.88 after 1,000 (the history of
this page).""",
    paper={
        "claim": """Two layers of width 64 with feed-forward layers, 131,072 tokens, a vocabulary of 30, 200
epochs of 2,000 rows. The network of the implicit filters (64 wide, 16 frequencies, sine 14) is ours.""",
        "runs": paper_runs,
        "published": dict(zip(at(FILTERS, 131_072), PUBLISHED.values(), strict=True)),
        "above": [(at(["implicit"], 131_072), at(FILTERS[1:], 131_072))],
    },
)

if __name__ == "__main__":
    main(STUDY)
