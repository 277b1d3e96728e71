"""Associative recall by the filter of one Hyena operator.

python experiments/recall_by_filter/run.py [--workdir runs/recall_by_filter] [--jobs 2] [--quick]
"""

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
SEEDS = (0, 1, 2)


def make_runs() -> dict[str, Experiment]:
    """Every filter; a run stops once it has solved its task."""
    flags = ["--data.seq-len", "2048", "--model.max-len", "2050", "--model.n-layers", "1"]
    flags += ["--data.vocab-size", "30", "--data.batch-size", "8"]
    flags += ["--data.test-rows", "256", "--training.eval-batch-size", "16"]
    flags += budget(2000, 100, "accuracy=0.995", save_every=500)
    return filter_runs("tasks:recall", flags)


def paper_runs() -> dict[str, Experiment]:
    """Every filter as published, in eight parts of a batch: its activations take gigabytes."""
    flags = ["--no-model.learned-positions", "--model.ffn", "gelu", "--model.d-ff", "256"]
    flags += ["--optimizer.learning-rate", "0.0005", "--optimizer.schedule.warmup-steps", "625"]
    flags += ["--optimizer.accumulation-steps", "8", "--training.eval-batch-size", "4"]
    flags += budget(12_500, 625, "accuracy=0.995")
    return filter_runs("tasks:recall/l131k", flags)


def filter_runs(task: str, flags: Sequence[str]) -> dict[str, Experiment]:
    """The runs of all filters, named by filter and seed."""
    axes = {"model.pattern.0.filter": FILTERS, "seed": SEEDS}
    runs = hyena_jax.make_runs(task, axes, flags).values()
    names = [f"filter={name},seed={seed}" for name in FILTERS for seed in SEEDS]
    return dict(zip(names, runs, strict=True))


def at(filters: Sequence[str]) -> tuple[str, ...]:
    """The groups of these filters."""
    return tuple(f"filter={name}" for name in filters)


STUDY = Study(
    folder=Path(__file__).parent,
    title="Recall of one pair, by Hyena's filter",
    source="Hyena Hierarchy (Poli et al. 2023, 2302.10866), figure of filters at vocabulary 30",
    message="After 16,000 rows filters that a network computes from the position lead at recall",
    claim="""One Hyena operator of order 2 whose long filters are parametrised in several ways. The paper
trains two layers at 131,072 tokens, where only its implicit filters recall. Here one layer at 2,048 tokens,
and new rows, at most 16,000. Chance is 0.07. The published value next to `s4d` is that of H3's state-space
filter.""",
    runs=make_runs(),
    paper_rows="2,000 rows, 200 times each",
    metric="accuracy",
    solved=0.99,
    chance=1 / 14,
    published=dict(zip(at(FILTERS), PUBLISHED.values(), strict=True)),
    published_at="published, at 131,072 tokens",
    above=[
        (at(["implicit"]), at(FILTERS[2:])),
        (at(["implicit"]), at(["ckconv"])),
    ],
    findings="""Within 16,000 rows the two filters that a network makes of the position, `implicit` and
`ckconv`, come furthest, and all others are behind them. In the paper `implicit` is far above `ckconv`,
unlike here, at 64 times the length.""",
    limits="""No filter has solved the task: twice the rows raise `s4d`, the free taps and `fno` by 0.21 to
0.35, so with more training they may solve it. The rates of `fno` and of the transfer function were chosen
by losses that hardly differ.""",
    paper={
        "claim": """Two layers of width 64 with feed-forward layers, 131,072 tokens, a vocabulary of 30, 200
epochs of 2,000 rows. The network of the implicit filters (64 wide, 16 frequencies, sine 14) is ours.""",
        "runs": paper_runs,
        "published": dict(zip(at(FILTERS), PUBLISHED.values(), strict=True)),
        "above": [(at(["implicit"]), at(FILTERS[1:]))],
    },
)

if __name__ == "__main__":
    main(STUDY)
