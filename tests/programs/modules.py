"""Writes the list of modules into hyena_jax/README.md, from the first sentence of each module's docstring.

python tests/programs/modules.py

`tests/test_readme.py` checks that the page is up to date.
"""

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "hyena_jax"
PAGE = PACKAGE / "README.md"
BEGIN, END = "<!-- modules -->\n", "<!-- end -->\n"


def first_sentence(file: Path) -> str:
    """The module's docstring up to its first full stop, list of axes or empty line."""
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
    text = " ".join(text.partition("\n\n")[0].split()).partition(" Axes: ")[0]
    return re.split(r"(?<=[^.][^.A-Z])\. ", text)[0].rstrip(".:")


def modules() -> str:
    """A table for the package and one for each folder in it."""
    lines = []
    for folder in sorted(path.parent for path in PACKAGE.rglob("__init__.py")):
        name = "hyena_jax" if folder == PACKAGE else f"{folder.relative_to(PACKAGE)}/"
        lines += [f"### {name}", "", f"{first_sentence(folder / '__init__.py')}.", ""]
        lines += ["| file | what it holds |", "|---|---|"]
        for file in sorted(folder.glob("*.py")):
            if file.name != "__init__.py":
                about = first_sentence(file).replace("|", "\\|")
                lines.append(f"| [{file.name}]({file.relative_to(PACKAGE)}) | {about} |")
        lines.append("")
    return "\n".join(lines)


def page() -> str:
    """The page with the list as it should be."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    return before + BEGIN + modules() + END + rest.split(END, 1)[1]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
