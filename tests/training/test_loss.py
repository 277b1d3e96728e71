"""Losses and metrics against their formulas, in every layout, and errors of a user's own."""

import dataclasses
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hyena_jax import models, parallel
from hyena_jax.config import (
    AccuracyConfig,
    AttentionConfig,
    CrossEntropyConfig,
    Experiment,
    LanguageModelConfig,
    LossConfig,
    MetricConfig,
    ParallelConfig,
    TopKAccuracyConfig,
    decode,
    encode,
    identity_differences,
    register,
)
from hyena_jax.system.errors import UserError
from hyena_jax.training.loss import (
    are_classes,
    loss_function,
    metric_functions,
    scored,
    train_values,
)
from hyena_jax.training.step import init_params, init_state, make_eval_step, make_train_step

pytestmark = pytest.mark.xdist_group("scores")  # its tests share a training

CONFIG = LanguageModelConfig(
    pattern=(AttentionConfig(2),), n_layers=1, d_model=8, d_ff=8, max_len=11, vocab_size=13
)
MODEL = models.build(CONFIG)
PARAMS = init_params(MODEL, 0)
RNG = np.random.default_rng(0)
LOGITS = RNG.standard_normal((3, 5, 7)).astype(np.float32)
TARGETS = RNG.integers(0, 7, (3, 5)).astype(np.int32)
LOGP = np.float64(LOGITS) - np.log(np.exp(np.float64(LOGITS)).sum(-1, keepdims=True))
TRUE = np.take_along_axis(LOGP, TARGETS[..., None], -1)[..., 0]


@dataclass(frozen=True)
class SquaredConfig(LossConfig):
    wrong: str = "no"


@dataclass(frozen=True)
class DistanceConfig(MetricConfig):
    pass


def squared(config, logits, targets):
    values = (logits.mean(-1) - targets) ** 2
    wrong = {"shape": values.mean, "dtype": lambda: values > 1, "raises": lambda: values @ jnp.zeros((99, 1))}
    return wrong.get(config.wrong, lambda: values)()


def distance(config, logits, targets):
    return abs(logits.argmax(-1) - targets)


@pytest.fixture(autouse=True)
def _registered(own_parts):
    register("test_squared", SquaredConfig, squared)
    register("test_distance", DistanceConfig, distance)


DATA = SimpleNamespace(scores={"first": lambda logits, targets: targets == 0}, tallies={})


def batch(t: int) -> dict[str, np.ndarray]:
    """Rows of very different weight, so that a mean of the parts' means would differ."""
    rng = np.random.default_rng(t)
    windows = rng.integers(0, 13, (8, 12), dtype=np.int32)
    weights = rng.random((8, 11)) * np.arange(8)[:, None] ** 2 * (rng.random((8, 11)) > 0.5)
    targets = np.where(weights == 0, -100, windows[:, 1:])
    return {"inputs": windows[:, :-1], "targets": targets, "weights": np.float32(weights)}


@jax.jit
def computed():
    """With smoothing and without, at tokens and at labels of all patches; the accuracies by k."""
    smooth = loss_function(CrossEntropyConfig(label_smoothing=0.2))
    losses = [
        f(LOGITS, t) for t in (TARGETS, TARGETS[:, 0]) for f in (smooth, loss_function(CrossEntropyConfig()))
    ]
    ks = tuple(TopKAccuracyConfig(k) for k in (1, 3, 7, 99))
    metrics = metric_functions(Experiment(metrics=(*ks, AccuracyConfig())), DATA)
    ties = jnp.zeros((4, 7)), np.arange(4)
    return losses, {name: (score(LOGITS, TARGETS), score(*ties)) for name, score in metrics.items()}


def test_losses_and_accuracies_are_their_formulas():
    (smooth, plain, smooth_of_all, plain_of_all), accuracies = computed()
    np.testing.assert_allclose(plain, -TRUE, rtol=1e-5)
    np.testing.assert_allclose(smooth, -0.8 * TRUE - 0.2 * LOGP.mean(-1), rtol=1e-5)
    once_a_patch = -LOGP[np.arange(3), :, TARGETS[:, 0]].mean(1)
    np.testing.assert_allclose(plain_of_all, once_a_patch, rtol=1e-5)
    np.testing.assert_allclose(smooth_of_all, 0.8 * once_a_patch - 0.2 * LOGP.mean((1, 2)), rtol=1e-5)
    # Only the likelihood itself has a perplexity.
    assert [CrossEntropyConfig(share).in_nats for share in (0.0, 0.2)] == [True, False]
    order = np.argsort(-LOGITS, -1, kind="stable")
    for name, k in {"accuracy": 1, **{f"top_{k}_accuracy": k for k in (1, 3, 7, 99)}}.items():
        found, of_ties = accuracies[name]
        np.testing.assert_array_equal(found, (order[..., :k] == TARGETS[..., None]).any(-1))
        np.testing.assert_array_equal(of_ties, np.arange(4) < k)


def trained(config: ParallelConfig, parts: int, chunk: int | None = None):
    """Metrics of each step, and the parameters at the end, under SGD: Adam would magnify rounding."""
    strategy = parallel.make_strategy(config)
    model = models.build(dataclasses.replace(CONFIG, loss_chunk=chunk))
    optimizer = optax.sgd(0.3)

    def make():
        return init_state(init_params(model, 0), optimizer)

    step = make_train_step(model, optimizer, 0, strategy.axis_name, parts, metrics=METRICS)
    step = strategy.map_train_step(step, jax.eval_shape(make))
    state, found = strategy.make_state(make), []
    for one in BATCHES:
        state, values = step(state, strategy.place_batch(one))
        found.append({name: np.asarray(value) for name, value in values.items()})
    return found, strategy.host_copy(state.params)


ONE, SHARDED = ParallelConfig(devices=1), ParallelConfig(strategy="sharded", devices=4, data=2, fsdp=2)
IN_GRID = [(ONE, 4, None), (ONE, 1, 3), (ParallelConfig(devices=4), 1, None), (SHARDED, 2, None)]
LAYOUTS = [
    (ParallelConfig(devices=2), 4, None),
    *(pytest.param(*layout, marks=pytest.mark.grid) for layout in IN_GRID),
]
BATCHES = [batch(0), batch(1), batch(2) | {"weights": np.zeros((8, 11), np.float32)}]
METRICS = {
    "right": lambda logits, targets: logits.argmax(-1) == targets,
    # Its derivative is not finite, as no gradient may flow through a metric.
    "root": lambda logits, targets: jnp.sqrt(logits[..., 0] - logits[..., 0]),
}


@pytest.fixture(scope="module")
def alone():
    """One device, the whole batch at once."""
    return trained(ONE, 1)


@pytest.mark.parametrize(("config", "parts", "chunk"), LAYOUTS)
def test_a_weighted_mean_is_the_same_in_every_layout(config, parts, chunk, alone):
    found, params = trained(config, parts, chunk)
    for name in ("loss", "grad_norm", "right", "root"):
        expected = [values[name] for values in alone[0]]
        np.testing.assert_allclose([values[name] for values in found], expected, rtol=1e-6, atol=1e-7)
    chex.assert_trees_all_close(params, alone[1], atol=1e-6, rtol=1e-7)


@jax.jit
def forward(inputs):
    return MODEL.apply({"params": PARAMS}, inputs)


def test_a_weighted_mean_is_sum_of_w_x_over_sum_of_w_and_0_without_any_weight(alone):
    one, (found, _, weightless) = BATCHES[0], alone[0]
    logits = np.float64(forward(one["inputs"]))
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    nats = -np.take_along_axis(logp, np.maximum(one["targets"], 0)[..., None], -1)[..., 0]
    right, w = logits.argmax(-1) == one["targets"], np.float64(one["weights"])
    assert found["loss"] == pytest.approx((w * nats).sum() / w.sum(), rel=1e-6)
    assert found["right"] == pytest.approx((w * right).sum() / w.sum(), rel=1e-6)
    assert weightless["loss"] == weightless["grad_norm"] == 0


def test_evaluation_with_another_loss_keeps_nats():
    metrics = metric_functions(Experiment(metrics=(DistanceConfig(),)), DATA)
    steps = make_eval_step(MODEL, loss_function(SquaredConfig()), metrics), make_eval_step(MODEL)
    one = batch(3)
    sums, plain = jax.jit(lambda batch: [step(PARAMS, batch) for step in steps])(one)
    for name in ("count", "nats", "correct", "probability"):
        np.testing.assert_array_equal(sums[name], plain[name])
    np.testing.assert_array_equal(plain["loss"], plain["nats"])
    logits = np.asarray(forward(one["inputs"]))
    expected = (one["weights"] * squared(SquaredConfig(), logits, one["targets"])).sum(-1)
    np.testing.assert_allclose(sums["loss"], expected, rtol=1e-5)
    apart = (one["weights"] * abs(logits.argmax(-1) - one["targets"])).sum(-1)
    np.testing.assert_allclose(sums["test_distance"], apart, rtol=1e-6)
    assert {*sums} == {"count", "loss", "nats", "correct", "probability", "test_distance", "first"}


def test_targets_that_are_not_classes_have_no_nats():
    assert are_classes(LOGITS, TARGETS)
    assert are_classes(LOGITS, TARGETS[:, 0])
    assert not are_classes(LOGITS, np.float32(TARGETS))
    assert not are_classes(LOGITS[..., 0], TARGETS)
    assert not are_classes(LOGITS[..., :1], TARGETS)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            "shape",
            r"the loss must be of the shape \(8, 11\) of the targets, one value each, got"
            r" float32\[\] of logits float32\[8, 11, 13\] and targets int32\[8, 11\]",
        ),
        ("dtype", "the loss must be floating, got 'bool'"),
        ("raises", r"the loss cannot be computed from logits .*: TypeError"),
    ],
)
def test_a_wrong_loss_is_refused_when_it_is_traced(wrong, message):
    def trace(params):
        score = partial(train_values, loss_function(SquaredConfig(wrong)), {})
        return scored(score, MODEL, params, batch(0))

    with pytest.raises(UserError, match=message):
        jax.eval_shape(trace, PARAMS)


def test_names_of_metrics_differ():
    with pytest.raises(UserError, match="metrics must be different from each other, got 'top_5_"):
        Experiment(metrics=(TopKAccuracyConfig(), TopKAccuracyConfig()))
    own = Experiment(metrics=(AccuracyConfig(),))
    for name, experiment, message in (
        ("accuracy", own, "'accuracy' is given by the experiment and by its data"),
        ("loss", Experiment(), "the name 'loss' of a metric is taken"),
    ):
        data = SimpleNamespace(scores={name: METRICS["right"]}, tallies={})
        with pytest.raises(UserError, match=message):
            metric_functions(experiment, data)


def test_old_experiments_have_the_usual_loss():
    values = encode(Experiment())
    assert values["loss"] == {"type": "cross_entropy", "label_smoothing": 0.0}
    old = {name: value for name, value in values.items() if name not in ("loss", "metrics")}
    assert decode(old) == Experiment()
    mine = Experiment(loss=SquaredConfig(), metrics=(TopKAccuracyConfig(3), DistanceConfig()))
    assert decode(encode(mine)) == mine
    assert identity_differences(mine, dataclasses.replace(mine, metrics=())) == []
    assert any("loss.type" in line for line in identity_differences(mine, Experiment()))
