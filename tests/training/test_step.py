"""The train step on one device and on several; tests with several devices compare with one."""

import dataclasses
from types import SimpleNamespace

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hyena_jax import models, parallel
from hyena_jax.config import (
    AdamWConfig,
    AttentionConfig,
    LanguageModelConfig,
    ParallelConfig,
    SGDConfig,
)
from hyena_jax.data.text import Corpus
from hyena_jax.data.tokenizers import BytesTokenizer
from hyena_jax.parallel.strategy import check_batch
from hyena_jax.system.errors import UserError
from hyena_jax.training.evaluate import held_out_values, sum_held_out
from hyena_jax.training.loss import answers, cross_entropy, scored
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


def batch(t: int) -> dict[str, np.ndarray]:
    windows = np.random.default_rng(t).integers(0, 13, (8, 12), dtype=np.int32)
    return {"inputs": windows[:, :-1], "targets": windows[:, 1:]}


def on(n_devices: int):
    return parallel.make_strategy(ParallelConfig(devices=n_devices))


class Dropping(nn.Module):
    """A small model, which drops half of its embeddings' entries."""

    @nn.compact
    def __call__(self, tokens, segment_ids=None, deterministic=True):
        embedding = nn.Embed(13, 8)
        return embedding.attend(nn.Dropout(0.5)(embedding(tokens), deterministic))


def test_a_step_is_the_mean_over_devices_and_parts_which_have_masks_of_their_own():
    """Four times one row: equal masks would give equal losses. A rate of 1 shows the gradient."""
    model, sgd = Dropping(), optax.sgd(1.0)
    row = {name: x[:1] for name, x in batch(0).items()}
    of_device = {name: np.repeat(x, 2, axis=0) for name, x in row.items()}
    params = model.init(jax.random.key(0), row["inputs"])["params"]
    state, step = init_state(params, sgd), make_train_step(model, sgd, 0, "devices", accumulation_steps=2)
    on_two = jax.vmap(lambda state: step(state, of_device), None, axis_name="devices", axis_size=2)

    def of_row(params, key):
        return scored(cross_entropy, model, params, row, False, {"dropout": key}).mean()

    def keys(t):
        of_step = jax.random.fold_in(jax.random.key(0), t)
        return [part for d in range(2) for part in jax.random.split(jax.random.fold_in(of_step, d))]

    @jax.jit
    def both():
        alone = jax.vmap(jax.value_and_grad(of_row), (None, 0))(params, jnp.stack([*keys(0), *keys(1)]))
        return alone, jax.vmap(lambda t: on_two(state._replace(step=t)))(np.arange(2))

    (losses, gradients), (after, means) = both()
    assert len({*losses.tolist()}) == 8
    np.testing.assert_allclose(means["loss"][:, 0], losses.reshape(2, 4).mean(1), rtol=1e-5)
    gradient, wanted = (
        jax.tree.map(lambda old, new: old - new[0, 0], params, after.params),
        jax.tree.map(lambda x: x[:4].mean(0), gradients),
    )
    chex.assert_trees_all_close(gradient, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.wide
def test_the_state_is_donated_and_a_copy_on_the_host_survives_it():
    """By a step with dropout, which is traced once."""
    model = models.build(dataclasses.replace(CONFIG, dropout=0.3))
    optimizer, strategy = make_optimizer(AdamWConfig(), PARAMS, 20), on(2)
    state = strategy.place(init_state(jax.tree.map(jnp.copy, PARAMS), optimizer))
    step = chex.assert_max_traces(n=1)(make_train_step(model, optimizer, 0, strategy.axis_name))
    step = strategy.map_train_step(step, state)
    state, _ = step(state, strategy.place_batch(batch(0)))
    old, copy = state.params, strategy.host_copy(state.params)
    before = jax.tree.map(np.copy, copy)
    for t in range(1, 4):
        state, _ = step(state, strategy.place_batch(batch(t)))
    assert old["embedding"]["embedding"].is_deleted()
    chex.assert_trees_all_equal(copy, before)


def test_the_first_step_whose_loss_or_gradient_is_not_finite_is_remembered():
    params = {"w": np.ones(2, np.float32)}
    optimizer = optax.sgd(0.1)
    finite = TrainState(np.int32(4), params, optimizer.init(params), np.int32(FINITE))
    for loss, gradient, bad_step in ((1.0, 1.0, FINITE), (1.0, np.inf, 5), (np.nan, 1.0, 5)):
        grads = {"w": np.float32([0, gradient])}
        state, metrics = _updated(optimizer, finite, grads, {"loss": np.float32(loss)})
        assert metrics["bad_step"] == state.bad_step == bad_step
    state, metrics = _updated(optimizer, state, grads, {"loss": np.float32(np.nan)})
    assert (state.step, metrics["bad_step"], state.bad_step) == (6, 5, 5)


@pytest.mark.parametrize(
    ("n_devices", "rows"),
    [
        (2, 4),
        *(pytest.param(*case, marks=pytest.mark.grid) for case in [(2, 10**12), (1, 3), (4, 8), (1, 7)]),
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

    @jax.jit
    def judged(logits):
        return cross_entropy(logits, labels), answers(logits, 1)

    nats, found = judged(logits[:, 0])
    np.testing.assert_allclose(nats, -logp[[0, 1, 2], 0, labels], rtol=1e-6)
    np.testing.assert_array_equal(found, logp[:, 0].argmax(-1))
    nats, found = judged(logits)
    np.testing.assert_allclose(
        nats, [-logp[row, :, label].mean() for row, label in enumerate(labels)], rtol=1e-6
    )
    np.testing.assert_array_equal(found, logp.mean(axis=1).argmax(-1))


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
