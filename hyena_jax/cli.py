"""`hyena-jax train | eval | generate | bench`: arguments in, a function of the library called, results out.

Exit codes: 0 done; 1 what was to be timed differs from its oracle; 2 wrong input; 3 the machine failed us
(disk full, no permission); 4 the run diverged; 130 stopped by SIGINT or SIGTERM, a training after saving.
Heavy packages are imported by the command that needs them.
"""

import ctypes
import io
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from hyena_jax import config
from hyena_jax.benchmark.command import Bench
from hyena_jax.config import Experiment, ImagesConfig, TextConfig, UserError, require

if TYPE_CHECKING:
    import numpy as np

    from hyena_jax.data.tokenizers import Tokenizer
    from hyena_jax.training.loop import Result

Section = tyro.conf.arg(name="")


@dataclass(frozen=True)
class Train:
    """Train CONFIG[:VARIANT] in a folder, or continue the run that is there."""

    config: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="CONFIG[:VARIANT]")]]
    """Name in configs/ or a Python file with get_config()."""
    workdir: Path
    """Folder of the run; made if missing, continued if it holds this experiment."""
    profile: Path | None
    """Write a jax.profiler trace of ten steps to this folder."""
    experiment: Annotated[Experiment, Section]


@dataclass(frozen=True)
class RunSelection:
    """Which parameters of which run."""

    workdir: tyro.conf.Positional[Path]
    """Folder of a run."""
    step: str = "latest"
    """Checkpoint: `latest`, `best` (lowest validation loss), or the number of a saved step."""


@dataclass(frozen=True)
class Evaluate:
    """Evaluate a run on all the data that it held out."""

    run: Annotated[RunSelection, Section]
    path: str | None = None
    """Text file or folder, or folder of IDX images, to evaluate on instead."""
    batch_size: int = 64
    """Sequences or images at once; does not change the result."""


@dataclass(frozen=True)
class Generate:
    """Continue a prompt with a run's model."""

    run: Annotated[RunSelection, Section]
    prompt: str
    """Text to continue."""
    max_new_tokens: int = 256
    """Tokens to add."""
    temperature: float = 1.0
    """Divides the logits."""
    top_k: int | None = None
    """Sample from the k most probable tokens only."""
    top_p: float | None = None
    """Sample from the fewest most probable tokens that reach probability p."""
    greedy: bool = False
    """Take the most probable token."""
    seed: int = 0
    """Seed of the sampling."""
    num_samples: int = 1
    """Continuations, printed one after the other."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a sample may hold what the terminal cannot show
        sys.stdout.reconfigure(errors="replace")
    try:
        command = tyro.cli(_commands(arguments), prog="hyena-jax", args=arguments, config=TYRO)
        return _run(command, arguments)
    except UserError as error:
        return _fail(error, 2)
    except BrokenPipeError:  # the reader of our output closed it, as `head` does
        sys.stdout = None
        return 0
    except OSError as error:
        return _fail(error, 3)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)


# Unions take the class of their default; every flag is `--name value`, also for booleans.
TYRO = (tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff)


def _commands(arguments: Sequence[str]) -> type:
    """The union of all commands; the config that `train` names gives the defaults of its flags."""
    experiment = Experiment()
    if arguments[:1] == ["train"] and len(arguments) > 1 and arguments[1] not in ("-h", "--help"):
        if arguments[1].startswith("-"):
            raise UserError(f"CONFIG must come first after train, got {arguments[1]!r}")
        experiment = config.load(arguments[1])
    defaults = Train(tyro.MISSING, tyro.MISSING, None, experiment)
    return (
        Annotated[Train, tyro.conf.subcommand("train", default=defaults)]
        | Annotated[Evaluate, tyro.conf.subcommand("eval")]
        | Annotated[Generate, tyro.conf.subcommand("generate")]
        | Annotated[Bench, tyro.conf.subcommand("bench")]
    )


def _run(command: Train | Evaluate | Generate | Bench, arguments: Sequence[str]) -> int:
    _quiet_libraries()
    match command:
        case Train():
            return _train(command)
        case Evaluate():
            return _evaluate(command)
        case Generate():
            return _generate(command)
        case Bench():
            return _bench(command, arguments)


def _train(command: Train) -> int:
    from rich.console import Console

    from hyena_jax.training.loop import Diverged, Interrupted, train

    keep_freed_memory()
    experiment, workdir = command.experiment, command.workdir
    try:
        result = train(experiment, workdir, Console(highlight=False, markup=False), command.profile)
    except Diverged as error:
        return _fail(error, 4)
    except Interrupted as error:
        return _fail(error, 130)
    if isinstance(experiment.data, ImagesConfig):
        _show_predictions(experiment, workdir, result)
    else:
        _show_sample(experiment, workdir, result)
    print(f"\nrun folder: {workdir}   curves: {workdir / 'learning_curves.png'}")
    return 0


def _show_sample(experiment: Experiment, workdir: Path, result: "Result") -> None:
    """Continues the prompt of a run on text, on the screen and in `sample.txt`."""
    from hyena_jax.generation import SamplingRule, generate

    count, tokenizer = experiment.logging.sample_tokens, result.data.tokenizer
    if count == 0:
        return
    prompt = result.data.prompt(experiment.logging.sample_prompt)
    tokens = generate(
        result.model,
        result.params,
        prompt,
        count,
        SamplingRule(),
        experiment.seed,
        n_symbols=tokenizer.vocab_size,
    )
    print("sample:\n")
    text = _stream(tokenizer, prompt, tokens)
    (workdir / "sample.txt").write_text(text, encoding="utf-8")


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

    from hyena_jax import models
    from hyena_jax.training.evaluate import evaluate_run
    from hyena_jax.training.run_folder import load_params, read_run

    run = read_run(command.run.workdir)
    model = models.build(run.experiment.model)
    step, params = load_params(run, model, command.run.step, _note)
    values = evaluate_run(run, model, params, command.path, command.batch_size)
    table = Table("metric", "value", title=Text(f"{command.run.workdir}, step {step}"), box=None)
    for name, value in values.items():
        table.add_row(name, f"{value:,.6g}")
    Console(highlight=False).print(table)
    return 0


def _generate(command: Generate) -> int:
    from hyena_jax import models
    from hyena_jax.generation import SamplingRule, generate
    from hyena_jax.training.run_folder import load_params, read_run

    rule = SamplingRule(command.greedy, command.temperature, command.top_k, command.top_p)
    run = read_run(command.run.workdir)
    is_text = isinstance(run.experiment.data, TextConfig)
    require(is_text, "workdir", str(command.run.workdir), "a run on text, which alone can be continued")
    tokenizer = run.encoding
    try:
        prompt = tokenizer.encode(command.prompt)
    except UserError as error:
        raise UserError(f"prompt {command.prompt!r}: {error}") from error
    model = models.build(run.experiment.model)
    _, params = load_params(run, model, command.run.step, _note)
    count, seed, samples = command.max_new_tokens, command.seed, command.num_samples
    tokens = generate(model, params, prompt, count, rule, seed, samples, tokenizer.vocab_size)
    if samples == 1:
        _stream(tokenizer, prompt, tokens)
        return 0
    rows = list(zip(*tokens, strict=True)) or [()] * samples
    for i, row in enumerate(rows, start=1):
        print(f"--- sample {i}\n{tokenizer.decode([*prompt, *row])}")
    return 0


def _bench(command: Bench, arguments: Sequence[str]) -> int:
    from rich.console import Console

    from hyena_jax.benchmark.command import run
    from hyena_jax.benchmark.verify import Mismatch

    keep_freed_memory()
    # A table in a file is not folded to the width of some terminal.
    width = None if sys.stdout.isatty() else 200
    try:
        run(command.settings, Console(highlight=False, markup=False, width=width), ["hyena-jax", *arguments])
    except Mismatch as error:
        return _fail(error, 1)
    return 0


def _stream(tokenizer: "Tokenizer", prompt: "np.ndarray", tokens: Iterator["np.ndarray"]) -> str:
    """Prints the prompt and each token of the one sample as it comes; returns the whole text."""
    decode = tokenizer.stream()
    pieces = [decode(prompt)]
    print(pieces[0], end="", flush=True)
    for new in tokens:
        pieces.append(decode(new))
        print(pieces[-1], end="", flush=True)
    pieces.append(decode([], final=True))
    print(pieces[-1])
    return "".join(pieces)


def _quiet_libraries() -> None:
    """Libraries' own start-up messages would bury ours; an explicit setting of the user's wins."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    logging.getLogger("absl").setLevel(logging.ERROR)


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


if __name__ == "__main__":
    sys.exit(main())
