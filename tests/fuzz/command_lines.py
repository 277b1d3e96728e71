"""Generated command lines: flags of the commands with values of all kinds, in a folder with `run/`,
`other/` and `text.txt`."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from fuzz.experiments import mostly, values
from hypothesis import strategies as st

from hyena_jax.cli.base import OfConfig
from hyena_jax.cli.commands import COMMANDS as KINDS
from hyena_jax.cli.launch import Launch
from hyena_jax.config import (
    Cluster,
    Experiment,
    HyenaConfig,
    ImplicitFilterConfig,
    LanguageModelConfig,
    TextConfig,
)
from hyena_jax.config.flags import flags_of

VALUES = st.one_of(
    st.sampled_from(
        "0 1 2 3 4 8 16 17 64 -1 -0 1.5 1e-3 1e3 1e400 nan inf -inf None True False 2147483648"
        " -9223372036854775809 100000000000000000000000000000 text.txt run other nowhere bytes characters"
        " hyena hawk all float32 best latest x".split()
    ),
    st.sampled_from(
        ["", " ", "\n", "ß", "--", "-", "-h", "a b", "/", ".", "..", "x" * 300, "\udcff", "[", "{}"]
    ),
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=6),
)

SMALL = Experiment(
    model=LanguageModelConfig(pattern=(HyenaConfig(filter=ImplicitFilterConfig()),)), data=TextConfig()
)
RUN_SETTINGS = "--training.steps 2 --parallel.devices 1 --logging.sample-tokens 0".split()


PLACES = Literal["run", "other", "nowhere", "text.txt", "", "x/y"]
TOGETHER = Literal["seed", "seed,seed", "optimizer.learning-rate", "optimizer", "model.pattern", ",", ""]
POINTED = {"--tokenizer-path": PLACES, "--init-from": PLACES, "--together": TOGETHER}
"""Values of flags that take texts, of which most mean nothing."""
TRACKERS = Literal["", "tensorboard", "wandb,wandb", "tensorboard,nowhere", ","]
NOT_GIVEN = {"--output", "--save-state", "--plugin", "--tfds-dir", "--manual-dir"}
"""Flags that would write files, import modules or download."""
MEETING = {flag.name for flag in flags_of(Cluster)}
"""Those of processes that wait for each other."""


@cache
def flags_for(*words: str) -> dict[str, Any]:
    """The flags of a command, and the types of their values."""
    kind: Any = KINDS
    for word in words:
        kind = kind[word]
    has_experiment = issubclass(kind, OfConfig)
    found = flags_of(kind, {"experiment": SMALL} if has_experiment else {})
    left_out = NOT_GIVEN if kind is Launch else NOT_GIVEN | MEETING
    flags = {
        flag.name: POINTED.get(flag.name, flag.hint)
        for flag in found
        if not flag.is_positional and flag.base is None and flag.name not in left_out
    }
    return {**flags, "--logging.trackers": TRACKERS} if has_experiment else flags


COMMANDS = ["train"] * 6 + ["eval", "generate", "bench"] * 2
COMMANDS += ["export", "distill", "launch", "prepare", "sweep", "score", "embed", "compare", "tarin"]
BENCHES = ["operators", "model", "decode", "function", "compare"]
CONFIGS = ["quickstart"] * 3 + ["images", "shakespeare_cpu:hawk", "griffin:x", "text.txt", ""]


@st.composite
def command_lines(draw: Callable) -> list[str]:
    """One command with up to three flags, and sometimes a word that does not belong there."""
    command = draw(st.sampled_from(COMMANDS))
    place = draw(st.sampled_from(["run"] * 6 + ["other", "nowhere", "text.txt", ""]))
    config = draw(st.sampled_from(CONFIGS))
    line = [command]
    match command:
        case "train":
            line += [
                config,
                "--workdir",
                draw(st.sampled_from(["run", "new", "new/er", "other", "text.txt"])),
            ]
            line += ["--data.path", draw(st.sampled_from(["text.txt"] * 6 + ["nowhere", "other", "run"]))]
            line += RUN_SETTINGS
        case "eval" | "compare":
            line += [place]
        case "generate":
            line += [place, "--prompt", draw(st.sampled_from(["the", "", "ß", "a" * 99]))]
        case "export":
            # Names that exist, or are impossible, so that nothing is written.
            names = ["text.txt", "other", "nowhere/a.safetensors", "run/config.json"]
            line += [place, "--output", draw(st.sampled_from(names))]
        case "distill":
            line += [place, "--output", "other"]
        case "bench":
            kind = draw(st.sampled_from(BENCHES))
            arguments = {"model": [config], "function": ["text.txt:f"], "compare": [place, "run"]}
            line += [kind, *arguments.get(kind, [])]
        case "score":
            line += [place, "--path", "text.txt"]
        case "embed":
            names = ["text.txt", "other/thesis.npy/a.npy", "nowhere/a.npy"]
            line += [place, "--path", "text.txt", "--output", draw(st.sampled_from(names))]
        case "prepare":  # into folders that hold other files, so that nothing is written
            line += [place, "--output", draw(st.sampled_from(["other", "run"]))]
        case "sweep":
            line += [config, "--workdir", "other"]
            line += ["--grid", draw(st.sampled_from(["seed=0,1", "seed=0", "seed=", "=", "x=1", ""]))]
    flags = flags_for(*{"bench": line[:2], "tarin": ["train"]}.get(command, [command]))
    free, n_flags = sorted(flags.keys() - {*line}), draw(st.sampled_from([0, 0, 1, 2, 3]))
    for flag in draw(st.lists(st.sampled_from(free), min_size=n_flags, max_size=n_flags)):
        if flags[flag] is bool and draw(st.integers(0, 14)) != 13:
            line.append(draw(st.sampled_from([flag, f"--no-{flag[2:]}"])))
        else:
            line += [flag, *draw(words(flags[flag]))]
    if draw(st.integers(0, 19)) == 13:  # not 0, which Hypothesis draws more often than the others
        line.insert(draw(st.integers(0, len(line))), draw(VALUES))
    return line


def words(hint: Any) -> st.SearchStrategy[list[str]]:
    """Words that a user might type for a value of that type."""
    if Path in (hint, *get_args(hint)):
        hint = str

    def typed(value: Any) -> list[str]:
        return [str(part).replace("\0", "") for part in (value if isinstance(value, tuple) else (value,))]

    return mostly(values(hint).map(typed), VALUES.map(lambda value: [value]), 5)
