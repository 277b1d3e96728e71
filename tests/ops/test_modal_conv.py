"""Decoding by the state of a modal filter equals the convolution with its taps."""

from functools import partial

import jax
import numpy as np
import pytest
from tolerances import assert_close

from hyena_jax.ops import modal_conv
from hyena_jax.ops.modal_conv import Modes

WIDTH, GROUPS, BATCH, N_MODES = 2, 3, 2, 3


def system(kind: str) -> tuple[Modes, np.ndarray]:
    """Modes of magnitude 0.7 to 0.95, and their first 21 taps by powers, both float64."""
    rng = np.random.default_rng(0)
    log_modes = np.log(rng.uniform(0.7, 0.95, (WIDTH, N_MODES)))
    weights = rng.standard_normal((WIDTH, N_MODES))
    if kind == "complex":
        log_modes = log_modes + 1j * rng.uniform(0, np.pi, log_modes.shape)
        weights = weights + 1j * rng.standard_normal(weights.shape)
    lag_zero = rng.standard_normal(WIDTH)
    later = [(weights * np.exp(log_modes) ** t).sum(-1).real for t in range(20)]
    return Modes(log_modes, weights, lag_zero), np.stack([lag_zero, *later], axis=-1)


def rounded(modes: Modes) -> Modes:
    return jax.tree.map(lambda x: x.astype(np.complex64 if np.iscomplexobj(x) else np.float32), modes)


kinds = pytest.mark.parametrize("kind", ["real", "complex"])


@kinds
def test_taps_are_sums_of_powers(kind):
    modes, h = system(kind)
    taps = jax.jit(modal_conv.modal_taps, static_argnums=1)
    assert_close(taps(rounded(modes), 21), h)


@kinds
def test_prefills_and_steps_in_turn_equal_the_convolution(kind, monkeypatch):
    """Prefills of two blocks and a part of one, the second from a state that is not empty; and steps."""
    monkeypatch.setattr(modal_conv, "BLOCK", 4)
    modes, h = system(kind)
    u = np.random.default_rng(1).standard_normal((GROUPS * WIDTH, BATCH, 21)).astype(np.float32)
    prefill, step = (jax.jit(partial(run, rounded(modes))) for run in (modal_conv.prefill, modal_conv.step))
    state, parts, t = modal_conv.empty(rounded(modes), BATCH, GROUPS * WIDTH), [], 0
    for n_tokens in (9, 1, 1, 9, 1):
        y, state = (step if n_tokens == 1 else prefill)(state, u[..., t : t + n_tokens])
        parts.append(y)
        t += n_tokens
    expected = [[np.convolve(row, h[c % WIDTH])[:21] for row in u[c]] for c in range(GROUPS * WIDTH)]
    assert_close(np.concatenate(parts, axis=-1), expected)
