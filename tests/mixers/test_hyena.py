"""What is Hyena's own: how its parameters start."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hyena_jax.config import HyenaConfig
from hyena_jax.mixers import Hyena

PARAMS = Hyena(128, 64, HyenaConfig(order=3), n_layers=8).init(jax.random.key(0), jnp.zeros((1, 64, 128)))[
    "params"
]


@pytest.mark.parametrize(
    ("path", "deviation"),
    [
        ("in_proj/kernel", 0.02),
        ("out_proj/kernel", 0.02 / np.sqrt(16)),
        ("skip", 1.0),
        ("filter/dense_0/kernel", 0.02),
        ("filter/dense_1/kernel", 0.02),
        ("filter/dense_3/kernel", 0.02),
        ("short_taps", 1 / 3),  # uniform in +-1/sqrt(3)
        ("short_bias", 1 / 3),
    ],
)
def test_initial_distributions(path, deviation):
    values = PARAMS
    for name in path.split("/"):
        values = values[name]
    # Five standard errors of a standard deviation.
    assert np.std(values) == pytest.approx(deviation, rel=5 / np.sqrt(2 * values.size))
    assert abs(np.mean(values)) < 5 * deviation / np.sqrt(values.size)


def test_initial_constants():
    for module in ("in_proj", "out_proj"):
        assert np.all(PARAMS[module]["bias"] == 0)
    assert np.all(PARAMS["filter"]["sine_frequency"] == 14.0)
    assert np.abs(PARAMS["short_taps"]).max() <= 1 / np.sqrt(3)
    assert set(PARAMS["filter"]["dense_3"]) == {"kernel"}
