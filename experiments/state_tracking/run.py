"""Parity: which recurrences track a state, and how far beyond their training length.

python experiments/state_tracking/run.py [--workdir runs/state_tracking] [--jobs 2] [--quick]
"""

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from study import Study, budget, main, model_runs, of_length

LONGEST = 256


def models(n_heads: int) -> dict[str, tuple[str, list[str]]]:
    """Mixers and their flags by name; `n_heads` is that of the delta rules."""
    heads = ["--model.pattern.0.n-heads", str(n_heads)]
    negative = [*heads, "--model.pattern.0.negative-eigenvalues"]
    shifted = ["--model.pattern.0.sign", "shifted", "--model.pattern.0.min-radius", "0.3"]
    return {
        "hawk": ("hawk", []),
        "hawk_shifted": ("hawk", shifted),
        "hawk_gate": ("hawk", ["--model.pattern.0.sign", "gate"]),
        "gated_delta": ("gated_delta", heads),
        "gated_delta_negative": ("gated_delta", negative),
        "kda": ("kda", heads),
        "kda_negative": ("kda", negative),
        "gated_delta2": ("gated_delta2", heads),
        "gated_delta2_negative": ("gated_delta2", negative),
        "rwkv7": ("rwkv7", heads),
        "mamba2": ("mamba2", ["--model.pattern.0.d-state", "16"]),
        "mamba3": ("mamba3", ["--model.pattern.0.d-state", "16"]),
        "hyena": ("hyena", []),
        "attention": ("attention", []),
    }


DELTA_NET = {
    f"delta{kind}": (
        "gated_delta",
        [*models(n_heads=4)[f"gated_delta{kind}"][1], "--no-model.pattern.0.decay"],
    )
    for kind in ("", "_negative")
}
"""The gated delta rule without its decay."""
UNSIGNED = ("hawk", "gated_delta", "kda", "gated_delta2", "mamba2", "hyena", "attention")
SIGNED = ("hawk_shifted", "hawk_gate", "gated_delta_negative", "kda_negative", "gated_delta2_negative")
SEEDS = (0, 1, 2)
FLAGS = ["--model.max-len", str(LONGEST), *budget(2000, 500)]
RECIPE = [
    *("--model.n-layers", "2", "--model.d-model", "128", "--optimizer.learning-rate", "0.001"),
    *("--optimizer.schedule.warmup-steps", "2000", "--optimizer.schedule.final-fraction", "0.001"),
    *("--model.max-len", str(LONGEST), *budget(20_000, 1000)),
]

SHOWN = (
    *("hawk_gate", "hawk_shifted", "gated_delta_negative", "kda_negative", "mamba3", "hawk", "gated_delta"),
    *("mamba2", "rwkv7", "attention"),
)

STUDY = Study(
    folder=Path(__file__).parent,
    title="Parity beyond the training length",
    source="Unlocking State-Tracking in Linear RNNs Through Negative Eigenvalues (2411.12537)",
    message="Factors down to -1 track parity beyond training, factors in (0, 1) guess",
    claim="""The parity of the bits so far, at every bit; trained on 3 to 40 tokens. A recurrence whose
factors lie in (0, 1) cannot flip its state's sign, nor track parity at every length (proved in the paper);
one whose factors reach down to -1 can. The paper trains two layers of DeltaNet; here one layer of width 32.
`hawk_shifted` has 2a - 1 for Hawk's factor a, `hawk_gate` a third gate in (-1, 1); `_negative` are delta
rules with beta up to 2; RWKV-7's factors reach down to -0.45, and Mamba-3 rotates its keys: half a turn
flips their sign.""",
    runs=model_runs("parity", models(n_heads=2), SEEDS, FLAGS),
    paper_rows="5,120,000 rows",
    metric="accuracy",
    solved=0.99,
    chance=0.5,
    above=[
        (("model=gated_delta_negative",), ("model=gated_delta", "model=mamba2")),
        (tuple(f"model={name}" for name in SIGNED), tuple(f"model={name}" for name in UNSIGNED)),
        (("model=mamba3",), ("model=mamba2",)),
    ],
    above_at=64,
    unit="bits",
    n_scored=lambda length: length - 1,
    evaluated="the 24 bits that follow the 39 of training, computed from accuracies at two lengths (standard"
    " error up to 0.01)",
    lengths={length: partial(of_length, length) for length in (40, 64, 128, 256)},
    x="length",
    shown=tuple(f"model={name}" for name in SHOWN),
    drawn=("hawk_gate", "gated_delta_negative", "kda_negative", "mamba3", "hawk", "mamba2", "attention"),
    findings="""All five recurrences whose factors reach down to -1 get every one of the 24 bits beyond
training right in every seed. To bit 255 `hawk_gate` does so in all seeds and `hawk_shifted` in one; the delta
rules stay close, but for `kda_negative` (0.32 to 0.77). Two of Mamba-3's seeds get 63 bits right; the third
guesses beyond training. All others guess there; so does the paper's DeltaNet with factors in (0, 1) (0.02,
chance 0), in forty times the rows.""",
    limits="""Rates are chosen on rows of 40 to 64 tokens, the lengths that the claims are scored on.
Attention has learned positions, of which only the first 39 are trained. More rows may bring RWKV-7 to a
solution, one seed of which knows 0.77 of the first 39 bits.""",
    paper={
        "claim": """Two layers of width 128, delta rules with four heads, 20,000 steps of 256 rows, whose last
bit alone is scored; accuracy is not scaled to chance. The first two are DeltaNet itself; all others, float32
for bfloat16, and clipping are ours. Mamba with factors from -1 to 1 and the two xLSTMs have no
counterpart.""",
        "runs": partial(model_runs, "parity/published", {**DELTA_NET, **models(n_heads=4)}, SEEDS, RECIPE),
        "evaluated": "rows of 40 to 256 tokens, each a bit but the last",
        # The last bit alone is scored.
        **{"n_scored": None, "above_at": None, "unit": "tokens"},
        "above": [(("model=delta_negative",), ("model=delta",))],
    },
)

if __name__ == "__main__":
    main(STUDY)
