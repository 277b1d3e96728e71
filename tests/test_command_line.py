"""Flags derived from the fields of a dataclass: their values, errors and help."""

import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from hyena_jax.config import NO_DECAY, AdamWConfig, Checked, Experiment
from hyena_jax.config.flags import FLAT, as_flag, flags_of, positional, read_flags
from hyena_jax.config.help import command_help
from hyena_jax.system.errors import UserError, require


@dataclass(frozen=True)
class Part(Checked):
    """One of several parts."""

    width: int = 4
    """Channels."""
    shape: tuple[int, int] | None = None

    def __post_init__(self):
        super().__post_init__()
        require(self.width >= 1, "width", self.width, "at least 1")


@dataclass(frozen=True)
class Inner(Checked):
    """What is inside."""

    parts: tuple[Part, ...] = (Part(), Part(width=5))
    is_on: bool = True
    rate: float | None = None
    kind: Literal["one", "two"] = "one"
    most: int = 9

    def __post_init__(self):
        super().__post_init__()
        widest = max((part.width for part in self.parts), default=0)
        require(widest <= self.most, "parts", widest, "at most 9 wide")


@dataclass(frozen=True)
class Settings:
    """An experiment's flags."""

    experiment: Experiment = field(default=Experiment(optimizer=AdamWConfig(groups=(NO_DECAY, NO_DECAY))))


@dataclass(frozen=True)
class Command:
    """What the command does."""

    folder: Path = field(metadata=positional("FOLDER"))
    """Where."""
    size: int | Literal["auto"] = "auto"
    names: tuple[str, ...] = ()
    """Which; None takes none."""
    is_quick: bool = False
    is_known: bool | None = None
    place: Path | None = Path("there")
    inner: Inner = field(default=Inner())
    flat: Part = field(default=Part(), metadata=FLAT)


def made(line: str) -> Command:
    return read_flags(Command, "command", line.split())


HERE = Path("here")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("here", Command(HERE)),
        ("--size 3 here --inner.rate -1e-3", Command(HERE, 3, inner=Inner(rate=-1e-3))),
        ("here --size=auto --inner.kind=two", Command(HERE, inner=Inner(kind="two"))),
        ("here --width 7", Command(HERE, flat=Part(7))),
        ("here --inner.parts.1.shape 3 -4", Command(HERE, inner=Inner((Part(), Part(5, (3, -4)))))),
        ("here --place ./none", Command(HERE, place=Path("none"))),
        ("--names=--odd here", Command(HERE, names=("--odd",))),
        ("here --names a b --size 1 --names c", Command(HERE, 1, ("a", "b", "c"))),
        ("--is-quick here --no-inner.is-on", Command(HERE, is_quick=True, inner=Inner(is_on=False))),
        ("here --is_quick", Command(HERE, is_quick=True)),
        ("here --no-is-quick", Command(HERE)),
        ("here --is-known false", Command(HERE, is_known=False)),
        ("here --is-known=true", Command(HERE, is_known=True)),
    ],
)
def test_values_are_those_of_the_types(line, expected):
    assert made(line) == expected


@pytest.mark.parametrize("none", ["None", "none"])
def test_what_may_be_none_takes_none(none):
    line = f"here --inner.parts.1.shape {none} --inner.rate 2 --place {none} --is-known={none}"
    assert made(line) == Command(HERE, place=None, inner=Inner(rate=2.0))
    defaults = {"inner": Inner((Part(shape=(1, 2)),), rate=3.0), "is_known": True}
    line = f"here --inner.parts.0.shape {none} --inner.rate {none} --is-known {none}"
    assert read_flags(Command, "command", line.split(), defaults) == Command(HERE, inner=Inner((Part(),)))


def test_given_defaults_take_the_place_of_the_fields():
    line, defaults = ["here", "--inner.parts.0.width", "2"], {"inner": Inner((Part(3),))}
    assert read_flags(Command, "command", line, defaults).inner == Inner((Part(2),))
    names = [flag.name for flag in flags_of(Command, {"inner": Inner(())})]
    assert not any("parts" in name for name in names)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "FOLDER must be given: see hyena-jax command --help"),
        ("here there", "'there' is one argument too many for command"),
        ("here --size 1 2", "'2' is one argument too many for command; --size takes 1"),
        ("here --size few", "--size must be an int or 'auto', got 'few'"),
        ("here --inner.rate nan", "--inner.rate must be a finite float32 or None, got 'nan'"),
        ("here --inner.kind tow", "--inner.kind 'tow' is unknown (did you mean 'two'?); allowed: one, two"),
        ("here --inner.parts.0.shape 3", "--inner.parts.0.shape must be followed by 2 values, got 1"),
        ("here --inner.parts.0.width 0", "--inner.parts.0.width must be at least 1, got 0"),
        ("here --inner.parts.0.width 10", "--inner: parts must be at most 9 wide, got 10"),
        ("here --is-quick true", "--is-quick takes no value, got 'true': write --is-quick or --no-is-quick"),
        ("here --is-quick=1", "--is-quick takes no value, got '1'"),
        ("here --is-known 0", "--is-known must be a bool or None, got '0'"),
        ("here --names", "--names must be followed by a value"),
        ("--size 1 here --size 2", "--size is given twice"),
        ("here --is-quick --no-is-quick", "--is-quick is given twice"),
        ("here --inner.parts.1.shape 1 2 --inner.parts.1.shape 3 4", "--inner.parts.1.shape is given twice"),
        ("here --most 3", "--most is not a flag of command; did you mean --inner.most?"),
        ("here --inner.moast 3", "did you mean --inner.most?"),
        ("here --size " + "9" * 5000, "got '999"),
    ],
)
def test_what_is_wrong_is_said_of_the_flag(line, message):
    with pytest.raises(UserError) as caught:
        made(line)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 200


def test_later_errors_name_the_flag_where_one_alone_is_called_so():
    names = [flag.name for flag in flags_of(Command)]
    for argument, flag in (("is_quick", "--is-quick"), ("most", "--inner.most"), ("shape", "--shape")):
        assert str(as_flag(UserError("must be alone", argument), names)) == f"{flag} must be alone"
    for error in (UserError("must be new", "folder"), UserError("most must be new"), UserError("rate: bad")):
        assert as_flag(error, names) is error


def test_a_wrong_value_deep_inside_is_said_of_its_flag():
    flag = "--experiment.optimizer.groups.1.learning-rate"
    with pytest.raises(UserError, match=f"^{flag} must be at least 0.*, got -1.0$"):
        read_flags(Settings, "train", [flag, "-1"])


def test_the_argument_of_an_error_survives_another_process():
    error = pickle.loads(pickle.dumps(UserError("must be new", "folder")))
    assert (str(error), error.message, error.argument) == ("folder must be new", "must be new", "folder")


def test_help_says_what_each_flag_takes_does_and_is(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    text = command_help("hyena-jax command", Command.__doc__, flags_of(Command), ["A note."])
    lines = text.splitlines()
    assert lines[0] == "usage: hyena-jax command FOLDER [options]"
    for line in (
        "What the command does.",
        "A note.",
        "  FOLDER                          Where.",
        "  --size INT|auto                 (default: auto)",
        "  --names TEXT ...                Which; None takes none.",
        "  --is-quick",
        "  --is-known true|false",
        "inner: What is inside.",
        "  --[no-]inner.is-on              (default: on)",
        "  --inner.kind one|two            (default: one)",
        "  --inner.parts.1.shape INT INT",
        "  --width INT                     Channels. (default: 4)",
    ):
        assert line in [line.rstrip() for line in lines]
    assert max(map(len, lines)) <= 100
