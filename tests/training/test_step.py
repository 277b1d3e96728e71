"""The train step on one device and on several; tests with several devices compare with one."""

import dataclasses
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hyena_jax import models, parallel
from hyena_jax.config import (
    AdamWConfig,
    AttentionConfig,
    CosineConfig,
    LanguageModelConfig,
    ParallelConfig,
    SGDConfig,
)
from hyena_jax.data.text import Corpus
from hyena_jax.data.tokenizers import BytesTokenizer
from hyena_jax.parallel.strategy import check_batch
from hyena_jax.system.errors import UserError
from hyena_jax.training.evaluate import held_out_values, sum_held_out
from hyena_jax.training.loss import answers, cross_entropy
from hyena_jax.training.optimizer import make_optimizer
from hyena_jax.training.step import (
    FINITE,
    TrainState,
    _updated,
    init_params,
    init_state,
    make_eval_step,
    make_gradients,
    make_joint_step,
    make_train_step,
)

CONFIG = LanguageModelConfig(
    pattern=(AttentionConfig(2),), n_layers=1, d_model=8, d_ff=8, max_len=11, vocab_size=13
)
MODEL = models.build(CONFIG)
PARAMS = init_params(MODEL, 0)
OPTIMIZER = make_optimizer(AdamWConfig(schedule=CosineConfig(warmup_steps=0), learning_rate=1e-2), PARAMS, 20)


def batch(t: int, rows: int = 8) -> dict[str, np.ndarray]:
    windows = np.random.default_rng(t).integers(0, 13, (rows, 12), dtype=np.int32)
    return {"inputs": windows[:, :-1], "targets": windows[:, 1:]}


def on(n_devices: int):
    return parallel.make_strategy(ParallelConfig(devices=n_devices))


def fresh_state(n_devices: int = 1, optimizer=OPTIMIZER):
    return on(n_devices).place(init_state(jax.tree.map(jnp.copy, PARAMS), optimizer))


def train_step(strategy, model=MODEL, optimizer=OPTIMIZER, accumulation_steps: int = 1):
    return make_train_step(model, optimizer, 0, strategy.axis_name, accumulation_steps)


def run(n_devices: int, optimizer=OPTIMIZER, accumulation_steps: int = 1, steps: int = 5):
    strategy, state, losses = on(n_devices), fresh_state(n_devices, optimizer), []
    step = train_step(strategy, optimizer=optimizer, accumulation_steps=accumulation_steps)
    step = strategy.map_train_step(step, state)
    for t in range(steps):
        state, metrics = step(state, strategy.place_batch(batch(t)))
        losses.append(float(metrics["loss"]))
    return losses, strategy.host_copy(state)


@pytest.mark.parametrize(
    ("n_devices", "accumulation_steps"),
    [(2, 2), *(pytest.param(*case, marks=pytest.mark.grid) for case in [(2, 1), (4, 1), (1, 4)])],
)
def test_devices_and_accumulation_do_not_change_the_training(n_devices, accumulation_steps):
    sgd = optax.sgd(0.1)  # Adam would magnify the rounding of gradients that are almost zero
    losses, state = run(1, sgd)
    others, other = run(n_devices, sgd, accumulation_steps)
    np.testing.assert_allclose(others, losses, atol=1e-5)
    chex.assert_trees_all_close(state.params, other.params, atol=1e-6, rtol=1e-7)


@pytest.fixture(scope="module")
def two():
    """Two devices, and a step with dropout that may be traced only once."""
    strategy = on(2)
    step = train_step(strategy, models.build(dataclasses.replace(CONFIG, dropout=0.3)))
    step = strategy.map_train_step(chex.assert_max_traces(n=1)(step), fresh_state(2))
    return strategy, lambda state, t: step(state, strategy.place_batch(batch(t)))


@pytest.mark.wide
def test_two_runs_are_identical_to_the_last_bit(two):
    strategy, step = two
    ends = []
    for _ in range(2):
        state = fresh_state(2)
        for t in range(3):
            state, _ = step(state, t)
        ends.append(strategy.host_copy(state))
    chex.assert_trees_all_equal(*ends)


def test_parts_of_a_batch_with_unequal_weights_are_one_mean():
    found = []
    weights = np.float32(np.arange(8 * 11).reshape(8, 11) % 5 == 0)
    weights[::2] = 1
    for parts in (1, 2):
        gradients = make_gradients(MODEL, accumulation_steps=parts)
        found.append(jax.jit(gradients)(PARAMS, None, {**batch(0), "weights": weights}, jax.random.key(0)))
    chex.assert_trees_all_close(*found, rtol=1e-4, atol=1e-6)


def test_each_step_and_each_part_of_a_batch_has_masks_of_its_own():
    """With one row throughout, equal masks would give equal losses."""
    model = models.build(dataclasses.replace(CONFIG, dropout=0.5))
    row = {name: x[:1] for name, x in batch(0).items()}
    rows = {name: np.repeat(x, 2, axis=0) for name, x in row.items()}

    def loss_of(key, rows, parts):
        return make_gradients(model, accumulation_steps=parts)(PARAMS, None, rows, key)[1]["loss"]

    loss_of = jax.jit(loss_of, static_argnums=2)
    key = jax.random.key(1)
    alone = [float(loss_of(one, row, 1)) for one in (*jax.random.split(key), key)]
    assert float(loss_of(key, rows, 2)) == pytest.approx(np.mean(alone[:2]), rel=1e-5)
    assert len({*alone}) == 3
    state, step = init_state(PARAMS, optax.sgd(0.0)), make_train_step(model, optax.sgd(0.0), 0)
    losses = jax.jit(lambda t: step(state._replace(step=t), rows)[1]["loss"])
    assert float(losses(state.step)) != float(losses(state.step + 1))


def test_devices_drop_out_differently():
    """With equal rows and equal dropout everywhere, the mean loss on two devices would equal that on one."""
    model = models.build(dataclasses.replace(CONFIG, dropout=0.5))
    rows = {name: np.tile(values[:1], (2, 1)) for name, values in batch(0).items()}

    def first_loss(n_devices, rows):
        strategy, state = on(n_devices), fresh_state(n_devices)
        step = strategy.map_train_step(train_step(strategy, model), state)
        return float(step(state, strategy.place_batch(rows))[1]["loss"])

    alone = first_loss(1, {name: values[:1] for name, values in rows.items()})
    assert first_loss(2, rows) != alone


@pytest.mark.wide
def test_the_state_is_donated_and_a_copy_on_the_host_survives_it(two):
    strategy, step = two
    state, _ = step(fresh_state(2), 0)
    old, copy = state.params, strategy.host_copy(state.params)
    before = jax.tree.map(np.copy, copy)
    for t in range(3):
        state, _ = step(state, t)
    assert old["embedding"]["embedding"].is_deleted()
    chex.assert_trees_all_equal(copy, before)


def test_the_first_step_that_is_not_finite_is_remembered(two):
    strategy, step = two
    state, metrics = step(fresh_state(2), 0)
    assert metrics["bad_step"] == FINITE
    nan = jax.tree.map(lambda x: x * np.float32("nan"), strategy.host_copy(state.params))
    state = state._replace(params=strategy.place(nan))
    for t in range(1, 4):
        state, metrics = step(state, t)
    assert metrics["bad_step"] == state.bad_step == 2


def test_a_step_whose_gradient_alone_is_not_finite_is_remembered():
    params = {"w": np.ones(2, np.float32)}
    optimizer = optax.sgd(0.1)
    state = TrainState(np.int32(4), params, optimizer.init(params), np.int32(FINITE))
    for gradient, bad_step in ((1.0, FINITE), (np.inf, 5)):
        grads = {"w": np.float32([0, gradient])}
        assert _updated(optimizer, state, grads, {"loss": np.float32(1)})[1]["bad_step"] == bad_step


@pytest.mark.parametrize(
    ("n_devices", "rows"),
    [
        (2, 4),
        (2, 10**12),
        *(pytest.param(*case, marks=pytest.mark.grid) for case in [(1, 3), (4, 8), (1, 7)]),
    ],
)
def test_evaluation_is_exact_and_independent_of_batches_and_devices(n_devices, rows):
    tokens = np.random.default_rng(0).integers(0, 13, 7 * 11 + 1, dtype=np.uint8)
    texts = {"train": tokens, "held_out": tokens, "held_out_bytes": 2 * len(tokens)}
    corpus = Corpus(tokenizer=BytesTokenizer(), **texts, fingerprint="", source="", seq_len=11)
    strategy = on(n_devices)
    step = strategy.map_eval_step(make_eval_step(MODEL))
    sums = sum_held_out(strategy, step, strategy.place(PARAMS), corpus, rows)
    values = held_out_values(corpus, sums)
    inputs, targets = tokens[:-1].reshape(7, 11).astype(int), tokens[1:].reshape(7, 11).astype(int)
    logits = np.float64(jax.jit(MODEL.apply)({"params": PARAMS}, inputs))
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    true = np.take_along_axis(logp, targets[..., None], -1)
    assert values["loss"] == pytest.approx(-true.mean(), rel=1e-6)
    assert values["perplexity"] == pytest.approx(np.exp(-true.mean()), rel=1e-6)
    assert values["bits_per_byte"] == pytest.approx(-true.mean() * 0.5 / np.log(2), rel=1e-6)
    assert values["probability"] == pytest.approx(np.exp(true).mean(), rel=1e-6)
    assert values["accuracy"] == np.mean(logits.argmax(-1) == targets)


def test_a_metric_without_a_sum_is_not_a_number():
    """Such as one that is inf in one row and -inf in another."""
    strategy = SimpleNamespace(row_shards=1, row_shard=SimpleNamespace(of=dict), place_batch=dict)
    data = SimpleNamespace(n_eval_rows=lambda most: 2, eval_batches=lambda *_: [{}])
    sums = sum_held_out(strategy, lambda *_: {"margin": np.array([np.inf, -np.inf])}, None, data, 2)
    assert np.isnan(sums["margin"])


def test_a_label_judges_one_answer_or_the_answers_of_all_patches():
    logits = np.random.default_rng(0).standard_normal((3, 5, 4)).astype(np.float32)
    labels = np.array([0, 2, 3])
    logp = np.float64(logits) - np.log(np.exp(np.float64(logits)).sum(-1, keepdims=True))
    np.testing.assert_allclose(cross_entropy(logits[:, 0], labels), -logp[[0, 1, 2], 0, labels], rtol=1e-6)
    np.testing.assert_array_equal(answers(logits[:, 0], 1), logp[:, 0].argmax(-1))
    nats = [-logp[row, :, label].mean() for row, label in enumerate(labels)]
    np.testing.assert_allclose(cross_entropy(logits, labels), nats, rtol=1e-6)
    np.testing.assert_array_equal(answers(logits, 1), logp.mean(axis=1).argmax(-1))


def test_indivisible_batches_are_refused():
    with pytest.raises(UserError, match="data.batch_size must be a multiple of .* = 2 x 3, got 8"):
        check_batch(8, 2, 3)


@pytest.mark.grid
@pytest.mark.parametrize("parts", [1, 2])
def test_joint_steps_are_those_of_the_runs_alone(parts):
    """100 steps of runs with other seeds, rates and optimizers, the last of which begins at another step."""
    model = models.build(dataclasses.replace(CONFIG, dropout=0.1))
    configs = (AdamWConfig(1e-2), AdamWConfig(1e-3, weight_decay=0.5), SGDConfig(0.1))
    optimizers = [make_optimizer(config, PARAMS, 100) for config in configs]
    alone = [
        jax.jit(make_train_step(model, optimizer, seed, accumulation_steps=parts))
        for seed, optimizer in enumerate(optimizers)
    ]
    gradients = make_gradients(model, accumulation_steps=parts)
    joint = jax.jit(make_joint_step(model, optimizers, range(3), gradients))
    expected = [init_state(init_params(model, seed), optimizer) for seed, optimizer in enumerate(optimizers)]
    expected[2], _ = alone[2](expected[2], batch(7))
    states = tuple(expected)
    for t in range(100):
        batches = tuple(batch(1000 * seed + t) for seed in range(3))
        states, metrics = joint(states, batches)
        for i in range(3):
            expected[i], wanted = alone[i](expected[i], batches[i])
            chex.assert_trees_all_close(metrics[i], wanted, atol=1e-5)
    chex.assert_trees_all_close(list(states), expected, atol=1e-5)
