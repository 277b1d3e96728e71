import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hyena_jax.config import OptimizerConfig, ParameterGroup, UserError
from hyena_jax.training.optimizer import global_norm, label_parameters, make_optimizer, make_schedule

PARAMS = {
    "dense": {"kernel": jnp.array([1.0, -2.0]), "bias": jnp.array([0.5])},
    "filter": {"z": jnp.array([3.0])},
}
GRADS = {
    "dense": {"kernel": jnp.array([0.3, 0.4]), "bias": jnp.array([-1.2])},
    "filter": {"z": jnp.array([8.0])},
}


def update(config: OptimizerConfig, steps: int = 1):
    optimizer = make_optimizer(config, PARAMS, total_steps=10)
    params, state = PARAMS, optimizer.init(PARAMS)
    for _ in range(steps):
        updates, state = optimizer.update(GRADS, state, params)
        params = optax.apply_updates(params, updates)
    return params


def adamw(value, grad, rates, decay, config):
    """AdamW by its definition (Loshchilov and Hutter 2019, algorithm 2)."""
    m = v = 0.0
    for t, rate in enumerate(rates, start=1):
        m = config.b1 * m + (1 - config.b1) * grad
        v = config.b2 * v + (1 - config.b2) * grad**2
        step = (m / (1 - config.b1**t)) / (np.sqrt(v / (1 - config.b2**t)) + config.eps)
        value = value - rate * (step + decay * value)
    return value


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_equals_adamw_with_the_rate_and_decay_of_each_group(clip_norm):
    config = OptimizerConfig(
        learning_rate=0.1,
        final_learning_rate=0.01,
        warmup_steps=2,
        clip_norm=clip_norm,
        groups=(ParameterGroup("filter/", learning_rate=0.02), ParameterGroup("bias$", weight_decay=0.0)),
    )
    schedule = make_schedule(config, 10)
    rates = np.array([schedule(t) for t in range(4)], np.float64)
    norm = np.sqrt(0.3**2 + 0.4**2 + 1.2**2 + 8.0**2)
    scale = 1.0 if clip_norm is None else clip_norm / norm
    params = update(config, steps=4)
    expected = {
        ("dense", "kernel"): adamw(np.array([1.0, -2.0]), scale * np.array([0.3, 0.4]), rates, 0.1, config),
        ("dense", "bias"): adamw(np.array([0.5]), scale * np.array([-1.2]), rates, 0.0, config),
        ("filter", "z"): adamw(np.array([3.0]), scale * np.array([8.0]), rates * 0.2, 0.1, config),
    }
    for (module, name), value in expected.items():
        np.testing.assert_allclose(params[module][name], value, rtol=1e-5)


def test_a_group_with_learning_rate_0_is_constant_and_out_of_the_norm():
    config = OptimizerConfig(
        warmup_steps=0, clip_norm=1.3, groups=(ParameterGroup("filter", learning_rate=0.0),)
    )
    params = update(config)
    assert params["filter"]["z"] == PARAMS["filter"]["z"]
    # Without the 8.0 the norm is 1.3: nothing is clipped, and Adam's first step has length 1.
    unclipped = update(OptimizerConfig(warmup_steps=0, clip_norm=None, groups=config.groups))
    np.testing.assert_allclose(params["dense"]["kernel"], unclipped["dense"]["kernel"], rtol=1e-6)


def test_the_first_group_wins():
    groups = (ParameterGroup("dense/kernel"), ParameterGroup("dense"))
    labels = label_parameters(groups, PARAMS)
    assert labels == {"dense": {"kernel": 0, "bias": 1}, "filter": {"z": 2}}


@pytest.mark.parametrize("groups", [("kernl",), ("dense", "kernel")])
def test_a_group_that_matches_nothing_is_an_error(groups):
    with pytest.raises(
        UserError, match=rf"optimizer.groups.{len(groups) - 1}.pattern .* matches no parameter"
    ):
        label_parameters([ParameterGroup(g) for g in groups], PARAMS)


def test_a_broken_pattern_is_an_error():
    with pytest.raises(UserError, match=r"'\(' is not a regular expression"):
        label_parameters([ParameterGroup("(")], PARAMS)


def test_schedule():
    config = OptimizerConfig(learning_rate=1.0, final_learning_rate=0.1, warmup_steps=10)
    schedule = make_schedule(config, 110)
    assert [float(schedule(t)) for t in (0, 5, 10)] == pytest.approx([0.0, 0.5, 1.0])
    assert float(schedule(60)) == pytest.approx(0.55)
    assert float(schedule(110)) == float(schedule(500)) == pytest.approx(0.1)


def test_without_warmup_the_first_step_has_the_peak_rate():
    assert make_schedule(OptimizerConfig(learning_rate=0.5, warmup_steps=0), 10)(0) == 0.5


def test_global_norm_is_float32():
    norm = global_norm({"a": jnp.full(4, 2.0, jnp.bfloat16)})
    assert norm.dtype == jnp.float32
    assert norm == 4.0
    assert jax.tree.leaves(norm)
