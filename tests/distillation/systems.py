"""Impulse responses to distil."""

import numpy as np


def oscillations(poles: list[complex], n_taps: int, n_channels: int = 3, seed: int = 0) -> np.ndarray:
    """Re sum_n R_n pole_n^t with random residues of modulus 0.5 .. 1.5 [n_channels, n_taps]."""
    rng = np.random.default_rng(seed)
    shape = (n_channels, len(poles), 1)
    residue = rng.uniform(0.5, 1.5, shape) * np.exp(1j * rng.uniform(-1, 1, shape))
    return (residue * np.asarray(poles, complex)[:, None] ** np.arange(n_taps)).real.sum(1)


def noise(n_channels: int, n_taps: int, seed: int = 0) -> np.ndarray:
    """White noise, which no much smaller recurrence approximates."""
    return np.random.default_rng(seed).standard_normal((n_channels, n_taps))


def decaying_noise(n_channels: int, n_taps: int, decay: float, seed: int = 0) -> np.ndarray:
    """White noise times exp(-decay t)."""
    return noise(n_channels, n_taps, seed) * np.exp(-decay * np.arange(n_taps))
