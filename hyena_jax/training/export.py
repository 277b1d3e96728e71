"""Parameters as one safetensors file, and back: to share them, or to start another run from them.

A tensor's name is its path in the tree of parameters, such as `blocks_0/mixer/in_proj/kernel`. The metadata
hold `config`, the experiment as in its run's `config.json`, and `step`. Knows pytrees, not models.
"""

import difflib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from hyena_jax.system import files
from hyena_jax.system.errors import UserError, printable, require
from hyena_jax.system.files import open_safetensors
from hyena_jax.system.trees import named_leaves

Tree = Any

DTYPES = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8")
"""Dtypes that a parameter can be read from, as the format names them."""
MAX_LINES = 100
"""Most lines of a report about a file that does not fit."""


def check_target(path: Path) -> None:
    """Raises UserError unless `write` can create `path` and its config without overwriting a file."""
    # With another suffix the config or the model card, which stand beside the file, could have its name.
    require(path.suffix == ".safetensors", "output", str(path), "a file such as model.safetensors")
    require(path.parent.is_dir(), "output", str(path), "in a folder that exists")
    for file in (path, config_beside(path)):
        require(not file.exists(), "output", str(path), f"a new file, but {file.name} already exists")


def config_beside(path: Path) -> Path:
    """The config file of the parameters in `path`."""
    return path.with_suffix(".json")


def write(path: Path, params: Tree, config: Mapping[str, Any], step: int) -> None:
    """Writes `path`, the same bytes for the same run, and the config beside it, in readable form (`.json`).

    `config` is the experiment as JSON values. UserError if either file exists by then;
    if writing fails, nothing is left.
    """
    metadata, beside = {"config": json.dumps(config), "step": str(step)}, None
    try:
        with files.replacing(path, is_new=True) as draft:
            files.write_safetensors(draft, named_leaves(params), metadata)
            files.write_text(config_beside(path), json.dumps(config, indent=2) + "\n", is_new=True)
            beside = config_beside(path)
    except BaseException:
        if beside is not None:  # alone, the config would keep the same command from being repeated
            beside.unlink(missing_ok=True)
        raise


def read(path: Path, shapes: Tree, report: Callable[[str], None], argument: str = "init_from") -> Tree:
    """The tree of `shapes` filled with the arrays in `path` of the same names, in the dtypes of `shapes`.

    Raises UserError, which calls the file `argument`, if a tensor is missing, unexpected or not finite, or
    has another shape or a dtype that NumPy cannot read; `report` gets a line for each.
    """
    wanted = named_leaves(shapes)
    with open_safetensors(argument, path) as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        found = {
            name: Tensor(tensor.get_dtype(), tuple(tensor.get_shape())) for name, tensor in slices.items()
        }
        problems = list(_problems(wanted, found))
        if not problems:
            with np.errstate(over="ignore"):
                arrays = {name: file.get_tensor(name).astype(leaf.dtype) for name, leaf in wanted.items()}
            problems = [
                f"{name} must be finite as {wanted[name].dtype}, got {array[~np.isfinite(array)].flat[0]}"
                for name, array in arrays.items()
                if not np.isfinite(array).all()
            ]
    _refuse(argument, path, problems, report)
    return jax.tree.unflatten(jax.tree.structure(shapes), arrays.values())


def require_fit(path: Path, params: Tree, shapes: Tree, report: Callable[[str], None]) -> None:
    """Refuses, as `read` does, parameters of the run in the folder `path` that are not those of `shapes`."""
    found = {name: Tensor(DTYPES[1], leaf.shape) for name, leaf in named_leaves(params).items()}
    _refuse("init_from", path, list(_problems(named_leaves(shapes), found)), report)


def _refuse(argument: str, path: Path, problems: Sequence[str], report: Callable[[str], None]) -> None:
    for problem in problems[:MAX_LINES]:
        report(f"{path}: {problem}")
    if problems:
        count = f"{len(problems)} parameters, first {problems[0]}"  # a sweep shows this line alone
        raise UserError(f"{argument} {str(path)!r} does not fit the model: {count}")


class Tensor(NamedTuple):
    """A tensor as the header of a file describes it."""

    dtype: str
    shape: tuple[int, ...]


def _problems(wanted: Mapping[str, Any], found: Mapping[str, Tensor]) -> Iterator[str]:
    unexpected = [name for name in found if name not in wanted]
    for name, leaf in wanted.items():
        if name not in found:
            near = difflib.get_close_matches(name, unexpected[:MAX_LINES], n=1, cutoff=0.6)
            yield f"{name} {leaf.shape} is missing" + (f"; the file has {printable(near[0])}" if near else "")
        elif found[name].shape != leaf.shape:
            yield f"{name} must be {leaf.shape}, got {found[name].shape}"
        elif found[name].dtype not in DTYPES:
            yield f"{name} must be of a dtype that NumPy reads ({', '.join(DTYPES)}), got {found[name].dtype}"
    for name in unexpected:
        yield f"{printable(name)} {found[name].shape} is unexpected: the model has no such parameter"
