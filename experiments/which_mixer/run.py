"""Which mixer should I use? One page and a figure from the results that the other experiments have committed.

python experiments/which_mixer/run.py
"""

import dataclasses
import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import reproduce
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox
from pages import N_SEEDS, Group, groups_of, style_of
from study import results_of

from hyena_jax import config
from hyena_jax.sweeps.compare import KIB, markdown, state_size
from hyena_jax.sweeps.figure import save_figure
from hyena_jax.system.files import write_text

HERE = Path(__file__).parent
RESULTS = HERE.parent
MIXERS = (
    *("mamba2", "mamba3", "signed_hawk", "gated_delta2", "gated_hyena", "gated_delta", "hawk", "kda"),
    *("rwkv7", "hyena", "local_attention", "h3", "s4d", "aft_conv", "attention", "fastmax"),
)
CONTEXT = "4096"
"""The context of decoding that the table shows."""
KEPT = 0.9
"""The accuracy from which on a model recalls so many pairs."""


def load(path: str) -> dict[str, Any]:
    """The results in a file of the experiments."""
    return json.loads((RESULTS / path).read_text(encoding="utf-8"))


def language_models() -> tuple[dict[str, Any], dict[str, Any]]:
    """What was measured of each on Tiny Shakespeare, and of their decoding."""
    return load("shakespeare_cpu/results.json")["variants"], load("generation/tokens.json")["mixers"]


def study(name: str) -> dict[str, Group]:
    """The groups of a study."""
    found = reproduce.load(name)
    return groups_of(found, results_of(found))


def state_of(variant: str) -> float:
    """KiB of the decoding state of a language model of `shakespeare_cpu`."""
    model = config.load(f"shakespeare_cpu:{variant}").model
    return state_size(dataclasses.replace(model, vocab_size=65)) / KIB


def losses_of(variants: dict[str, Any], mixer: str) -> list[float]:
    """The validation losses of all seeds."""
    return [run["validation_loss"] for run in variants[mixer]["runs"]]


def recalled() -> dict[str, dict[int, Group]]:
    """How each mixer with three seeds and its usual state recalls, by the number of pairs."""
    found: dict[str, dict[int, Group]] = {}
    for name, group in study("recall").items():
        mixer, pairs = name.removeprefix("pattern=").split(",pairs=")
        if not re.search(r"attention_|_\d+$|_at_", mixer) and group.n_runs >= N_SEEDS:
            found.setdefault(mixer, {})[int(pairs)] = group
    return found


def draw(path: Path) -> None:
    """Language loss over bytes of state, coloured by the time of a decoded token; pairs kept over bytes."""
    variants, decoding = language_models()
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    language, recall = figure.subplots(1, 2)
    names = [name for name in MIXERS if name in decoding]
    losses = {name: losses_of(variants, name) for name in names}
    times = [1e6 / decoding[name][CONTEXT]["tokens_per_second"] for name in names]
    sizes, means = [state_of(name) for name in names], [statistics.fmean(losses[name]) for name in names]
    language.vlines(sizes, [min(losses[n]) for n in names], [max(losses[n]) for n in names], color="0.6")
    points = language.scatter(sizes, means, c=times, cmap="viridis_r", norm="log", s=40, zorder=3)
    label = f"µs a decoded token, {int(CONTEXT):,} tokens before it"
    bar = figure.colorbar(points, ax=language, label=label, ticks=(60, 100, 200, 400, 800), format="{x:g}")
    bar.minorticks_off()
    language.set_xscale("log")
    language.xaxis.set_major_formatter("{x:g}")
    language.set(xlabel="decoding state at a context of 64, KiB", ylabel="validation loss, nats")
    language.set_title("Language: Mamba-2 is lowest, Hawk smallest", fontsize="medium")
    named = {language: dict(zip(names, zip(sizes, means, strict=True), strict=True)), recall: {}}
    by_mixer = recalled()
    levels = [0, *sorted({pairs for groups in by_mixer.values() for pairs in groups})]
    for name, groups in by_mixer.items():
        least, kept, most = (
            max((pairs for pairs, group in groups.items() if of(group.last) >= KEPT), default=0)
            for of in (min, statistics.median, max)
        )
        size = (groups[kept or min(groups)].state_bytes or 0) / KIB
        colour, height = style_of(name)["color"], levels.index(kept)
        recall.vlines(size, levels.index(least), levels.index(most), color=colour, alpha=0.4)
        recall.plot(size, height, "o", color=colour)
        named[recall][name] = (size, height)
    recall.set_xscale("log", base=2)
    recall.xaxis.set_major_formatter("{x:g}")
    recall.set_yticks(range(len(levels)), ["none", *map(str, levels[1:])])
    recall.set(
        xlabel="decoding state, KiB", ylabel=f"pairs recalled at {KEPT}: median, all seeds to best seed"
    )
    recall.set_title("Recall: in the median RWKV-7 and attention learn 32 pairs", fontsize="medium")
    for axes in (language, recall):
        axes.margins(x=0.12)
        axes.spines[["top", "right"]].set_visible(False)
    figure.draw_without_rendering()
    for axes, points in named.items():
        _name(axes, points)
    save_figure(figure, path, dpi=130)


SIDES = (
    *(
        (6, 0, "left", "center"),
        (-6, 0, "right", "center"),
        (0, 6, "center", "bottom"),
        (0, -6, "center", "top"),
    ),
    *((5, 5, "left", "bottom"), (5, -5, "left", "top"), (-5, 5, "right", "bottom"), (-5, -5, "right", "top")),
)
"""Where a name may stand beside its point: an offset in points, and the alignments."""


def _name(axes: Axes, points: dict[str, tuple[float, float]]) -> None:
    """Names the points, on the first side where a name is inside and covers no point and no other name."""
    taken = [Bbox.from_bounds(x - 5, y - 5, 10, 10) for x, y in axes.transData.transform([*points.values()])]
    for name, point in points.items():
        for x, y, across, up in SIDES:
            text = axes.annotate(
                *(name, point, (x, y)), textcoords="offset points", fontsize="small", ha=across, va=up
            )
            text.set_in_layout(False)
            box = text.get_window_extent()
            is_inside = axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1
            if is_inside and not any(box.overlaps(other) for other in taken):
                taken.append(box)
                break
            text.remove()
        else:
            raise ValueError(f"no place for the name of {name}")


def rows() -> list[tuple[str, list[str]]]:
    """The line of each mixer: the language model, and its decoding."""
    variants, decoding = language_models()
    found = []
    for mixer in sorted(MIXERS, key=lambda name: statistics.fmean(losses_of(variants, name))):
        losses, step = losses_of(variants, mixer), variants[mixer]["ms_per_step"]["median"]
        decoded = decoding.get(mixer, {}).get(CONTEXT)
        cells = [
            f"{statistics.fmean(losses):.3f}",
            f"{min(losses):.3f} to {max(losses):.3f}",
            f"{state_of(mixer):,.1f}",
            f"{step:.0f}",
            "" if decoded is None else f"{1e6 / decoded['tokens_per_second']:,.0f}",
        ]
        found.append((f"`{mixer}`", cells))
    return found


def page() -> str:
    """The page, in Markdown."""
    variants, decoding = language_models()
    loss = {name: statistics.fmean(losses_of(variants, name)) for name in MIXERS}
    parity, words, copying, longer, behind = map(
        study, ("state_tracking", "word_problems", "string_copying", "extrapolation", "recall")
    )
    step = {name: variants[name]["ms_per_step"]["median"] for name in MIXERS}
    token = {name: 1e6 / each[CONTEXT]["tokens_per_second"] for name, each in decoding.items()}
    induction = longer["task=induction,model=hawk"].at(256)
    of_delta = longer["task=induction,model=gated_delta"].at(256)
    columns = ("loss, nats", "over seeds", "state, KiB", "ms a step", "µs a token")

    def span(mixer: str, pairs: int) -> str:
        group = behind[f"pattern={mixer},pairs={pairs}"]
        return f"{min(group.last):.2f} to {max(group.last):.2f}"

    needs = [
        (
            "recall in a constant state",
            [
                "`rwkv7`",
                f"[of 8 pairs {span('rwkv7', 8)}; `mamba2` {span('mamba2', 8)}, `gated_delta`"
                f" {span('gated_delta', 8)}, Hawk {span('hawk', 8)}](../recall/README.md)",
                f"a training step of {step['rwkv7'] / step['hawk']:.1f} times Hawk's",
            ],
        ),
        (
            "recall of many pairs",
            [
                "`rwkv7`; `attention` behind a gated convolution",
                f"[of 32 pairs {span('rwkv7', 32)}, {span('attention', 32)}; of 64"
                f" {span('rwkv7', 64)}, {span('attention', 64)}](../recall/README.md)",
                "attention: a state that grows with the text, and one seed of three that did not learn",
            ],
        ),
        (
            "the lowest loss of a small model",
            [
                "`mamba2`, `mamba3`",
                f"[{loss['mamba2']:.3f} nats; Hawk {loss['hawk']:.3f}](../shakespeare_cpu/README.md)",
                f"{state_of('mamba2'):.0f} KiB of state, Hawk {state_of('hawk'):.0f}",
            ],
        ),
        (
            "a small state, quick tokens, a low loss",
            [
                "`hawk`, `gated_delta`",
                f"{state_of('hawk'):.0f} and {state_of('gated_delta'):.0f} KiB; [{token['hawk']:.0f} and"
                f" {token['gated_delta']:.0f} µs a token, attention {token['attention']:.0f}]"
                "(../generation/README.md)",
                "Hawk: little recall",
            ],
        ),
        (
            "a state that flips, or a group",
            [
                "`hawk` with `sign` gate; `gated_delta` with `negative_eigenvalues` and `factors` 2",
                f"[parity of bits 128 to 255 {parity['model=hawk_gate'].median(256):.2f}, Hawk"
                f" {parity['model=hawk'].median(256):.2f}](../state_tracking/README.md); [permutations"
                f" {words['model=delta_product'].median(64):.2f}](../word_problems/README.md)",
                "two factors are two updates a token",
            ],
        ),
        (
            "longer inputs than in training",
            [
                "`gated_delta`, `hawk`; for strings, `attention` with `hard_alibi_heads`",
                f"[induction at eight times {min(of_delta):.2f}, Hawk {min(induction):.2f} to"
                f" {max(induction):.2f}](../extrapolation/README.md); [strings at twice"
                f" {copying['model=hard_alibi'].median(48):.2f}](../string_copying/README.md)",
                f"on strings Hawk has {copying['model=hawk'].median(48):.2f}, the delta rule"
                f" {copying['model=gated_delta'].median(48):.2f}",
            ],
        ),
    ]
    header, rule, *lines = markdown("if you need", ("take", "evidence", "cost"), needs)
    return f"""# Which mixer should I use?

**For recall take RWKV-7, or attention behind a convolution; for the lowest loss Mamba-2; for the smallest
state Hawk.** All numbers are of small models on two CPU cores, and of the pages that are linked.

![Language loss, and pairs that are recalled, over the size of the decoding state](plot.png)

{chr(10).join([header, rule.replace(":", ""), *lines])}

## Negative factors show no help on language

What `signed_hawk` gains over `hawk` on language comes from its third gate. Three seeds show no gain from its
sign, and cannot rule out one of 0.01 nats ([runs](../signed/README.md)).

## All mixers at one size

{chr(10).join(markdown("`shakespeare_cpu:NAME`", columns, rows()))}

Loss, state and step are of the same model: four layers of width 128 on [Tiny
Shakespeare](../shakespeare_cpu/README.md), at a context of 64. The time of a token is of [another of the same
width](../generation/README.md), with the mixer's default options, {int(CONTEXT):,} tokens before it; where it
was not measured, the mixer is not in the picture.

[One table](../tpu/README.md#every-mixer-at-125m) has the compiler's estimates of step time, memory and state
at 125M on 16 chips of v5e; nothing there is measured.

## How it was made

```bash
python experiments/which_mixer/run.py
```

## What it does not show

A context of 64 and a budget of minutes say little about large models. Each learning rate is the best of
three; for attention, H3, S4D, AFT and RWKV-7 it is the highest of them.
"""


if __name__ == "__main__":
    draw(HERE / "plot.png")
    write_text(HERE / "README.md", page())
