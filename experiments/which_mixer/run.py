"""Which mixer should I use? One page from the results that the other experiments have committed.

python experiments/which_mixer/run.py
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import reproduce
from pages import Group, groups_of
from study import results_of

from hyena_jax.comparison.table import KIB, markdown
from hyena_jax.files import write_text

HERE = Path(__file__).parent
RESULTS = HERE.parent
CONTEXT, LAYERS = "4096", 4
"""The context and the layers of the models in generation/tokens.json."""
MIXERS = {
    "attention": "exact recall of everything in the context; the baseline",
    "local_attention": "what lies within a window, beside a recurrence",
    "hyena": "language at a cost near linear in the length; fixed delays",
    "gated_hyena": "language in small budgets, cheap steps",
    "h3": "as Hyena, with state-space filters and a constant state",
    "s4d": "fixed linear memories: copying, filtering of signals",
    "hawk": "language with a tiny constant state; longer inputs than in training",
    "signed_hawk": "parity and other states that flip",
    "gated_delta": "recall in a constant state, by replacing what a key held",
    "kda": "as `gated_delta`, with a decay for each channel; permutations, with negative eigenvalues",
    "gated_delta2": "as `kda`, with separate strengths of erasing and writing; language",
    "rwkv7": "the weights that are published for it",
    "mamba2": "language with a large constant state",
    "mamba3": "as `mamba2`, with rotations instead of a short convolution",
    "fastmax": "attention's form in linear time",
    "aft_conv": "attention-free mixing with biases inside a window",
}
"""What each is for, in words; the numbers are read from results."""
NAMES = {"signed_hawk": {"state_tracking": "hawk_gate", "word_problems": "hawk_gate"}}
"""Where a study has another name for a mixer."""


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
            shown(of(mixer, "string_copying", "model={}"), 16),
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
    mqar, parity, words, induction = map(
        study, ("mqar_state", "state_tracking", "word_problems", "extrapolation")
    )
    delta, attention = mqar["pattern=gated_delta,width=16"], mqar["pattern=attention,width=64"]
    smallest = mqar["pattern=rwkv7,width=16"]
    gate, hawk = parity["model=hawk_gate"], parity["model=hawk"]
    product, longer = words["model=delta_product"], induction["task=induction,pattern=hawk"]
    columns = ("for", "language", "recall", "copying", "parity", "permutations", "compression", "state, KiB")
    table = "\n".join(markdown("mixer", (*columns, "step", "token"), rows()))
    return f"""# Which mixer should I use?

`python experiments/which_mixer/run.py` makes this page from the results of the other experiments. All of them
are small models on two CPU cores: take the numbers as hints, and read their pages.

{table}

**Numbers in brackets are unfinished**: more training may raise them, and nothing rests on them.

- language: validation loss on [Tiny Shakespeare](../shakespeare_cpu/README.md) in nats, lower is better; 0.8M
  parameters, a context of 64
- recall: accuracy of [four pairs in 32 tokens](../mqar_state/README.md) at width 64
- copying: of [16 letters, trained on 8](../string_copying/README.md)
- parity: of [256 bits, trained on 40](../state_tracking/README.md); permutations: of
  [64, trained on 16](../word_problems/README.md); one half and a sixth at random
- compression: [MAD's task](../mad/README.md), its macro accuracy
- state: KiB a layer of width 128 at 4,096 tokens
- step, token: time of a training step at a context of 64, and of a decoded token at 4,096, relative to
  attention ([decoding](../generation/README.md))

## In words

- If you need **exact recall in a constant state**, take `gated_delta`: it has solved the recall of four pairs
  with {delta.state_bytes / KIB:.1f} KiB ({shown(delta)}), and `rwkv7`, in one seed, with
  {smallest.state_bytes / KIB:.1f} ({shown(smallest)}), where the smallest attention that has needed
  {attention.state_bytes / KIB:.0f} ({shown(attention)}).
- If you need **the lowest loss in a small budget** of language, take `mamba2` ({loss["mamba2"]:.3f} nats), or
  `signed_hawk` ({loss["signed_hawk"]:.3f}) and `gated_hyena` ({loss["gated_hyena"]:.3f}), whose steps take
  {of_mamba2["signed_hawk"]:.2f} and {of_mamba2["gated_hyena"]:.2f} of its time; attention has
  {loss["attention"]:.3f}. A context of 64 says little about larger models.
- If you need to **track a state that flips**, take a recurrence whose factors may be negative: `signed_hawk`
  keeps parity to 256 bits ({shown(gate, 256)}); `hawk` is at {hawk.median(256):.2f} after as many steps.
- If the states are those of **a group that does not commute**, take `gated_delta` with `negative_eigenvalues`
  and `factors` 2: {sum(value >= product.solved for value in product.last)} of {product.n_runs} seeds has
  learned permutations of three, and keeps them at four times the training length.
- If inputs are **longer than in training**, take `hawk`: it keeps the induction head at four times the length
  ({shown(longer, 128)}).
- If you need **the smallest state while decoding**, take `hawk`; if you need **all of a context**, take
  `attention`, or a long convolution: both keep all inputs.

The papers are in the [list of mixers](../../hyena_jax/mixers/README.md); mixers without a row here have not
been trained in these studies. Nor have hybrids of a recurrence with a few layers of attention, which are
among the [configs](../../configs/README.md).
"""


if __name__ == "__main__":
    write_text(HERE / "README.md", page())
