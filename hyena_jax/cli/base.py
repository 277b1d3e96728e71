"""What the commands share: what a command is, the flags that name a run, and lines for the user.

No module of a command imports JAX at module level, so that `--help` and wrong flags answer at once.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from hyena_jax import config
from hyena_jax.config import Checked
from hyena_jax.config.flags import FLAT, PluginFlags, flags_of, positional, read_flags
from hyena_jax.config.help import command_help
from hyena_jax.system.errors import UserError, as_printed
from hyena_jax.system.storage.location import Location

if TYPE_CHECKING:
    from hyena_jax.system.output import Output

T = TypeVar("T")

LINE_END = 600
"""Characters of the end of a long error that are printed, and half of those of its beginning."""
HELP = ("-h", "--help")
POSITIONS = ("--model.learned-positions", "--no-model.learned-positions")
PLUGINS = "HYENA_JAX_PLUGINS"


class Command(Checked):
    """A command: a subclass is a frozen dataclass whose fields are its flags, documented for `--help`.

    Values that are wrong for every run are refused when it is built, as those of a config are.
    """

    @classmethod
    def take(cls, called: str, arguments: list[str]) -> tuple[list[str], dict[str, Any]]:
        """Takes what is not a flag of its own out of the arguments; imports the plugins that they name.

        Returns the rest, and values that replace defaults of fields.
        """
        given, rest, waiting = [], [], False
        for argument in arguments:
            if waiting or argument.startswith("--plugin="):
                given.append(argument.removeprefix("--plugin="))
            elif argument != "--plugin":
                rest.append(argument)
            waiting = argument == "--plugin" and not waiting
        if waiting:
            raise UserError("--plugin must be followed by a Python file or the name of a module")
        named = filter(None, os.environ.get(PLUGINS, "").split(os.pathsep))
        for name in dict.fromkeys([*named, *given]):
            config.load_plugin(name)
        return ([*rest, "--plugin", *given] if given else rest), {}

    @classmethod
    def notes(cls) -> list[str]:
        """Paragraphs of `--help` between the description and the flags."""
        return []

    def run(self, arguments: Sequence[str]) -> int:
        """Runs the command; returns its exit code. `arguments` are the whole command line, to be recorded."""
        raise NotImplementedError


class OfConfig(Command):
    """A command with the fields `config` and `experiment`: CONFIG comes first, with the flags' defaults."""

    trains: ClassVar[bool] = False
    """Whether it needs the trackers of a run whose config.json is CONFIG."""

    @classmethod
    def take(cls, called: str, arguments: list[str]) -> tuple[list[str], dict[str, Any]]:
        arguments, values = super().take(called, arguments)
        if arguments and not arguments[0].startswith("-"):
            given = {argument.partition("=")[0].replace("_", "-") for argument in arguments}
            values["experiment"] = config.load(arguments[0], cls.trains and "--logging.trackers" not in given)
            if "--data" in given:
                # The prompt of the config's own data need not be one of these.
                logging = replace(values["experiment"].logging, sample_prompt=None)
                values["experiment"] = replace(values["experiment"], logging=logging)
            model, given_for_them = values["experiment"].model, {*POSITIONS, *HELP} & given
            # Unlike in models of images, which have them by default, the config chose them for its own mixer.
            are_chosen = getattr(model, "learned_positions", False) and not type(model).learned_positions
            if cls.trains and "--model.pattern" in given and are_chosen and not given_for_them:
                note(
                    f"the config's learned positions stay with any --model.pattern: {POSITIONS[1]} drops them"
                )
        else:
            require_config_first(called, arguments)
        return arguments, values


@dataclass(frozen=True)
class OfRun(Command):
    """A command on a run, and on one of its checkpoints."""

    workdir: Path | Location = field(metadata=positional("WORKDIR"))
    """Folder of a run; or gs://BUCKET/NAME."""
    step: str = "latest"
    """Checkpoint: `latest`, `best` (lowest validation loss), or the number of a saved step."""
    plugins: PluginFlags = field(default=PluginFlags(), metadata=FLAT)


def read_command(
    kind: type[Command], called: str, arguments: Sequence[str]
) -> tuple[Command | None, list[str]]:
    """The command that its arguments describe, and the names of its flags; None if help has been printed."""
    rest, values = kind.take(called, list(arguments))
    flags = flags_of(kind, values, rest)
    if asks_for_help(rest):
        notes = kind.notes()
        if issubclass(kind, OfConfig) and not values:  # without a config, only its own flags
            flags = [flag for flag in flags if flag.path[0] != "experiment"]
            notes = [
                f"Configs: {', '.join(config.config_files())}",
                f"`hyena-jax {called} CONFIG --help` describes the options of a config.",
            ]
        print(command_help(f"hyena-jax {called}", kind.__doc__, flags, notes))
        return None, []
    return read_flags(kind, called, rest, values), [flag.name for flag in flags if flag.base is None]


def asks_for_help(arguments: Sequence[str]) -> bool:
    """Whether one of the arguments is --help."""
    return any(argument in HELP for argument in arguments)


def script_flags(kind: type[T]) -> T:
    """The flags of a script outside of this package; `--help`, which prints them, and a wrong one end it."""
    called, *arguments = sys.argv
    if asks_for_help(arguments):
        print(command_help(f"python {called}", kind.__doc__, flags_of(kind)))
        sys.exit()
    try:
        return read_flags(kind, called, arguments, program="python")
    except UserError as error:
        sys.exit(fail(error, 2))


def require_config_first(called: str, arguments: Sequence[str]) -> None:
    """Raises UserError if a flag comes before CONFIG, unless help is asked for."""
    if arguments and arguments[0].startswith("-") and not asks_for_help(arguments):
        resume = " (or --resume DIR, to continue a run)" if called == "train" else ""
        raise UserError(f"CONFIG must come first after {called}{resume}, got {arguments[0]!r}")


def note(text: str) -> None:
    """Prints a line to the standard error."""
    print(f"hyena-jax: {as_printed(text)}", file=sys.stderr)


def say(text: str) -> None:
    """Prints lines to the standard output."""
    print(as_printed(text))


def fail(reason: object, code: int) -> int:
    """Prints an error on one line, of a long one only both ends; returns the exit code."""
    line = as_printed(" ".join(str(reason).split()))
    n_left_out = len(line) - 3 * LINE_END
    if n_left_out > 0:
        line = f"{line[: 2 * LINE_END]} ... ({n_left_out:,} characters are left out) ... {line[-LINE_END:]}"
    note(f"error: {line}")
    return code


def unread() -> int:
    """Says that nobody reads the standard output, as after `| head`; returns the exit code."""
    sys.stdout = None
    return fail("nobody reads the output any more; rerun the command to continue", 3)


def table_console() -> "Output":
    """A console for tables; in a file they are not folded to the width of some terminal."""
    from hyena_jax.system.output import Output

    return Output(width=None if sys.stdout.isatty() else 200)
