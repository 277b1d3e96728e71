"""The user's files and modules that register parts; config files may register parts too."""

import hashlib
import importlib
import importlib.metadata
import importlib.util
import shlex
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from hyena_jax.config.registry import Plugin, Registry, parts_in
from hyena_jax.errors import UserError, printable
from hyena_jax.files import MAX_CODE, open_input

ENTRY_POINTS = "hyena_jax.plugins"
# Prefix of the module names of the user's files.
FILE_MODULE = "hyena_jax_file_"


@dataclass(frozen=True)
class PluginFlags:
    """Flags that every command takes and reads before its others."""

    plugin: tuple[str, ...] = ()
    """Python file, module or entry point (group hyena_jax.plugins) that registers your parts; may be
    repeated. The environment variable HYENA_JAX_PLUGINS names more, separated by colons."""


class MissingPlugin(UserError):
    """A part of a saved experiment is not registered."""


def load_plugin(name: str, registries: Iterable[Registry]) -> None:
    """Imports a plugin, which registers its parts.

    Args:
      name: a Python file; a module on the path; or an entry point of the group `hyena_jax.plugins`.
      registries: the registries of all kinds.

    Raises:
      UserError: if there is no such file or module, or its import fails.
    """
    with own_code(f"plugin {name!r} cannot be imported"):
        try:
            import_parts(name, registries)
        except UserError as error:
            raise UserError(f"plugin {name!r}: {error}") from None


def import_parts(name: str, registries: Iterable[Registry]) -> ModuleType:
    """Imports a plugin and returns its module; the parts that it registers are marked as its parts."""
    registries = tuple(registries)
    before = {id(part) for registry in registries for part in registry.parts.values()}
    module = run_file(Path(name)) if name.endswith(".py") else _import_module(name)
    plugin = Plugin(str(Path(name).resolve()) if name.endswith(".py") else name, _digest(module))
    for registry in registries:
        for part in [part for part in registry.parts.values() if id(part) not in before]:
            registry.add(part._replace(plugin=plugin))
    return module


def run_file(path: Path) -> ModuleType:
    """Runs a Python file as a module whose name depends only on the path.

    Raises:
      UserError: if there is no such file.
    """
    if not path.is_file():
        raise UserError(f"{str(path)!r} is not a file")
    with open_input("Python file", path, MAX_CODE):
        pass  # it can be opened and is not too large
    path = path.resolve()
    name = f"{FILE_MODULE}{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses in the file look up their annotations there
    spec.loader.exec_module(module)
    return module


def plugins_in(experiment: Any) -> dict[str, Any]:
    """The parts of an experiment that are not this package's, by plugin, as config.json names them.

    For a part that a script or a notebook registered, the plugin is the file of its config class, if any.
    """
    found: dict[Plugin, list[str]] = {}
    for part in parts_in(experiment):
        if part.config_class.__module__.split(".")[0] == "hyena_jax":
            continue
        plugin = part.plugin or _of_class(part.config_class)
        found.setdefault(plugin, []).append(f"{part.config_class.registry.kind} {part.name}")
    return {
        plugin.name: {"sha256": plugin.sha256, "parts": list(dict.fromkeys(names))}
        for plugin, names in found.items()
    }


def require_plugins(saved: Any, registries: Iterable[Registry]) -> None:
    """Refuses a saved value of `plugins_in` if one of its parts is not registered now.

    A run folder is not trusted: the plugins that it names are shown, never imported.

    Raises:
      MissingPlugin: naming the missing parts and the flag to add.
    """
    registered = {f"{registry.kind} {name}" for registry in registries for name in registry}
    for name, about in saved.items() if isinstance(saved, dict) else ():
        parts = about.get("parts") if isinstance(about, dict) else None
        is_list = isinstance(parts, list) and all(isinstance(part, str) for part in parts)
        missing = [part for part in parts if part not in registered] if is_list else []
        if missing:
            how = f"add --plugin {_quoted(name)}" if name else "register it before the run is opened"
            raise MissingPlugin(f"{', '.join(map(printable, missing))} must be registered: {how}")


def changed_plugins(experiment: Any, saved: Any) -> list[str]:
    """A line for each plugin of the experiment whose code differs from `saved`; it may have been moved."""
    saved = saved if isinstance(saved, dict) else {}
    digests = {name: about.get("sha256") for name, about in saved.items() if isinstance(about, dict)}
    lines = []
    for name, about in plugins_in(experiment).items():
        was_moved = name not in digests and about["sha256"] != "" and about["sha256"] in digests.values()
        if digests.get(name) != about["sha256"] and not was_moved:
            lines.append(f"the code of plugin {_quoted(name)} (its SHA-256 differs)")
    return lines


def _import_module(name: str) -> ModuleType:
    for entry_point in importlib.metadata.entry_points(group=ENTRY_POINTS, name=name):
        return importlib.import_module(entry_point.module)
    return importlib.import_module(name)


def _digest(module: ModuleType) -> str:
    file = getattr(module, "__file__", None)
    if file is None:
        return ""
    path = Path(file)
    files = [path]
    if path.name == "__init__.py":
        files = sorted(file for file in path.parent.rglob("*.py") if file.is_file())
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _of_class(config_class: type) -> Plugin:
    module = sys.modules.get(config_class.__module__)
    file = getattr(module, "__file__", None)
    if file is None or not Path(file).is_file():
        return Plugin("", "")
    return Plugin(str(Path(file).resolve()), _digest(module))


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
        part of the experiment is, and an OSError is the machine's.
    """
    try:
        yield
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:
        if experiment is not None:
            is_fault = isinstance(error, Exception) and not isinstance(error, OSError)
            if not is_fault or not plugins_in(experiment):
                raise
        raise UserError(f"{what}: {describe_fault(error)}") from error


def is_of_own_code(error: BaseException, registries: Iterable[Registry]) -> bool:
    """Whether the error was raised in, or below, the user's config or plugin code."""
    parts = (part for registry in registries for part in registry.parts.values())
    names = {part.config_class.__module__ for part in parts if part.plugin is not None}
    files = {
        getattr(module, "__file__", None)
        for name, module in list(sys.modules.items())
        if name.startswith(FILE_MODULE) or name in names
    }
    return any(frame.filename in files for frame in traceback.extract_tb(error.__traceback__))


def describe_fault(error: BaseException) -> str:
    """One line for an error in the user's code: its type, its message, and where it was raised."""
    ours = str(Path(__file__).parents[1])
    installed = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((ours, *installed, "<"))
    ]
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    try:
        lines = str(error).strip().splitlines() or [""]
    except Exception:  # the error's class may also be the user's code
        lines = [""]
    return f"{type(error).__name__}: {lines[0]}{where}"
