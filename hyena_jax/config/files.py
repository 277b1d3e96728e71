"""Experiments in files: loaded from a config, saved with a digest, read and compared."""

import dataclasses
import functools
import hashlib
import inspect
import itertools
import json
import operator
import os
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Union, get_args, get_origin

from hyena_jax.config.plugins import (
    MissingPlugin,
    import_parts,
    missing_parts,
    own_code,
    plugins_in,
    require_plugins,
)
from hyena_jax.config.registry import REGISTRIES, Registry, name_of, walk
from hyena_jax.config.training import Experiment, LoggingConfig
from hyena_jax.system.errors import UserError, choose, require
from hyena_jax.system.files import RUN_CONFIG, parse_json, read_json

if TYPE_CHECKING:
    import cattrs

STAGES = "optimizers.json"
"""The file of a run whose optimizer was changed on purpose: see `read_stages`."""
DIGEST = "sha256"
"""The key under which a JSON file holds the digest of its other values, so that a flipped bit is noticed."""
MAX_PATH, MAX_NAME = 3800, 255
"""Most bytes of a run folder's path (Linux allows 4,096 with the names in it), and of a file's name."""


def load(spec: str, keep_trackers: bool = True) -> Experiment:
    """The experiment of `CONFIG` or `CONFIG:VARIANT`, or of the `config.json` in a run folder.

    CONFIG is a name in `configs/` or a Python file. For `keep_trackers` see `decode`.
    """
    if Path(spec).name == RUN_CONFIG:
        return read_run(Path(spec).parent, keep_trackers)
    name, _, variant = spec.partition(":")
    if name not in config_files() and not name.endswith(".py"):
        if os.path.isfile(os.path.join(name, RUN_CONFIG)):  # False for a name that no file can have
            raise UserError(f"config {name!r} is the folder of a run: `train --resume {name}` continues it")
        if os.path.isfile(name):
            raise UserError(
                f"config {name!r} is not a Python file with get_config() (a text to train on: --data.path)"
            )
    path = Path(name) if name.endswith(".py") else choose("config", name, config_files())
    if not path.is_file():
        raise UserError(f"config {name!r} is not a file")
    with own_code(f"config {path} cannot be read"):
        try:
            module = import_parts(str(path))
            if not hasattr(module, "get_config"):
                raise UserError("it has no get_config() (a file that registers parts of your own: --plugin)")
            if variant and not inspect.signature(module.get_config).parameters:
                raise UserError("it has no variants")
            experiment = module.get_config(variant) if variant else module.get_config()
            if type(experiment) is not Experiment:
                raise UserError(f"get_config must return an Experiment, got {type(experiment).__name__}")
            # Written and read as in a run folder, so that later commands see the same, checked values.
            return decode(parse_json(json.dumps(encode(experiment))))
        except UserError as error:
            raise UserError(f"config {spec}: {error}") from None


def config_files() -> dict[str, Path]:
    """The shipped configs by name: inside the package when installed, next to it in a checkout."""
    package = Path(__file__).parents[1]
    for folder in (package / "configs", package.parent / "configs"):
        if folder.is_dir():
            return {path.stem: path for path in sorted(folder.glob("*.py"))}
    return {}


@functools.cache
def _converter() -> "cattrs.Converter":
    """Reads and writes configs, those of later plugins too."""
    import cattrs
    from cattrs.gen import make_dict_unstructure_fn, override

    converter = cattrs.Converter(forbid_extra_keys=True)
    for hint in (int, float, str, bool):  # unchanged, for the configs to check: cattrs would turn 2.7 into 2
        converter.register_structure_hook(hint, lambda value, _: value)
    converter.register_structure_hook_func(_has_choices, lambda value, _: _as_tuples(value))
    for registry in REGISTRIES:
        _tag(converter, registry)
    # Written only if there are any: config.json without trackers is what it was before there were trackers.
    some = make_dict_unstructure_fn(LoggingConfig, converter, trackers=override(omit_if_default=True))
    converter.register_unstructure_hook(LoggingConfig, some)
    return converter


def _has_choices(hint: Any) -> bool:
    """Whether a type is a union such as `int | str`, which cattrs does not read; it reads `int | None`."""
    kinds = [kind for kind in get_args(hint) if kind is not type(None)]
    return get_origin(hint) in (Union, types.UnionType) and len(kinds) > 1


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def _tag(converter: "cattrs.Converter", registry: Registry) -> None:
    def write(value: Any) -> dict[str, Any]:
        return {"type": registry.part_of(type(value)).name, **converter.unstructure(value)}

    def read(value: Any, _: Any) -> Any:
        tagged = isinstance(value, Mapping) and isinstance(value.get("type"), str)
        require(tagged, registry.kind, value, f"an object with a `type`, one of {', '.join(registry)}")
        config_class = registry.choose(registry.kind, value["type"])
        rest = {key: inner for key, inner in value.items() if key != "type"}
        return converter.structure(rest, config_class)

    def is_base(hint: Any) -> bool:
        return hint is registry.base  # not a subclass, whose fields are read and written directly

    converter.register_unstructure_hook_func(is_base, write)
    converter.register_structure_hook_func(is_base, read)


def encode(experiment: Experiment) -> dict[str, Any]:
    """The experiment as JSON values: parts have the tag `type`, and `plugins`, if any, is of `plugins_in`."""
    plugins = plugins_in(experiment)
    values = _converter().unstructure(experiment, unstructure_as=Experiment)
    return values | {"plugins": plugins} if plugins else values


def decode(values: Mapping[str, Any], keep_trackers: bool = True) -> Experiment:
    """The inverse of `encode`; refuses unknown keys, wrong types, and a missing plugin, with the flag to add.

    Without `keep_trackers`, trackers whose plugin is missing are left out: a run can be read without them.
    """
    import cattrs

    require(isinstance(values, Mapping), "an experiment", values, "a JSON object")
    plugins, logging = values.get("plugins"), values.get("logging")
    require_plugins(plugins, but="" if keep_trackers else "tracker")
    values = {key: value for key, value in values.items() if key != "plugins"}
    missing = [part for parts in missing_parts(plugins).values() for part in parts]
    if missing and isinstance(logging, Mapping) and isinstance(logging.get("trackers"), list):
        kept = [
            one
            for one in logging["trackers"]
            if not (isinstance(one, Mapping) and f"tracker {one.get('type')}" in missing)
        ]
        values["logging"] = {**logging, "trackers": kept}

    def describe(error: BaseException, expected: type | None) -> str:
        return str(error) if isinstance(error, UserError) else cattrs.v.format_exception(error, expected)

    try:
        return _converter().structure(values, Experiment)
    except cattrs.BaseValidationError as error:
        raise UserError("; ".join(cattrs.transform_error(error, format_exception=describe))) from error


def read(path: Path, keep_trackers: bool = False) -> Experiment:
    """The experiment saved at `path`; for `keep_trackers` see `decode`."""
    try:
        return decode(without_digest(read_json("config", path)), keep_trackers)
    except MissingPlugin as error:
        raise UserError(f"{path}: {error}") from error
    except UserError as error:
        raise UserError(f"{path} is not an experiment's config: {error}") from error


def is_run(workdir: Path) -> bool:
    """Whether a folder holds a run; refuses a path that is not UTF-8, or too long for the files of a run."""
    try:
        os.fsencode(workdir.absolute()).decode()
    except UnicodeError:
        raise UserError(f"must be a path in UTF-8, got {str(workdir.absolute())!r}", "workdir") from None
    size = len(os.fsencode(workdir.absolute()))
    longest = max((len(os.fsencode(part)) for part in workdir.parts), default=0)
    if size > MAX_PATH or longest > MAX_NAME:
        raise UserError(
            f"must be a path of at most {MAX_PATH} bytes, {MAX_NAME} between two slashes, got"
            f" {str(workdir)[:40]!r}... of {size}",
            "workdir",
        )
    return (workdir / RUN_CONFIG).is_file()


def read_run(workdir: Path, keep_trackers: bool = False) -> Experiment:
    """The experiment of a run folder; for `keep_trackers` see `decode`."""
    if not is_run(workdir):
        raise UserError(f"workdir {str(workdir)!r} holds no run: there is no {RUN_CONFIG}")
    return read(workdir / RUN_CONFIG, keep_trackers)


class Stage(NamedTuple):
    """Steps that a run trained with the same values of its optimizer."""

    first_step: int
    values: dict[str, Any]
    """The identity fields of the optimizer as JSON values, by path, such as `optimizer.learning_rate`."""


def read_stages(workdir: Path, experiment: Experiment) -> tuple[Stage, ...]:
    """The stages of a run, in order; a single one unless its optimizer was changed on purpose.

    `experiment` is that of config.json.
    """
    path = workdir / STAGES
    now = _values(experiment)
    if not path.exists():
        return (Stage(1, now),)
    try:
        listed = without_digest(read_json("workdir", path))["stages"]
        stages = [Stage(operator.index(one["first_step"]), dict(one["values"])) for one in listed]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    while stages and stages[-1].values != now:  # a start was killed between this file and config.json
        stages.pop()
    return tuple(stages) or (Stage(1, now),)


def stages_after(stages: Iterable[Stage], experiment: Experiment, step: int) -> tuple[Stage, ...]:
    """The stages of a run that continues after `step` with the optimizer of `experiment`.

    Later stages belong to steps that were lost, as when the newest checkpoint is damaged.
    """
    kept = [stage for stage in stages if stage.first_step <= step]
    now = _values(experiment)
    if not kept or kept[-1].values != now:
        kept.append(Stage(step + 1, now))
    return tuple(kept)


def stage_changes(stages: Iterable[Stage]) -> dict[int, list[str]]:
    """For the first step of each stage but the first, lines `field: before -> after`."""
    return {
        b.first_step: _differences(b.values.items(), a.values.items()) for a, b in itertools.pairwise(stages)
    }


def _values(experiment: Experiment) -> dict[str, Any]:
    leaves = _leaves(experiment.optimizer, runtime=False, path="optimizer")
    is_json = (str, int, float, type(None))
    return {path: value if isinstance(value, is_json) else str(value) for path, value in leaves}


def identity_differences(ours: Experiment, theirs: Experiment) -> list[str]:
    """Lines `field: theirs -> ours` for the identity fields that differ."""
    return _differences(_leaves(ours, runtime=False), _leaves(theirs, runtime=False))


def runtime_differences(ours: Experiment, theirs: Experiment) -> list[str]:
    """Lines `field: theirs -> ours` for the runtime fields that differ."""
    return _differences(_leaves(ours, runtime=True), _leaves(theirs, runtime=True))


def _differences(ours: Iterable[tuple[str, Any]], theirs: Iterable[tuple[str, Any]]) -> list[str]:
    """The fields that differ; of a part of another type, the type alone."""
    a, b = dict(ours), dict(theirs)
    keys = [key for key in a | b if a.get(key) != b.get(key)]
    replaced = [key.removesuffix("type") for key in keys if key.endswith(".type")]
    for part in replaced:
        keys = [key for key in keys if key == f"{part}type" or not key.startswith(part)]
    return [f"{key}: {b.get(key)!r} -> {a.get(key)!r}" for key in keys]


def _leaves(config: Any, runtime: bool, path: str = "") -> Iterable[tuple[str, Any]]:
    """Pairs of path and value, of a config its type, in runtime fields or in all others."""
    for node in walk(config, path):
        if node.is_runtime == runtime:
            if not dataclasses.is_dataclass(node.value) and not isinstance(node.value, tuple):
                yield node.path, node.value
            elif node.path and dataclasses.is_dataclass(node.value):
                yield f"{node.path}.type", name_of(node.value)


def with_digest(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values, and their SHA-256 under DIGEST."""
    values = {name: value for name, value in values.items() if name != DIGEST}
    return {DIGEST: _digest(values)} | values  # first: a person can delete its line and leave valid JSON


def without_digest(values: Any) -> Any:
    """The inverse of `with_digest`, which it checks; values whose digest a person removed are unchanged."""
    if not isinstance(values, Mapping) or DIGEST not in values:
        return values
    rest = {name: value for name, value in values.items() if name != DIGEST}
    if values[DIGEST] != _digest(rest):
        raise UserError(
            f"it was damaged or edited: its {DIGEST} does not match its values (if you edited it, delete the"
            f" line {DIGEST!r})"
        )
    return rest


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
