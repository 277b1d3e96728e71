"""The list of commands, and the command that a command line names."""

import os
from collections.abc import Sequence
from typing import Any

from hyena_jax import config
from hyena_jax.benchmark.settings import Decode, Model, Operators
from hyena_jax.cli import (
    bench,
    compare,
    convert,
    distill,
    eval,
    export,
    generate,
    launch,
    plan,
    score,
    show,
    sweep,
    task,
    train,
)
from hyena_jax.cli.choices import choice_flags, choose_kinds, describe_choices
from hyena_jax.cli.flags import flags_of, split
from hyena_jax.cli.flags import read as read_flags
from hyena_jax.config import UserError, choose, require
from hyena_jax.startup import refuse_wrong_jaxlib

PLUGINS = "HYENA_JAX_PLUGINS"
# By what a person wants to do. For a command of two words, a table by the second word.
GROUPS = {
    "Train": {"train": train.Train, "sweep": sweep.Sweep, "launch": launch.Launch},
    "Look": {"show": show.Show, "compare": compare.Compare},
    "Use": {
        "generate": generate.Generate,
        "export": export.Export,
        "convert": convert.Convert,
        "distill": distill.Distill,
    },
    "Measure": {
        "eval": eval.Evaluate,
        "score": score.Score,
        "bench": {"operators": Operators, "model": Model, "decode": Decode},
    },
    "Prepare": {"plan": plan.Plan, "task": task.DrawTask},
}
COMMANDS = {name: kind for group in GROUPS.values() for name, kind in group.items()}
RUN = {
    train.Train: train.run,
    sweep.Sweep: sweep.run,
    compare.Compare: compare.run,
    eval.Evaluate: eval.run,
    score.Score: score.run,
    generate.Generate: generate.run,
    export.Export: export.run,
    convert.Convert: convert.run,
    distill.Distill: distill.run,
    plan.Plan: plan.run,
    show.Show: show.run,
    **dict.fromkeys(COMMANDS["bench"].values(), bench.run),
    task.DrawTask: task.run,
    launch.Launch: launch.run,
}
# Commands whose first argument is a config, the defaults of their other flags.
OF_A_CONFIG = (train.Train, plan.Plan)
HELP = ("-h", "--help")
ABOUT = "Train, evaluate and sample sequence models: Hyena, Hawk, attention and others."
BENCH = "Measure time and memory: of mixers, of a config's model, or of decoding. Each is checked first."


def run(command: Any, arguments: Sequence[str]) -> int:
    """Runs a command; returns its exit code."""
    refuse_wrong_jaxlib()
    if isinstance(command, launch.Launch):
        require(arguments[:1] == ["train"], "the command after --", " ".join(arguments), "train ...")
        if read(arguments)[0] is None:  # help; and wrong flags are one error, not one from each process
            return 0
    return RUN[type(command)](command, arguments)


def split_launch(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The arguments before and after the `--` of `launch`; for another command, all arguments and none."""
    if arguments[:1] != ["launch"] or "--" not in arguments:
        return arguments, []
    cut = arguments.index("--")
    return arguments[:cut], arguments[cut + 1 :]


def read(arguments: Sequence[str]) -> tuple[Any, list[str]]:
    """The command that the arguments describe, and the names of its flags; None if it printed help.

    For `train` and `plan`, the defaults of the flags are the named config's, with the parts that the
    arguments choose.
    """
    kind, words, rest = COMMANDS, [], _load_plugins(train.expand_resume(list(arguments)))
    while isinstance(kind, dict):
        if not rest:
            start = " ".join(["hyena-jax", *words])
            raise UserError(f"{start} must be followed by a command: {', '.join(kind)}; see {start} --help")
        if rest[0] in HELP:
            print(_overview(words, kind))
            return None, []
        kind = choose(" ".join([*words, "command"]), rest[0], kind)
        words.append(rest.pop(0))
    called, defaults, others = " ".join(words), {}, []
    asks_for_help = any(argument in HELP for argument in rest)
    if kind in OF_A_CONFIG and rest and not rest[0].startswith("-"):
        experiment, rest = choose_kinds(config.load(rest[0]), rest)
        defaults, others = {"experiment": experiment}, choice_flags(experiment)
    elif kind in (*OF_A_CONFIG, sweep.Sweep) and rest and rest[0].startswith("-") and not asks_for_help:
        raise UserError(f"CONFIG must come first after {called}, got {rest[0]!r}")
    if asks_for_help:
        print(_describe(called, kind, defaults))
        return None, []
    if kind is sweep.Sweep:  # all other flags are settings of its runs, whose configs depend on the grid
        rest, _ = split(kind, rest)
    command = read_flags(kind, called, rest, defaults, others)
    return command, [flag.name for flag in flags_of(kind, defaults)]


def _load_plugins(arguments: list[str]) -> list[str]:
    """Imports the plugins that are named; returns the arguments with one flag for all of them, at the end."""
    given, rest, waiting = [], [], False
    for argument in arguments:
        if waiting or argument.startswith("--plugin="):
            given.append(argument.removeprefix("--plugin="))
        elif argument != "--plugin":
            rest.append(argument)
        waiting = argument == "--plugin" and not waiting
    if waiting:
        raise UserError("--plugin must be followed by a Python file or the name of a module")
    for name in dict.fromkeys([*filter(None, os.environ.get(PLUGINS, "").split(os.pathsep)), *given]):
        config.load_plugin(name, config.REGISTRIES)
    return [*rest, "--plugin", *given] if given else rest


def _overview(words: Sequence[str], commands: dict[str, Any]) -> str:
    """The help of a table of commands."""
    from hyena_jax.cli.help import overview

    start = " ".join(["hyena-jax", *words])
    sections = {
        title: {
            name: BENCH if isinstance(kind, dict) else kind.__doc__.partition("\n")[0]
            for name, kind in group.items()
        }
        for title, group in ({"": commands} if words else GROUPS).items()
    }
    notes = [f"`{start} COMMAND --help` describes a command."]
    if not words:
        notes.append(
            "To start: hyena-jax train quickstart --workdir runs/first, then hyena-jax show runs/first"
        )
    return overview(f"{start} COMMAND ...", BENCH if words else ABOUT, sections, notes)


def _describe(called: str, kind: type, defaults: dict[str, Any]) -> str:
    """The help of a command; `train` and `plan` without a config show only their own flags."""
    from hyena_jax.cli.help import command_help

    flags, notes = flags_of(kind, defaults), []
    if kind in OF_A_CONFIG and defaults:
        notes.append(describe_choices(defaults["experiment"]))
    elif kind in OF_A_CONFIG:
        flags = [flag for flag in flags if flag.path[0] != "experiment"]
        notes.append(f"Configs: {', '.join(config.config_files())}")
        notes.append(f"`hyena-jax {called} CONFIG --help` describes the options of a config.")
    return command_help(called, kind.__doc__, flags, notes)
