"""Functions on arrays, without Flax and without configs.

In addition to their arguments they read what JAX holds for the whole process: the default backend and the
x64 flag, by which a form of an operator is chosen, and the ambient mesh, over which arrays are sharded.
"""

__all__ = [
    "aft",
    "attention",
    "delta_rule",
    "documents",
    "fastmax",
    "few_taps",
    "linear_recurrence",
    "long_conv",
    "modal_conv",
    "online_conv",
    "rg_lru",
    "short_conv",
]
