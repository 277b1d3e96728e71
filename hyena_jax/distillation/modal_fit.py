"""Fits sums of a few decaying oscillations to impulse responses, in float64 NumPy, all channels at once.

    g_t ~ Re sum_{n<d} R_n lambda_n^t,  t = 0 .. T-1,  |lambda_n| < 1

Axes: C channels, T taps, d modes. A mode is one complex state: d modes have 2d real numbers of state.
"""

from typing import NamedTuple

import numpy as np

from hyena_jax.ops import hankel

# Steps of the refinement; most of the gain is in the first ten.
STEPS = 40
# A channel has converged when a step reduces its squared error by at most this fraction.
LEAST_GAIN = 1e-4
# Levenberg-Marquardt damping; a channel that even the largest does not improve has converged, too.
LEAST_DAMPING, MAX_DAMPING = 1e-12, 1e6
# Ridge of the least squares, relative to the mean diagonal of the Gram matrix. Without it, modes that nearly
# coincide would get large residues that cancel, which loses precision in float32.
RIDGE = 1e-10


class FittedModes(NamedTuple):
    """lambda = exp(-exp(log_decay) + i angle), both [C, d]; residues R complex [C, d]."""

    log_decay: np.ndarray
    angle: np.ndarray
    residue: np.ndarray


class _Point(NamedTuple):
    """A set of modes with its least-squares residues, and quantities derived from them."""

    log_decay: np.ndarray  # [C, d]
    angle: np.ndarray  # [C, d]
    powers: np.ndarray  # lambda^t, complex [C, d, T]
    basis: np.ndarray  # [Re, -Im] of the powers [C, 2d, T]
    weights: np.ndarray  # [Re R, Im R], [C, 2d]
    error: np.ndarray  # [C, T]
    cost: np.ndarray  # squared norm of the error plus the ridge term [C]


def fit(taps: np.ndarray, n_modes: int, seed: int = 0) -> FittedModes:
    """Modes fitted to taps [C, T] in the L2 norm, float64.

    Each channel starts from the best of three: the recurrence of Ho and Kalman from the taps, the same from
    the taps continued by zeros (whose error balanced truncation bounds), and a ring. `seed` is of the random
    subspace, used where filters are too long for dense Hankel matrices.
    """
    n_taps = taps.shape[1]
    largest = 8 * max(4 * n_modes * n_taps, (4 * n_modes) ** 2, n_taps * min(n_taps, hankel.DENSE_ROWS))
    return FittedModes(*hankel.in_groups(lambda group: _fit_group(group, n_modes, seed), taps, largest))


def response(modes: FittedModes, n_taps: int) -> np.ndarray:
    """Re sum_n R_n lambda_n^t, float64 [C, n_taps]."""
    return (modes.residue[..., None] * _powers(modes.log_decay, modes.angle, n_taps)).real.sum(1)


def ring(n_channels: int, n_modes: int, n_taps: int) -> tuple[np.ndarray, np.ndarray]:
    """log_decay and angle [C, d] of modes at evenly spaced angles that decay to exp(-3) over the taps."""
    angle = np.pi * (np.arange(n_modes) + 0.5) / n_modes
    return np.full((n_channels, n_modes), np.log(3 / n_taps)), np.tile(angle, (n_channels, 1))


def ho_kalman(taps: np.ndarray, n_modes: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """log_decay and angle [C, d] of the largest recurrence from `hankel.realization` that fits in d modes.

    A conjugate pair of eigenvalues takes one mode, and so does a real eigenvalue: the order is 2d minus the
    number of real eigenvalues. Unused modes are taken from the ring.
    """
    a = hankel.realization(taps, 2 * n_modes, seed)
    (slowest, fastest), least = _decay_limits(taps.shape[1]), 1e-2 / taps.shape[1]
    log_decay, angle = ring(len(taps), n_modes, taps.shape[1])
    todo, order = np.arange(len(taps)), a.shape[1]
    while len(todo) and order:
        eigenvalues = np.linalg.eigvals(a[todo, :order, :order])
        is_mode = eigenvalues.imag >= 0
        fits = is_mode.sum(1) <= n_modes
        for channel, values, chosen in zip(todo[fits], eigenvalues[fits], is_mode[fits], strict=True):
            poles, of_mode = values[chosen], (channel, slice(chosen.sum()))
            radius = np.clip(np.abs(poles), np.exp(-np.exp(fastest)), np.exp(-np.exp(slowest)))
            log_decay[of_mode] = np.log(-np.log(radius))
            # Off the real axis: a mode would stay there, since the error's derivative by its angle is 0.
            angle[of_mode] = np.clip(np.abs(np.angle(poles)), least, np.pi - least)
        todo, order = todo[~fits], order - 1
    return log_decay, angle


def refine(taps: np.ndarray, log_decay: np.ndarray, angle: np.ndarray, steps: int = STEPS) -> FittedModes:
    """Modes refined by Levenberg-Marquardt steps on the L2 error, with least-squares residues throughout.

    This is variable projection in the form of Ruhe and Wedin (1980): a Gauss-Newton step in modes and
    residues together, then the least-squares residues of the new modes. Each channel has its own damping, and
    takes only steps that lower its error.
    """
    n_modes, n_taps = log_decay.shape[1], taps.shape[1]
    now = _evaluate(taps, log_decay, angle)
    damping = np.full(len(taps), 1e-2)
    moving = np.arange(len(taps))
    for _ in range(steps):
        old = _take(now, moving)
        move = _gauss_newton(old, damping[moving])
        log_decay = old.log_decay + np.clip(move[:, :n_modes], -1, 1)
        angle = old.angle + np.clip(move[:, n_modes:], -0.5, 0.5)
        new = _evaluate(taps[moving], np.clip(log_decay, *_decay_limits(n_taps)), angle)
        better = new.cost < old.cost
        _put(now, moving[better], _take(new, better))
        damping[moving] = np.clip(damping[moving] * np.where(better, 1 / 3, 4), LEAST_DAMPING, None)
        arrived = better & (old.cost - new.cost <= LEAST_GAIN * old.cost)
        moving = moving[~arrived & (damping[moving] <= MAX_DAMPING)]
        if not len(moving):
            break
    return FittedModes(now.log_decay, now.angle, now.weights[:, :n_modes] + 1j * now.weights[:, n_modes:])


def _fit_group(taps: np.ndarray, n_modes: int, seed: int) -> FittedModes:
    starts = [
        ho_kalman(taps, n_modes, seed),
        ho_kalman(hankel.continued(taps), n_modes, seed),
        ring(*taps.shape[:1], n_modes, taps.shape[1]),
    ]
    best = _evaluate(taps, *starts[0])
    for start in starts[1:]:
        point = _evaluate(taps, *start)
        better = point.cost < best.cost
        _put(best, better, _take(point, better))
    return refine(taps, best.log_decay, best.angle)


def _evaluate(taps: np.ndarray, log_decay: np.ndarray, angle: np.ndarray) -> _Point:
    powers = _powers(log_decay, angle, taps.shape[1])
    basis = np.concatenate([powers.real, -powers.imag], axis=1)
    gram = basis @ basis.swapaxes(1, 2)
    diagonal = np.einsum("cii->ci", gram)
    ridge = RIDGE * diagonal.mean(1)
    gram = gram + ridge[:, None, None] * np.eye(gram.shape[1])
    weights = np.linalg.solve(gram, basis @ taps[..., None])[..., 0]
    error = taps - (weights[:, None] @ basis)[:, 0]
    cost = np.square(error).sum(1) + ridge * np.square(weights).sum(1)
    return _Point(log_decay, angle, powers, basis, weights, error, cost)


def _gauss_newton(point: _Point, damping: np.ndarray) -> np.ndarray:
    """The step in log_decay and angle [C, 2d]."""
    n_modes, n_taps = point.powers.shape[1:]
    residue = point.weights[:, :n_modes] + 1j * point.weights[:, n_modes:]
    by_log_mode = residue[..., None] * point.powers * np.arange(n_taps)
    by_decay = -np.exp(point.log_decay)[..., None] * by_log_mode.real
    jacobian = np.concatenate([by_decay, -by_log_mode.imag, point.basis], axis=1)
    gram = jacobian @ jacobian.swapaxes(1, 2)
    diagonal = np.einsum("cii->ci", gram).copy()
    of_modes, of_residues = np.split(diagonal, 2, axis=1)
    # Modes without any effect must not make the equations singular.
    of_modes = damping[:, None] * (of_modes + 1e-12 * of_modes.max(1, keepdims=True) + 1e-300)
    of_residues = np.broadcast_to(RIDGE * of_residues.mean(1, keepdims=True), of_residues.shape)
    on_diagonal = np.arange(4 * n_modes)
    gram[:, on_diagonal, on_diagonal] += np.concatenate([of_modes, of_residues], axis=1)
    return np.linalg.solve(gram, jacobian @ point.error[..., None])[:, : 2 * n_modes, 0]


def _take(point: _Point, channels: np.ndarray) -> _Point:
    return _Point(*(part[channels] for part in point))


def _put(point: _Point, channels: np.ndarray, values: _Point) -> None:
    for part, value in zip(point, values, strict=True):
        part[channels] = value


def _powers(log_decay: np.ndarray, angle: np.ndarray, n_taps: int) -> np.ndarray:
    return np.exp((-np.exp(log_decay) + 1j * angle)[..., None] * np.arange(n_taps))


def _decay_limits(n_taps: int) -> tuple[float, float]:
    """Range of log_decay: from a decay by one millionth over all taps to exp(-7) per tap."""
    return np.log(1e-6 / n_taps), np.log(7.0)
