"""Writes hyena_jax/PARAMETERS.md from the docstrings of mixers, filters and models.

python tests/programs/parameter_table.py

`tests/test_parameters.py` checks that the docstrings are true and that the file is up to date.
"""

import inspect
import re
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).parents[2] / "hyena_jax" / "PARAMETERS.md"

HEAD = """# Parameters

The path, shape and layout of every parameter, for converting weights of other implementations. Paths are the
keys of the `params` tree, joined by `/`. Dense kernels are [inputs, outputs] (PyTorch has the transpose);
`name/*` stands for the table of that part. Letters: D = d_model, Lmax = max_len, B batch, K taps of a short
filter, H heads; others are explained where they are used, or are names of config fields. Parameters that only
some options have are marked. LayerNorm is (x - mean) / sqrt(variance + eps) * scale + bias, and RMSNorm
x / sqrt(mean square + eps) * (1 + scale): eps is `norm_eps` of the model, by default 1e-5 in LayerNorm (as
in PyTorch; Flax's default is 1e-6) and 1e-6 in RMSNorm.

This file is generated: `python tests/programs/parameter_table.py`.
"""


class Entry(NamedTuple):
    """One line of a docstring's section `Parameters`."""

    path: str
    shape: str | None
    """Python expressions, comma separated; None for `name/*`."""
    layout: str


def entries(module: type) -> list[Entry]:
    """The section `Parameters` of a module's docstring, after those of its base classes that are not in it.

    Raises ValueError if there is none, or a line of it cannot be read.
    """
    found: dict[str, Entry] = {}
    for part in reversed(module.__mro__):
        _, _, section = inspect.cleandoc(part.__doc__ or "").partition("\nParameters:\n")
        # Continuation lines are indented deeper than the two spaces of an entry.
        lines = re.sub(r"\n {3,}", " ", section).splitlines()
        found |= {entry.path: entry for entry in (_entry(module, line) for line in lines if line.strip())}
    if not found:
        raise ValueError(f"{module.__name__} does not document its parameters")
    return list(found.values())


def _entry(module: type, line: str) -> Entry:
    match = re.fullmatch(r" {2}(\S+?)(?: \[(.*?)\])?(?::(?: (.*))?)?", line)
    if match is None:
        raise ValueError(f"{module.__name__}: not a parameter: {line!r}")
    return Entry(match[1], match[2], match[3] or "")


def table(name: str, module: type) -> str:
    """The section of one module."""
    summary = inspect.getdoc(module).splitlines()[0]
    rows = [f"| `{e.path}` | {f'`[{e.shape}]`' if e.shape else ''} | {e.layout} |" for e in entries(module)]
    head = ["| path | shape | layout |", "|---|---|---|"]
    return "\n".join([f"### `{name}`\n", summary, "", *head, *rows, ""])


def render() -> str:
    """The whole file."""
    from hyena_jax.filters import FILTERS
    from hyena_jax.mixers import MIXERS
    from hyena_jax.models import Autoencoder, ImageClassifier, LanguageModel
    from hyena_jax.models.blocks import Block

    models = {"language_model": LanguageModel, "image_classifier": ImageClassifier}
    models |= {"autoencoder": Autoencoder, "block": Block}
    parts = [HEAD]
    for title, modules in (("Models", models), ("Mixers", MIXERS), ("Filters", FILTERS)):
        parts.append(f"## {title}\n")
        parts += [table(name, module) for name, module in modules.items()]
    return "\n".join(parts)


if __name__ == "__main__":
    FILE.write_text(render(), encoding="utf-8")
