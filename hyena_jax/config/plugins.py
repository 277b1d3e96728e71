"""Plugins: the user's files and modules that register parts, and errors of the user's code."""

import hashlib
import importlib
import importlib.metadata
import importlib.util
import shlex
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from hyena_jax.config.registry import REGISTRIES, Plugin, parts_in
from hyena_jax.system.errors import UserError, describe_fault, printable

ENTRY_POINTS = "hyena_jax.plugins"
# Prefix of the module names of the user's files.
FILE_MODULE = "hyena_jax_file_"
NOWHERE = Plugin("", "")
"""In place of a plugin, of a part that a notebook or an interactive session registered."""

# Errors of a path, which the user's code gives; other OSErrors, such as a full disk, are the machine's.
OF_PATHS = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)


class MissingPlugin(UserError):
    """A part of a saved experiment is not registered."""


def load_plugin(name: str) -> None:
    """Imports a plugin: a Python file, a module on the path, or an entry point of `hyena_jax.plugins`."""
    with own_code(f"plugin {name!r} cannot be imported"):
        try:
            import_parts(name)
        except UserError as error:
            raise UserError(f"plugin {name!r}: {error}") from None


def import_parts(name: str) -> ModuleType:
    """Imports a plugin and returns its module; the parts that it registers are marked as its parts.

    A Python file becomes a module whose name depends only on its path.
    """
    before = [part for registry in REGISTRIES for part in registry.parts.values()]
    if name.endswith(".py"):
        if not Path(name).is_file():
            raise UserError(f"{name!r} is not a file")
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
        for part in [*registry.parts.values()]:
            if not any(part is earlier for earlier in before):
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
    """Refuses a saved value of `plugins_in` if a part of it, not of the kind `but`, is not registered.

    A run folder is not trusted: the plugins that it names are shown, never imported.
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
    return "'" + printable(text).replace("'", "'\\''") + "'"


@contextmanager
def own_code(what: str, experiment: Any = None) -> Iterator[None]:
    """A block that runs the user's code: its errors become a UserError `{what}: {error} ({file}:{line})`.

    `experiment` is given where code of this package runs too. Then errors are the user's only if a part of it
    is; an OSError is the machine's, unless the user's code gave a wrong path; what is no Exception, such as
    SystemExit, the user's where its code raised it.
    """
    try:
        yield
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:
        if experiment is not None:
            is_fault = isinstance(error, Exception) and not isinstance(error, OSError)
            is_odd = isinstance(error, OF_PATHS) or not isinstance(error, Exception)
            is_fault |= is_odd and is_of_own_code(error)
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
