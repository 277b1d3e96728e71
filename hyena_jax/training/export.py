"""Parameters as one safetensors file, and back: to share them, or to start another run from them.

A tensor's name is its path in the tree of parameters, such as `blocks_0/mixer/in_proj/kernel`. The file's
metadata hold `config`, the experiment as `config.json` of its run has it, and `step`. Knows pytrees, not
models.
"""

import difflib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from hyena_jax.config import UserError, require
from hyena_jax.training import atomic
from hyena_jax.training.optimizer import path_name

Tree = Any


def check_target(path: Path) -> None:
    """Raises UserError unless `write` can make `path`, and what goes beside it, and overwrites nothing."""
    require(path.suffix not in ("", ".json"), "output", str(path), "a file such as model.safetensors")
    require(path.parent.is_dir(), "output", str(path), "in a folder that exists")
    for file in (path, config_beside(path)):
        require(not file.exists(), "output", str(path), f"a new file, but {file.name} is there")


def config_beside(path: Path) -> Path:
    """Where the config of the parameters in `path` is."""
    return path.with_suffix(".json")


def write(path: Path, params: Tree, config: Mapping[str, Any], step: int) -> None:
    """Writes `path`, and the config once more in readable form beside it (`.json` in place of the suffix).

    Args:
      params: arrays of any dtype that safetensors knows.
      config: the experiment as JSON values.

    Raises:
      OSError: if that fails; then `path` is as it was.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    tensors = {name: np.ascontiguousarray(leaf) for name, leaf in named(params).items()}
    metadata = {"config": json.dumps(config), "step": str(step)}
    draft = atomic.draft_of(path)
    try:
        save_file(tensors, draft, metadata)
        atomic.write_text(config_beside(path), json.dumps(config, indent=2) + "\n")
        draft.rename(path)
    except SafetensorError as error:
        raise OSError(f"{path} could not be written: {error}") from error
    finally:
        draft.unlink(missing_ok=True)


def read(path: Path, shapes: Tree, report: Callable[[str], None]) -> Tree:
    """The tree of `shapes`, with the arrays that `path` holds under its names, as the dtypes of `shapes`.

    Args:
      report: is given a line for each tensor that is missing, has another shape, or has no place.

    Raises:
      UserError: if there is such a tensor, or `path` is no safetensors file.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        found = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"init_from {str(path)!r} cannot be read: {error}") from error
    wanted = named(shapes)
    problems = list(_problems(wanted, found))
    for problem in problems:
        report(f"{path}: {problem}")
    if problems:
        count = len(problems)
        raise UserError(f"init_from {str(path)!r} does not fit the model: {count} parameters, listed above")
    leaves = [found[name].astype(leaf.dtype) for name, leaf in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)


def named(tree: Tree) -> dict[str, Any]:
    """The leaves by their paths, in the order of the tree."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _problems(wanted: Mapping[str, Any], found: Mapping[str, np.ndarray]) -> Iterator[str]:
    unexpected = [name for name in found if name not in wanted]
    for name, leaf in wanted.items():
        if name not in found:
            near = difflib.get_close_matches(name, unexpected, n=1, cutoff=0.6)
            yield f"{name} {leaf.shape} is missing" + (f"; the file has {near[0]}" if near else "")
        elif found[name].shape != leaf.shape:
            yield f"{name} must be {leaf.shape}, got {found[name].shape}"
    for name in unexpected:
        yield f"{name} {found[name].shape} is unexpected: the model has no such parameter"
