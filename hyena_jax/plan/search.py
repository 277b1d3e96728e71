"""A search over remat, batch and layout: the experiments to compare, and their plans."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from hyena_jax.config import Experiment
from hyena_jax.plan.compiling import DoesNotCompile, Limits, Unfinished
from hyena_jax.plan.planning import StepPlan, describe, make_plan
from hyena_jax.plan.targets import Target
from hyena_jax.system.chips import GIB
from hyena_jax.system.errors import UserError, choose, require

AXES = ("remat", "batch", "layout")
# Policies that differ most; the others lie between them.
REMATS = ("none", "dots_no_batch", "block")
# Batch sizes to try, as multiples of the config's.
BATCHES = (0.5, 1, 2, 4)


def search(
    rows: Sequence[Sequence[Experiment]],
    target: Target,
    limits: Limits,
    whole: bool,
    advance: Callable[[int], None],
    report: Callable[[str], None],
) -> tuple[list[StepPlan], list[str]]:
    """The plans of `candidates`, and a line for each that is refused.

    `advance` is told how many candidates are done, `report` what each came to, and the time left.
    """
    plans, refused, n_done, n_all, begun = [], [], 0, sum(map(len, rows)), time.monotonic()
    for row in rows:
        for i, experiment in enumerate(row):
            try:
                plans.append(make_plan(experiment, target, limits, whole))
                fits = plans[-1].fits
                came_to = f"{'fits' if fits else 'does not fit'} in {plans[-1].memory / GIB:.1f} GiB"
            except (DoesNotCompile, Unfinished, UserError) as error:
                refused.append(f"{describe(experiment, target)}: {error}")
                fits, came_to = False, "refused"
            done = 1 if fits else len(row) - i  # nor do larger batches
            advance(done)
            n_done += done
            left = (n_all - n_done) / n_done * (time.monotonic() - begun)
            report(f"{n_done} of {n_all}: {describe(experiment, target)}: {came_to}; {left:.0f} s left")
            if not fits:
                break
    return plans, refused


def candidates(experiment: Experiment, target: Target, axes: Sequence[str]) -> Iterator[list[Experiment]]:
    """Experiments that differ in `axes`: lists of growing batch, of which the rest is skipped once one fails.

    Refuses axes that are unknown or missing, and batches that no layout can split.
    """
    require(len(axes) > 0, "search", axes, f"some of {', '.join(AXES)}")
    for axis in axes:
        choose("search", axis, dict.fromkeys(AXES))
    model = experiment.model
    require("remat" not in axes or hasattr(model, "remat"), "search", "remat", "of axes that the model has")
    models = [model] if "remat" not in axes else [replace(model, remat=name) for name in REMATS]
    layouts = [experiment.parallel]
    if "layout" in axes:  # pmap; fsdp over a slice, a fourth of it, and a fourth beside a sequence of 4
        n, plain = target.chips_of_slice, replace(experiment.parallel, devices=None, data=None)
        layouts = [replace(plain, strategy="pmap", fsdp=1, sequence=1)]
        for fsdp, sequence in ((n, 1), (n // 4, 1), (n // 4, 4)):
            if fsdp > 1 and n % (fsdp * sequence) == 0:
                layouts.append(replace(plain, strategy="sharded", fsdp=fsdp, sequence=sequence))
    batch = experiment.data.batch_size
    batches = [batch] if "batch" not in axes else [round(batch * times) for times in BATCHES]
    splits, is_empty = [], True
    for parallel in layouts:
        for model in models:
            row_shards = target.n_chips // (parallel.sequence if parallel.strategy == "sharded" else 1)
            parts = row_shards * experiment.optimizer.accumulation_steps
            sizes = [size for size in batches if size >= parts and size % parts == 0]
            found = [
                replace(
                    experiment, model=model, parallel=parallel, data=replace(experiment.data, batch_size=n)
                )
                for n in sizes
            ]
            splits.append(parts)
            if found:
                is_empty = False
                yield found
    must = f"a multiple of {min(splits)}, the shards of its rows times optimizer.accumulation_steps"
    require(not is_empty, "data.batch_size", batch, must)
