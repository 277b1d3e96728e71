"""How the runs of a study are made: rates are searched first, and longer runs show whether training ended.

1. Search: at a quarter of the steps or at all of them (`Study.search_part`), on rows and a seed of its own,
   at least three learning rates around the mixer's own, half a decade apart; more on a side while the best is
   the outermost there. The best has the lowest loss, which falls long before a first answer is right; of
   several that solve the task, it is the nearest to the mixer's own. (Searches whose results keep `values` of
   the metric took the highest of them.)
2. Report: every run of the study at the best rate of its mixer.
3. Longer: of a group that should be below another and has not solved its task, the run with the median value
   is trained once more, with twice the steps and a schedule of that length; not where the search took all of
   the steps.
"""

import dataclasses
import hashlib
import json
import math
import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count, islice
from pathlib import Path
from typing import Any

import hyena_jax
from hyena_jax import config
from hyena_jax.config import Experiment
from hyena_jax.sweeps.compare import n_params, state_size
from hyena_jax.sweeps.runs import without_seed
from hyena_jax.sweeps.sweep import Outcome
from hyena_jax.system.errors import UserError
from hyena_jax.system.machine import describe_machine, describe_versions
from hyena_jax.system.output import bar, watched
from hyena_jax.system.signals import Interrupted, raising

HALF_DECADE = 10**0.5
SEARCH_SEED = 1000
"""The seed of the runs that search a rate, and of the rows that they are evaluated on."""
MAX_RATES = 5
N_LOSSES = 20
"""The first losses of a run, which a later version of the code must repeat."""


@contextmanager
def ended_after(minutes: float | None) -> Iterator[None]:
    """Asks this process to stop after so many minutes by SIGTERM: a sweep then saves, and continues later.

    Raises:
      Interrupted: at SIGTERM outside of a sweep.
    """
    if minutes is None:
        yield
        return
    stopped = Interrupted("stopped by SIGTERM between two sweeps. Rerun the command to continue.")
    timer = threading.Timer(60 * minutes, os.kill, (os.getpid(), signal.SIGTERM))
    timer.daemon = True
    timer.start()
    try:
        with raising(signal.SIGTERM, stopped):
            yield
    finally:
        timer.cancel()


def measure(
    study: Any,
    workdir: Path,
    jobs: int,
    groups: Collection[str],
    known: Mapping[str, Mapping[float, float | None]],
) -> dict[str, Any]:
    """Trains and evaluates groups of a study; started again, it continues. Returns what results.json holds.

    Args:
      study: see `study.Study`.
      workdir: of three sweeps: `search`, `runs` and `longer`.
      jobs: runs that are trained at the same time.
      groups: those to train.
      known: losses by learning rate of groups that were searched before, and are not again.
    """
    first_of_all = {without_seed(name): name for name in reversed(study.runs)}
    first = {group: name for group, name in first_of_all.items() if group in groups}
    searched = {study.searched_at(group) for group in first}
    bases = {group: study.runs[name] for group, name in first_of_all.items() if group in searched}
    new = {group: base for group, base in bases.items() if group not in known}
    searching = {group: _searching(base, study.search_part) for group, base in new.items()}

    def loss_of(values: Mapping[str, float]) -> float:
        return 0.0 if values[study.metric] >= study.solved else values["loss"]

    found, spent = search(searching, loss_of, workdir / "search", jobs)
    losses_of = {**known, **found}
    best = {group: best_rate(losses_of[group], base.optimizer.learning_rate) for group, base in bases.items()}
    rates = {group: best[study.searched_at(group)] for group in first}
    runs = {
        name: with_rate(run, rates[without_seed(name)])
        for name, run in study.runs.items()
        if without_seed(name) in first
    }
    outcomes = trained(runs, workdir / "runs", jobs)
    values = {name: outcome.values[study.metric] for name, outcome in outcomes.items()}
    by_group = {group: {n: v for n, v in values.items() if without_seed(n) == group} for group in first}
    below = {group for _, lower in study.above for group in lower if study.search_part > 1}
    medians = {median_run(found): group for group, found in by_group.items() if group in below}
    unsolved = {name: group for name, group in medians.items() if values[name] < study.solved}
    longer = {group: shortened_by(runs[name], 1 / 2) for name, group in unsolved.items()}
    longer_outcomes = trained(longer, workdir / "longer", jobs)
    rows: dict[str, dict[str, Any]] = {}
    with bar("evaluating", len(outcomes)) as advance:
        for name, outcome in outcomes.items():
            rows[name] = _row(study, outcome, values[name], with_losses=name in first.values())
            _forget_programs()
            advance()
    outcomes_of_all = [*outcomes.values(), *longer_outcomes.values()]
    seconds = spent + sum(outcome.seconds for outcome in outcomes_of_all)
    return {
        "seconds": round(seconds / jobs),
        "hardware": describe_machine(),
        "versions": describe_versions(),
        "search": {
            group: {"steps": searching[group].training.steps, "losses": losses}
            for group, losses in found.items()
        },
        "runs": rows,
        "longer": {
            group: {
                "run": name,
                "value": longer_outcomes[group].values[study.metric],
                "gain": longer_outcomes[group].values[study.metric] - values[name],
                "rows": n_rows(longer[group], longer_outcomes[group].step),
            }
            for name, group in unsolved.items()
        },
    }


def search(
    bases: Mapping[str, Experiment],
    loss_of: Callable[[Mapping[str, float]], float],
    workdir: Path,
    jobs: int,
) -> tuple[dict[str, dict[float, float | None]], float]:
    """The loss of each group by learning rate, None where the run diverged; and the seconds of all runs.

    Args:
      bases: a run of each group, whose rate is the first in the middle.
      loss_of: what counts, of the values of an evaluation; 0 if they could not be better.
      workdir: of a sweep for each round of rates.
      jobs: runs that are trained at the same time.
    """
    found: dict[str, dict[float, float | None]] = {group: {} for group in bases}
    own = {group: base.optimizer.learning_rate for group, base in bases.items()}
    new = {group: first_rates(rate) for group, rate in own.items()}
    seconds = 0.0
    for i in count(1):  # a sweep of its own each, as one that is continued must have all its runs
        names = {f"{group},learning_rate={rate:.3g}": (group, rate) for group in new for rate in new[group]}
        runs = {name: with_rate(bases[group], rate) for name, (group, rate) in names.items()}
        outcomes = trained(runs, workdir / f"round_{i}", jobs, may_diverge=True)
        seconds += sum(outcome.seconds for outcome in outcomes.values())
        for name, (group, rate) in names.items():
            values = outcomes[name].values if outcomes[name].status == "done" else None
            found[group][rate] = None if values is None else loss_of(values)
        more = {group: next_rate(losses, own[group]) for group, losses in found.items()}
        new = {group: (rate,) for group, rate in more.items() if rate is not None}
        if not new:
            return found, seconds


def median_run(values: Mapping[str, float]) -> str:
    """The name of the run with the median value, of an even number the lower one."""
    return sorted(values, key=values.__getitem__)[(len(values) - 1) // 2]


def first_rates(own: float) -> tuple[float, ...]:
    """The rates to begin with: a mixer's own, and half a decade on each side."""
    return tuple(float(f"{own * HALF_DECADE**i:.2g}") for i in (-1, 0, 1))


def best_rate(losses: Mapping[float, float | None], own: float) -> float:
    """The rate with the lowest loss; of several the nearest to `own`."""

    def rank(rate: float) -> tuple[float, float]:
        loss = losses[rate]
        return math.inf if loss is None else loss, abs(math.log(rate / own))

    return min(losses, key=rank)


def next_rate(losses: Mapping[float, float | None], own: float) -> float | None:
    """Half a decade beyond the best rate if that is the outermost; None to end the search."""
    rates, best = sorted(losses), best_rate(losses, own)
    if len(rates) >= MAX_RATES or best not in (rates[0], rates[-1]):
        return None
    return float(f"{best * (HALF_DECADE if best == rates[-1] else 1 / HALF_DECADE):.2g}")


def _searching(base: Experiment, part: int) -> Experiment:
    data = dataclasses.replace(base.data, test_seed=SEARCH_SEED)
    return shortened_by(dataclasses.replace(base, seed=SEARCH_SEED, data=data), part)


def with_rate(run: Experiment, rate: float) -> Experiment:
    """The run at another learning rate."""
    return dataclasses.replace(run, optimizer=dataclasses.replace(run.optimizer, learning_rate=rate))


def shortened_by(run: Experiment, factor: float) -> Experiment:
    """The run with its steps, and a schedule over them, divided by `factor`; it ends with an evaluation."""
    training, schedule = run.training, run.optimizer.schedule
    steps = max(1, round(training.steps / factor))
    warmup = min(schedule.warmup_steps, max(1, steps // 2)) if hasattr(schedule, "warmup_steps") else None
    if warmup is not None:
        schedule = dataclasses.replace(schedule, warmup_steps=warmup)
    return dataclasses.replace(
        run,
        optimizer=dataclasses.replace(run.optimizer, schedule=schedule),
        training=dataclasses.replace(
            training, steps=steps, eval_every=min(training.eval_every, steps), checkpoint_every=steps
        ),
    )


def n_rows(run: Experiment, step: int) -> int:
    """The rows that a run has been trained on at a step."""
    return step * run.data.batch_size


def trained(
    runs: Mapping[str, Experiment], workdir: Path, jobs: int, may_diverge: bool = False
) -> dict[str, Outcome]:
    """The runs, trained; raises UserError if one of them is not done."""
    if not runs:
        return {}
    outcomes = hyena_jax.sweep(runs, workdir, jobs=jobs)
    for name, outcome in outcomes.items():
        is_done = outcome.status == "done" and outcome.values is not None
        if not is_done and not (may_diverge and outcome.status == "diverged"):
            raise UserError(f"the run {name} is not done: {outcome.error or 'it has no evaluation'}")
    return outcomes


def _row(study: Any, outcome: Outcome, value: float, with_losses: bool) -> dict[str, Any]:
    experiment = config.read_run(outcome.workdir)  # with the vocabulary filled in
    by_length = {}
    if study.lengths:
        run = hyena_jax.load_run(outcome.workdir, quiet=True)
        by_length = {
            str(length): run.evaluate(data=change(run.experiment.data))[study.metric]
            for length, change in study.lengths.items()
        }
    row = {
        "value": value,
        "step": outcome.step,
        "rows": n_rows(experiment, outcome.step),
        "learning_rate": experiment.optimizer.learning_rate,
        "seconds": round(outcome.seconds, 1),
        "n_params": n_params(experiment.model),
        "state_bytes": state_size(experiment.model),
        "by_length": by_length,
    }
    return {**row, **first_losses(experiment)} if with_losses else row


def first_losses(experiment: Experiment) -> dict[str, Any]:
    """What later code has to repeat: digests of the settings and the data, and the first losses."""
    from hyena_jax.data.dataset import iterate
    from hyena_jax.system.output import Output
    from hyena_jax.training.run import initial_state
    from hyena_jax.training.setup import make_setup, mapped_train_step

    setup = make_setup(experiment, Output(quiet=True))
    experiment, data = setup.experiment, setup.data
    state, losses = initial_state(setup), []
    step = mapped_train_step(setup, state)
    batches = data.train_batches(experiment.data.batch_size, experiment.seed, *setup.strategy.row_shard)
    for _, batch in islice(iterate(batches), min(N_LOSSES, experiment.training.steps)):
        state, metrics = step(state, setup.strategy.place_batch(batch))
        losses.append(float(setup.strategy.host_copy(metrics)["loss"]))
    settings = json.dumps(config.encode(experiment), sort_keys=True)
    return {
        "settings": hashlib.sha256(settings.encode()).hexdigest(),
        "fingerprint": data.fingerprint,
        "losses": losses,
    }


def stale(study: Any, results: Mapping[str, Any]) -> list[str]:
    """What of the results this version of the code does not repeat, one line each; trains N_LOSSES steps.

    One run of each group is repeated, with its settings, data, and first losses within 1e-5.
    """
    found, kept = [], {name: row for name, row in results["runs"].items() if "losses" in row}
    now = describe_versions()["jax"]
    for then in {made["versions"]["jax"] for made in (results, *results.get("later", []))} - {now}:
        found.append(f"made with JAX {then}, and this is {now}")
    groups = dict.fromkeys(map(without_seed, study.runs))
    unsearched = {without_seed(name) for name, row in results["runs"].items() if "learning_rate" not in row}
    if unsearched:
        found.append(
            f"{len(unsearched)} of {len(groups)} groups: made before rates were searched and training was "
            "followed to its end"
        )
    missing = {without_seed(name) for name in study.runs if name not in results["runs"]}
    found += [f"{group}: not run yet" for group in groups if group in missing]
    for name, row in watched(study.folder.name, kept.items(), len(kept)):
        if name not in study.runs:
            found.append(f"{name}: no longer a run of the study")
            continue
        again = first_losses(with_rate(study.runs[name], row["learning_rate"]))
        _forget_programs()
        for what in ("settings", "fingerprint"):
            if again[what] != row[what]:
                found.append(f"{without_seed(name)}: another {what}")
        pairs = list(zip(again["losses"], row["losses"], strict=True))
        off = max((abs(a - b) for a, b in pairs), key=lambda each: (math.isnan(each), each), default=0.0)
        if not off <= 1e-5:
            found.append(f"{without_seed(name)}: the first losses differ by {off:.2g}")
    return found


def _forget_programs() -> None:
    """Frees compiled programs: with those of a hundred runs a process has no memory mapping left."""
    import jax

    jax.clear_caches()


def budget_in_rows(runs: Sequence[Experiment]) -> tuple[int, int]:
    """The least and the most rows that the runs may be trained on."""
    rows = [n_rows(run, run.training.steps) for run in runs]
    return min(rows), max(rows)
