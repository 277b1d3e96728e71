"""Multi-query associative recall: accuracy against the size of the decoding state.

python experiments/mqar_state/run.py [--workdir runs/mqar_state] [--jobs 2] [--quick]
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from study import GATED_TAPS, Study, budget, main, task_runs

from hyena_jax.config import Experiment

STEPS = budget(4000, 200, until="accuracy=0.99")
WIDTHS = (16, 32, 64)
POINTS = {
    **dict.fromkeys(("attention", "rotary_attention", "conv_attention"), WIDTHS),
    **dict.fromkeys(("gated_delta", "kda", "gated_delta2", "rwkv7", "mamba2", "mamba3", "h3"), WIDTHS),
    **dict.fromkeys(("hyena", "hawk"), (*WIDTHS, 128)),
    "fastmax": (32, 64),
    **dict.fromkeys(("signed_hawk", "stu", "hyena_real_modal"), (64,)),
}
"""Widths of the model by mixer; the state grows with the width."""
ROTARY = ("--model.pattern.0.rotary-fraction", "1.0")
TWO_HEADS = ("--model.pattern.0.n-heads", "2")
OPTIONS = {
    **{name: (name, *TWO_HEADS) for name in ("gated_delta", "kda", "gated_delta2", "rwkv7")},
    **{name: (name, "--model.pattern.0.d-state", "16") for name in ("mamba2", "mamba3")},
    "rotary_attention": ("attention", "--no-model.learned-positions", *ROTARY),
    "conv_attention": ("hyena,attention", *GATED_TAPS, "--model.pattern.1.n-heads", "1"),
    "signed_hawk": ("hawk", "--model.pattern.0.sign", "gate"),
    "stu": ("fir", "--model.pattern.0.filter", "stu"),
    "hyena_real_modal": ("hyena", "--model.pattern.0.filter", "real_modal"),
}
"""The registered mixer and its flags, where these are more than a mixer's name."""
SEEDS = (0, 1, 2)
DECISIVE = {
    **dict.fromkeys(("attention", "hyena", "hawk", "h3", "rwkv7", "mamba2", "mamba3"), (64,)),
    **dict.fromkeys(("rotary_attention", "conv_attention"), (64,)),
    **dict.fromkeys(("gated_delta", "kda", "gated_delta2"), (16, 64)),
}
"""Widths with three seeds; all other points have one."""
HARDER = {
    **dict.fromkeys(("gated_delta", "kda", "gated_delta2"), (32, 64)),
    **dict.fromkeys(("attention", "rotary_attention", "conv_attention", "mamba2"), (64,)),
}
"""Widths at which a mixer also recalls 8 pairs in 64 tokens, with three seeds."""
WINDOWS = (4, 8, 16)
"""Windows of local attention, at width 64."""


def make_runs() -> dict[str, Experiment]:
    """All points of the figure."""
    runs: dict[str, Experiment] = {}
    for mixer, widths in POINTS.items():
        name, *own = OPTIONS.get(mixer, (mixer,))
        for width in widths:
            seeds = SEEDS if width in DECISIVE.get(mixer, ()) else (0,)
            flags = [*STEPS, *own, "--model.d-model", str(width)]
            runs |= task_runs(f"pattern={mixer},width={width}", "mqar", name, seeds, flags)
    longer = ("--model.max-len", "64", "--data.n-pairs", "8", "--data.seq-len", "64")
    for mixer, widths in HARDER.items():
        name, *own = OPTIONS.get(mixer, (mixer,))
        for width in widths:
            flags = [*STEPS, *own, "--model.d-model", str(width), *longer]
            runs |= task_runs(f"task=8 pairs,pattern={mixer},width={width}", "mqar", name, SEEDS, flags)
    for window in WINDOWS:
        flags = [*STEPS, "--model.pattern.0.window", str(window), "--model.pattern.0.n-heads", "1"]
        runs |= task_runs(f"pattern=local_attention,window={window}", "mqar", "local_attention", [0], flags)
    flags = [*STEPS, "--model.pattern.1.window", "8", "--model.pattern.1.n-heads", "1"]
    return runs | task_runs("pattern=griffin,window=8", "mqar", "hawk,local_attention", [0], flags)


def paper_runs() -> dict[str, Experiment]:
    """The published lengths and widths, 64 epochs of 100,000 rows."""
    runs: dict[str, Experiment] = {}
    for preset, steps in (("l64", 12_500), ("l128", 12_500), ("l256", 25_000)):
        for mixer in ("attention", "conv_attention", "gated_delta", "mamba2", "hyena", "hawk", "h3"):
            name, *own = OPTIONS.get(mixer, (mixer,))
            for width in (64, 128, 256, 512):
                group, flags = f"task={preset},pattern={mixer},width={width}", ["--model.d-model", str(width)]
                flags += [*own, *budget(steps, steps // 20, "accuracy=0.99")]
                seeds = SEEDS if width == 64 else (0,)
                runs |= task_runs(group, f"mqar/{preset}", name, seeds, flags)
    return runs


def searched_at(group: str) -> str:
    """Rates are searched once for each mixer, at width 64 and 4 pairs; those of attention at each setting."""
    if "pattern=attention" in group or "pattern=rotary_attention" in group:
        return group
    return re.sub(r"width=\d+", "width=64", group.removeprefix("task=8 pairs,"))


STUDY = Study(
    folder=Path(__file__).parent,
    title="Recall of 4 and of 8 pairs against the size of the state (MQAR)",
    source="Zoology (2312.04927), figure 2, and Based (2402.18668), figure 2",
    claim="""Attention keeps all keys and values and recalls them at every width of the papers, 64 and more;
gated convolutions and recurrences need a width, and with it a state, that grows with what is to be
remembered. `rotary_attention` has rotary positions, `conv_attention` a gated convolution of four taps before
attention; `signed_hawk` is Hawk with `sign` gate, `hyena_real_modal` Hyena with filters of real poles, `stu`
a convolution with the spectral filter, without gates. The papers show figures only, at vocabulary 8,192 and
up to hundreds of tokens; here 4 pairs, of 31 keys and 32 values, in 32 tokens, which two CPU cores learn. One
of the 4 values at random is 0.25. Delta rules with a decay or a strength for each channel are expected at or
above the one with a scalar of each, also with 8 pairs in 64 tokens.""",
    runs=make_runs(),
    searched_at=searched_at,
    paper_rows="100,000 rows, 64 times each",
    metric="accuracy",
    solved=0.99,
    above=[
        (("pattern=attention,width=64",), ("pattern=hyena,width=64", "pattern=hawk,width=64")),
        *(
            ((setting.format(attention),), (setting.format("mamba2"),))
            for setting in ("pattern={},width=16", "pattern={},width=32", "task=8 pairs,pattern={},width=64")
            for attention in ("attention", "rotary_attention", "conv_attention")
        ),
        (
            ("pattern=gated_delta,width=32",),
            (
                *("pattern=hawk,width=128", "pattern=signed_hawk,width=64"),
                *("pattern=griffin,window=8", "pattern=hyena_real_modal,width=64"),
            ),
        ),
        *(
            ((setting.format(mixer),), (setting.format("gated_delta"),))
            for setting in ("pattern={},width=16", "task=8 pairs,pattern={},width=32")
            for mixer in ("kda", "gated_delta2")
        ),
    ],
    x="state",
    findings="""At width 64 attention solves the recall of 4 pairs within 600 steps (with rotary positions
within 200), the delta rules within 400, and Mamba-2 and Mamba-3 within 1,200. H3 gets to 0.90 to 0.94 and
still gains. So do Hawk (0.46 to 0.98 over seeds) and Hyena (0.28 to 0.69), whose median seeds get to 0.94 and
0.50 with twice the steps; Hyena of width 128 is at 0.94 (one seed; 0.97 with twice the steps). Hyena's rate
was chosen by losses of 2.08 to 3.27, above that of a guess among the four values (1.39): before anything was
recalled. With real poles for its filter instead of the implicit one, Hyena gets to 0.982, and to 0.988 with
twice the steps (4 of 2,048 answers short of solving it), in a state of constant size (one seed), at 0.02, a
rate that was not tried with the implicit filter: so filter and rate were not separated. Signed Hawk, in
Hawk's 2 KiB, is at 0.93 and solves the task at step 6,600 of a schedule of 8,000 (one seed). Attention to a
window of 16 tokens solves it, to 8 it stays at 0.77, and to 4 at 0.42 (one seed each). Fastmax (0.26 and
0.27, one seed each), which keeps moments of the keys, is near a guess, at a rate that, like H3's, was chosen
by losses above one; the spectral filter (`stu`, 0.27, and 0.30 with twice the steps) has a rate that its
search could hardly tell from others.

Seeds say less than they seem to: the same ones at the same rates ended elsewhere on another machine of this
kind, though their first 20 losses agree to 5e-7. The cause was not looked for.

At width 16 RWKV-7 (1.1 KiB of state, one seed), the gated delta rule and KDA (2.1 KiB, three seeds) solve it;
gated DeltaNet 2 gets to 0.97 to 0.99, and its median seed solves it at step 2,200 of a schedule of 8,000.
Mamba-2 of this width stays at 0.27 over a schedule of 4,000 steps, and solves it at step 3,800 of a schedule
of 8,000: the number of rows did not decide this, but the rate, which falls more slowly there, or chance (one
seed).

Attention alone does not recall 4 pairs at widths 16 and 32, where the papers do not try it, nor 8 pairs at
width 64: it ends near chance among the values shown, with learned positions and with rotary ones, in one
seed at widths 16 and 32; twice the steps add nothing. Its rates are the best of three or four by the loss at
1,000 steps, before anything is recalled. `conv_attention`, whose first layer is a gated convolution of four
taps and whose second is attention, without positions, solves all of these: 4 pairs within 1,000 steps at
widths 16 and 32 (one seed each), and within 200 at 64, and 8 pairs within 600. Keys stand before their
values, and the delta rules and Mamba-2 read their neighbours through short filters, too. Which of three
differences matters, the convolution, the missing positions, or one layer of attention for two, was not
tested; and Hyena and Hawk, which have short filters as well, are unfinished. In the released configurations
of Based, attention comes after a gated convolution as well. The paper's attention solves 16 pairs without one
at width 64, in 25 times as many rows. KDA was expected above the scalar rule, and these settings are too easy
to show it.

The rate changes the speed: in 1,000 steps Mamba-2 of width 64 reaches 0.79 at 0.002, the rate of
`tasks:mqar`, and 1.00 at 0.0063. How the rate is searched matters, too: after 1,000 steps H3's accuracy is
near chance at most rates, and the one that was highest then left it at 0.38 after 4,000 (the history of this
page); the one of the lowest loss leads to 0.92. Points with one seed may be lucky or unlucky: Hawk and H3 of
width 32 (0.27) are below those of width 16 (0.45), at the rate of width 64, which says nothing of the
state.""",
    paper={
        "claim": """4, 8 and 16 pairs of 8,192 ids in 64, 128 and 256 tokens; two layers, as in the released
configuration since a correction of May 2024 (four before, except for attention), of width 64 to 512 without
feed-forward layers, 64 epochs of 100,000 rows. Of the mixers only attention, Hyena and H3 are the paper's.
Rates from 0.0006 on, where the paper takes the best of four from 0.0001 to 0.01, no dropout, and one seed at
widths above 64 are ours.""",
        "runs": paper_runs,
        "above": [
            ((f"task={preset},pattern=attention,width=64",), (f"task={preset},pattern=hyena,width=64",))
            for preset in ("l64", "l128", "l256")
        ],
    },
)

if __name__ == "__main__":
    main(STUDY)
