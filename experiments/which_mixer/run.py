"""Which mixer should I use? One page from the results that the other experiments have committed.

python experiments/which_mixer/run.py
"""

import json
import runpy
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import reproduce
from pages import Group, groups_of
from study import results_of

from hyena_jax.sweeps.compare import KIB, markdown
from hyena_jax.system.files import write_text

HERE = Path(__file__).parent
RESULTS = HERE.parent
CONTEXT, LAYERS = "4096", 4
"""The context and the layers of the models in generation/tokens.json."""
MIXERS = {
    "attention": "keeps all keys and values; the baseline",
    "local_attention": "what lies within a window",
    "hyena": "language at a cost near linear in the length; fixed delays",
    "gated_hyena": "language in small budgets; decodes faster than attention",
    "h3": "as Hyena, with state-space filters and a constant state",
    "s4d": "fixed linear memories: copying at a fixed delay",
    "hawk": "language with a tiny constant state",
    "signed_hawk": "parity and other states that flip",
    "gated_delta": "recall in a constant state, by replacing what a key held",
    "kda": "as `gated_delta`, with a decay for each channel",
    "gated_delta2": "as `kda`, with separate strengths of erasing and writing; language",
    "rwkv7": "recall in a small state",
    "mamba2": "language with a large constant state",
    "mamba3": "as `mamba2`, with rotations and a trapezoidal step, without a short convolution",
    "fastmax": "attention's form in linear time",
    "aft_conv": "attention-free mixing with biases inside a window",
}
"""What each is for, in words; the numbers are read from results."""
NAMES = {
    "signed_hawk": {"state_tracking": "hawk_gate", "word_problems": "hawk_gate"},
    "attention": {"string_copying": "hard_alibi"},
}
"""Where a study has another name for a mixer, or a form of it that suits the task."""
LETTERS = 48
"""The length of the strings to copy, of which the longest in training have 24."""


def load(path: str) -> dict[str, Any]:
    """The results in a file of the experiments."""
    return json.loads((RESULTS / path).read_text(encoding="utf-8"))


def study(name: str) -> dict[str, Group]:
    """The groups of a study."""
    found = reproduce.load(name)
    return groups_of(found, results_of(found))


def shown(group: Group | None, length: int | None = None) -> str:
    """A group's median; in brackets if more training may raise it, empty if there is none."""
    if group is None:
        return ""
    value = f"{group.median(length):.2f}"
    return value if group.is_finished else f"({value})"


def values(group: Group, length: int) -> str:
    """The least and the most over seeds at a test length."""
    return f"{min(group.at(length)):.2f} to {max(group.at(length)):.2f}"


def rows() -> list[tuple[str, list[str]]]:
    """The line of each mixer."""
    variants, decoding = (
        load("shakespeare_cpu/results.json")["variants"],
        load("generation/tokens.json")["mixers"],
    )
    studies = {
        name: study(name)
        for name in ("mqar_state", "state_tracking", "word_problems", "string_copying", "mad")
    }

    def of(mixer: str, name: str, group: str) -> Group | None:
        own = NAMES.get(mixer, {}).get(name, mixer)
        return studies[name].get(group.format(own))

    def relative(value: float | None, reference: float) -> str:
        return "" if value is None else f"{value / reference:.2f}"

    step = variants["attention"]["ms_per_step"]["median"]
    speed = decoding["attention"][CONTEXT]["tokens_per_second"]
    found = []
    for mixer, job in MIXERS.items():
        variant, decoded = variants.get(mixer), decoding.get(mixer, {}).get(CONTEXT)
        loss = (
            None if variant is None else statistics.fmean(run["validation_loss"] for run in variant["runs"])
        )
        cells = [
            job,
            "" if loss is None else f"{loss:.3f}",
            shown(of(mixer, "mqar_state", "pattern={},width=64")),
            shown(of(mixer, "string_copying", "model={}"), LETTERS),
            shown(of(mixer, "state_tracking", "model={}"), 256),
            shown(of(mixer, "word_problems", "model={}"), 64),
            shown(of(mixer, "mad", "task=compression,pattern={}")),
            "" if decoded is None else f"{decoded['state_bytes'] / LAYERS / KIB:,.0f}",
            "" if "ms_per_step" not in (variant or {}) else relative(variant["ms_per_step"]["median"], step),
            "" if decoded is None else relative(speed, decoded["tokens_per_second"]),
        ]
        found.append((f"`{mixer}`", cells))
    return found


def page() -> str:
    """The page, in Markdown."""
    variants = load("shakespeare_cpu/results.json")["variants"]
    loss = {
        name: statistics.fmean(run["validation_loss"] for run in variant["runs"])
        for name, variant in variants.items()
    }
    of_mamba2 = {
        name: variants[name]["ms_per_step"]["median"] / variants["mamba2"]["ms_per_step"]["median"]
        for name in ("signed_hawk", "gated_hyena")
    }
    mqar, parity, words, copying, longer = map(
        study, ("mqar_state", "state_tracking", "word_problems", "string_copying", "extrapolation")
    )
    small = {name: mqar[f"pattern={name},width=16"] for name in ("gated_delta", "kda", "rwkv7")}
    attention, behind = mqar["pattern=attention,width=64"], mqar["pattern=conv_attention,width=16"]
    product = words["model=delta_product"]
    negative, turned = (
        ", ".join(
            shown(found[f"model={name}_negative"], length) for name in ("gated_delta", "kda", "gated_delta2")
        )
        for found, length in ((parity, 256), (words, 64))
    )
    hawk = {task: longer[f"task={task},model=hawk"] for task in ("induction", "selective_copying")}
    kept = [group.median(256) for name, group in longer.items() if name.endswith("attention")]
    gained = runpy.run_path(str(RESULTS / "signed" / "run.py"))["gains"](load("signed/results.json"))
    columns = ("for", "language", "recall", "copying", "parity", "permutations", "compression", "state, KiB")
    table = "\n".join(markdown("mixer", (*columns, "step", "token"), rows()))
    return f"""# Which mixer should I use?

`python experiments/which_mixer/run.py` makes this page from the results of the other experiments. All of them
are small models on two CPU cores: take the numbers as hints, and read their pages.

{table}

**Numbers in brackets are unfinished**: more training may raise them.

- language: validation loss on [Tiny Shakespeare](../shakespeare_cpu/README.md) in nats, lower is better; 0.8M
  to 0.9M parameters, a context of 64, one learning rate for all (half of it for the state-space
  parameters of `h3` and `s4d`), which was searched for none; attention there has learned positions, and local
  attention rotary ones
- recall: accuracy of [four pairs in 32 tokens](../mqar_state/README.md) at width 64; guessing
  one of the values shown gives 0.25; `fastmax` and `signed_hawk` in one seed. At eight pairs attention alone
  ends at {shown(mqar["task=8 pairs,pattern=attention,width=64"])} in this budget
- copying: letters of strings of [{LETTERS}, trained on 3 to 24](../string_copying/README.md), of attention
  with Hard-ALiBi; 0.04 at random
- parity: of [256 tokens, trained on 3 to 40](../state_tracking/README.md); permutations: of [64, trained on
  16](../word_problems/README.md); one half and a sixth at random (evenness alone gives a third
  of the permutations); positions of training count, too; attention has learned positions in both, which are
  not trained beyond these lengths; both of delta rules without `negative_eigenvalues` (with them
  `gated_delta`, `kda` and `gated_delta2` have {negative}, and {turned})
- compression: [MAD's task](../mad/README.md), its macro accuracy; one seed each, and all but one
  unfinished: no ranking
- state: KiB a layer of width 128 at 4,096 tokens
- step, token: time of a training step at a context of 64, and of a decoded token at 4,096, relative to
  attention, lower is faster ([decoding](../generation/README.md)); two cores of an AMD EPYC, JAX 0.12.0.1

Columns in a row come from models of different sizes: state and token are of a mixer's default options, such
as 128 numbers a channel of Mamba-2 and a window of 1,024; language and step of 64 numbers and a window of 32;
recall and parity of 16 numbers, copying and permutations of 128. `fastmax` has its quadratic form in
language and step.

## In words

- If you need **recall in a constant state**, take `gated_delta` or `kda`: they have solved the recall of four
  pairs (0.99 of them) with {small["kda"].state_bytes / KIB:.1f} KiB in both layers together
  ({shown(small["gated_delta"])} and {shown(small["kda"])}, three seeds each), and `rwkv7`, in one seed, with
  {small["rwkv7"].state_bytes / KIB:.1f} ({shown(small["rwkv7"])}). Attention did so with
  {attention.state_bytes / KIB:.0f} ({shown(attention)}), and behind a gated convolution of four taps with
  {behind.state_bytes / KIB:.0f} ({shown(behind)}, one seed).
- If you need **the lowest loss in a small budget** of language, take, in this recipe, `mamba2`
  ({loss["mamba2"]:.3f} nats), or `signed_hawk` ({loss["signed_hawk"]:.3f}) and `gated_hyena`
  ({loss["gated_hyena"]:.3f}), whose steps take {of_mamba2["signed_hawk"]:.2f} and
  {of_mamba2["gated_hyena"]:.2f} of its time; attention has {loss["attention"]:.3f}. A context of 64 says
  little about larger models.
- If you need to **track a state that flips**, take `signed_hawk`. Its factors may be negative, and it keeps
  parity to 256 tokens ({shown(parity["model=hawk_gate"], 256)}), where `hawk` is at
  {shown(parity["model=hawk"], 256)}.
- If the states are those of **a group that does not commute**, try `gated_delta` with `negative_eigenvalues`
  and `factors` 2: {sum(value >= product.solved for value in product.last)} of {product.n_runs} seeds learned
  the permutations of three objects (an earlier version of the code: 1 of 3); at four times the training
  length their median is {shown(product, 64)}.
- If you need to **copy long strings**, take attention with `hard_alibi_heads`
  ({shown(copying["model=hard_alibi"], LETTERS)} of {LETTERS} letters, each predicted after the correct ones
  before it). With a constant state `gated_delta` has {values(copying["model=gated_delta"], LETTERS)} over
  seeds, `mamba2` {values(copying["model=mamba2"], LETTERS)}, and `hawk`, which is unfinished,
  {values(copying["model=hawk"], LETTERS)} so far.
- If inputs are **longer than in training**, try `hawk`, of the four mixers that were tried
  (none with a matrix as memory; of strings see above): at eight times
  the length it keeps the induction head ({values(hawk["induction"], 256)} over seeds) and selective copying
  ({values(hawk["selective_copying"], 256)}; 0.34 at another rate and schedule), where attention, with learned
  positions or rotary ones, has medians of {min(kept):.2f} to {max(kept):.2f} ([32 tokens in
  training](../extrapolation/README.md)). Parity it has not learned even at the training length, and long
  strings are unfinished: see above.
- If you need **a small state while decoding**, take `hawk` for language (2 KiB a layer), or `signed_hawk`,
  whose state is of the same size, and `rwkv7` or `gated_delta` of a small width for recall. `attention` and
  long convolutions keep all inputs; whether training learns to use them is another matter.

## A finding of our own

**The third gate accounts for most of what helps the signed Hawk on language; no help of the sign is seen
beyond the noise of three seeds** (up to about 0.01 nats is not excluded). Factors that
reach down to -1 track parity, and on Tiny Shakespeare the signed Hawk also ended 0.03 nats lower than Hawk,
in a state of the same size: the sign seemed to help on language, too. [Runs that could refute
this](../signed/README.md) did: a third gate that cannot change the sign gains as much as one that can
(`third_gate_hawk`), and Hawk with the wider initial radii of `shifted` gains about as much as `shifted`
(`wide_hawk`). Each model has the rate that was best in a search of one seed on Shakespeare; `_at_0.002` has
that of the signed form, and `wide_hawk` that of `shifted_hawk`. By how much the first ends lower (nats; means
of three seeds, and the least and the most between any two of them):

{gained}

All are models of 0.9M parameters after 2,000 steps; for larger ones nothing is known.

The papers are in the [list of mixers](../../hyena_jax/mixers/README.md). Not all mixers have a line: `fir`,
`stu`, other forms of AFT and of Hyena, and patterns of several mixers, such as `griffin`, were trained on
[Tiny Shakespeare](../shakespeare_cpu/README.md), and on little else.
"""


if __name__ == "__main__":
    write_text(HERE / "README.md", page())
