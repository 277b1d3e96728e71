"""Exact evaluation on held-out data, and the value at which a run stops early, such as `accuracy=0.99`."""

import math
from collections.abc import Callable, Iterable
from dataclasses import fields, replace

import flax.linen as nn
import jax
import numpy as np
import optax

from hyena_jax import parallel
from hyena_jax.config import DataConfig, ParallelConfig, TextConfig, TokensConfig, name_of
from hyena_jax.config.checks import MAX_COUNT
from hyena_jax.config.training import parse_until
from hyena_jax.data.dataset import Batch, Dataset, load
from hyena_jax.data.text import fingerprint_of_no_text
from hyena_jax.parallel.strategy import Strategy, round_up
from hyena_jax.system.errors import UserError, choose, require
from hyena_jax.training.folder import RunFolder
from hyena_jax.training.loss import TAKEN, loss_function, metric_functions
from hyena_jax.training.metrics import Values
from hyena_jax.training.step import make_eval_step

LOWER_IS_BETTER = ("loss", "perplexity", "bits_per_byte")
"""Held-out values that reach a target from above; all others reach it from below."""

Sums = dict[str, float | np.ndarray]
"""Sums over held-out rows by name: of values [B] a number, of values [B, m] an array [m]."""

Watch = Callable[[Iterable[Batch], int], Iterable[Batch]]
"""watch(batches, their number) -> the same batches."""


def sum_held_out(
    strategy: Strategy,
    eval_step: Callable,
    params: optax.Params,
    data: Dataset,
    batch_size: int,
    max_rows: int | None = None,
    watch: Watch | None = None,
) -> Sums:
    """The results of `eval_step(params, batch)`, [B] or [B, m], summed over the rows of the held-out data.

    Every held-out row counts once (or `max_rows` of them). Rows are summed without intermediate rounding, so
    the result does not depend on how rows were batched, beyond the rounding within a row. All processes must
    call this.

    Args:
      eval_step: of `make_eval_step`, mapped by `strategy`; `params` are placed by `strategy`.
      watch: yields the same batches, and may show progress.
    """
    n_rows = data.n_eval_rows(max_rows)
    batch_size = round_up(min(batch_size, n_rows), strategy.row_shards)
    rows: dict[str, list[np.ndarray]] = {}
    batches = data.eval_batches(batch_size, max_rows)
    for batch in batches if watch is None else watch(batches, math.ceil(n_rows / batch_size)):
        sums = eval_step(params, strategy.place_batch(strategy.row_shard.of(batch)))
        for name, values in sums.items():
            rows.setdefault(name, []).append(np.asarray(values, np.float64).reshape(batch_size, -1))
    found = {name: np.concatenate(values) for name, values in rows.items()}

    def total(x: np.ndarray) -> float | np.ndarray:
        try:
            return math.fsum(x[:, 0]) if x.shape[1] == 1 else x.sum(axis=0)
        except (ValueError, OverflowError):  # a metric that is inf in one row and -inf in another
            return math.nan

    return {name: total(x) for name, x in found.items()}


def measured_on(data: Dataset, max_rows: int | None = None) -> str:
    """Names the rows that `sum_held_out` reads: losses can be compared where these names are equal."""
    return f"{data.fingerprint}:{data.n_eval_rows(max_rows)}"


def held_out_values(data: Dataset, sums: Sums) -> Values:
    """Metrics from sums over held-out targets: the mean `loss`, `Dataset.metrics`, and other means."""
    count = sums["count"]
    require(count > 0, "sum of the weights of held-out targets", count, "above 0")
    others = sums.keys() - TAKEN - data.tallies.keys()
    means = {name: sums[name] / count for name in sums if name in others}
    return {"loss": sums["loss"] / count, **data.metrics(sums), **means}


def evaluate_run(
    run: RunFolder,
    model: nn.Module,
    params: optax.Params,
    path: str | None,
    batch_size: int,
    watch: Watch | None = None,
    data_config: DataConfig | None = None,
) -> Values:
    """Metrics on all held-out data of a run, or on all data at `path`; and the number of evaluated units.

    With `data_config`, on what is held out of these data instead, such as longer rows of a task.
    """
    require(1 <= batch_size <= MAX_COUNT, "batch_size", batch_size, f"in 1..{MAX_COUNT}")
    if data_config is None:
        data = load_data(run, path)
    else:
        ours, theirs = name_of(run.experiment.data), name_of(data_config)
        require(type(data_config) is type(run.experiment.data), "data", theirs, f"{ours!r}, as the run's")
        experiment = replace(run.experiment, data=data_config)  # which checks the length
        data = load(data_config, run.encoding)
        data.complete(experiment)
    strategy = parallel.make_strategy(ParallelConfig())
    scores = loss_function(run.experiment.loss), metric_functions(run.experiment, data)
    eval_step = strategy.map_eval_step(make_eval_step(model, *scores, data.tallies))
    sums = sum_held_out(strategy, eval_step, strategy.place(params), data, batch_size, watch=watch)
    return {**held_out_values(data, sums), f"{data.unit}s": data.n_held_out, **data.eval_metrics(sums)}


def load_data(run: RunFolder, path: str | None = None) -> Dataset:
    """The data of a run, refused if they changed since its start; or the data at `path`, all held out."""
    config = run.experiment.data
    if path is not None:
        names = {field.name for field in fields(config)}
        kind = name_of(config)
        require(
            {"path", "validation_path"} <= names,
            "path",
            path,
            f"left out: {kind!r} has no options path and validation_path that could name it; without --path,"
            " what these data hold out is evaluated",
        )
        config = replace(config, path=path, validation_path=path)
    elif isinstance(config, TextConfig | TokensConfig):
        is_known = run.fingerprint != fingerprint_of_no_text(run.encoding)
        require(is_known, "path", None, "the text to measure on, as the run was converted and has none")
    data = load(config, run.encoding)
    if path is None and data.fingerprint != run.fingerprint:
        raise UserError(
            f"the {data.kind} changed since the run was started (its fingerprint differs);"
            " name one with --path"
        )
    data.complete(run.experiment)
    return data


def is_reached(until: str, values: Values) -> bool:
    """Whether held-out values reach the target `NAME=VALUE`."""
    name, target = parse_until(until)
    return values[name] <= target if name in LOWER_IS_BETTER else values[name] >= target


def check_target(until: str, data: Dataset, eval_step: Callable, *arguments: object) -> None:
    """Raises UserError unless the target names a value that evaluations of `data` measure.

    `eval_step`, as `make_eval_step` makes it, is traced with `arguments`, its parameters and a batch.
    """
    sums = jax.eval_shape(eval_step, *arguments)
    ones = {name: np.ones(sum_.shape[1:]) if sum_.ndim > 1 else 1.0 for name, sum_ in sums.items()}
    names = held_out_values(data, ones)
    choose("the value in training.until", parse_until(until)[0], names)
