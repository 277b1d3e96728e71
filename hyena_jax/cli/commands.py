"""The list of commands, and the command that a command line names.

A new command is a file with a subclass of `Command`, and its name in GROUPS.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from hyena_jax import __version__
from hyena_jax.cli.base import HELP, Command, read_command
from hyena_jax.cli.bench import BenchCompare, BenchDecode, BenchFunction, BenchModel, BenchOperators
from hyena_jax.cli.check import Check
from hyena_jax.cli.compare import Compare
from hyena_jax.cli.convert import Convert
from hyena_jax.cli.distill import Distill
from hyena_jax.cli.embed import Embed
from hyena_jax.cli.eval import EvaluateRun
from hyena_jax.cli.export import Export
from hyena_jax.cli.generate import Generate
from hyena_jax.cli.launch import Launch
from hyena_jax.cli.plan import Plan
from hyena_jax.cli.prepare import Prepare
from hyena_jax.cli.score import Score
from hyena_jax.cli.show import ShowRun
from hyena_jax.cli.sweep import Sweep
from hyena_jax.cli.task import DrawTask
from hyena_jax.cli.train import Train
from hyena_jax.config.flags import as_flag
from hyena_jax.config.help import overview
from hyena_jax.system.errors import UserError, choose
from hyena_jax.system.startup import refuse_wrong_jaxlib
from hyena_jax.system.storage.location import Location
from hyena_jax.training.options import StartOptions

# By what a person wants to do. For a command of two words, a table by the second word.
GROUPS = {
    "Train": {"train": Train, "sweep": Sweep, "launch": Launch},
    "Look": {"show": ShowRun, "compare": Compare},
    "Use": {"generate": Generate, "embed": Embed, "export": Export, "convert": Convert, "distill": Distill},
    "Measure": {
        "check": Check,
        "eval": EvaluateRun,
        "score": Score,
        "bench": {
            "operators": BenchOperators,
            "model": BenchModel,
            "decode": BenchDecode,
            "function": BenchFunction,
            "compare": BenchCompare,
        },
    },
    "Prepare": {"prepare": Prepare, "plan": Plan, "task": DrawTask},
}
COMMANDS = {name: kind for group in GROUPS.values() for name, kind in group.items()}
ABOUT = "Train, evaluate and sample sequence models: Hyena, Hawk, attention and others."
BENCH = "Measure time and memory, after a check, of mixers, models, decoding or your functions; and compare."
START = "To start: hyena-jax train quickstart --workdir runs/first, then hyena-jax show runs/first"


def run(arguments: Sequence[str]) -> int:
    """Runs the command that the arguments name, or prints help or the version; returns the exit code."""
    command, flags = find(arguments)
    if command is None:
        return 0
    refuse_wrong_jaxlib()
    try:
        return _with_copies(command).run(arguments)
    except UserError as error:  # names a field, which the user knows as a flag
        raise as_flag(error, flags) from error


def _with_copies(command: Command) -> Command:
    """The command with local copies in the place of runs in a bucket."""

    def local(value: Any, argument: str) -> Any:
        if isinstance(value, Location):
            from hyena_jax.system.storage.mirror import opened

            return opened(value, argument)
        if type(value) is tuple:
            return tuple(local(one, argument) for one in value)
        return inside(value) if isinstance(value, StartOptions) else value

    def inside(fields: Any) -> Any:
        values = {field.name: getattr(fields, field.name) for field in dataclasses.fields(fields)}
        copies = {name: local(value, name) for name, value in values.items()}
        return fields if copies == values else dataclasses.replace(fields, **copies)

    return inside(command)


def find(arguments: Sequence[str]) -> tuple[Command | None, list[str]]:
    """The command that the arguments describe, and the names of its flags; None if all has been printed."""
    kind, words, rest = COMMANDS, [], list(arguments)
    while isinstance(kind, dict):
        start = " ".join(["hyena-jax", *words])
        if not rest:
            raise UserError(f"{start} must be followed by a command: {', '.join(kind)}; see {start} --help")
        if rest[0] in HELP:
            groups = {"": kind} if words else GROUPS
            abouts = {
                title: {name: BENCH if isinstance(one, dict) else one.__doc__ for name, one in group.items()}
                for title, group in groups.items()
            }
            notes = [f"`{start} COMMAND --help` describes a command.", *([] if words else [START])]
            print(overview(f"{start} COMMAND ...", BENCH if words else ABOUT, abouts, notes))
            return None, []
        if rest[0] == "--version" and not words:
            print(f"hyena-jax {__version__}")
            return None, []
        kind = choose(" ".join([*words, "command"]), rest[0], kind)
        words.append(rest.pop(0))
    return read_command(kind, " ".join(words), rest)
