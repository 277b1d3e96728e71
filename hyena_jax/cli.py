"""The commands: arguments in, a function of the library called, results out.

Exit codes: 0 done; 1 what was to be timed differs from its oracle, or no state size keeps to the bound of a
distillation; 2 wrong input; 3 the machine failed us (disk full, no permission, another process lost); 4 the
run diverged; 75 a training was asked to stop (SIGINT, SIGTERM, SIGHUP) and saved, or had nothing to save at
SIGTERM or SIGHUP: the same command continues, as EX_TEMPFAIL of sysexits.h says; 130 interrupted by SIGINT
with nothing to save. Heavy packages are imported by the command that needs them.
"""

import ctypes
import io
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyena_jax import config
from hyena_jax.benchmark.settings import Decode, Model, Operators, Settings
from hyena_jax.config import Cluster, Experiment, PluginFlags, UserError, choose, require
from hyena_jax.config.choices import choice_flags, describe_choices, take_flag
from hyena_jax.config.flags import FLAT, as_flag, flags_of, positional, read
from hyena_jax.distillation.command import Distill
from hyena_jax.generation.command import Generate, RunSelection
from hyena_jax.launch import launch
from hyena_jax.startup import import_jax, keep_compiled_programs, refuse_wrong_jaxlib, start_devices

if TYPE_CHECKING:
    from rich.console import Console

    from hyena_jax.training.loop import Result

PLUGINS = "HYENA_JAX_PLUGINS"


@dataclass(frozen=True)
class Train:
    """Train CONFIG[:VARIANT] in a folder, or continue the run that is there.

    `hyena-jax train --resume DIR [flags]` continues the run in DIR with its own settings; CONFIG and
    --workdir are not given then, and flags, such as --training.steps, change a setting.
    """

    config: str = field(metadata=positional("CONFIG[:VARIANT]"))
    """Name of a config, or a Python file with get_config()."""
    workdir: Path
    """Folder of the run; made if missing, continued if it holds this experiment."""
    profile: Path | None = None
    """Write a jax.profiler trace of ten steps to this folder."""
    init_from: Path | None = None
    """File of parameters, as `export` writes them, that a new run starts from."""
    accept_changed_data: bool = False
    """Continue the run although its data changed; they are read as before (same tokenizer)."""
    plugins: PluginFlags = field(default=PluginFlags(), metadata=FLAT)
    cluster: Cluster = field(default=Cluster(), metadata=FLAT)
    experiment: Experiment = field(default=Experiment(), metadata=FLAT)


@dataclass(frozen=True)
class Launch:
    """Train in several processes on this machine: hyena-jax launch --num-processes N -- train ..."""

    num_processes: int
    """Processes that train together; their devices share every batch."""
    grace: float = 10.0
    """Seconds that the others have to end by themselves after one failed."""

    def __post_init__(self) -> None:
        require(self.num_processes >= 1, "num_processes", self.num_processes, "at least 1")
        require(self.num_processes <= 256, "num_processes", self.num_processes, "at most 256 on one machine")
        require(self.grace >= 0, "grace", self.grace, "at least 0")


@dataclass(frozen=True)
class Evaluate:
    """Evaluate a run on all the data that it held out."""

    run: RunSelection = field(metadata=FLAT)
    path: str | None = None
    """Text file or folder, or folder of IDX images, to evaluate on instead."""
    batch_size: int = 64
    """Sequences or images at once; does not change the result."""


@dataclass(frozen=True)
class Export:
    """Write a run's parameters to a safetensors file, and its config beside it."""

    run: RunSelection = field(metadata=FLAT)
    output: Path
    """File to write, such as model.safetensors."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a sample may hold what the terminal cannot show
        sys.stdout.reconfigure(errors="replace")
    _quiet_libraries()  # before a plugin imports them
    try:
        ours, launched = _split_launch(arguments)
        command, flags = _read(_load_plugins(_resumed(ours)))
        if command is None:
            return 0
        try:
            return _run(command, launched if isinstance(command, Launch) else arguments)
        except UserError as error:  # of a field, which a person knows as a flag
            raise UserError(as_flag(str(error), flags)) from error
    except UserError as error:
        return _fail(error, 2)
    except BrokenPipeError:  # the reader of our output closed it, as `head` does
        sys.stdout = None
        return 0
    except OSError as error:
        return _fail(error, 3)
    except Exception as error:
        is_of_xla = isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" in str(error)
        if isinstance(error, MemoryError) or is_of_xla:
            return _fail(f"out of memory: {error}", 3)
        if config.is_of_own_code(error, config.REGISTRIES):
            return _fail(f"a part of your own failed: {config.describe_fault(error)}", 2)
        raise
    except KeyboardInterrupt:
        _note("interrupted")
        return 130


# A command of two words is a table of those that its first word can be followed by.
COMMANDS = {
    "train": Train,
    "eval": Evaluate,
    "generate": Generate,
    "export": Export,
    "distill": Distill,
    "bench": {"operators": Operators, "model": Model, "decode": Decode},
    "launch": Launch,
}
HELP = ("-h", "--help")


def _read(arguments: Sequence[str]) -> tuple[Any, list[str]]:
    """The command that the arguments describe, and the names of its flags; None where help was printed.

    The config that `train` names, with the kinds that are chosen in it, gives the defaults of its flags.
    """
    kind, words, rest = COMMANDS, [], list(arguments)
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
    asks = any(argument in HELP for argument in rest)
    if kind is Train and rest and not rest[0].startswith("-"):
        experiment, rest = config.choose_kinds(config.load(rest[0]), rest)
        defaults, others = {"experiment": experiment}, choice_flags(experiment)
    elif kind is Train and rest and not asks:
        raise UserError(f"CONFIG must come first after train, got {rest[0]!r}")
    if asks:
        print(_describe(called, kind, defaults))
        return None, []
    command = read(kind, called, rest, defaults, others)
    return command, [flag.name for flag in flags_of(kind, defaults)]


def _overview(words: Sequence[str], commands: dict[str, Any]) -> str:
    from hyena_jax.config.flag_help import overview

    start = " ".join(["hyena-jax", *words])
    rows = {name: _about(kind) for name, kind in commands.items()}
    notes = [f"`{start} COMMAND --help` describes a command."]
    if not words:
        notes.append("For a start: hyena-jax train quickstart --workdir runs/first")
    return overview(f"{start} COMMAND ...", BENCH if words else ABOUT, rows, notes)


def _about(kind: Any) -> str:
    return BENCH if isinstance(kind, dict) else kind.__doc__.partition("\n")[0]


ABOUT = "Train, evaluate and sample sequence models: Hyena, Hawk, attention and others."
BENCH = "Measure time and memory: of mixers, of a config's model, or of decoding. Each is checked first."


def _describe(called: str, kind: type, defaults: dict[str, Any]) -> str:
    """The help of a command; for `train` without a config, that of its own flags alone."""
    from hyena_jax.config.flag_help import command_help

    flags, notes = flags_of(kind, defaults), []
    if kind is Train and defaults:
        notes.append(describe_choices(defaults["experiment"]))
    elif kind is Train:
        flags = [flag for flag in flags if flag.path[0] != "experiment"]
        notes.append(f"Configs: {', '.join(config.config_files())}")
        notes.append("`hyena-jax train CONFIG --help` describes the options of a config.")
    return command_help(called, kind.__doc__, flags, notes)


def _resumed(arguments: list[str]) -> list[str]:
    """The arguments with `--resume DIR` as the config and the workdir that it stands for."""
    if arguments[:1] != ["train"]:
        return arguments
    folder, rest = take_flag("--resume", arguments)
    if folder is None:
        return arguments
    others = [argument for argument in rest if argument.partition("=")[0] == "--workdir"]
    others += [argument for argument in rest[1:2] if not argument.startswith("-")]
    if others:
        raise UserError(f"--resume {folder!r} says config and workdir already: leave out {others[0]!r}")
    return ["train", str(Path(folder) / "config.json"), "--workdir", folder, *rest[1:]]


def _load_plugins(arguments: list[str]) -> list[str]:
    """Imports the plugins that are named; returns the arguments with one flag for them all, at the end."""
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


def _split_launch(arguments: list[str]) -> tuple[list[str], list[str]]:
    """What is before and after the `--` of `launch`; other commands are all before."""
    if arguments[:1] != ["launch"] or "--" not in arguments:
        return arguments, []
    cut = arguments.index("--")
    return arguments[:cut], arguments[cut + 1 :]


def _run(
    command: Train | Launch | Evaluate | Generate | Export | Distill | Settings, arguments: Sequence[str]
) -> int:
    refuse_wrong_jaxlib()
    if not isinstance(command, Launch):  # it does not compute
        import_jax()
    if not isinstance(command, Launch | Settings):  # a benchmark times the compiler
        keep_compiled_programs(_note)
    if not isinstance(command, Launch | Train):  # a training may have to join other processes first
        start_devices()
    match command:
        case Train():
            return _train(command)
        case Launch():
            require(arguments[:1] == ["train"], "the command after --", " ".join(arguments), "train ...")
            # Wrong flags are one line, not one from each process.
            if _read(_load_plugins(_resumed(list(arguments))))[0] is None:
                return 0
            return launch(arguments, command.num_processes, command.grace, _note)
        case Evaluate():
            return _evaluate(command)
        case Generate():
            from hyena_jax.generation.command import run

            return run(command, _note)
        case Export():
            return _export(command)
        case Distill():
            return _distill(command, arguments)
        case Operators() | Model() | Decode():
            return _bench(command, arguments)


def _train(command: Train) -> int:
    from rich.console import Console

    from hyena_jax.parallel import processes as distributed
    from hyena_jax.training.loop import train
    from hyena_jax.training.signals import Interrupted
    from hyena_jax.training.trainer import Diverged

    keep_freed_memory()
    experiment, workdir = command.experiment, command.workdir
    distributed.join(command.cluster, experiment.parallel.heartbeat_timeout)
    start_devices()
    console = Console(highlight=False, markup=False)
    try:
        with distributed.leaving_on_failure(_fail):
            result = train(
                experiment,
                workdir,
                console,
                command.profile,
                command.init_from,
                command.accept_changed_data,
            )
            is_first = distributed.is_first()
            distributed.leave()
    except Diverged as error:
        return _fail(error, 4) if distributed.is_first() else 4
    except Interrupted as error:
        if distributed.is_first():
            _note(str(error))
        return 75
    except BrokenPipeError:
        sys.stdout = None
        return _fail("nobody reads the output any more; the same command continues", 3)
    if not is_first:
        return 0
    inputs = experiment.data.inputs
    if inputs == "tokens" and getattr(result.data, "tokenizer", None) is not None:
        _show_sample(experiment, workdir, result)
    elif inputs == "images" and _has_labels(result):
        _show_predictions(experiment, workdir, result)
    print(f"\nrun folder: {workdir}   curves: {workdir / 'learning_curves.png'}")
    return 0


def _show_sample(experiment: Experiment, workdir: Path, result: "Result") -> None:
    """Continues the prompt of a run on tokens, on the screen and in `sample.txt`."""
    from hyena_jax.generation.command import stream
    from hyena_jax.generation.decoding import Request, generate
    from hyena_jax.training import atomic

    count, tokenizer = experiment.logging.sample_tokens, result.data.tokenizer
    if count == 0:
        return
    prompt = result.data.prompt(experiment.logging.sample_prompt)
    request = Request(count, seed=experiment.seed, n_symbols=tokenizer.vocab_size)
    pieces = generate(result.model, result.params, [prompt], request)
    print("sample:\n")
    text = stream(tokenizer, prompt, pieces)
    atomic.write_text(workdir / "sample.txt", text)


def _has_labels(result: "Result") -> bool:
    """Whether each row of the data has one integer as target."""
    targets = next(result.data.eval_batches(1, 1))["targets"]
    return targets.ndim == 1 and targets.dtype.kind == "i"


def _show_predictions(experiment: Experiment, workdir: Path, result: "Result") -> None:
    """Draws held-out images of a run on images into `predictions.png`."""
    from hyena_jax.training.predictions import draw_predictions

    count = experiment.logging.sample_images
    if count == 0:
        return
    path = workdir / "predictions.png"
    n_right, n_drawn = draw_predictions(result.model, result.params, result.data, count, path)
    print(f"predictions: {n_right} of {n_drawn} right, drawn in {path}")


def _evaluate(command: Evaluate) -> int:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from hyena_jax.api import load_run

    run = load_run(command.run.workdir, command.run.step)
    values = run.evaluate(command.path, command.batch_size, progress=True)
    table = Table("metric", "value", title=Text(f"{run.workdir}, step {run.step}"), box=None)
    for name, value in values.items():
        table.add_row(name, f"{value:,.6g}")
    Console(highlight=False).print(table)
    return 0


def _export(command: Export) -> int:
    from hyena_jax.api import load_run
    from hyena_jax.training import export

    export.check_target(command.output)
    run = load_run(command.run.workdir, command.run.step)
    export.write(command.output, run.params, config.encode(run.experiment), run.step)
    beside = export.config_beside(command.output)
    print(f"step {run.step} written to {command.output}, its config to {beside}")
    return 0


def _distill(command: Distill, arguments: Sequence[str]) -> int:
    from hyena_jax.distillation.command import NoSizeHolds, run

    keep_freed_memory()
    try:
        run(command, _table_console(), ["hyena-jax", *arguments])
    except NoSizeHolds as error:
        return _fail(error, 1)
    return 0


def _bench(settings: Settings, arguments: Sequence[str]) -> int:
    from hyena_jax.benchmark.command import run
    from hyena_jax.benchmark.verify import Mismatch

    keep_freed_memory()
    try:
        run(settings, _table_console(), ["hyena-jax", *arguments])
    except Mismatch as error:
        return _fail(error, 1)
    return 0


def _table_console() -> "Console":
    from rich.console import Console

    # A table in a file is not folded to the width of some terminal.
    width = None if sys.stdout.isatty() else 200
    return Console(highlight=False, markup=False, width=width)


def _quiet_libraries() -> None:
    """Libraries' own start-up messages would bury ours; an explicit setting of the user's wins.

    Orbax and asyncio also log, with a traceback, the errors that Orbax raises.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ["MPLBACKEND"] = "agg"  # figures are only written to files
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def keep_freed_memory() -> None:
    """Tells glibc to keep what XLA frees: on a CPU, XLA takes its temporary memory anew at every step.

    Handing it back to the kernel in between costs page faults: 73 -> 64 ms a step of `shakespeare_cpu`.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            trim_threshold, mmap_max = -1, -4
            libc.mallopt(trim_threshold, -1)  # never
            libc.mallopt(mmap_max, 0)


def _note(text: str) -> None:
    print(f"hyena-jax: {text}", file=sys.stderr)


def _fail(reason: object, code: int) -> int:
    _note(f"error: {' '.join(str(reason).split())}")
    return code


if __name__ == "__main__":  # python -m hyena_jax.cli is python -m hyena_jax
    from hyena_jax.__main__ import main as run

    sys.exit(run())
