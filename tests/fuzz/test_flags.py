"""Wrong flags and values of every command, derived from its flags: each is one line that names the flag."""

import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import pytest

from hyena_jax import cli, config
from hyena_jax.cli import commands
from hyena_jax.config.flags import Flag, flags_of, n_values

CONFIGS = ("quickstart", "images", "shakespeare_cpu:hawk", "griffin", "wikitext103_hyena_125m")
# Required arguments of each command and each config of `train`.
COMMANDS = {
    **{f"train {name}": ["--workdir", "new"] for name in CONFIGS},
    "eval": ["run"],
    "generate": ["run", "--prompt", "a"],
    "export": ["run", "--output", "new.safetensors"],
    "convert": ["lfm2", "weights", "--output", "new"],
    "distill": ["run", "--output", "new"],
    "show": ["run"],
    "bench operators": [],
    "bench model": ["quickstart"],
    "bench decode": [],
    "launch": ["--num-processes", "2"],
    "prepare": ["a.txt", "--output", "new"],
}
WRONG = {
    int: ("x", "1.5", "1e3", "0x10", ""),
    float: ("x", "nan", "-inf", "1,5", ""),
    Path: ("", "x" * 300, "x/" * 3000, "a\0b"),
}


def config_of(command: str) -> str:
    """The config in it, or nothing."""
    word, _, rest = command.partition(" ")
    return {"train": rest, "bench": "quickstart" if rest == "model" else ""}.get(word, "")


@cache
def all_flags(command: str) -> list[Flag]:
    word, _, rest = command.partition(" ")
    kind = commands.COMMANDS[word][rest] if word == "bench" else commands.COMMANDS[word]
    name = config_of(command)
    return flags_of(kind, {"experiment": config.load(name)} if name else {})


def wrong_values(hint: Any) -> tuple[str, ...]:
    """Texts that are not a value of the type."""
    if get_origin(hint) in (Union, types.UnionType):
        kinds = [wrong_values(kind) for kind in get_args(hint) if kind is not type(None)]
        return tuple(text for text in kinds[0] if all(text in other for other in kinds))
    if get_origin(hint) is tuple:
        return wrong_values(get_args(hint)[0])
    if get_origin(hint) is Literal:
        return ("x", "1.5", "nan", "")
    return WRONG.get(hint, ())


def wrong_lines(command: str) -> Iterator[tuple[list[str], str]]:
    """Words to add to a command line, and text that the message must contain."""
    flags = [flag for flag in all_flags(command) if not flag.is_positional and flag.base is None]
    known = {flag.name for flag in all_flags(command)}
    called = "train" if command.startswith("train ") else command
    for flag in flags:
        name = flag.name
        for typo in (f"{name}s", name[:-1], name.replace("-", "_", 3).replace("__", "--") + "x"):
            shown = typo.replace("_", "-")
            if shown not in known and len(shown) > 3:
                yield [typo, "1"], f"{shown} is not a flag of {called}"
        if flag.hint is bool:
            yield [name, "True"], f"{name} takes no value"
            yield [f"{name}=False"], f"{name} takes no value"
            continue
        yield [name], f"{name} must be followed by a"
        count = n_values(flag.hint) or 1
        for text in wrong_values(flag.hint):
            yield [name, *[text] * count], name
            if count == 1:
                yield [f"{name.replace('-', '_').replace('__', '--')}={text}"], name
        if count > 1:
            yield [name, "1"], f"{name} must be followed by {count} values, got 1"


CASES = [(command, *line) for command in COMMANDS for line in wrong_lines(command)]
# The flags of every config are mostly those of the first.
FIRST = {tuple(words) for command, words, _ in CASES if command == f"train {CONFIGS[0]}"}
ELSEWHERE = [
    ([], "hyena-jax must be followed by a command"),
    (["bench"], "hyena-jax bench must be followed by a command"),
    (["train"], "CONFIG[:VARIANT] must be given"),
    (["train", "quickstart", "--workdir", "new", "--optimizer", "lino"], "--optimizer 'lino' is unknown"),
]


def refuse(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(commands, "refuse_wrong_jaxlib", lambda: pytest.fail("accepted"))
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("hyena-jax: error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert list(tmp_path.iterdir()) == []


def line_of(case):
    command, words, _ = case
    return [*command.split(), *COMMANDS[command], *words]


@pytest.mark.parametrize("case", CASES[:: len(CASES) // 25], ids=lambda case: " ".join(line_of(case)))
def test_a_wrong_flag_is_one_line_that_names_it(case, tmp_path, monkeypatch, capsys):
    refuse(line_of(case), case[2], tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize(("arguments", "message"), ELSEWHERE, ids=lambda value: " ".join(value))
def test_what_is_missing_or_too_much_is_one_line(arguments, message, tmp_path, monkeypatch, capsys):
    refuse(arguments, message, tmp_path, monkeypatch, capsys)


@pytest.mark.fuzz
@pytest.mark.parametrize("command", COMMANDS)
def test_many_wrong_flags(command, tmp_path, monkeypatch, capsys):
    """Every third, so that each kind of mistake takes part."""
    mine = [case for case in CASES if case[0] == command]
    assert len(mine) >= 8
    if command.startswith("train ") and command != f"train {CONFIGS[0]}":
        mine = [case for case in mine if tuple(case[1]) not in FIRST]
    for case in mine[::3]:
        refuse(line_of(case), case[2], tmp_path, monkeypatch, capsys)


def test_there_are_many_cases():
    assert len(CASES) >= 1000
