"""The experiments that a search over remat, batch and layout compares."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hyena_jax.config import Experiment, ParallelConfig, choose, require
from hyena_jax.plan.targets import Target

AXES = ("remat", "batch", "layout")
# Policies that differ most; the others lie between them.
REMATS = ("none", "dots_no_batch", "block")
# Batch sizes to try, as multiples of the config's.
BATCHES = (0.5, 1, 2, 4)


def candidates(experiment: Experiment, target: Target, axes: Sequence[str]) -> Iterator[list[Experiment]]:
    """Experiments that differ in `axes`: lists of growing batch, of which the rest is skipped once one fails.

    Raises:
      UserError: for an unknown axis, or none.
    """
    require(len(axes) > 0, "search", axes, f"some of {', '.join(AXES)}")
    for axis in axes:
        choose("search", axis, dict.fromkeys(AXES))
    model = experiment.model
    require("remat" not in axes or hasattr(model, "remat"), "search", "remat", "of axes that the model has")
    models = [model] if "remat" not in axes else [replace(model, remat=name) for name in REMATS]
    layouts = [experiment.parallel] if "layout" not in axes else list(_layouts(experiment, target))
    batch = experiment.data.batch_size
    batches = [batch] if "batch" not in axes else [round(batch * times) for times in BATCHES]
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
            if found:
                yield found


def _layouts(experiment: Experiment, target: Target) -> Iterator[ParallelConfig]:
    """pmap; and meshes whose fsdp is every chip, a fourth of them, or a fourth beside a sequence of 4."""
    n, plain = target.n_chips, replace(experiment.parallel, devices=None, data=None)
    yield replace(plain, strategy="pmap", fsdp=1, sequence=1)
    for fsdp, sequence in ((n, 1), (n // 4, 1), (n // 4, 4)):
        if fsdp > 1 and n % (fsdp * sequence) == 0:
            yield replace(plain, strategy="sharded", fsdp=fsdp, sequence=sequence)
