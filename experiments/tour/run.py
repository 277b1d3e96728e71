"""Runs the tour's sources and writes their notebooks, with outputs.

python experiments/tour/run.py [NAME ...] [--output FOLDER]

A source is a Python file whose cells begin with `# %%`, or with `# %% [markdown]` for prose; editors run such
cells one by one. The notebook NAME.ipynb holds the same cells, what they print and show, and their pictures.
On one machine a second run writes the same bytes.
"""

import ast
import base64
import contextlib
import io
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hyena_jax.cli.base import script_flags
from hyena_jax.config import Checked
from hyena_jax.config.flags import positional
from hyena_jax.system.errors import choose

HERE = Path(__file__).resolve().parent


class Cell(NamedTuple):
    """The text of a cell, and whether it is prose."""

    text: str
    is_prose: bool


def names() -> list[str]:
    """The sources in order."""
    return sorted((path.stem for path in HERE.glob("[0-9]*.py")), key=lambda name: int(name.split("_")[0]))


def cells(name: str) -> list[Cell]:
    """The cells of a source."""
    found = []
    for part in ("\n" + (HERE / f"{name}.py").read_text(encoding="utf-8")).split("\n# %%")[1:]:
        mark, _, text = part.partition("\n")
        is_prose = mark.strip() == "[markdown]"
        if is_prose:
            text = "\n".join(line.removeprefix("#").removeprefix(" ") for line in text.splitlines())
        found.append(Cell(text.strip("\n"), is_prose))
    return found


def notebook(name: str) -> dict[str, Any]:
    """The executed notebook; an exception in a cell, such as a failed assertion, is raised."""
    written, variables, count = [], {"__name__": "__main__"}, 0
    for index, cell in enumerate(cells(name)):
        entry = {"id": f"cell-{index}", "metadata": {}, "source": cell.text.splitlines(keepends=True)}
        if cell.is_prose:
            entry["cell_type"] = "markdown"
        else:
            count += 1
            outputs = execute(cell.text, f"{name}, cell {index}", variables)
            entry |= {"cell_type": "code", "execution_count": count, "outputs": outputs}
        written.append(entry)
    return {
        "cells": written,
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"file_extension": ".py", "mimetype": "text/x-python", "name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def execute(text: str, where: str, variables: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs a cell; what it printed and showed, then the figures that it drew, as outputs of a notebook."""
    from matplotlib import pyplot

    statements = ast.parse(text).body
    last = statements.pop().value if isinstance(statements[-1], ast.Expr) else ast.Constant(None)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(statements, []), where, "exec"), variables)
        value = eval(compile(ast.fix_missing_locations(ast.Expression(last)), where, "eval"), variables)
    outputs = []
    if printed.getvalue():
        lines = printed.getvalue().splitlines(keepends=True)
        outputs.append({"name": "stdout", "output_type": "stream", "text": lines})
    if hasattr(value, "_repr_markdown_"):  # as Jupyter does with the value of a last line
        data = {"text/markdown": value._repr_markdown_().splitlines(keepends=True)}
        outputs.append({"data": data, "metadata": {}, "output_type": "display_data"})
    for number in pyplot.get_fignums():
        picture = io.BytesIO()
        # Without the name and version of the software, which would change the bytes.
        pyplot.figure(number).savefig(picture, format="png", metadata={"Software": None})
        data = {"image/png": base64.b64encode(picture.getvalue()).decode(), "text/plain": ["<Figure>"]}
        outputs.append({"data": data, "metadata": {}, "output_type": "display_data"})
    pyplot.close("all")
    return outputs


@dataclass(frozen=True)
class Flags(Checked):
    """Runs the tour's sources and writes their notebooks, with outputs."""

    names: tuple[str, ...] = field(default=(), metadata=positional("NAME..."))
    """Sources, such as 1_fourier; all by default."""
    output: Path = HERE
    """Folder of the notebooks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.names:
            choose("NAME", name, dict.fromkeys(names()))


def main(flags: Flags) -> None:
    folder = flags.output.resolve()
    os.environ["MPLBACKEND"] = "agg"
    os.chdir(HERE)  # as in Jupyter
    for name in flags.names or names():
        text = json.dumps(notebook(name), indent=1, ensure_ascii=False) + "\n"
        (folder / f"{name}.ipynb").write_text(text, encoding="utf-8")
        print(name)


if __name__ == "__main__":
    main(script_flags(Flags))
