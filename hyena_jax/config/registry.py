"""What an experiment can be made of: a registry for each kind of part, all filled by `register`.

A part is a frozen dataclass of options (its config) and what is built from it. The config derives from the
base class of its kind, such as `MixerConfig`, and that base class holds the registry of the kind. The parts
of this package are registered in the same way as a user's, by the name of what is built ("module:name"), so
that nothing is imported before it is used.
"""

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from hyena_jax.config.checks import UserError, require

NAME = re.compile(r"[a-z][a-z0-9_]*")


class Plugin(NamedTuple):
    """A file or a module of the user's that registers parts, and its code when it was imported."""

    name: str
    """What `--plugin` takes: the absolute path of a file, or the name of a module."""
    sha256: str
    """SHA-256 of the file, or of all Python files of the package, in hexadecimal."""


class Part(NamedTuple):
    """What is known by a name in configs."""

    name: str
    config_class: type
    target: Any
    """What is built from the config, or "module:name" where it is imported from."""
    oracle: Any
    """Its float64 oracle, or "module:name"; None where it has none."""
    plugin: Plugin | None
    """The plugin that registered it; None for parts of this package, of scripts and of notebooks."""


class Registry(Mapping[str, type]):
    """The parts of one kind: their config classes by name, in the order of their registration."""

    def __init__(self, kind: str, is_module: bool):
        """A registry of Linen modules, or of functions of a config."""
        self.kind = kind
        self.is_module = is_module
        self._parts: dict[str, Part] = {}

    def __getitem__(self, name: str) -> type:
        return self._parts[name].config_class

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    @property
    def parts(self) -> Mapping[str, Part]:
        """The parts by name."""
        return self._parts

    def add(self, part: Part) -> None:
        """Adds a part, or replaces an earlier definition of the same class: a notebook runs cells again.

        Raises:
          UserError: if another class has the name, or the class another name.
        """
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
        """The part of a config class.

        Raises:
          UserError: if the class is not registered, or was when it was defined another time.
        """
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

    def target(self, config_class: type) -> Any:
        """What is built from configs of this class: a Linen module class, or a function of the config.

        Raises:
          UserError: if the class is not registered, or what it names cannot be imported or called.
        """
        part = self.part_of(config_class)
        target = _imported(part.target)
        _check_target(self, part.name, target)
        return target

    def oracle(self, config_class: type) -> Any:
        """The float64 oracle of configs of this class; None where it was registered without one."""
        return _imported(self.part_of(config_class).oracle)


class Targets(Mapping[str, Any]):
    """What a registry's parts build, by name; imported when asked for."""

    def __init__(self, registry: Registry):
        self._registry = registry

    def __getitem__(self, name: str) -> Any:
        return self._registry.target(self._registry[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._registry)

    def __len__(self) -> int:
        return len(self._registry)


def registry_of(config_class: type) -> Registry | None:
    """The registry of the kind that a config class belongs to; None for other classes."""
    return getattr(config_class, "registry", None)


def is_kind(hint: Any) -> bool:
    """Whether an annotated type is the base class of a kind of parts, such as `MixerConfig`."""
    return inspect.isclass(hint) and isinstance(vars(hint).get("registry"), Registry)


def register(name: str, config_class: type, target: Any, oracle: Any = None) -> None:
    """Makes a part known by `name`, in Python, in config.json and on the command line.

    Args:
      name: lower-case letters, digits and underscores; unique within its kind.
      config_class: a frozen dataclass derived from the base class of its kind: `MixerConfig`, `FilterConfig`,
        `ModelConfig`, `DataConfig`, `LossConfig`, `MetricConfig`, `OptimizerConfig` or `ScheduleConfig`,
        whose docstring says what the target must be.
      target: what is built from the config, a Linen module or a function; or "module:name", from where it is
        imported when it is first used.
      oracle: the same computation in NumPy float64, where the kind has oracles (mixers, filters and models),
        for benchmarks to check against; or "module:name".

    Raises:
      UserError: if an argument is not what it should be, or the name is taken.
    """
    require(isinstance(name, str) and NAME.fullmatch(name) is not None, "name", name, f"like {NAME.pattern}")
    registry = registry_of(config_class) if inspect.isclass(config_class) else None
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
    if not isinstance(target, str):
        _check_target(registry, name, target)
    registry.add(Part(name, config_class, target, oracle, None))


def _check_target(registry: Registry, name: str, target: Any) -> None:
    if not registry.is_module:
        require(callable(target), f"what {registry.kind} {name!r} names", target, "a function of its config")
        return
    # The class itself is always callable; its instances are if a class in its hierarchy says how.
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
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"{target!r} cannot be imported: {error}") from error


def _qualified(config_class: type) -> tuple[str, str]:
    return config_class.__module__, config_class.__qualname__


def parts_in(value: Any) -> Iterator[Part]:
    """The registered parts of a config, from the outside in.

    Raises:
      UserError: for a config of a kind whose class is not registered.
    """
    if isinstance(value, tuple):
        for child in value:
            yield from parts_in(child)
    elif dataclasses.is_dataclass(value):
        registry = registry_of(type(value))
        if registry is not None:
            yield registry.part_of(type(value))
        for field in dataclasses.fields(value):
            yield from parts_in(getattr(value, field.name))
