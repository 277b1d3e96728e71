"""A plan as lines, as JSON and as a picture."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hyena_jax.plan.compiling import VOCABULARY
from hyena_jax.plan.planning import Ends, StepPlan
from hyena_jax.plan.roofline import KINDS, TERMS
from hyena_jax.system.chips import GIB, MIB
from hyena_jax.system.files import write_text

CAVEAT = "estimated, not measured on a device"
# Okabe and Ito's colours, which colour-blind readers tell apart.
COLOURS = dict(
    zip(
        (*KINDS, "exchanges"),
        ("#0072B2", "#009E73", "#56B4E9", "#E69F00", "#D55E00", "#CC79A7", "#999999", "#000000"),
        strict=True,
    )
)
OF_MEMORY = ("#0072B2", "#56B4E9", "#E69F00")


def print_plan(plan: StepPlan, console: Console) -> None:
    """Prints memory, exchanges, time by kind and the step's speed."""
    how = "compiled whole"
    if len(plan.compiled_layers) == 2:
        once, twice = plan.compiled_layers
        how = f"continued from {once} and {twice} layers to {plan.n_layers}, memory to about a quarter"
    console.print(
        f"{plan.target}, {plan.n_chips} chips, {plan.layout}, remat {plan.remat}, batch {plan.batch_size}, "
        f"{'with' if plan.kernels else 'without'} Pallas kernels: "
        f"{plan.n_params:,} parameters; {how}, {plan.compile_seconds:.0f} s; {CAVEAT}"
    )
    if plan.assumes_vocabulary:
        console.print(f"a vocabulary of {VOCABULARY:,} is assumed: --model.vocab-size sets another")
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in plan.memory_parts.items())
    console.print(
        f"\nmemory: {plan.memory / GIB:.2f} of {plan.usable_memory / GIB:.2f} GiB a chip, {verdict} ({parts})"
    )
    if plan.buffers:
        console.print("largest buffers of a chip, each with the arrays that it holds in turn")
    for (size, shapes), count in list(Counter(plan.buffers).items())[:4]:
        console.print(f"  {count:3} x {size / MIB:8,.0f} MiB  {shapes[:90]}")
    console.print("")
    console.print(_exchanges(plan))
    if plan.between_slices:
        console.print(
            f"between slices, over the data-centre network: {plan.between_slices / 1e9:.3f} GB received by "
            f"a chip, {1e3 * plan.between_slices_seconds:.1f} ms, not in the tables"
        )
    if plan.largest_exchanges:
        console.print("largest exchanges of the deepest compiled program")
    for one in plan.largest_exchanges[:4]:
        what = f"{one.kind} x{one.rounds} {one.shapes[:40]}: {one.source}"
        console.print(f"  {one.received / 1e9:8.3f} GB  {what}")
    console.print(_kinds(plan))
    console.print("largest instructions of the deepest compiled program, ms")
    for one in plan.largest:
        times = f"{1e3 * one.seconds.roofline:8.2f} to {1e3 * one.seconds.pessimistic:.2f}"
        console.print(f"  {times:18s}  {one.kind}, {one.bound}: {one.source or one.name}")
    console.print("")
    for line in speeds(plan):
        console.print(line)


def _exchanges(plan: StepPlan) -> Table:
    table = Table("exchange", "GB received by a chip", "GB a repeat of the layers", box=None)
    for row in plan.exchanges:
        each = "" if row.received_per_repeat is None else f"{row.received_per_repeat / 1e9:.3f}"
        table.add_row(row.kind, f"{row.received / 1e9:.3f}", each)
    total = sum(row.received for row in plan.exchanges)
    ratio = f"; {total / plan.needed_exchange:.2f} times that" if plan.needed_exchange else ""
    least = f"(at least {plan.needed_exchange / 1e9:.3f} with this layout{ratio})"
    table.add_row("all", f"{total / 1e9:.3f}", least)
    return table


def _kinds(plan: StepPlan) -> Table:
    table = Table("kind", "roofline ms", "share", "pessimistic ms", "share", "bound", *TERMS, box=None)
    rows = [(row.kind, row.seconds, row.bound, (row.products, row.memory, row.vector)) for row in plan.kinds]
    rows.append(("exchanges", plan.exchange_seconds, "links", ()))
    roofline, pessimistic = (
        sum(getattr(ends, end) for _, ends, _, _ in rows) for end in ("roofline", "pessimistic")
    )
    for kind, ends, bound, terms in rows:
        table.add_row(
            kind,
            f"{1e3 * ends.roofline:.2f}",
            f"{ends.roofline / max(roofline, 1e-12):.0%}",
            f"{1e3 * ends.pessimistic:.2f}",
            f"{ends.pessimistic / max(pessimistic, 1e-12):.0%}",
            bound,
            *(f"{1e3 * each:.2f}" for each in terms),
        )
    return table


def speeds(plan: StepPlan) -> Iterator[str]:
    """Time of a step, tokens a second and utilisation, from the roofline to the pessimistic end."""

    def bracket(ends: Ends, factor: float, form: str) -> str:
        return f"{format(factor * ends.roofline, form)} to {format(factor * ends.pessimistic, form)}"

    yield f"step: {bracket(plan.seconds, 1e3, ',.1f')} ms, from the roofline to the pessimistic end"
    yield f"{plan.unit}s/s a chip: {bracket(plan.units_per_second, 1, ',.0f')}"
    with_transforms = bracket(plan.mfu(True), 1, ".3f")
    yield (
        f"MFU: {bracket(plan.mfu(False), 1, '.3f')} (3 x the forward pass's products / time / peak; "
        f"{with_transforms} with 5 n log2 n a complex transform)"
    )


def as_json(plan: StepPlan) -> dict[str, Any]:
    """The plan's fields, and what follows from them."""
    derived = {
        "fits": plan.fits,
        "units_per_second": asdict(plan.units_per_second),
        "mfu": asdict(plan.mfu(False)),
        "mfu_with_transforms": asdict(plan.mfu(True)),
    }
    return {"caveat": CAVEAT, **asdict(plan), **derived}


def write(folder: Path, plans: Sequence[StepPlan], summary: dict[str, Any]) -> None:
    """Writes plan.json and plan.png."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [as_json(plan) for plan in plans]
    write_text(folder / "plan.json", json.dumps({**summary, "plans": rows}, indent=1) + "\n")
    draw(folder / "plan.png", plans, summary["command"])


def draw(path: Path, plans: Sequence[StepPlan], title: str) -> None:
    """Stacked bars for each plan: milliseconds of a step by kind, at both ends; and memory by part."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 1.6 + 0.9 * max(len(plans), 2)), layout="constrained")
    figure.suptitle(f"{title}\n{CAVEAT}", fontsize="small")
    times, memory = figure.subplots(1, 2, width_ratios=(3, 1), sharey=True)
    labels, seen = [], set()
    for i, plan in enumerate(plans):
        kinds = [(row.kind, row.seconds) for row in plan.kinds] + [("exchanges", plan.exchange_seconds)]
        for end, shift in (("roofline", -0.2), ("pessimistic", 0.2)):
            left = 0.0
            for kind, ends in kinds:
                width = 1e3 * getattr(ends, end)
                name = None if kind in seen else kind
                seen.add(kind)
                times.barh(i + shift, width, 0.36, left=left, color=COLOURS[kind], label=name)
                left += width
            times.text(left, i + shift, f" {end}", va="center", fontsize="x-small")
        left = 0.0
        for (name, size), colour in zip(plan.memory_parts.items(), OF_MEMORY, strict=True):
            memory.barh(i, size / GIB, 0.5, left=left, color=colour, label=name if i == 0 else None)
            left += size / GIB
        memory.plot([plan.usable_memory / GIB] * 2, [i - 0.35, i + 0.35], color="black")
        labels.append(f"{plan.layout}\nremat {plan.remat}, batch {plan.batch_size}")
    times.set(xlabel="ms of a step", yticks=range(len(plans)), ylim=(len(plans) - 0.4, -0.6))
    times.set_yticklabels(labels, fontsize="small")
    times.margins(x=0.1)
    memory.set(xlabel="GiB of a chip; the line is what it has")
    times.legend(fontsize="x-small", ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.25), frameon=False)
    memory.legend(fontsize="x-small", loc="upper center", bbox_to_anchor=(0.5, -0.25), frameon=False)
    figure.savefig(path, dpi=120)


def print_best(plans: Sequence[StepPlan], refused: Sequence[str], most: int, console: Console) -> None:
    """The fastest plans that fit, by speed at the pessimistic end; then what was left out and why."""
    ranked = best(plans)
    table = Table("layout", "remat", "batch", "GiB a chip", "step ms", "a second and chip", "MFU", box=None)
    for plan in ranked[:most]:
        table.add_row(
            plan.layout,
            plan.remat,
            str(plan.batch_size),
            f"{plan.memory / GIB:.2f}",
            f"{1e3 * plan.seconds.roofline:,.1f} to {1e3 * plan.seconds.pessimistic:,.1f}",
            f"{plan.units_per_second.roofline:,.0f} to {plan.units_per_second.pessimistic:,.0f}",
            f"{plan.mfu(False).roofline:.3f} to {plan.mfu(False).pessimistic:.3f}",
        )
    console.print(f"the best {min(most, len(ranked))} of {len(plans) + len(refused)}, {CAVEAT}")
    console.print(table)
    for line in refused:
        console.print(f"left out: {line}")
    for plan in plans:
        if not plan.fits:
            where = f"{plan.layout}, remat {plan.remat}, batch {plan.batch_size}"
            console.print(f"left out: {where}: {plan.memory / GIB:.1f} GiB a chip do not fit")


def best(plans: Sequence[StepPlan]) -> list[StepPlan]:
    """The plans that fit, the fastest at the pessimistic end first."""
    return sorted((plan for plan in plans if plan.fits), key=lambda plan: -plan.units_per_second.pessimistic)
