"""Compares the Pallas kernels of a platform with plain forms, on the device, before their first use.

Axes: B batch, L length, D and C channels.
"""

from collections.abc import Callable
from functools import cache

import jax
import numpy as np

TOLERANCE = 1e-4
"""Largest difference of a value or a gradient, relative to the largest value: float32 rounds to 1e-6."""


def usable(platform: str) -> bool:
    """Whether a platform has kernels, and they equal the plain forms on its device."""
    return platform in ("gpu", "tpu") and fault(platform) is None


@cache
def fault(platform: str) -> str | None:
    """What is wrong with the kernels of "gpu" or "tpu", in one line; None if nothing is.

    Values and gradients of small cases, on the first device of the platform, once a process.
    """
    from hyena_jax.ops.delta_rule import delta_rule
    from hyena_jax.ops.kernels.delta_rule import fused_delta_rule
    from hyena_jax.ops.kernels.long_conv import fused_conv
    from hyena_jax.ops.kernels.recurrence import gpu_recurrence, tpu_recurrence
    from hyena_jax.ops.linear_recurrence import linear_recurrence, scan_recurrence
    from hyena_jax.ops.long_conv import direct_conv

    def recurrence(form: Callable) -> Callable:
        return lambda a, x, h0: linear_recurrence(a, x, h0, method=form)

    rng = np.random.default_rng(0)
    # A last block of channels, and of steps, that is not full.
    rows = [np.float32(rng.uniform(0.5, 1, (2, 300, 161))), *_normal(rng, (2, 300, 161), (2, 161))]
    kernel = gpu_recurrence if platform == "gpu" else tpu_recurrence
    cases = [(kernel.__name__, recurrence(kernel), recurrence(scan_recurrence), rows)]
    if platform == "tpu":
        cases.append(("fused_conv", fused_conv, direct_conv, _normal(rng, (8, 2, 300), (8, 1, 300))))
        for by_channel in (False, True):
            arrays = _delta_rule_arrays(rng, by_channel)
            kind = "of each channel" if by_channel else "of each head"
            forms = (
                lambda *arrays, f=f: f(*arrays[:5], None, *arrays[5:]) for f in (fused_delta_rule, delta_rule)
            )
            cases.append((f"fused_delta_rule with decays {kind}", *forms, arrays))
    return next(filter(None, (_difference(platform, *case) for case in cases)), None)


def _delta_rule_arrays(rng: np.random.Generator, by_channel: bool) -> list[np.ndarray]:
    """Of two chunks, the last not full, and two heads of values for each of keys: q, k, v, log_a, r, S."""
    q, k, v, state = _normal(rng, (2, 100, 2, 96), (2, 100, 2, 96), (2, 100, 4, 128), (2, 4, 96, 128))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    log_a = -rng.exponential(0.3, (2, 100, 4, *[96] * by_channel))
    read = rng.uniform(0, 1, (2, 100, 4, 1)) * np.repeat(k, 2, axis=2)
    return [q, k, v, np.float32(log_a), np.float32(read), state]


def _normal(rng: np.random.Generator, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    return [rng.standard_normal(shape, np.float32) for shape in shapes]


def _difference(
    platform: str, name: str, kernel: Callable, plain: Callable, arrays: list[np.ndarray]
) -> str | None:
    """How the kernel differs from the plain form, or why it does not run."""

    def run(f: Callable) -> list[np.ndarray]:
        def values_and_gradients(*arrays: jax.Array) -> tuple:
            y, pull_back = jax.vjp(f, *arrays)
            return y, pull_back(jax.tree.map(jax.numpy.ones_like, y))

        return jax.device_get(jax.tree.leaves(jax.jit(values_and_gradients)(*arrays)))

    try:
        device = jax.local_devices(backend=platform)[0]
        with jax.default_device(device), jax.default_matmul_precision("highest"):  # not bfloat16, as on TPUs
            pairs = zip(run(kernel), run(plain), strict=True)
    except Exception as error:  # Mosaic's, Triton's and XLA's own kinds
        return (
            f"the kernel {name} does not run here: {(str(error).splitlines() or [type(error).__name__])[0]}"
        )
    for ours, theirs in pairs:
        difference = np.abs(ours - theirs).max() / np.abs(theirs).max()
        if not difference <= TOLERANCE:
            return f"the kernel {name} differs from its plain form by {difference:.1e} of the largest value"
    return None
