"""The six tasks of MAD at a size for two CPU cores, by mixer.

python experiments/mad/run.py [--workdir runs/mad] [--jobs 2] [--quick]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from study import GATED_TAPS, Study, budget, main, task_runs

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

RECALLS = ("recall", "noisy_recall", "fuzzy_recall")
LONG = MIXERS[:3]
"""The published mixers, which are trained longer on recall, from three seeds."""
LONGER = budget(4000, 250, "macro_accuracy=0.995")
ATTENTION = (
    *("--model.pattern.0.n-heads", "16", "--model.pattern.0.rotary-fraction", "1.0"),
    "--no-model.learned-positions",
)
"""The published heads and positions."""
CONV_ATTENTION = (*GATED_TAPS, "--model.pattern.1.n-heads", "16")
"""A gated convolution of four taps in the first layer, attention without positions in the second."""


def make_runs() -> dict[str, Experiment]:
    """Every mixer on every task, one seed; the recalls by the published mixers longer, three."""
    runs: dict[str, Experiment] = {}
    for task in PUBLISHED:
        for mixer in MIXERS:
            flags, seeds = ATTENTION if mixer == "attention" else (), (0,)
            if task in RECALLS and mixer in LONG:
                flags, seeds = (*flags, *LONGER), (0, 1, 2)
            runs |= task_runs(f"task={task},pattern={mixer}", f"mad_{task}", mixer, seeds, flags)
    group, flags = "task=recall,pattern=conv_attention", [*CONV_ATTENTION, *LONGER]
    return runs | task_runs(group, "mad_recall", "hyena,attention", (0, 1, 2), flags)


RECIPE = (
    *("--model.d-model", "128", "--model.ffn", "swiglu", "--model.d-ff", "352", "--no-model.ffn-bias"),
    *("--optimizer.learning-rate", "0.0005"),
)
"""352 is two thirds of four times the width, rounded up to sixteens."""


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
    claim="""The tasks by which MAD ranks architectures before they are trained at scale: recall (the value of
a repeated key), noisy recall (with noise between the pairs), fuzzy recall (keys and values of one to three
ids), memorisation (values that are the same in all rows), selective copying, and compression (giving back all
ids of a row from the output at the last). Macro accuracy is the mean of each class's. Published: means over a
grid of this setting and harder ones, the best of six optimizer settings, 128 wide; here each task is at or
below its easiest setting (recall in 64 tokens for 128, selective copying in 64 for 256), 64 wide, 1,000
steps; attention, `conv_attention`, Hyena and the gated delta rule have up to 4,000 on the recalls. Attention
has 16 heads and rotary positions, as published (of 4 numbers each, for 8 there); `conv_attention` has a gated
convolution of four taps in its first layer, and attention without positions in its second. The published
values next to `gated_delta` are those of DeltaNet, which has no decay.""",
    runs=make_runs(),
    paper_rows="12,800 rows (memorisation: 256), 200 times each",
    metric="macro_accuracy",
    solved=0.99,
    published={
        f"task={task},pattern={mixer}": value
        for task, values in PUBLISHED.items()
        for mixer, value in zip(LONG, values, strict=True)
    },
    findings="""Recall and noisy recall in three seeds each: the gated delta rule solves both within 250
steps, and Hyena recall within 2,000 to 3,500 and noisy recall within 2,750 to 3,750. On recall attention with
the published heads and positions is at 0.45 to 0.49 after 256,000 rows, and its median seed at 0.59 after
512,000: it still gains, and the published 0.94 is a mean over a grid whose baseline takes 12,800 rows 200
times, at another size. With a gated convolution of four taps in place of its first layer, and no positions,
it solves the task within 500 to 1,000 steps, in three seeds of three, with about as many parameters. The
searches have four rates in common, 0.00032 to 0.01; at each of them `conv_attention` has the lower loss, as
0.10 against 1.23 at 0.0032. Keys stand right before their values, and Hyena and the delta rules, too, read
their neighbours through short filters. On noisy recall one seed of attention solves the task at step 1,750,
and the two others are at 0.42 and 0.45 after 4,000 (twice the steps were not tried): attention without a
convolution can begin to recall, but not in every seed within these rows. Whether the convolution or the
missing positions help `conv_attention` was not run apart. So attention is below Hyena so far, the other way
round than in the published table, and unfinished: these runs do not show where its other seeds end.

KDA, gated DeltaNet 2 and RWKV-7 solve recall, noisy recall and selective copying, and Mamba-3 both recalls.
H3 and Hawk are at 0.97 and 0.98 on recall and at 0.92 and 0.82 on noisy recall after 1,000 steps (Hyena had
up to 4,000). The rate matters much there: in the searches the loss falls from 1.68 (H3) and 1.69 (Hawk) at
0.001 to 1.45 at 0.01 and 1.15 at 0.032, the largest rate tried; with noise from 1.80 to 1.69 and 1.71, both
at 0.0032. Selective copying is solved by H3 and the gated delta rule, too; Hyena is at 0.95, and Hawk at 0.62
at the largest rate tried (twice the steps not tried). On selective copying Mamba-3 is unfinished: 0.73 after
1,000 steps at 0.032, the largest rate tried, where another seed had 0.95 after 250; no smaller rate was
trained as long. Attention has 0.96 there, and solves it with twice the steps. Memorisation is solved by all.
On fuzzy recall all are unfinished: after 256,000 rows the gated delta rule is at 0.63 to 0.78, Hyena at 0.25
to 0.30 and attention at 0.26, and twice the steps were not tried; the others have a quarter of these rows
(0.22 to 0.72). Attention's rate, 0.01, was found over a schedule of 1,000 steps, and may be too high for
4,000. The search hardly told the gated delta rule's rates apart (losses of 2.056 at 0.00032, which was taken,
and 2.067 at 0.001); the other was not trained in full. On compression (0.20 to 0.34) all are unfinished but
the gated delta rule, at 0.23: twice the steps take attention's from 0.26 to 0.40, and H3's from 0.28 to 0.42.
Of the published values nine are at finished groups, of which eight are solved: no correlation can be taken
from these. Recall by attention, `conv_attention`, Hyena and the gated delta rule, and noisy and fuzzy recall
by the first and the latter two have three seeds, all else has one, so that differences of a few hundredths
mean nothing there. The seconds of noisy and fuzzy recall, and of the groups that were made last, were
measured while other programs ran, and two of Hyena's runs of noisy recall were paused for half an hour.""",
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
