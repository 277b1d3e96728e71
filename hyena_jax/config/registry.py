"""The parts of experiments, of this package and of plugins: a registry for each kind, filled by `register`.

A part is a frozen dataclass of options (its config) and a target that is built from it. The config derives
from the base class of its kind, such as `MixerConfig`, and that base class holds the registry of the kind.
This package registers its parts as a user does, but names targets as "module:name", so that nothing is
imported before it is used. `hyena_jax.config.plugins` imports the user's files that register more.
"""

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from hyena_jax.config.checks import check_annotations
from hyena_jax.system.errors import UserError, choose, require

NAME = re.compile(r"[a-z][a-z0-9_]*")
OWN_NAMES = "a name of your own needs --plugin FILE; in Python, import its module first"


class Plugin(NamedTuple):
    """A user's file or module that registers parts, and a digest of its code at import."""

    name: str
    """The value for `--plugin`: the absolute path of a file, or the name of a module."""
    sha256: str
    """SHA-256 of the file, or of all Python files of the package, in hexadecimal."""


class Part(NamedTuple):
    """A registered part."""

    name: str
    config_class: type
    target: Any
    """The module or function that is built from the config, or "module:name" to import it from."""
    oracle: Any
    """Its float64 oracle, or "module:name"; None if it has none."""
    plugin: Plugin | None
    """The plugin that registered it; None for parts of this package, scripts and notebooks."""


REGISTRIES: list["Registry"] = []
"""The registries of all kinds."""


class Registry(Mapping[str, type]):
    """The parts of one kind: config classes by name, in the order of registration."""

    base: type
    """The base class of the configs of this kind, which holds this registry."""

    def __init__(self, kind: str, is_module: bool):
        """A registry of Linen modules if `is_module`, else of functions of a config."""
        self.kind = kind
        self.is_module = is_module
        self._parts: dict[str, Part] = {}

    def __set_name__(self, base: type, name: str) -> None:
        self.base = base
        REGISTRIES.append(self)

    def __getitem__(self, name: str) -> type:
        return self._parts[name].config_class

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    @property
    def parts(self) -> Mapping[str, Part]:
        return self._parts

    def add(self, part: Part) -> None:
        """Adds a part, or replaces an earlier definition of its class, as when a notebook reruns a cell."""
        taken = self._parts.get(part.name)
        if taken is not None and _qualified(taken.config_class) != _qualified(part.config_class):
            raise UserError(
                f"the name {part.name!r} is taken by the {self.kind} {taken.config_class.__name__};"
                f" register {part.config_class.__name__} under another name"
            )
        for other in self._parts.values():
            if other.config_class is part.config_class and other.name != part.name:
                raise UserError(f"{part.config_class.__name__} is already registered as {other.name!r}")
        self._parts[part.name] = part

    def part_of(self, config_class: type) -> Part:
        for part in self._parts.values():
            if part.config_class is config_class:
                return part
        if any(_qualified(part.config_class) == _qualified(config_class) for part in self._parts.values()):
            name = config_class.__name__
            raise UserError(f"{name} was defined again since this config was made; make the config again")
        what = "module" if self.is_module else "function"
        raise UserError(
            f"{config_class.__name__} is not a registered {self.kind}: call"
            f" hyena_jax.register(name, {config_class.__name__}, {what}) first"
        )

    def choose(self, what: str, name: str) -> type:
        """The config class of that name; UserError, about `what`, if there is none."""
        return choose(what, name, self, OWN_NAMES)

    def target(self, config_class: type) -> Any:
        """The target of configs of this class: a Linen module class, or a function of the config."""
        part = self.part_of(config_class)
        target = _imported(part.target)
        _check_target(self, part.name, target)
        return target

    def oracle(self, config_class: type) -> Any:
        """The float64 oracle of configs of this class; None if it was registered without one."""
        return _imported(self.part_of(config_class).oracle)


class Targets(Mapping[str, Any]):
    """The targets of a registry's parts by name, imported on access."""

    def __init__(self, registry: Registry):
        self._registry = registry

    def __getitem__(self, name: str) -> Any:
        return self._registry.target(self._registry[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._registry)

    def __len__(self) -> int:
        return len(self._registry)


def is_kind(hint: Any) -> bool:
    """Whether an annotated type is the base class of a kind of parts, such as `MixerConfig`."""
    return inspect.isclass(hint) and isinstance(vars(hint).get("registry"), Registry)


def register(name: str, config_class: type, target: Any, oracle: Any = None) -> None:
    """Registers a part under `name`, for Python, config.json and the command line.

    Args:
      name: lower-case letters, digits and underscores; unique within its kind.
      config_class: a frozen dataclass derived from the base class of its kind: `MixerConfig`, `FilterConfig`,
        `ModelConfig`, `DataConfig`, `LossConfig`, `MetricConfig`, `OptimizerConfig`, `ScheduleConfig` or
        `TrackerConfig`, whose docstring says what the target must be. Each field has a default and a type
        that `Checked` checks, with a range if it is a number: `Annotated[int, AtLeast(1)]`.
      target: the Linen module or function that is built from the config; or "module:name", to import it on
        first use.
      oracle: the same computation in NumPy float64, for kinds with oracles (mixers, filters and models), for
        benchmarks to check against; or "module:name".

    Raises:
      UserError: if an argument is of the wrong kind, or the name is taken.

    >>> from dataclasses import dataclass
    >>> import flax.linen as nn
    >>> import hyena_jax
    >>> from hyena_jax.mixers import Mixer
    >>> @dataclass(frozen=True)
    ... class MeanConfig(hyena_jax.MixerConfig):
    ...     bias: bool = True
    >>> class Mean(Mixer):
    ...     config: MeanConfig = MeanConfig()
    ...     @nn.compact
    ...     def mix(self, x, seq, deterministic):
    ...         return nn.Dense(self.d_model, self.config.bias)((x + seq.shift(x)) / 2)
    >>> hyena_jax.register("mean", MeanConfig, Mean)
    >>> model = hyena_jax.LanguageModelConfig(pattern=(MeanConfig(bias=False),))
    """
    require(isinstance(name, str) and NAME.fullmatch(name) is not None, "name", name, f"like {NAME.pattern}")
    registry = getattr(config_class, "registry", None) if inspect.isclass(config_class) else None
    if registry is None or is_kind(config_class):
        raise UserError(
            f"the config of {name!r} must be a class derived from the base class of its kind, such as"
            f" MixerConfig, got {config_class!r}"
        )
    parameters = vars(config_class).get("__dataclass_params__")
    if parameters is None or not parameters.frozen:
        raise UserError(f"{config_class.__name__} must be decorated with @dataclasses.dataclass(frozen=True)")
    for field in dataclasses.fields(config_class):
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise UserError(f"{config_class.__name__}.{field.name} must have a default")
    _refuse_lost_fields(config_class)
    check_annotations(config_class)
    if not isinstance(target, str):
        _check_target(registry, name, target)
    registry.add(Part(name, config_class, target, oracle, None))


def _refuse_lost_fields(config_class: type) -> None:
    """Refuses values in the body of a class that `dataclass` does not make fields, for lack of a type."""
    fields = {field.name for field in dataclasses.fields(config_class)}
    annotated = inspect.get_annotations(config_class)
    for name, value in vars(config_class).items():
        is_inherited = any(name in vars(base) for base in config_class.__mro__[1:]) and name not in fields
        is_value = not callable(value) and not hasattr(value, "__get__")
        if is_value and not name.startswith("_") and name not in annotated and not is_inherited:
            kind = type(value).__name__
            raise UserError(
                f"{config_class.__name__}.{name} must be annotated to be an option, as in `{name}: {kind} ="
                f" {value!r}` (or `{name}: ClassVar[{kind}]` to be none)"
            )


def _check_target(registry: Registry, name: str, target: Any) -> None:
    if not registry.is_module:
        require(callable(target), f"what {registry.kind} {name!r} names", target, "a function of its config")
        return
    # Every class is callable; its instances are if a class in its hierarchy defines __call__.
    is_class = inspect.isclass(target)
    can_call = is_class and any("__call__" in vars(base) for base in target.__mro__)
    shown = target.__name__ if is_class else target
    require(can_call, f"the module of {registry.kind} {name!r}", shown, "a Linen module with __call__")


def _imported(target: Any) -> Any:
    if not isinstance(target, str):
        return target
    module, _, name = target.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except UserError:
        raise
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"{target!r} cannot be imported: {error}") from error


def _qualified(config_class: type) -> tuple[str, str]:
    return config_class.__module__, config_class.__qualname__


def name_of(value: Any) -> str:
    """The registered name of a config, for messages; its class's name if it is not registered."""
    registry = getattr(type(value), "registry", {})
    return next((name for name, kind in registry.items() if kind is type(value)), type(value).__name__)


class Node(NamedTuple):
    """A config, a tuple or a plain value within a config."""

    path: str
    """`model.pattern.0.order`; empty for the config itself."""
    value: Any
    is_runtime: bool
    """Whether it is, or is within, a field that may change between the runs of an experiment."""


def walk(value: Any, path: str = "", is_runtime: bool = False) -> Iterator[Node]:
    """A config and all values within it, each before those within it."""
    yield Node(path, value, is_runtime)
    start = f"{path}." if path else ""
    if isinstance(value, tuple):
        for i, child in enumerate(value):
            yield from walk(child, f"{start}{i}", is_runtime)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            child, marked = getattr(value, field.name), is_runtime or "runtime" in field.metadata
            yield from walk(child, f"{start}{field.name}", marked)


def parts_in(value: Any) -> Iterator[Part]:
    """The parts of a config, from the outside in; all must be registered."""
    for node in walk(value):
        registry = getattr(type(node.value), "registry", None)
        if isinstance(registry, Registry):
            yield registry.part_of(type(node.value))
