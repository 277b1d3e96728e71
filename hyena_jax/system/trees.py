"""Names and sizes of the leaves of a tree, such as parameters."""

from typing import Any

import jax


def path_name(path: jax.tree_util.KeyPath, separator: str = "/") -> str:
    """A leaf's path as `block_0/mixer/in_proj/kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator=separator)


def named_leaves(tree: Any, separator: str = "/") -> dict[str, Any]:
    """The leaves by their paths, in the order of the tree."""
    return {path_name(path, separator): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def n_entries(tree: Any) -> int:
    """The number of entries of all leaves, such as that of a model's parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))
