"""The command line: reads the arguments, runs a command, and turns errors into exit codes.

Exit codes: 0 done; 1 a benchmark found values that differ from their oracle, a distillation no state size
within its bound, a plan that its step does not compile or fit, or some run of a sweep failed; 2 wrong input;
3 the machine failed (disk full, no permission, another process lost); 4 the run diverged; 75 a training was
asked to stop (SIGINT, SIGTERM, SIGHUP) and saved, or had nothing to save at SIGTERM or SIGHUP: the same
command continues, as EX_TEMPFAIL of sysexits.h says; 130 interrupted by SIGINT with nothing to save.
"""

import io
import os
import sys
from collections.abc import Sequence
from typing import Any

from hyena_jax import config
from hyena_jax.benchmark.settings import Decode, Model, Operators
from hyena_jax.commands import (
    bench,
    compare,
    convert,
    distill,
    eval,
    export,
    fail,
    generate,
    launch,
    note,
    plan,
    score,
    show,
    sweep,
    task,
    train,
)
from hyena_jax.config import UserError, choose, require
from hyena_jax.config.choices import choice_flags, describe_choices
from hyena_jax.config.flags import as_flag, flags_of, read, split
from hyena_jax.startup import quiet_libraries, refuse_wrong_jaxlib

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


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    for name in ("stdout", "stderr"):  # closed, as by `>&-`
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (for as long as the process)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a sample may hold characters that the terminal cannot show
        sys.stdout.reconfigure(errors="replace")
    quiet_libraries()  # before a plugin imports them
    code = 0
    try:
        ours, launched = _split_launch(arguments)
        command, flags = _read(ours)
        if command is None:
            return 0
        try:
            code = _run(command, launched if isinstance(command, launch.Launch) else arguments)
            _flush()  # here, where a full disk and a closed pipe are handled
            return code
        except UserError as error:  # names a field, which the user knows as a flag
            raise UserError(as_flag(str(error), flags)) from error
    except UserError as error:
        return fail(error, 2)
    except BrokenPipeError:  # the reader of our output closed it, as `head` does
        sys.stdout = None
        return code
    except OSError as error:
        return fail(error, 3)
    except Exception as error:
        is_of_xla = isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" in str(error)
        if isinstance(error, MemoryError) or is_of_xla:
            return fail(f"out of memory: {error}", 3)
        if config.is_of_own_code(error, config.REGISTRIES):
            return fail(f"a part of your own failed: {config.describe_fault(error)}", 2)
        raise
    except KeyboardInterrupt:
        note("interrupted")
        return 130


def _flush() -> None:
    """Writes what has been printed; after a failure nothing is left for Python to write as it ends."""
    if sys.stdout is not None:
        try:
            sys.stdout.flush()
        except OSError:
            sys.stdout = None
            raise


def _run(command: Any, arguments: Sequence[str]) -> int:
    refuse_wrong_jaxlib()
    if isinstance(command, launch.Launch):
        require(arguments[:1] == ["train"], "the command after --", " ".join(arguments), "train ...")
        if _read(arguments)[0] is None:  # help; and wrong flags are one error, not one from each process
            return 0
    return RUN[type(command)](command, arguments)


def _split_launch(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The arguments before and after the `--` of `launch`; for another command, all arguments and none."""
    if arguments[:1] != ["launch"] or "--" not in arguments:
        return arguments, []
    cut = arguments.index("--")
    return arguments[:cut], arguments[cut + 1 :]


def _read(arguments: Sequence[str]) -> tuple[Any, list[str]]:
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
        experiment, rest = config.choose_kinds(config.load(rest[0]), rest)
        defaults, others = {"experiment": experiment}, choice_flags(experiment)
    elif kind in (*OF_A_CONFIG, sweep.Sweep) and rest and rest[0].startswith("-") and not asks_for_help:
        raise UserError(f"CONFIG must come first after {called}, got {rest[0]!r}")
    if asks_for_help:
        print(_describe(called, kind, defaults))
        return None, []
    if kind is sweep.Sweep:  # all other flags are settings of its runs, whose configs depend on the grid
        rest, _ = split(kind, rest)
    command = read(kind, called, rest, defaults, others)
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
    from hyena_jax.config.flag_help import overview

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
    from hyena_jax.config.flag_help import command_help

    flags, notes = flags_of(kind, defaults), []
    if kind in OF_A_CONFIG and defaults:
        notes.append(describe_choices(defaults["experiment"]))
    elif kind in OF_A_CONFIG:
        flags = [flag for flag in flags if flag.path[0] != "experiment"]
        notes.append(f"Configs: {', '.join(config.config_files())}")
        notes.append(f"`hyena-jax {called} CONFIG --help` describes the options of a config.")
    return command_help(called, kind.__doc__, flags, notes)


if __name__ == "__main__":  # python -m hyena_jax.cli is python -m hyena_jax
    from hyena_jax.__main__ import main as run

    sys.exit(run())
