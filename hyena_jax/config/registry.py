"""The parts of experiments, of this package and of plugins: a registry for each kind, filled by `register`.

A part is a frozen dataclass of options (its config) and a target that is built from it. The config derives
from the base class of its kind, such as `MixerConfig`, and that base class holds the registry of the kind.
This package registers its parts as a user does, but names targets as "module:name", so that nothing is
imported before it is used. Plugins are the user's files and modules that register parts.
"""

import dataclasses
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import re
import shlex
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from hyena_jax.config.checks import check_annotations
from hyena_jax.system.errors import UserError, choose, describe_fault, printable, require
from hyena_jax.system.files import MAX_CODE, open_input

NAME = re.compile(r"[a-z][a-z0-9_]*")
ENTRY_POINTS = "hyena_jax.plugins"
# Prefix of the module names of the user's files.
FILE_MODULE = "hyena_jax_file_"


class Plugin(NamedTuple):
    """A user's file or module that registers parts, and a digest of its code at import."""

    name: str
    """The value for `--plugin`: the absolute path of a file, or the name of a module."""
    sha256: str
    """SHA-256 of the file, or of all Python files of the package, in hexadecimal."""


NOWHERE = Plugin("", "")
"""In place of a plugin, of a part that a notebook or an interactive session registered."""


OWN_NAMES = "a name of your own needs --plugin FILE; in Python, import its module first"

# Errors of a path, which the user's code gives; other OSErrors, such as a full disk, are the machine's.
OF_PATHS = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)


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
        """The parts by name."""
        return self._parts

    def add(self, part: Part) -> None:
        """Adds a part, or replaces an earlier definition of its class, as when a notebook reruns a cell.

        Raises:
          UserError: if another class has this name, or the class has another name.
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
          UserError: if the class is not registered, or was redefined since.
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

    def choose(self, what: str, name: str) -> type:
        """The config class of that name; UserError, about `what`, if there is none."""
        return choose(what, name, self, OWN_NAMES)

    def target(self, config_class: type) -> Any:
        """The target of configs of this class: a Linen module class, or a function of the config.

        Raises:
          UserError: if the class is not registered, or its target cannot be imported or called.
        """
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


def parts_in(value: Any) -> Iterator[Part]:
    """The registered parts of a config, from the outside in.

    Raises:
      UserError: for a config of a kind whose class is not registered.
    """
    if isinstance(value, tuple):
        for child in value:
            yield from parts_in(child)
    elif dataclasses.is_dataclass(value):
        registry = getattr(type(value), "registry", None)
        if registry is not None:
            yield registry.part_of(type(value))
        for field in dataclasses.fields(value):
            yield from parts_in(getattr(value, field.name))


class MissingPlugin(UserError):
    """A part of a saved experiment is not registered."""


def load_plugin(name: str) -> None:
    """Imports a plugin, which registers its parts.

    Args:
      name: a Python file; a module on the path; or an entry point of the group `hyena_jax.plugins`.

    Raises:
      UserError: if there is no such file or module, or its import fails.
    """
    with own_code(f"plugin {name!r} cannot be imported"):
        try:
            import_parts(name)
        except UserError as error:
            raise UserError(f"plugin {name!r}: {error}") from None


def import_parts(name: str) -> ModuleType:
    """Imports a plugin and returns its module; the parts that it registers are marked as its parts.

    A Python file becomes a module whose name depends only on its path.
    """
    before = {id(part) for registry in REGISTRIES for part in registry.parts.values()}
    if name.endswith(".py"):
        if not Path(name).is_file():
            raise UserError(f"{name!r} is not a file")
        with open_input("Python file", name, MAX_CODE):
            pass  # it can be opened and is not too large
        path = Path(name).resolve()
        plugin_name, digest = str(path), hashlib.sha256(str(path).encode()).hexdigest()
        spec = importlib.util.spec_from_file_location(f"{FILE_MODULE}{path.stem}_{digest[:8]}", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses in the file look up their annotations there
        spec.loader.exec_module(module)
    else:
        found = importlib.metadata.entry_points(group=ENTRY_POINTS, name=name)
        module = importlib.import_module(next((point.module for point in found), name))
        plugin_name = name
    plugin = Plugin(plugin_name, _digest(module))
    for registry in REGISTRIES:
        for part in [part for part in registry.parts.values() if id(part) not in before]:
            registry.add(part._replace(plugin=plugin))
    return module


def _digest(module: ModuleType | None) -> str:
    """SHA-256 of a module's file, or of all Python files of a package; empty without a file."""
    file = getattr(module, "__file__", None)
    if file is None:
        return ""
    files = [Path(file)]
    if files[0].name == "__init__.py":
        files = sorted(file for file in files[0].parent.rglob("*.py") if file.is_file())
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def plugins_in(experiment: Any) -> dict[str, Any]:
    """The parts of an experiment that are not this package's, by plugin, as config.json names them.

    For a part that a script or a notebook registered, the plugin is the file of its config class, if any.
    """
    found: dict[Plugin, list[str]] = {}
    for part in parts_in(experiment):
        module = part.config_class.__module__
        if module.split(".")[0] == "hyena_jax":
            continue
        plugin = part.plugin
        if plugin is None:
            file = getattr(sys.modules.get(module), "__file__", None) or ""
            has_file = Path(file).is_file()
            plugin = Plugin(str(Path(file).resolve()), _digest(sys.modules[module])) if has_file else NOWHERE
        found.setdefault(plugin, []).append(f"{part.config_class.registry.kind} {part.name}")
    return {
        plugin.name: {"sha256": plugin.sha256, "parts": list(dict.fromkeys(names))}
        for plugin, names in found.items()
    }


def missing_parts(saved: Any) -> dict[str, list[str]]:
    """The parts in a saved value of `plugins_in` that are not registered, such as `mixer ema`, by plugin."""
    registered = {f"{registry.kind} {name}" for registry in REGISTRIES for name in registry}
    missing = {}
    for name, about in saved.items() if isinstance(saved, dict) else ():
        parts = about.get("parts") if isinstance(about, dict) else None
        is_list = isinstance(parts, list) and all(isinstance(part, str) for part in parts)
        missing[name] = [part for part in parts if part not in registered] if is_list else []
    return {name: parts for name, parts in missing.items() if parts}


def require_plugins(saved: Any, but: str = "") -> None:
    """Refuses a saved value of `plugins_in` if one of its parts is not registered now.

    A run folder is not trusted: the plugins that it names are shown, never imported.

    Args:
      but: a kind whose parts may be missing, such as `tracker`.

    Raises:
      MissingPlugin: naming the missing parts and the flag to add.
    """
    for name, parts in missing_parts(saved).items():
        needed = [part for part in parts if part.partition(" ")[0] != but]
        if needed:
            how = "register it before the run is opened"
            if name:
                how = f"add --plugin {_quoted(name)} (in Python, import it first)"
            if all(part.startswith("tracker ") for part in needed):
                how += ", or train without: --logging.trackers ''"
            raise MissingPlugin(f"{', '.join(map(printable, needed))} must be registered: {how}")


def changed_plugins(experiment: Any, saved: Any) -> list[str]:
    """A line for each plugin of the experiment whose code differs from `saved`; it may have been moved."""
    saved = saved if isinstance(saved, dict) else {}
    kept = {name: about for name, about in saved.items() if isinstance(about, dict)}
    digests = {name: about.get("sha256") for name, about in kept.items()}
    lists = (about.get("parts") for about in kept.values())
    parts = {str(part) for found in lists if isinstance(found, list) for part in found}
    lines = []
    for name, about in plugins_in(experiment).items():
        was_moved = name not in digests and about["sha256"] != "" and about["sha256"] in digests.values()
        if name not in digests and not was_moved and parts.isdisjoint(about["parts"]):
            lines.append(f"plugin {_quoted(name)}, which it did not use before")
        elif digests.get(name) != about["sha256"] and not was_moved:
            lines.append(f"the code of plugin {_quoted(name)} (its SHA-256 differs)")
    return lines


def plugin_flags(experiment: Any) -> str:
    """The flags ` --plugin FILE` with which a command knows the parts of an experiment, to be printed."""
    return "".join(f" --plugin {shlex.quote(printable(name))}" for name in plugins_in(experiment) if name)


def _quoted(text: object) -> str:
    """The text in shell quotes."""
    return "'" + printable(text).replace("'", "'\\''") + "'"


@contextmanager
def own_code(what: str, experiment: Any = None) -> Iterator[None]:
    """A block that runs the user's code: its errors become a UserError `{what}: {error} ({file}:{line})`.

    Args:
      experiment: given where code of this package runs in the block too. Then errors are the user's only if a
        part of the experiment is; an OSError is the machine's, unless the user's code gave a wrong path.
    """
    try:
        yield
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:
        if experiment is not None:
            is_fault = isinstance(error, Exception) and not isinstance(error, OSError)
            is_fault |= isinstance(error, OF_PATHS) and is_of_own_code(error)
            if not is_fault or not plugins_in(experiment):
                raise
        raise UserError(f"{what}: {describe_fault(error)}") from error


def is_of_own_code(error: BaseException) -> bool:
    """Whether the error was raised in, or below, the user's config or plugin code."""
    parts = (part for registry in REGISTRIES for part in registry.parts.values())
    names = {part.config_class.__module__ for part in parts if part.plugin is not None}
    files = {
        getattr(module, "__file__", None)
        for name, module in list(sys.modules.items())
        if name.startswith(FILE_MODULE) or name in names
    }
    return any(frame.filename in files for frame in traceback.extract_tb(error.__traceback__))
