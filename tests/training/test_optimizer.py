import dataclasses
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from grid import grid_but
from optax import contrib

from hyena_jax import config
from hyena_jax.config import (
    OPTIMIZER_CONFIGS,
    AdafactorConfig,
    AdamWConfig,
    ConstantConfig,
    CosineConfig,
    Experiment,
    LinearConfig,
    LionConfig,
    MuonConfig,
    OptimizerConfig,
    ParameterGroup,
    ScheduleConfig,
    SGDConfig,
    WarmupStableDecayConfig,
    register,
)
from hyena_jax.system.errors import UserError
from hyena_jax.training.checkpoint import Checkpoints, Meta
from hyena_jax.training.console import parameter_table
from hyena_jax.training.optimizer import global_norm, label_parameters, make_optimizer, make_schedule

PARAMS = {
    "dense": {"kernel": np.float32([1.0, -2.0]), "bias": np.float32([0.5])},
    "filter": {"z": np.float32([3.0])},
}
GRADS = {
    "dense": {"kernel": np.float32([0.3, 0.4]), "bias": np.float32([-1.2])},
    "filter": {"z": np.float32([8.0])},
}


def trained(optimizer: optax.GradientTransformation, params, grads):
    """The parameters after a step for each tree of gradients."""

    @jax.jit
    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.jit(optimizer.init)(params)
    for of_step in grads:
        params, state = step(params, state, of_step)
    return jax.device_get(params)


def update(config: OptimizerConfig, steps: int = 1):
    return trained(make_optimizer(config, PARAMS, total_steps=10), PARAMS, steps * [GRADS])


def adamw(value, grad, rates, decay, config):
    """AdamW by its definition (Loshchilov and Hutter 2019, algorithm 2)."""
    m = v = 0.0
    for t, rate in enumerate(rates, start=1):
        m = config.b1 * m + (1 - config.b1) * grad
        v = config.b2 * v + (1 - config.b2) * grad**2
        step = (m / (1 - config.b1**t)) / (np.sqrt(v / (1 - config.b2**t)) + config.eps)
        value = value - rate * (step + decay * value)
    return value


def test_equals_adamw_with_the_rate_and_decay_of_each_group():
    config = AdamWConfig(
        learning_rate=0.1,
        schedule=CosineConfig(warmup_steps=2),
        clip_norm=1.0,
        groups=(ParameterGroup("filter/", learning_rate=0.02), ParameterGroup("bias$", weight_decay=0.0)),
    )
    rates = np.float64(make_schedule(config, 10)(np.arange(4)))
    scale = 1 / np.sqrt(0.3**2 + 0.4**2 + 1.2**2 + 8.0**2)
    expected = {
        ("dense", "kernel"): adamw(np.array([1.0, -2.0]), scale * np.array([0.3, 0.4]), rates, 0.1, config),
        ("dense", "bias"): adamw(np.array([0.5]), scale * np.array([-1.2]), rates, 0.0, config),
        ("filter", "z"): adamw(np.array([3.0]), scale * np.array([8.0]), rates * 0.2, 0.1, config),
    }
    params = update(config, steps=4)
    for (module, name), value in expected.items():
        np.testing.assert_allclose(params[module][name], value, rtol=1e-5)


def test_a_group_with_learning_rate_0_is_constant_and_out_of_the_norm():
    config = SGDConfig(  # whose steps show the clipping; those of Adam do not depend on a factor
        schedule=CosineConfig(warmup_steps=0),
        clip_norm=1.3,
        groups=(ParameterGroup("filter", learning_rate=0.0),),
    )
    params = update(config)
    assert params["filter"]["z"] == PARAMS["filter"]["z"]
    # Without the 8.0 the norm is 1.3: nothing is clipped.
    unclipped = update(dataclasses.replace(config, clip_norm=None))
    np.testing.assert_allclose(params["dense"]["kernel"], unclipped["dense"]["kernel"], rtol=1e-6)


def test_the_first_group_wins():
    groups = (ParameterGroup("dense/kernel"), ParameterGroup("dense"))
    labels = label_parameters(groups, PARAMS)
    assert labels == {"dense": {"kernel": 0, "bias": 1}, "filter": {"z": 2}}


@pytest.mark.parametrize("groups", [("kernl",), ("dense", "kernel")])
def test_a_group_that_matches_nothing_is_an_error(groups):
    message = rf"optimizer.groups.{len(groups) - 1}.pattern .* matches no parameter"
    with pytest.raises(UserError, match=message):
        label_parameters([ParameterGroup(g) for g in groups], PARAMS)


def test_a_broken_pattern_is_an_error():
    with pytest.raises(UserError, match=r"'\(' is not a regular expression"):
        label_parameters([ParameterGroup("(")], PARAMS)


@pytest.mark.grid
def test_an_optional_group_may_match_nothing():
    config = AdamWConfig(groups=(ParameterGroup("rate", optional=True),))
    assert label_parameters(config.groups, PARAMS)["filter"] == {"z": 1}
    assert "match no parameter: 'rate'" in parameter_table(PARAMS, config).caption


def rates(schedule: ScheduleConfig, *steps: int, total_steps: int = 110) -> list[float]:
    made = make_schedule(AdamWConfig(learning_rate=2.0, schedule=schedule), total_steps)
    return [float(made(step)) for step in steps]


@pytest.mark.parametrize(
    ("schedule", "by_step"),
    [
        (CosineConfig(10), {0: 0.0, 5: 1.0, 10: 2.0, 60: 1.1, 110: 0.2, 500: 0.2}),
        (CosineConfig(0), {0: 2.0, 55: 1.1, 110: 0.2}),
        (CosineConfig(10, decay_steps=30, final_learning_rate=1.0), {10: 2.0, 20: 1.5, 30: 1.0, 110: 1.0}),
        (CosineConfig(10, initial_fraction=0.1), {0: 0.2, 5: 1.1, 10: 2.0, 60: 1.1, 110: 0.2}),
        (ConstantConfig(10, initial_fraction=1.0), {0: 2.0, 5: 2.0, 500: 2.0}),
        (LinearConfig(10), {0: 0.0, 5: 1.0, 10: 2.0, 60: 1.1, 85: 0.65, 110: 0.2, 500: 0.2}),
        (LinearConfig(0, final_fraction=0.0), {0: 2.0, 55: 1.0, 110: 0.0}),
        (ConstantConfig(10), {0: 0.0, 5: 1.0, 10: 2.0, 500: 2.0}),
        (ConstantConfig(0), {0: 2.0, 1: 2.0}),
        (WarmupStableDecayConfig(10), {5: 1.0, 10: 2.0, 88: 2.0, 99: 1.1, 110: 0.2, 500: 0.2}),
        (WarmupStableDecayConfig(10, decay_fraction=1.0), {10: 2.0, 60: 1.1, 110: 0.2}),
        (WarmupStableDecayConfig(0, decay_steps=4, decay_fraction=0.5), {0: 2.0, 2: 2.0, 3: 1.1, 4: 0.2}),
        (CosineConfig(200), {100: 1.0, 200: 2.0, 201: 0.2}),
        (WarmupStableDecayConfig(200), {100: 1.0, 200: 2.0, 201: 0.2}),
    ],
)
def test_schedules_at_their_corners(schedule, by_step):
    assert rates(schedule, *by_step) == pytest.approx(list(by_step.values()), abs=1e-6)


def tree(seed: int) -> dict:
    shapes = {"kernel": (6, 8), "bias": (8,)}, {"kernel": (2, 4, 3)}, {"kernel": (5, 7)}
    in_proj, gate, taps = shapes
    mixer = {"in_proj": in_proj, "gate": gate, "filter": taps}
    wanted = {"blocks_0": {"mixer": mixer}, "embedding": {"embedding": (9, 6)}}
    draw = np.random.default_rng(seed).standard_normal
    return jax.tree.map(lambda shape: np.float32(draw(shape)), wanted, is_leaf=lambda x: isinstance(x, tuple))


FREE = {"clip_norm": None, "learning_rate": 0.01, "schedule": LinearConfig(warmup_steps=1)}
RATE = make_schedule(AdamWConfig(**FREE), 10)
MATRIX = contrib.MuonDimensionNumbers(-2, -1)
MIXER = {"in_proj": {"kernel": MATRIX, "bias": None}, "gate": {"kernel": MATRIX}, "filter": {"kernel": None}}
MATRICES = {"blocks_0": {"mixer": MIXER}, "embedding": {"embedding": None}}


def muon_of_optax(consistent_rms: float | None) -> optax.GradientTransformation:
    options = {"nesterov": False, "consistent_rms": consistent_rms, "muon_weight_dimension_numbers": MATRICES}
    return contrib.muon(RATE, weight_decay=0.3, adam_weight_decay=0.3, **options)


PLAIN = {
    "adamw": (AdamWConfig(weight_decay=0.3, **FREE), optax.adamw(RATE, b2=0.99, weight_decay=0.3)),
    "lion": (LionConfig(weight_decay=0.3, **FREE), optax.lion(RATE, weight_decay=0.3)),
    "adafactor": (
        AdafactorConfig(weight_decay=0.0, min_dim_size_to_factor=5, **FREE),
        optax.adafactor(RATE, min_dim_size_to_factor=5),
    ),
    "sgd": (SGDConfig(weight_decay=0.0, nesterov=True, **FREE), optax.sgd(RATE, 0.9, nesterov=True)),
    "muon": (MuonConfig(weight_decay=0.3, nesterov=False, b2=0.999, **FREE), muon_of_optax(0.2)),
}
PLAIN["muon by shape"] = dataclasses.replace(PLAIN["muon"][0], consistent_rms=None), muon_of_optax(None)


def assert_trains_as(theirs: optax.GradientTransformation, options: OptimizerConfig, rtol, atol=0):
    params, grads = tree(0), [tree(t) for t in (1, 2, 3)]
    found, expected = (trained(one, params, grads) for one in (make_optimizer(options, params, 10), theirs))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), found, expected)


@pytest.mark.parametrize("name", [*OPTIMIZER_CONFIGS, "muon by shape"])
def test_values_are_those_of_optax(name):
    options, theirs = PLAIN[name]
    assert_trains_as(theirs, options, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", grid_but(OPTIMIZER_CONFIGS, "lion"))
def test_groups_act_on_every_optimizer(name):
    """Decay is decoupled, and constants stay."""
    constant = ParameterGroup("embedding", learning_rate=0.0)
    decayed = ParameterGroup("gate", weight_decay=0.5)
    plain = dataclasses.replace(PLAIN[name][0], schedule=ConstantConfig(warmup_steps=0), weight_decay=0.0)
    params = tree(0)
    found, other = (
        trained(make_optimizer(dataclasses.replace(plain, groups=groups), params, 10), params, [tree(1)])
        for groups in ((constant, decayed), (constant,))
    )
    np.testing.assert_array_equal(found["embedding"]["embedding"], params["embedding"]["embedding"])
    after, undecayed, before = (one["blocks_0"]["mixer"]["gate"]["kernel"] for one in (found, other, params))
    np.testing.assert_allclose(after, undecayed - 0.01 * 0.5 * before, rtol=1e-4, atol=1e-6)


def test_muon_without_any_matrix_is_refused():
    with pytest.raises(UserError, match=r"optimizer.matrices 'nothing' must match a parameter with two axes"):
        make_optimizer(MuonConfig(matrices="nothing"), tree(0), 10)


def test_without_gradients_kernels_alone_become_smaller():
    params = {
        "layer": dict.fromkeys(("kernel", "bias", "scale", "skip", "short_taps", "short_bias"), np.ones(3))
    }
    optimizer = make_optimizer(config.load("quickstart").optimizer, params, 2000)
    zeros = jax.tree.map(np.zeros_like, params)
    found = trained(optimizer, params, [zeros, zeros])["layer"]  # the first step has a rate of 0
    assert [name for name, values in found.items() if (values != 1).any()] == ["kernel"]
    assert found["kernel"].max() < 1


def test_a_state_from_before_there_were_several_optimizers_is_restored(tmp_path):
    """The optimizer as older versions built it, with one group and the rest."""
    params = tree(0)
    labels = jax.tree.map(lambda leaf: int(leaf.ndim > 1), params)

    def rule(decay: float) -> optax.GradientTransformation:
        return optax.chain(optax.add_decayed_weights(decay), optax.scale(-1.0))

    old = optax.chain(
        optax.partition({0: optax.identity(), 1: optax.identity()}, labels),
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(0.9, 0.99, 1e-8),
        optax.partition({0: rule(0.0), 1: rule(0.1)}, labels),
        optax.scale_by_schedule(optax.warmup_cosine_decay_schedule(0.0, 2e-3, 100, 2000, 2e-4)),
    )
    groups = (ParameterGroup("bias$", weight_decay=0.0),)
    new = make_optimizer(AdamWConfig(schedule=CosineConfig(100), groups=groups), params, 2000)
    state, update = old.init(params), jax.jit(old.update)
    for t in range(3):
        _, state = update(tree(t), state, params)
    with Checkpoints(tmp_path, 1, print) as checkpoints:
        checkpoints.save(Meta(1), {"opt_state": state})
    with Checkpoints(tmp_path, 1, print) as checkpoints:
        found = checkpoints.restore({"opt_state": new.init(params)}).items["opt_state"]
    chex.assert_trees_all_equal(found, state, strict=True)
    expected, _ = update(tree(3), state, params)
    updates, _ = jax.jit(new.update)(tree(3), found, params)
    jax.tree.map(np.testing.assert_array_equal, updates, expected)


@dataclasses.dataclass(frozen=True)
class RMSPropConfig(OptimizerConfig):
    """A user's optimizer, in ten lines."""

    decay: float = 0.9


def rmsprop(config, schedule, params):
    return optax.rmsprop(schedule, decay=config.decay)


@dataclasses.dataclass(frozen=True)
class StepsConfig(ScheduleConfig):
    every: int = 4


def steps_down(config, peak, total_steps):
    return lambda step: peak * 0.5 ** (step // config.every)


def test_an_optimizer_and_a_schedule_of_a_user(own_parts):
    register("rmsprop", RMSPropConfig, rmsprop)
    register("steps", StepsConfig, steps_down)
    options = RMSPropConfig(learning_rate=0.1, schedule=StepsConfig(every=2), decay=0.5)
    theirs = optax.rmsprop(lambda step: 0.1 * 0.5 ** (step // 2), decay=0.5)
    assert_trains_as(theirs, options, rtol=1e-6)
    experiment = Experiment(optimizer=options)
    assert config.decode(config.encode(experiment)) == experiment
    assert [column.header for column in parameter_table(tree(0), options).columns] == [
        "parameter", "shape", "count",
    ]  # fmt: skip


def failing(params):
    return params["no"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda params: None, "optimizer 'mine' must be an optax.GradientTransformation, got None"),
        (failing, f"optimizer 'mine' fails on these parameters: KeyError: 'no' ({__file__}:"),
        (lambda params: optax.polyak_sgd(), "optimizer 'mine' fails on these parameters: TypeError"),
        (
            lambda params: optax.add_noise(0.01, 0.55, jax.random.key(0)),
            "optimizer 'mine' must keep a state of numbers, which can be saved, got key<fry>",
        ),
        (
            lambda params: optax.GradientTransformation(lambda _: (), lambda grads, *_: (grads, (1.0,))),
            "optimizer 'mine' must give updates of the parameters' shapes",
        ),
    ],
)
def test_a_function_that_makes_no_optimizer_is_refused(own_parts, make, message):
    register("mine", RMSPropConfig, lambda config, schedule, params: make(params))
    with pytest.raises(UserError, match=re.escape(message)):
        make_optimizer(RMSPropConfig(), PARAMS, 10)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (2.0, "schedule 'mine' fails: TypeError"),
        (lambda step: jnp.ones(2), "must give one learning rate for a step"),
        (lambda step: None, "must give one learning rate for a step, got None"),
    ],
)
def test_a_function_that_makes_no_schedule_is_refused(own_parts, schedule, message):
    register("mine", StepsConfig, lambda config, peak, total_steps: schedule)
    with pytest.raises(UserError, match=message):
        make_optimizer(AdamWConfig(schedule=StepsConfig()), PARAMS, 10)


def test_an_optimizer_that_is_not_registered_is_refused():
    message = "RMSPropConfig is not a registered optimizer: call hyena_jax.register"
    with pytest.raises(UserError, match=message):
        make_optimizer(RMSPropConfig(), PARAMS, 10)


def test_global_norm_is_float32():
    norm = global_norm({"a": jnp.full(4, 2.0, jnp.bfloat16)})
    assert norm.dtype == jnp.float32
    assert norm == 4.0
