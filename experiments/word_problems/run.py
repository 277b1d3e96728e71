"""Products of permutations: which recurrences track a group that does not commute.

python experiments/word_problems/run.py [--workdir runs/word_problems] [--jobs 2] [--quick]
"""

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from study import Study, budget, main, model_runs, of_length

LENGTHS = (16, 32, 64)
HEADS = ["--model.pattern.0.n-heads", "2"]
NEGATIVE = [*HEADS, "--model.pattern.0.negative-eigenvalues"]
MODELS = {
    "attention": ("attention", []),
    "hyena": ("hyena", []),
    "mamba2": ("mamba2", []),
    "mamba3": ("mamba3", []),
    "hawk_gate": ("hawk", ["--model.pattern.0.sign", "gate"]),
    "gated_delta": ("gated_delta", HEADS),
    "gated_delta_negative": ("gated_delta", NEGATIVE),
    "kda": ("kda", HEADS),
    "kda_negative": ("kda", NEGATIVE),
    "gated_delta2": ("gated_delta2", HEADS),
    "gated_delta2_negative": ("gated_delta2", NEGATIVE),
    "rwkv7": ("rwkv7", HEADS),
    "delta_product": ("gated_delta", [*NEGATIVE, "--model.pattern.0.factors", "2"]),
}
OTHERS = [name for name in MODELS if name not in ("gated_delta", "gated_delta_negative", "delta_product")]
"""What the paper does not compare its product with."""
SEEDS = (0, 1, 2)
FLAGS = ["--model.max-len", str(LENGTHS[-1]), "--model.n-layers", "1", *budget(3000, 250, "accuracy=0.999")]

STUDY = Study(
    folder=Path(__file__).parent,
    title="Products of permutations beyond the training length",
    source="DeltaProduct (2502.10297), figure of the groups S3, S4, A5 and S5",
    claim="""The product of the permutations of three objects so far, at every position; trained on 16 tokens.
One factor of the delta rule is a reflection at strength 2, and the rotations among the permutations are
products of two: the paper's single layer tracks S3 with two factors a token and not with one. Here one layer
of width 64 with two heads; `delta_product` has the two factors, `_negative` strengths up to 2 and one factor,
`hawk_gate` a third gate in (-1, 1). Accuracies include the 16 positions of training. A model that knows only
whether a permutation is even names a third of the products.""",
    runs=model_runs("permutation_words", MODELS, SEEDS, FLAGS),
    metric="accuracy",
    solved=0.99,
    above=[
        (("model=delta_product",), ("model=gated_delta", "model=gated_delta_negative")),
        (("model=delta_product",), tuple(f"model={name}" for name in OTHERS)),
        (("model=mamba3",), ("model=mamba2",)),
    ],
    above_at=LENGTHS[-1],
    unit="permutations",
    evaluated="rows of 32 permutations, twice the training length",
    lengths={length: partial(of_length, length) for length in LENGTHS},
    x="length",
    findings="""With two factors all three seeds learn the group within 3,000 steps, two of them within
1,000, and keep it at four times the training length (0.97 to 1.00 at 64), as the paper has it. One factor
with strengths up to 2, and Hawk's `gate`, know more at the training length (0.50 to 0.70), but beyond it
about as much as evenness alone gives: the medians of 0.37 to 0.43 at 64 come to 0.33 to 0.35 without the 16
positions that are trained (one seed of gated DeltaNet 2 is near a sixth there). Of these, KDA knows more of
the trained positions than the rule with a scalar decay (0.70 against 0.50 at 16), which is most of its lead
at 32 (0.53 against 0.42; twice the rows raise neither): on positions 17 to 32 alone the one is at 0.33 to
0.40, the other at 0.33 to 0.34. Gated DeltaNet 2 with negative factors is unfinished. Models whose factors do
not reach -1 fall towards chance, a sixth, beyond the training length so far, attention, whose positions
beyond 16 are never trained, and Hyena (0.18 and 0.21 at 64) as the recurrences do, and so does RWKV-7 (0.22),
whose factors reach down to -0.45; one of its seeds got to 0.43 at 32. Mamba-3 is above Mamba-2 (0.39 against
0.28 at 32), and it falls later: on positions 17 to 32 it is at 0.30 to 0.33, about what even and odd give,
and on 17 to 64 at 0.17 to 0.21, where Mamba-2 is at chance. Rotations within fixed planes commute, which may
be why one layer does not keep this group; that does not explain why it also loses even and odd. KDA without
negative factors and gated DeltaNet 2 still gain 0.04 to 0.05 at 32 permutations from twice the rows.

Some searches could hardly tell rates apart, as those of attention (losses of 1.7222 to 1.7238) and of KDA
with negative factors; and Mamba-2's best, 0.063, is the largest of five. Of the seconds, those of KDA with
negative factors and of Mamba-3 say nothing: two of three runs took 3.5 to 11 times as long as the third, in
as many steps.""",
)

if __name__ == "__main__":
    main(STUDY)
