"""Known systems are recovered; incompressible responses keep a large error."""

import numpy as np
import pytest
from distillation.systems import decaying_noise, noise, oscillations

from hyena_jax.distillation import modal_fit
from hyena_jax.ops import hankel

SYSTEMS = {
    "one pair": ([0.95 * np.exp(0.3j)], 1),
    "three pairs": ([0.98 * np.exp(0.1j), 0.9 * np.exp(1.0j), 0.7 * np.exp(2.5j)], 3),
    "more modes than needed": ([0.95 * np.exp(0.3j)], 4),
    "real poles": ([0.95, 0.6, -0.8], 3),
    "a real pole and a pair": ([0.97, 0.9 * np.exp(2.0j)], 2),
    "undamped": ([np.exp(0.4j)], 1),
}


def relative_errors(taps: np.ndarray, modes: modal_fit.FittedModes) -> np.ndarray:
    error = modal_fit.response(modes, taps.shape[1]) - taps
    return np.linalg.norm(error, axis=1) / np.linalg.norm(taps, axis=1)


@pytest.mark.parametrize("n_taps", [63, 126])
@pytest.mark.parametrize(("poles", "n_modes"), SYSTEMS.values(), ids=SYSTEMS.keys())
def test_known_systems_are_recovered(poles, n_modes, n_taps):
    taps = oscillations(poles, n_taps)
    modes = modal_fit.fit(taps, n_modes)
    assert (relative_errors(taps, modes) < 1e-5).all()
    assert (modes.log_decay > -np.inf).all()  # |lambda| < 1


def test_the_ring_decays_to_exp_of_minus_3_over_the_taps():
    log_decay, angle = modal_fit.ring(2, 4, 64)
    np.testing.assert_allclose(np.exp(-64 * np.exp(log_decay)), np.full((2, 4), np.exp(-3)))
    np.testing.assert_allclose(angle, [np.pi * np.array([1, 3, 5, 7]) / 8] * 2)


def test_the_poles_themselves_are_found():
    poles = [0.98 * np.exp(0.1j), 0.9 * np.exp(1.0j), 0.7 * np.exp(2.5j)]
    modes = modal_fit.fit(oscillations(poles, 63), 3)
    found = np.exp(-np.exp(modes.log_decay) + 1j * modes.angle)
    np.testing.assert_allclose(np.sort_complex(found), np.tile(np.sort_complex(poles), (3, 1)), atol=1e-6)


def test_the_error_falls_with_the_order_and_never_below_what_is_possible():
    taps = decaying_noise(8, 63, 0.08)
    spectrum = hankel.spectrum(taps, 64)
    errors = []
    for n_modes in (1, 2, 4, 8):
        modes = modal_fit.fit(taps, n_modes)
        errors.append(relative_errors(taps, modes) * np.linalg.norm(taps, axis=1))
        assert (errors[-1] >= hankel.least_error(spectrum, 63, 2 * n_modes) * (1 - 1e-9)).all()
    assert (np.diff(errors, axis=0) < 0).all()
    assert (errors[-1] < 0.3 * errors[0]).all()


def test_refinement_lowers_the_error():
    taps = decaying_noise(8, 63, 0.08)
    start = modal_fit.ho_kalman(taps, 4)
    before, after = (modal_fit.refine(taps, *start, steps=steps) for steps in (0, 40))
    assert (relative_errors(taps, after) <= relative_errors(taps, before)).all()
    assert relative_errors(taps, after).mean() < 0.95 * relative_errors(taps, before).mean()


def test_white_noise_does_not_compress():
    taps = noise(8, 127)
    assert (relative_errors(taps, modal_fit.fit(taps, 4)) > 0.5).all()


def test_odd_filters():
    nothing, impulse, constant = np.zeros((1, 31)), np.eye(1, 31), np.ones((1, 31))
    for taps, most in ((nothing, 0), (impulse, 2e-3), (constant, 1e-3)):
        modes = modal_fit.fit(taps, 3)
        assert np.abs(modal_fit.response(modes, 31) - taps).max() <= most
        assert all(np.isfinite(part).all() for part in modes)


def test_channels_are_fitted_each_alone():
    taps = decaying_noise(3, 31, 0.1)
    together = modal_fit.fit(taps, 2)
    for i in range(3):
        np.testing.assert_allclose(modal_fit.fit(taps[i : i + 1], 2).angle[0], together.angle[i], atol=1e-6)


def test_filters_longer_than_a_dense_matrix_allows(monkeypatch):
    taps = oscillations([0.98 * np.exp(0.1j), 0.9 * np.exp(1.0j)], 101)
    monkeypatch.setattr(hankel, "DENSE_ROWS", 8)
    assert (relative_errors(taps, modal_fit.fit(taps, 2)) < 1e-5).all()
