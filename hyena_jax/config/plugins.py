"""Files and modules of the user's that register parts, and config files, which may do the same."""

import hashlib
import importlib
import importlib.metadata
import importlib.util
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from hyena_jax.config.checks import UserError
from hyena_jax.config.input_files import MOST_CODE, open_input
from hyena_jax.config.registry import Plugin, Registry, parts_in

ENTRY_POINTS = "hyena_jax.plugins"
# How the names of modules begin that are files of the user's.
FILE_MODULE = "hyena_jax_file_"


@dataclass(frozen=True)
class PluginFlags:
    """What every command takes, and reads before its other flags."""

    plugin: tuple[str, ...] = ()
    """Python file, module or entry point (group hyena_jax.plugins) that registers parts of your own; may be
    given several times. The variable HYENA_JAX_PLUGINS holds more, separated by colons."""


class MissingPlugin(UserError):
    """A part of a saved experiment is not registered here."""


def load_plugin(name: str, registries: Iterable[Registry]) -> None:
    """Imports a plugin, for the parts that it registers.

    Args:
      name: a Python file; a module on the path; or an entry point of the group `hyena_jax.plugins`.
      registries: of all kinds.

    Raises:
      UserError: if there is no such file or module, or it fails when it is imported.
    """
    try:
        import_parts(name, registries)
    except UserError as error:
        raise UserError(f"plugin {name!r}: {error}") from None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plugin is the user's own program: its faults are input
        raise UserError(f"plugin {name!r} cannot be imported: {describe_fault(error)}") from error


def import_parts(name: str, registries: Iterable[Registry]) -> ModuleType:
    """The module of a file, or of a name as `load_plugin` takes it; the parts it registers are its own."""
    registries = tuple(registries)
    before = {id(part) for registry in registries for part in registry.parts.values()}
    module = run_file(Path(name)) if name.endswith(".py") else _import_module(name)
    plugin = Plugin(str(Path(name).resolve()) if name.endswith(".py") else name, _digest(module))
    for registry in registries:
        for part in [part for part in registry.parts.values() if id(part) not in before]:
            registry.add(part._replace(plugin=plugin))
    return module


def run_file(path: Path) -> ModuleType:
    """Runs a Python file as a module whose name depends on its path alone.

    Raises:
      UserError: if there is no such file.
    """
    if not path.is_file():
        raise UserError(f"{str(path)!r} is not a file")
    with open_input("Python file", path, MOST_CODE):
        pass  # it may be opened, and is not larger than that
    path = path.resolve()
    name = f"{FILE_MODULE}{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses in the file look their annotations up
    spec.loader.exec_module(module)
    return module


def plugins_in(experiment: Any) -> dict[str, Any]:
    """The parts of an experiment that are not this package's, as config.json names them, by plugin.

    A part that a script or a notebook registered is known by the file of its config class, if it has one.
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
    """Refuses what `plugins_in` once returned, if a part in it is not registered now; says how to have it.

    What a run folder says is shown, never imported: it may come from a stranger.

    Raises:
      MissingPlugin: naming the parts that are missing and the flag to add.
    """
    registered = {f"{registry.kind} {name}" for registry in registries for name in registry}
    for name, about in saved.items() if isinstance(saved, dict) else ():
        parts = about.get("parts") if isinstance(about, dict) else None
        missing = [part for part in parts if part not in registered] if isinstance(parts, list) else []
        if missing:
            how = f"add --plugin {_quoted(name)}" if name else "register it before the run is opened"
            raise MissingPlugin(f"{', '.join(map(printable, missing))} must be registered: {how}")


def changed_plugins(experiment: Any, saved: Any) -> list[str]:
    """A line for each plugin of the experiment whose code is not what `saved` says."""
    lines = []
    for name, about in plugins_in(experiment).items():
        before = saved.get(name) if isinstance(saved, dict) else None
        digest = before.get("sha256") if isinstance(before, dict) else None
        if digest != about["sha256"]:
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


def _quoted(text: object) -> str:
    """In quotes, as a shell reads it."""
    return "'" + printable(text).replace("'", "'\\''") + "'"


def printable(text: object) -> str:
    """Without what a terminal would obey."""
    return "".join(character for character in str(text) if character.isprintable())


def is_of_own_code(error: BaseException, registries: Iterable[Registry]) -> bool:
    """Whether a file or a module of the user's, run as a config or plugin, was at work when it was raised."""
    parts = (part for registry in registries for part in registry.parts.values())
    names = {part.config_class.__module__ for part in parts if part.plugin is not None}
    files = {
        getattr(module, "__file__", None)
        for name, module in list(sys.modules.items())
        if name.startswith(FILE_MODULE) or name in names
    }
    return any(frame.filename in files for frame in traceback.extract_tb(error.__traceback__))


def describe_fault(error: BaseException) -> str:
    """An error of the user's own code on one line: what it is, and where in that code it was raised."""
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
    except Exception:  # the class of the error may be the user's, too
        lines = [""]
    return f"{type(error).__name__}: {lines[0]}{where}"
