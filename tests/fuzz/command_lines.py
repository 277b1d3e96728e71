"""Generated command lines: flags of the commands with values of all kinds, in a folder with `run/`,
`other/` and `text.txt`."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_type_hints

from fuzz.experiments import mostly, values
from hypothesis import strategies as st

from hyena_jax.benchmark.settings import Decode, Function, Model, Operators
from hyena_jax.config import Experiment, HyenaConfig, ImplicitFilterConfig, LanguageModelConfig, TextConfig

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


def flags_of(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The flags of the fields of a config, and the types of their values."""
    hints = get_type_hints(type(value))
    for field in dataclasses.fields(value):
        child, name = getattr(value, field.name, None), f"{prefix}{field.name.replace('_', '-')}"
        if dataclasses.is_dataclass(child):
            yield from flags_of(child, f"{name}.")
        elif isinstance(child, tuple) and child and dataclasses.is_dataclass(child[0]):
            for i, element in enumerate(child):
                yield from flags_of(element, f"{name}.{i}.")
        elif field.name != "groups":
            yield f"--{name}", hints[field.name]


TRAIN_FLAGS = {
    **dict(flags_of(SMALL)),
    "--workdir": Path,
    "--profile": Path,
    "--accept-changed-data": bool,
    "--accept-changed-optimizer": bool,
    "--optimizer.groups.0.pattern": str,
    "--logging.trackers": Literal["", "tensorboard", "wandb,wandb", "tensorboard,nowhere", ","],
}
EVAL_FLAGS = {"--step": str, "--path": str, "--batch-size": int, "--tasks": str, "--limit": int}
PLACES = Literal["run", "other", "nowhere", "text.txt", "", "x/y"]
PREPARE_FLAGS = {
    "--eos": int | str,
    "--held-out": float,
    "--shard-bytes": int,
    "--workers": int,
    "--field": str,
    "--tokenizer": Literal["bpe", "sentencepiece", "bytes", "dna"],
    "--tokenizer-path": PLACES,
    "--verify": bool,
}
SWEEP_FLAGS = {
    "--init-from": PLACES,
    "--jobs": int,
    "--until": str,
    "--per-run": str,
    "--seed": int,
    "--together": Literal[
        "seed", "seed,seed", "optimizer.learning-rate", "optimizer", "model.pattern", ",", ""
    ],
}
SCORE_FLAGS = {
    "--step": str,
    "--prefix": str,
    "--stride": int,
    "--batch-size": int,
    "--format": Literal["lines", "fasta", "x"],
}
EMBED_FLAGS = {**SCORE_FLAGS, "--layer": int, "--pool": Literal["mean", "last", "none", "x"]}
COMPARE_FLAGS = {"--by": str, "--metric": str, "--x": Literal["step", "seconds", "tokens", "x"]}
GENERATE_FLAGS = {
    "--step": int,
    "--prompt": str,
    "--max-new-tokens": int,
    "--temperature": float,
    "--top-k": int,
    "--top-p": float,
    "--min-p": float,
    "--greedy": bool,
    "--stop": str,
    "--on-full": str,
    "--load-state": Path,
    "--seed": int,
    "--num-samples": int,
}
EXPORT_FLAGS = {"--step": str}
DISTILL_FLAGS = {"--step": str, "--state-size": str, "--max-loss-increase": float}
LAUNCH_FLAGS = {"--num-processes": int, "--grace": float}
BENCH_FLAGS = {
    "operators": dict(flags_of(Operators())),
    "model": {flag: hint for flag, hint in flags_of(Model(config="quickstart")) if flag != "--config"},
    "decode": dict(flags_of(Decode())),
    "function": {flag: hint for flag, hint in flags_of(Function(target="f.py:f")) if flag != "--target"},
    "compare": {"--threshold": float, "--rounds": int, "--bench": str, "--allow-different": bool},
}
COMMANDS = ["train"] * 6 + ["eval", "generate", "bench"] * 2
COMMANDS += ["export", "distill", "launch", "prepare", "sweep", "score", "embed", "compare", "tarin"]
CONFIGS = [
    "quickstart",
    "quickstart",
    "quickstart",
    "images",
    "shakespeare_cpu:hawk",
    "griffin:x",
    "text.txt",
    "",
]


@st.composite
def command_lines(draw: Callable) -> list[str]:
    """One command with up to three flags, and sometimes a word that does not belong there."""
    command = draw(st.sampled_from(COMMANDS))
    places = st.sampled_from(["run"] * 6 + ["other", "nowhere", "text.txt", ""])
    match command:
        case "train":
            line, flags = [command, draw(st.sampled_from(CONFIGS))], TRAIN_FLAGS
            line += ["--workdir", draw(st.sampled_from(["run", "new", "new/er", "other", "text.txt"]))]
            line += ["--data.path", draw(st.sampled_from(["text.txt"] * 6 + ["nowhere", "other", "run"]))]
            line += RUN_SETTINGS
        case "eval":
            line, flags = [command, draw(places)], EVAL_FLAGS
        case "generate":
            prompt = draw(st.sampled_from(["the", "", "ß", "a" * 99]))
            line, flags = [command, draw(places), "--prompt", prompt], GENERATE_FLAGS
        case "export":
            # Names that exist, or are impossible, so that nothing is written.
            output = draw(st.sampled_from(["text.txt", "other", "nowhere/a.safetensors", "run/config.json"]))
            line, flags = [command, draw(places), "--output", output], EXPORT_FLAGS
        case "distill":
            line, flags = [command, draw(places), "--output", "other"], DISTILL_FLAGS
        case "launch":
            line, flags = [command], LAUNCH_FLAGS
        case "bench":
            kind = draw(st.sampled_from(sorted(BENCH_FLAGS)))
            line, flags = [command, kind], BENCH_FLAGS[kind]
            if kind == "model":
                line.append(draw(st.sampled_from(CONFIGS)))
            if kind == "function":
                line.append("text.txt:f")
            if kind == "compare":
                line += [draw(places), draw(places)]
        case "score":
            line, flags = [command, draw(places), "--path", "text.txt"], {**SCORE_FLAGS, "--per-token": bool}
        case "embed":
            output = draw(st.sampled_from(["text.txt", "other/thesis.npy/a.npy", "nowhere/a.npy"]))
            line, flags = [command, draw(places), "--path", "text.txt", "--output", output], EMBED_FLAGS
        case "compare":
            line, flags = [command, draw(places)], COMPARE_FLAGS
        case "prepare":  # into folders that hold other files, so that nothing is written
            line, flags = (
                [command, draw(places), "--output", draw(st.sampled_from(["other", "run"]))],
                PREPARE_FLAGS,
            )
        case "sweep":
            line, flags = [command, draw(st.sampled_from(CONFIGS)), "--workdir", "other"], SWEEP_FLAGS
            line += ["--grid", draw(st.sampled_from(["seed=0,1", "seed=0", "seed=", "=", "x=1", ""]))]
        case _:
            line, flags = [command], TRAIN_FLAGS
    n_flags = draw(st.sampled_from([0, 1, 2, 3]))
    for flag in draw(st.lists(st.sampled_from(sorted(flags)), min_size=n_flags, max_size=n_flags)):
        if flags[flag] is bool and draw(st.integers(0, 14)) != 13:
            line.append(draw(st.sampled_from([flag, f"--no-{flag[2:]}"])))
        else:
            line += [flag, *draw(words(flags[flag]))]
    if draw(st.integers(0, 19)) == 13:  # not 0, which Hypothesis draws more often than the others
        line.insert(draw(st.integers(0, len(line))), draw(VALUES))
    return line


def words(hint: Any) -> st.SearchStrategy[list[str]]:
    """Words that a user might type for a value of that type."""
    if hint in (Path, Path | None):
        hint = str

    def typed(value: Any) -> list[str]:
        return [str(part).replace("\0", "") for part in (value if isinstance(value, tuple) else (value,))]

    return mostly(values(hint).map(typed), VALUES.map(lambda value: [value]), 5)
