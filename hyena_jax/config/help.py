"""The text of `--help`, from the docstrings of a command's dataclasses and their fields."""

import ast
import itertools
import shutil
import sys
import textwrap
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from hyena_jax.config.checks import field_ranges, summary
from hyena_jax.config.flags import Flag, n_values
from hyena_jax.system.storage.location import Location

# Columns for the flags; a longer flag gets its own line.
LEFT = 34
MAX_COLUMNS = 110
WORDS = {int: "INT", float: "FLOAT", bool: "true|false", str: "TEXT", type(None): "None"}
WORDS |= {Path: "PATH", Location: "URL"}


def command_help(called: str, description: str, flags: Sequence[Flag], notes: Sequence[str] = ()) -> str:
    """Usage, description, `notes`, and every flag with its type, effect and default, by section."""
    places = [flag for flag in flags if flag.is_positional]
    required = [flag for flag in flags if not flag.is_positional and flag.default is MISSING]
    words = [flag.name for flag in places] + [_invocation(flag) for flag in required]
    lines = [f"usage: {' '.join([called, *words])} [options]"]
    lines += ["", *_wrap(" ".join(description.split()))]
    by_base: dict[type, list[str]] = {}
    for flag in flags:
        if flag.base is not None:
            word = " NAME" if flag.hint is flag.base else " A,B,..."
            by_base.setdefault(flag.base, []).append(flag.name + word)
    parts = [f"{', '.join(names)}: {', '.join(base.registry)}" for base, names in by_base.items()]
    choices = ["\n".join(["Parts chosen by name; each has its own options:", *parts])] if parts else []
    for paragraph in [*notes, *choices]:
        lines += ["", *_wrap(paragraph, "  ")]
    sections: dict[str, list[Flag]] = {"": places}
    for flag in flags:
        if not flag.is_positional and flag.base is None:
            sections.setdefault(flag.name.rpartition(".")[0].removeprefix("--"), []).append(flag)
    for section, members in sections.items():
        about = summary(members[0].owner) if section else ""
        lines += ["", f"{section or 'options'}: {about}".rstrip()]
        for flag in members:
            about = " ".join(_field_docs(flag.owner).get(flag.path[-1], "").split())
            ranges = ", ".join(map(str, field_ranges(flag.owner).get(flag.path[-1], ())))
            notes = "; ".join(filter(None, [_default(flag, about), ranges]))
            lines += _row(_invocation(flag), f"{about} ({notes})".strip() if notes else about)
    return "\n".join(lines)


def overview(
    usage: str, description: str, sections: Mapping[str, Mapping[str, str]], notes: Sequence[str] = ()
) -> str:
    """Usage, description and the first line about each choice, under its section's title; "" has no title."""
    lines = [f"usage: {usage}", "", *_wrap(description)]
    for title, rows in sections.items():
        lines += ["", *([f"{title}:"] if title else [])]
        for name, about in rows.items():
            lines += _row(name, about.partition("\n")[0], 14)
    for paragraph in notes:
        lines += ["", *_wrap(paragraph)]
    return "\n".join(lines)


def _row(left: str, right: str, width: int = LEFT) -> list[str]:
    lines = textwrap.wrap(right, terminal_width() - width, break_on_hyphens=False) or [""]
    if len(left) + 4 > width:
        return [f"  {left}", *(" " * width + line for line in lines if line)]
    return [f"  {left}".ljust(width) + lines[0], *(" " * width + line for line in lines[1:])]


def _wrap(paragraph: str, indent: str = "") -> list[str]:
    return [
        line
        for text in paragraph.splitlines()
        for line in textwrap.wrap(text, terminal_width(), subsequent_indent=indent, break_on_hyphens=False)
    ]


def terminal_width() -> int:
    """The width of the terminal, up to what can be read."""
    return min(shutil.get_terminal_size().columns, MAX_COLUMNS)


def _invocation(flag: Flag) -> str:
    """A flag with its values; for a boolean that is on by default, `--[no-]name`."""
    if flag.is_positional:
        return flag.name
    if flag.hint is bool:
        return f"--[no-]{flag.name[2:]}" if flag.default is True else flag.name
    count = n_values(flag.hint)
    word = _metavar(flag.hint)
    return f"{flag.name} {word + ' ...' if count is None else ' '.join([word] * count)}"


def _metavar(hint: Any) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return "|".join(_metavar(kind) for kind in arguments if kind is not type(None))
    if origin is Literal:
        return "|".join(arguments)
    if origin is tuple:
        return _metavar(arguments[0])
    return WORDS.get(hint, "VALUE")


def _default(flag: Flag, about: str) -> str:
    """The default; nothing if it is False, empty, or a None that the text does not explain."""
    value = flag.default
    if value is MISSING:
        return "" if flag.is_positional else "required"
    if value is False or value == () or (value is None and "None" not in about):
        return ""
    if isinstance(value, tuple):
        shown = " ".join(map(str, value))
    elif value is True:
        shown = "on"
    else:
        shown = repr(value) if isinstance(value, str) and not value.isidentifier() else str(value)
    return f"default: {shown}"


def _field_docs(owner: type) -> dict[str, str]:
    """The docstring of each field of a dataclass, including inherited fields."""
    docs: dict[str, str] = {}
    for base in reversed(owner.__mro__):
        file = getattr(sys.modules.get(base.__module__), "__file__", None)
        if file is not None and base is not object:
            docs |= _docs_in(file).get(base.__qualname__, {})
    return docs


@cache
def _docs_in(file: str) -> dict[str, dict[str, str]]:
    """For each class in a source file, the string below each annotated name."""
    try:
        tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):  # the source may be missing
        return {}
    return {
        node.name: {
            field.target.id: below.value.value
            for field, below in itertools.pairwise(node.body)
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr)
            if isinstance(below.value, ast.Constant) and isinstance(below.value.value, str)
        }
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }
