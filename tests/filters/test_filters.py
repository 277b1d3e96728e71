"""The contract of every filter, and each filter's initialisation."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from differences import assert_equal_differences
from distributions import assert_drawn, at
from grid import in_grid, in_wide
from tolerances import assert_close

from hyena_jax.config import (
    FILTER_CONFIGS,
    CKConvFilterConfig,
    ExplicitFilterConfig,
    FNOFilterConfig,
    ImplicitFilterConfig,
    LookupFilterConfig,
    ModalFilterConfig,
    RealModalFilterConfig,
    S4DFilterConfig,
    ShortFilterConfig,
    SirenFilterConfig,
    STUFilterConfig,
    TransferFunctionFilterConfig,
    WindowedFilterConfig,
)
from hyena_jax.filters import FILTERS, build_filter, spectral
from hyena_jax.filters.implicit import positional_features
from hyena_jax.filters.long_filter import decay_rates, l1_normalized
from hyena_jax.filters.spectral import spectral_vectors
from hyena_jax.reference import filters as oracles

pytestmark = pytest.mark.xdist_group("filters")  # its tests share compiled programs

N, D, MAX_LEN = 2, 3, 41
CONFIGS = {
    "implicit": ImplicitFilterConfig(),
    "implicit_length_norm": ImplicitFilterConfig(norm_axis="length", emb_dim=3, width=7, n_hidden=0),
    "implicit_annotated": ImplicitFilterConfig(
        features="harmonics",
        train_sine_frequency=False,
        sine_frequency=12.0,
        train_decay=True,
        window_shift=0.1,
        norm_axis="channels",
    ),
    "siren": SirenFilterConfig(width=8, n_hidden=2, frequency=20.0),
    "windowed": WindowedFilterConfig(),
    "windowed_length_norm": WindowedFilterConfig(
        norm_axis="length", train_decay=False, train_shift=False, window_shift=0.3
    ),
    "windowed_plain": WindowedFilterConfig(norm_axis="none"),
    "explicit": ExplicitFilterConfig(),
    "explicit_5_taps": ExplicitFilterConfig(n_taps=5),
    "short": ShortFilterConfig(n_taps=5),
    "short_decaying": ShortFilterConfig(n_taps=5, decay=(0.1, 100.0)),
    "ckconv": CKConvFilterConfig(emb_dim=5, width=8),
    "fno": FNOFilterConfig(),
    "fno_4_modes": FNOFilterConfig(n_modes=4),
    "transfer_function": TransferFunctionFilterConfig(n_state=3),
    "s4d": S4DFilterConfig(n_state=8),
    "s4d_inv": S4DFilterConfig(n_state=8, init="inv"),
    "modal": ModalFilterConfig(n_modes=3),
    "real_modal": RealModalFilterConfig(n_modes=3, min_rate=0.1, max_rate=0.2),
    "lookup": LookupFilterConfig(width=5),
    "stu": STUFilterConfig(n_vectors=4),
    "stu_shared": STUFilterConfig(n_vectors=4, alternating="shared"),
    "stu_plain": STUFilterConfig(n_vectors=4, alternating="none"),
}
NAMES = {config_class: name for name, config_class in FILTER_CONFIGS.items()}
# Of filters that differ only in a constant, slow tests run one by default.
NEAR = {"windowed_plain", "explicit", "short", "fno", "s4d_inv", "stu_shared", "stu_plain"}
# Their window, or norm, depends on the largest length, not on the one at hand.
WINDOWS = {"implicit_length_norm", "windowed_length_norm", "short_decaying"}


def over(by_default):
    """All configs, of which those outside `by_default` run under the marker `grid` alone."""
    params = [
        pytest.param(config, id=name, marks=[] if name in by_default else pytest.mark.grid)
        for name, config in CONFIGS.items()
    ]
    return pytest.mark.parametrize("config", params)


all_configs, most_configs = over(CONFIGS), over(CONFIGS.keys() - NEAR)


@cache
def initial(config, max_len: int, width: int = D) -> dict:
    """Initial parameters."""
    with jax.enable_x64(False):
        module = build_filter(N, width, max_len, config)
        init = jax.jit(lambda key: module.init(key, max_len))
        return jax.device_get(init(jax.random.key(0)))["params"]


@cache
def init(config, max_len: int = MAX_LEN):
    """The module and its initial parameters, slightly perturbed, so that zeros do not hide mistakes.

    The perturbation is at most the kernels' scale: sines of large arguments would amplify float32 rounding.
    """
    rng, scale = np.random.default_rng(1), np.float32(0.02)
    params = jax.tree.map(
        lambda x: x + scale * rng.standard_normal(x.shape, x.dtype), initial(config, max_len)
    )
    return build_filter(N, D, max_len, config), params


@cache
def taps(config, max_len: int = MAX_LEN):
    """The filter as a function of parameters and length; compiled once a length."""
    module = build_filter(N, D, max_len, config)
    return jax.jit(lambda params, length: module.apply({"params": params}, length), static_argnums=1)


def oracle(config, params, length, max_len=MAX_LEN):
    function = getattr(oracles, NAMES[type(config)])
    return function(params, N, length, max_len, config)


def test_names_are_those_of_the_configs():
    assert list(FILTERS) == list(FILTER_CONFIGS)
    assert {type(config) for config in CONFIGS.values()} == set(FILTER_CONFIGS.values())


@all_configs
@pytest.mark.parametrize("max_len", [*in_wide(MAX_LEN), *in_grid(1, 2, 5, 40)])
def test_equals_its_oracle(config, max_len):
    need_lags = TransferFunctionFilterConfig | ExplicitFilterConfig | ShortFilterConfig | STUFilterConfig
    if isinstance(config, need_lags) and max_len < 5:
        pytest.skip("needs more lags than that")
    _, params = init(config, max_len)
    h = taps(config, max_len)(params, max_len)
    assert h.shape == (N, D, max_len)
    assert h.dtype == jnp.float32
    assert_close(h, oracle(config, params, max_len, max_len))


@most_configs
def test_equals_its_oracle_and_its_differences_in_float64(config):
    _, params = init(config)
    weight = np.random.default_rng(0).standard_normal((N, D, MAX_LEN))
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)

        def product(params):
            h = taps(config)(params, MAX_LEN)
            return (weight * h).sum(), h

        grads, h = jax.device_get(jax.jit(jax.grad(product, has_aux=True))(params))
    assert h.dtype == np.float64
    assert_close(h, oracle(config, params, MAX_LEN))
    # By little, as a norm, the sum of magnitudes, has a kink wherever a tap is 0.
    assert_equal_differences(
        [grads], lambda params: (weight * oracle(config, params, MAX_LEN)).sum(), (params,), step=1e-7
    )


@over(WINDOWS)
@pytest.mark.parametrize("length", [7, *in_grid(1, 40)])
def test_a_short_filter_is_the_beginning_of_a_long_one(config, length):
    _, params = init(config)
    assert_close(taps(config)(params, length), oracle(config, params, MAX_LEN)[..., :length])


def test_lengths_that_a_filter_lacks_are_refused():
    module, params = init(CONFIGS["windowed"])
    for length in (0, MAX_LEN + 1):
        with pytest.raises(ValueError, match=f"sequence length must be in 1..max_len=41, got {length}"):
            module.apply({"params": params}, length)


def test_gradients_are_finite_where_a_window_leaves_almost_nothing():
    h = np.float32([[1e-20, -1e-21], [1e-25, 3e-26], [0, 0], [1e-12, 2e-12]])
    grads = jax.jit(jax.grad(lambda h: (l1_normalized(h, 1) * np.float32([1, 2])).sum()))(h)
    assert np.isfinite(grads).all()
    steep = WindowedFilterConfig(slow_decay=0.1, fast_decay=0.05)
    run = taps(steep)
    grads = jax.jit(jax.grad(lambda params: (run(params, MAX_LEN) ** 2).sum()))(initial(steep, MAX_LEN))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


def test_a_mode_that_forgets_at_once_is_finite():
    config = S4DFilterConfig(n_state=2, dt_min=4.0, dt_max=4.0)
    assert np.isfinite(taps(config)(initial(config, MAX_LEN), MAX_LEN)).all()


@pytest.mark.parametrize("features", ["published", "harmonics"])
@pytest.mark.parametrize("max_len", [1, 2, 7, 1024])
def test_positional_features(max_len, features):
    config = ImplicitFilterConfig(emb_dim=9, features=features)
    assert_close(positional_features(max_len, config), oracles.positional_features(max_len, config))


@pytest.mark.parametrize(("max_len", "n_vectors"), [(41, 18), pytest.param(256, 25, marks=pytest.mark.grid)])
def test_spectral_vectors_are_eigenvectors(max_len, n_vectors, monkeypatch):
    """Orthogonal ones, of descending eigenvalues; in blocks of rows as at once."""
    phi = spectral_vectors(max_len, n_vectors)
    size = np.square(phi).sum(1)  # the roots of the eigenvalues
    assert np.all(np.diff(size) < 0)
    i_plus_j = np.add.outer(np.arange(1.0, max_len + 1), np.arange(1.0, max_len + 1))
    z = 2 / (i_plus_j**3 - i_plus_j)
    np.testing.assert_allclose(z @ phi.T, size**2 * phi.T, rtol=0, atol=1e-11)
    vectors = phi / size[:, None] ** 0.5
    np.testing.assert_allclose(vectors @ vectors.T, np.eye(n_vectors), atol=1e-6)
    monkeypatch.setattr(spectral, "ROWS", 7)
    np.testing.assert_allclose(spectral_vectors.__wrapped__(max_len, n_vectors), phi, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["s4d", "modal", "real_modal"])
def test_the_recurrence_it_decodes_by_has_its_taps(name):
    module, params = init(CONFIGS[name])
    recurrence = jax.jit(lambda params: module.apply({"params": params}, method="recurrence"))
    log_modes, weights, lag_zero = (np.asarray(x) for x in recurrence(params))
    powers = np.exp(log_modes[..., None] * np.arange(MAX_LEN - 1))
    later = (weights[..., None] * powers).sum(-2).real
    h = np.concatenate([lag_zero[..., None], later], axis=-1)
    assert_close(np.float32(h), oracle(CONFIGS[name], params, MAX_LEN))


def test_with_shared_weights_odd_lags_vanish():
    config = CONFIGS["stu_shared"]
    h = np.asarray(taps(config)(init(config)[1], MAX_LEN))
    assert not h[..., 1::2].any()
    assert h[..., ::2].all()


def test_a_transfer_function_wraps_round():
    """Its taps are sums of the true impulse response over t, t + Lmax, t + 2 Lmax, ..."""
    config, max_len = TransferFunctionFilterConfig(n_state=2), 11
    _, params = init(config, max_len)
    b, a = np.float64(params["numerator"]), np.float64(params["denominator"])
    response = np.zeros((N, D, 40 * max_len))
    for t in range(1, response.shape[-1]):
        if t <= 2:
            response[..., t] = b[..., t - 1]
        for k in range(1, min(t, 2) + 1):
            response[..., t] -= a[..., k - 1] * response[..., t - k]
    wrapped = response.reshape(N, D, 40, max_len).sum(2)
    wrapped[..., 0] += params["lag_zero"]
    assert_close(taps(config, max_len)(params, max_len), wrapped)


def test_a_modal_filter_is_stable_however_far_its_parameters_go():
    config = CONFIGS["modal"]
    _, params = init(config)
    for value in (-30.0, 30.0):
        extreme = params | {"log_decay": np.full_like(params["log_decay"], value)}
        h = np.asarray(taps(config)(extreme, MAX_LEN))
        assert np.abs(h[..., 1:]).max() <= np.hypot(*np.moveaxis(params["residue"], -1, 0)).sum(-1).max()


@pytest.mark.grid
@pytest.mark.parametrize(
    ("config", "path", "mean", "deviation"),
    [
        (SirenFilterConfig(), "dense_0/kernel", 0, 3**-0.5),
        (SirenFilterConfig(), "dense_4/kernel", 0, (2 / 64) ** 0.5),
        (SirenFilterConfig(), "dense_5/kernel", 0, (0.04 / 64) ** 0.5),
        (WindowedFilterConfig(), "taps", 0, 1),
        (ExplicitFilterConfig(), "taps", 0, 256**-0.5),
        (ShortFilterConfig(), "taps", 0, 7**-0.5 / 3**0.5),
        (ShortFilterConfig(deviation=0.2), "taps", 0, 0.2),
        (RealModalFilterConfig(), "residue", 0, 0.1 / 4),
        (TransferFunctionFilterConfig(), "lag_zero", 0, 1),
        (S4DFilterConfig(), "c", 0, 0.5**0.5),
        (S4DFilterConfig(), "log_dt", np.log(1e-2), np.log(100) / 12**0.5),
        (ModalFilterConfig(), "angle", np.pi / 2, np.pi / 12**0.5),
        (STUFilterConfig(), "alternating_weights", 0, (2 / (16 + 128)) ** 0.5),
        (LookupFilterConfig(), "table", 0, 1),
        (LookupFilterConfig(), "dense_0/kernel", 0, 64**-0.5 / 3**0.5),
        (LookupFilterConfig(), "dense_1/bias", 0, 128**-0.5 / 3**0.5),
    ],
)
def test_initial_distributions(config, path, mean, deviation):
    assert_drawn(at(initial(config, 256, 128), path), deviation, mean)


def test_initial_constants():
    s4d, inv, transfer_function, windowed, real_modal, modal = (
        initial(CONFIGS[name], MAX_LEN)
        for name in ("s4d", "s4d_inv", "transfer_function", "windowed", "real_modal", "modal")
    )
    np.testing.assert_allclose(-np.exp(s4d["log_decay"]), -0.5, rtol=1e-6)
    np.testing.assert_allclose(s4d["frequency"][1, 2], np.pi * np.arange(4), rtol=1e-6)
    assert np.all(np.asarray(s4d["b"]) == [1, 0])
    np.testing.assert_allclose(inv["frequency"][0, 0], 8 / np.pi * (8 / np.array([1, 3, 5, 7]) - 1))
    assert not transfer_function["numerator"].any()
    assert not transfer_function["denominator"].any()
    assert not windowed["shift"].any()
    np.testing.assert_allclose(windowed["decay"], decay_rates(WindowedFilterConfig(), D), rtol=1e-6)
    radius = np.exp(-np.exp(modal["log_decay"]))
    for values, least, most in ((np.exp(real_modal["log_rate"]), 0.1, 0.2), (radius, 0.9, 0.999)):
        assert values.min() >= least - 1e-6
        assert values.max() <= most + 1e-6


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ExplicitFilterConfig(n_taps=42), "n_taps must be at most max_len=41, got 42"),
        (ShortFilterConfig(n_taps=42), "n_taps must be at most max_len=41, got 42"),
        (TransferFunctionFilterConfig(n_state=41), "n_state must be below max_len=41, got 41"),
        (STUFilterConfig(n_vectors=42), "n_vectors must be at most max_len=41, got 42"),
        (STUFilterConfig(n_vectors=19), "n_vectors must be at most 18 with max_len=41, got 19"),
    ],
)
def test_what_does_not_fit_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        init(config)
