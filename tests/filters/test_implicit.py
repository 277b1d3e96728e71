import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerances import assert_close

from hyena_jax.config import ImplicitFilterConfig
from hyena_jax.filters import ImplicitFilter
from hyena_jax.filters.implicit import decay_rates, positional_features
from hyena_jax.reference import hyena as reference

CONFIGS = {
    "paper": ImplicitFilterConfig(),
    "channel_norm": ImplicitFilterConfig(norm_axis="channels", emb_dim=5),
    "length_norm": ImplicitFilterConfig(norm_axis="length", emb_dim=3, width=7),
    "trained_decay": ImplicitFilterConfig(train_decay=True, window_shift=0.1, n_hidden=0),
}
all_configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())


def build(config: ImplicitFilterConfig, max_len: int = 41):
    module = ImplicitFilter(n_filters=2, d_model=3, max_len=max_len, config=config)
    return module, module.init(jax.random.key(0), max_len)


@all_configs
@pytest.mark.parametrize("length", [1, 7, 41])
def test_equals_its_oracle(config, length):
    module, variables = build(config)
    h = module.apply(variables, length)
    assert h.shape == (2, 3, length)
    assert_close(h, reference.implicit_filter(jax.device_get(variables["params"]), 2, length, 41, config))


@all_configs
def test_a_short_filter_is_the_beginning_of_a_long_one(config):
    module, variables = build(config)
    long = module.apply(variables, 41)
    for length in (1, 7, 40):
        assert_close(module.apply(variables, length), long[..., :length])


@pytest.mark.parametrize("max_len", [1, 2, 7, 1024])
def test_positional_features(max_len):
    assert_close(positional_features(max_len, 9), reference.positional_features(max_len, 9))


def test_decay_rates_reach_the_target_at_their_fractions():
    config = ImplicitFilterConfig()
    rates = np.abs(decay_rates(config, 10))
    assert np.exp(-rates[0] * config.slow_decay) == pytest.approx(config.decay_target)
    assert np.exp(-rates[-1] * config.fast_decay) == pytest.approx(config.decay_target)


def test_one_frequency_vector_serves_all_layers():
    _, variables = build(ImplicitFilterConfig())
    names = {
        "/".join(k.key for k in path) for path, _ in jax.tree_util.tree_leaves_with_path(variables["params"])
    }
    assert {name for name in names if "sine" in name} == {"sine_frequency"}
    assert variables["params"]["sine_frequency"].shape == (64,)


def test_gradients_are_finite_for_all_parameters():
    module, variables = build(CONFIGS["trained_decay"])
    grads = jax.grad(lambda v: (module.apply(v, 41) ** 2).sum())(variables)
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


def test_a_length_beyond_max_len_is_refused():
    module, variables = build(ImplicitFilterConfig())
    with pytest.raises(ValueError, match="sequence length must be in 1..max_len=41, got 42"):
        module.apply(variables, 42)
