"""The six tasks of MAD at a size for two CPU cores, by mixer.

python experiments/mad/run.py [--workdir runs/mad] [--jobs 2] [--quick]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from study import Study, budget, main, task_runs

from hyena_jax.config import Experiment

PUBLISHED = {
    "compression": (0.516, 0.452, 0.422),
    "fuzzy_recall": (0.298, 0.079, 0.357),
    "recall": (0.941, 0.817, 1.000),
    "memorisation": (0.852, 0.895, 0.528),
    "noisy_recall": (0.868, 0.788, 1.000),
    "selective_copying": (0.996, 0.931, 1.000),
}
"""Accuracy of attention, Hyena and DeltaNet, means over a grid of harder settings than here, by task."""
MIXERS = ("attention", "hyena", "gated_delta", "hawk", "h3", "kda", "gated_delta2", "rwkv7", "mamba3")


def make_runs() -> dict[str, Experiment]:
    """Every mixer on every task, one seed."""
    runs: dict[str, Experiment] = {}
    for task in PUBLISHED:
        for mixer in MIXERS:
            runs |= task_runs(f"task={task},pattern={mixer}", f"mad_{task}", mixer, [0])
    return runs


RECIPE = (
    *("--model.d-model", "128", "--model.ffn", "swiglu", "--model.d-ff", "352", "--no-model.ffn-bias"),
    *("--optimizer.learning-rate", "0.0005"),
)
"""352 is two thirds of four times the width, rounded up to sixteens."""
ATTENTION = (
    *("--model.pattern.0.n-heads", "16", "--model.pattern.0.rotary-fraction", "1.0"),
    "--no-model.learned-positions",
)
"""The published heads and positions."""


def paper_runs() -> dict[str, Experiment]:
    """Every mixer on every task at the baseline of the paper's grid."""
    runs: dict[str, Experiment] = {}
    for task in PUBLISHED:
        steps = 400 if task == "memorisation" else 20_000  # 200 epochs: it has 256 rows, all others 12,800
        training = budget(steps, steps // 20, "macro_accuracy=0.995")
        for mixer in MIXERS:
            flags = [*RECIPE, *training, *(ATTENTION if mixer == "attention" else ())]
            runs |= task_runs(f"task={task},pattern={mixer}", f"mad_{task}/baseline", mixer, (0, 1, 2), flags)
    return runs


STUDY = Study(
    folder=Path(__file__).parent,
    title="MAD's six tasks by mixer",
    source="MAD (Poli et al. 2024, 2403.17844); the table in 2406.06484",
    claim="""Recall, noisy and fuzzy recall, memorisation, selective copying and compression, by which MAD
ranks architectures before they are trained at scale. Published: means over harder settings, the best of six
optimizer settings, 128 wide; here each task is at or below its easiest setting (recall in 64 tokens for 128,
selective copying in 64 for 256), 64 wide, 1,000 steps, most at one learning rate. The published values next
to `gated_delta` are those of DeltaNet, which has no decay.""",
    runs=make_runs(),
    paper_rows="12,800 rows, 200 times each",
    metric="macro_accuracy",
    solved=0.99,
    published={
        f"task={task},pattern={mixer}": value
        for task, values in PUBLISHED.items()
        for mixer, value in zip(MIXERS[:3], values, strict=True)
    },
    findings="""The gated delta rule is level with the first on four of the six tasks. On fuzzy recall it has
0.53 at a rate that was not searched, and KDA 0.72 at one that was; on compression it is eighth of nine, where
little is between them. In the published table DeltaNet is first on four, of the three mixers that we compare.
Recall, noisy recall, memorisation and selective copying are each solved by some mixers; on fuzzy recall (0.17
to 0.72) and compression (0.20 to 0.27) all are unfinished. Attention is far below its published recall (0.34
against 0.94) after 64,000 rows; longer runs were not tried, and nothing is known of where it ends. One seed
each, so that differences of a few hundredths mean nothing.

KDA, the gated delta rule 2 and RWKV-7, whose learning rates were searched, solve recall, noisy recall and
selective copying, as the gated delta rule does. Mamba-3 solves both recalls. On selective copying it is
unfinished: 0.73 after 1,000 steps at 0.032, the largest rate tried, where another seed had 0.95 after 250; no
smaller rate was trained as long. Unfinished groups were not trained on twice the rows.""",
    paper={
        "claim": """The baseline of MAD's grid, its easiest setting: two mixers, each with a feed-forward
layer (SwiGLU), of width 128, 200 epochs of 12,800 rows (memorisation: of 256); attention with 16 heads and
rotary positions. The published values are means over the whole grid. Here a rate is searched and the weight
decay is 0.1, where MAD takes the best of three rates and two decays; float32 stands for bfloat16, and Hyena's
projections are not widened by four. Of the mixers attention and Hyena are the paper's.""",
        "runs": paper_runs,
    },
)

if __name__ == "__main__":
    main(STUDY)
