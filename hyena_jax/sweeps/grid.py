"""The runs of a grid: every combination of the values of some fields of an experiment."""

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hyena_jax import config
from hyena_jax.config import Experiment, UserError, require
from hyena_jax.config.choices import choice_flags
from hyena_jax.config.flags import FLAT, as_flag, flags_of, read

VARIANT, SEED = "variant", "seed"
"""The axis of the config's variants, with which names begin; and the axis with which they end."""
MOST_RUNS = 10_000


@dataclass(frozen=True)
class _Settings:
    experiment: Experiment = field(default=Experiment(), metadata=FLAT)


def parse_axis(text: str) -> tuple[str, tuple[str, ...]]:
    """The field and the values of an axis `FIELD=VALUE,VALUE,...`, or `FIELD=LIST;LIST` with lists as values.

    Raises:
      UserError: if it is not of that form, or has a value twice.
    """
    name, equals, listed = text.partition("=")
    values = tuple(value.strip() for value in listed.split(";" if ";" in listed else ","))
    allowed = "FIELD=VALUE,VALUE,... (with lists as values: FIELD=LIST;LIST)"
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
    """
    require(bool(axes), "grid", dict(axes), "given: at least one FIELD=VALUE,...")
    has_two = VARIANT in axes and ":" in spec
    require(not has_two, "CONFIG", spec, f"without a variant if {VARIANT} is an axis of the grid")
    count = 1
    for name, values in axes.items():
        require(len(values) > 0, name, values, "at least one value")
        count *= len(values)
    require(count <= MOST_RUNS, "grid", f"{count} runs", f"at most {MOST_RUNS} runs")
    # In one order, so that the same grid has the same names, however it was written.
    axes = dict(sorted(axes.items(), key=lambda axis: (axis[0] != VARIANT, axis[0] == SEED, axis[0])))
    labels = _labels(list(axes))
    runs: dict[str, Experiment] = {}
    seen = set()
    for values in itertools.product(*axes.values()):
        point = dict(zip(axes, map(str, values), strict=True))
        name = ",".join(f"{labels[axis]}={_safe(value)}" for axis, value in point.items())
        experiment = _experiment(spec, point, flags)
        is_new = name not in runs and repr(experiment) not in seen
        require(is_new, "grid", name, "different from all other runs of it")
        seen.add(repr(experiment))
        runs[name] = experiment
    return runs


def with_until(runs: Mapping[str, Experiment], until: str) -> dict[str, Experiment]:
    """The runs, each ending at the first evaluation that reaches the target `until`."""
    return {
        name: dataclasses.replace(run, training=dataclasses.replace(run.training, until=until))
        for name, run in runs.items()
    }


def _experiment(spec: str, point: Mapping[str, str], flags: Sequence[str]) -> Experiment:
    """The experiment at one point of the grid."""
    spec = f"{spec}:{point[VARIANT]}" if VARIANT in point else spec
    given = [*flags]
    for name, value in point.items():
        if name != VARIANT:
            given.append(f"--{name.replace('_', '-')}={value}")
    experiment, rest = config.choose_kinds(config.load(spec), given)
    defaults = {"experiment": experiment}
    known = flags_of(_Settings, defaults)
    switches = {flag.name for flag in known if flag.hint is bool}
    for i, argument in enumerate(rest):  # a switch has no value on the command line
        name, _, value = argument.partition("=")
        if name in switches and value.lower() in ("true", "false"):
            rest[i] = name if value.lower() == "true" else f"--no-{name[2:]}"
    try:
        return read(_Settings, "sweep", rest, defaults, choice_flags(experiment)).experiment
    except UserError as error:
        raise UserError(as_flag(str(error), [flag.name for flag in known])) from error


def _labels(names: Sequence[str]) -> dict[str, str]:
    """The names of axes in the names of runs: the last part, or the whole name if two share it."""
    last = [name.rpartition(".")[2] for name in names]
    return {name: end if last.count(end) == 1 else name for name, end in zip(names, last, strict=True)}


def _safe(value: str) -> str:
    """The value as part of a folder's name."""
    return re.sub(r"[^\w.+:-]", "_", value)
