"""The runs of a grid: every combination of the values of some fields of an experiment."""

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hyena_jax import config
from hyena_jax.config import Experiment
from hyena_jax.config.flags import FLAT, as_flag, flags_of, read_flags
from hyena_jax.system.errors import UserError, require

VARIANT, SEED = "variant", "seed"
"""The axis of the config's variants, with which names begin; and the axis with which they end."""
MAX_RUNS = 1000


@dataclass(frozen=True)
class _Settings:
    experiment: Experiment = field(default=Experiment(), metadata=FLAT)


def parse_axis(text: str) -> tuple[str, tuple[str, ...]]:
    """The field and values of an axis `FIELD=VALUE,VALUE`; with lists of parts `FIELD=PART,PART;PART`."""
    name, equals, listed = text.partition("=")
    values = tuple(value.strip() for value in listed.split(";" if ";" in listed else ","))
    allowed = "FIELD=VALUE,VALUE,... (with lists of parts: FIELD=PART,PART;PART)"
    require(bool(name and equals) and all(values), "grid", text, allowed)
    require(len({*values}) == len(values), "grid", text, "different values")
    return name.removeprefix("--").replace("-", "_"), values


def make_runs(
    spec: str, axes: Mapping[str, Sequence[object]], flags: Sequence[str] = ()
) -> dict[str, Experiment]:
    """An experiment for every combination of values, by name, such as `variant=hawk,seed=0`.

    Args:
      spec: CONFIG or CONFIG:VARIANT, as `hyena-jax train` takes it.
      axes: for each field, such as `optimizer.learning_rate`, its values, as texts or as they are.
      flags: settings of all runs, as on the command line of `train`.

    Raises:
      UserError: for an unknown field, a value of the wrong type, and experiments that contradict themselves.

    >>> axes = {"model.pattern": ["hyena", "hawk"], "seed": [0, 1]}
    >>> list(hyena_jax.make_runs("tasks:recall", axes, ["--training.steps", "200"]))
    ['pattern=hyena,seed=0', 'pattern=hyena,seed=1', 'pattern=hawk,seed=0', 'pattern=hawk,seed=1']
    """
    require(bool(axes), "grid", dict(axes), "given: at least one FIELD=VALUE,...")
    for name, values in axes.items():
        is_several = isinstance(values, Iterable) and not isinstance(values, str)
        require(is_several, name, values, "a list of values")
    axes = {
        name.removeprefix("--").replace("-", "_"): [
            ",".join(map(str, value)) if isinstance(value, tuple) else str(value) for value in values
        ]
        for name, values in axes.items()
    }
    has_two = VARIANT in axes and ":" in spec
    require(not has_two, "CONFIG", spec, f"without a variant if {VARIANT} is an axis of the grid")
    for name, values in axes.items():
        require(len(values) > 0, name, values, "at least one value")
    count = math.prod(map(len, axes.values()))
    require(count <= MAX_RUNS, "grid", f"{count} runs", f"at most {MAX_RUNS} runs")
    # In one order, so that the same grid has the same names, however it was written.
    axes = dict(sorted(axes.items(), key=lambda axis: (axis[0] != VARIANT, axis[0] == SEED, axis[0])))
    ends = [name.rpartition(".")[2] for name in axes]  # which name a run, unless two axes share it
    labels = {name: end if ends.count(end) == 1 else name for name, end in zip(axes, ends, strict=True)}
    bases: dict[str, Experiment] = {}
    runs: dict[str, Experiment] = {}
    seen = set()
    for values in itertools.product(*axes.values()):
        point = dict(zip(axes, values, strict=True))
        safe = {axis: re.sub(r"[^\w.+:-]", "_", value) for axis, value in point.items()}  # in a folder's name
        name = ",".join(f"{labels[axis]}={value}" for axis, value in safe.items())
        base = f"{spec}:{point.pop(VARIANT)}" if VARIANT in point else spec
        if base not in bases:
            bases[base] = config.load(base)
        run = _experiment(bases[base], point, flags)
        if repr(run) in seen:
            raise UserError(f"the grid describes the run {name!r} twice")
        if name in runs:
            raise UserError(f"the grid has two values whose folders would have the same name, {name!r}")
        seen.add(repr(run))
        runs[name] = run
    return runs


def _experiment(base: Experiment, point: Mapping[str, str], flags: Sequence[str]) -> Experiment:
    given = [*flags, *(f"--{name.replace('_', '-')}={value}" for name, value in point.items())]
    defaults = {"experiment": base}
    known = [flag for flag in flags_of(_Settings, defaults, given) if flag.base is None]
    switches = {flag.name for flag in known if flag.hint is bool}
    for i, argument in enumerate(given):  # a switch has no value on the command line
        name, _, value = argument.partition("=")
        if name in switches and value.lower() in ("true", "false"):
            given[i] = name if value.lower() == "true" else f"--no-{name[2:]}"
    try:
        return read_flags(_Settings, "sweep", given, defaults).experiment
    except UserError as error:
        raise as_flag(error, [flag.name for flag in known]) from error
