"""Stopping early, at the first evaluation that reaches `training.until`, such as `accuracy=0.99`."""

from collections.abc import Callable

import jax
import numpy as np

from hyena_jax.config import choose
from hyena_jax.config.experiment import parse_target
from hyena_jax.data.dataset import Dataset
from hyena_jax.training.evaluate import held_out_values
from hyena_jax.training.metrics import Values

LOWER_IS_BETTER = ("loss", "perplexity", "bits_per_byte")
"""Held-out values that reach a target from above; all others reach it from below."""


def is_reached(until: str, values: Values) -> bool:
    """Whether held-out values reach the target `NAME=VALUE`."""
    name, target = parse_target(until)
    return values[name] <= target if name in LOWER_IS_BETTER else values[name] >= target


def check_target(until: str, data: Dataset, eval_step: Callable, *arguments: object) -> None:
    """Raises UserError unless the target names a value that evaluations of `data` measure.

    Args:
      eval_step: as `make_eval_step` makes it; traced with `arguments`, its parameters and a batch.
    """
    sums = jax.eval_shape(eval_step, *arguments)
    ones = {name: np.ones(sum_.shape[1:]) if sum_.ndim > 1 else 1.0 for name, sum_ in sums.items()}
    names = held_out_values(data, ones)
    choose("the value in training.until", parse_target(until)[0], names)
