"""The linear recurrence's forms, for `hyena-jax bench function`: is the kernel worth having.

hyena-jax bench function experiments/accelerators/recurrence.py:associative,kernel --sizes 2048 8192
"""

from functools import partial

import jax
import numpy as np

from hyena_jax.ops.linear_recurrence import associative_recurrence, linear_recurrence, scan_recurrence
from hyena_jax.reference.recurrence import linear_recurrence as exact

TOKENS, CHANNELS = 65_536, 2048


def make_inputs(size: int) -> tuple:
    """a, x and h0 of rows of `size` tokens; a thousandth as many numbers on a CPU."""
    share = 1 if jax.default_backend() != "cpu" else 32
    shape = max(1, TOKENS // size // share), size, CHANNELS // share
    rng = np.random.default_rng(0)
    a = rng.uniform(0.8, 1, shape).astype(np.float32)
    return a, rng.standard_normal(shape, np.float32), rng.standard_normal((shape[0], shape[2]), np.float32)


def oracle(*args):
    """The last state by a loop over time."""
    return exact(*args)[1]


def _last(form, a, x, h0):
    return linear_recurrence(a, x, h0, method=form)[1]


associative = partial(_last, associative_recurrence)
scan = partial(_last, scan_recurrence)


def kernel(a, x, h0):
    """The platform's Pallas kernel."""
    from hyena_jax.ops.kernels.recurrence import gpu_recurrence, tpu_recurrence

    return _last(gpu_recurrence if jax.default_backend() == "gpu" else tpu_recurrence, a, x, h0)
