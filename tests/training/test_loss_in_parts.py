"""The loss in parts equals the loss at once."""

import dataclasses
import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest
from tolerances import assert_close

from hyena_jax import models
from hyena_jax.config import AttentionConfig, LanguageModelConfig
from hyena_jax.training import loss
from hyena_jax.training.step import init_params, make_eval_step

CONFIG = LanguageModelConfig(
    pattern=(AttentionConfig(2),), n_layers=1, d_model=8, d_ff=8, max_len=11, vocab_size=13, soft_cap=3.0
)
PARAMS = init_params(models.build(CONFIG), 0)
WINDOWS = np.random.default_rng(0).integers(0, 13, (3, 12), dtype=np.int32)
WEIGHTS = np.array([[1.0] * 11, [1.0] * 4 + [0.0] * 7, [0.0] * 11], np.float32)
BATCH = {"inputs": WINDOWS[:, :-1], "targets": WINDOWS[:, 1:], "weights": WEIGHTS}


def value_and_gradients(config, params=PARAMS):
    def mean(params):
        return loss.scored(loss.cross_entropy, models.build(config), params, BATCH).mean()

    return jax.jit(jax.value_and_grad(mean))(params)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("chunk", "tied_head"),
    [
        (4, True),
        *(pytest.param(*case, marks=pytest.mark.grid) for case in [(1, False), (1, True), (4, False)]),
    ],
)
def test_in_parts_equals_at_once(chunk, tied_head):
    config = dataclasses.replace(CONFIG, tied_head=tied_head)
    params = init_params(models.build(config), 1)
    expected = value_and_gradients(config, params)
    actual = value_and_gradients(dataclasses.replace(config, loss_chunk=chunk), params)
    jax.tree.map(assert_close, actual, expected)


class Plain(nn.Module):
    """A user's model with only `__call__`."""

    config: Any

    def setup(self):
        self.embedding = nn.Embed(13, 8)

    def __call__(self, tokens, segment_ids=None, deterministic=True):
        return self.embedding.attend(self.embedding(tokens))


class Split(Plain):
    """The same model with `hidden` and `logits`."""

    def hidden(self, tokens, segment_ids=None, deterministic=True):
        return self.embedding(tokens)

    def logits(self, x):
        return self.embedding.attend(x)


class Whole(nn.Module):
    """Its logits say which document a token is of."""

    config: Any = None

    def __call__(self, tokens, segment_ids=None, deterministic=True):
        return jax.nn.one_hot(segment_ids, 13)


class Halves(Whole):
    """The same model with `hidden` and `logits`."""

    hidden = Whole.__call__

    def logits(self, x):
        return x


@pytest.mark.parametrize("model", [Whole(), Halves(SimpleNamespace())], ids=["whole", "halves"])
def test_the_model_is_told_the_documents(model):
    documents = np.array([[0] * 4 + [1] * 7, [0] * 9 + [1, 2], [0] * 11], np.int32)
    found = loss.scored(lambda logits, _: logits.argmax(-1), model, {}, {**BATCH, "segment_ids": documents})
    np.testing.assert_array_equal(found, documents)


# Positions repeat where a row has fewer answers than places for them.
POSITIONS = np.array([[10, 0, 4, 3], [5, 5, 0, 0], [9, 8, 7, 1]], np.int32)
AT_POSITIONS = {
    "inputs": BATCH["inputs"],
    "targets": np.take_along_axis(BATCH["targets"], POSITIONS, 1),
    "positions": POSITIONS,
}


def value_and_gradients_at_positions(model, params, batch):
    """Of a weighted sum of the loss at the positions, computed from all logits if the batch has none."""
    weights = np.random.default_rng(1).normal(size=POSITIONS.shape).astype(np.float32)

    def weighted_sum(params):
        nats = loss.scored(loss.cross_entropy, model, params, batch)
        if "positions" not in batch:
            nats = nats[np.arange(3)[:, None], POSITIONS]
        return (weights * nats).sum()

    return jax.value_and_grad(weighted_sum)(params)


def test_the_loss_at_positions_is_the_full_loss_at_these_positions():
    """Of a model without `hidden`, and of others whose logits are computed at once or in parts."""
    plain = Plain(SimpleNamespace(vocab_size=13))
    others = (
        plain,
        Split(plain.config),
        Split(SimpleNamespace()),
        Split(SimpleNamespace(vocab_size=13, loss_chunk=3)),
    )
    assert [loss.chunk_tokens(model, POSITIONS.shape) for model in others] == [None, None, None, 3]
    cases = (plain, BATCH), *((model, AT_POSITIONS) for model in others)

    @jax.jit
    def found():
        params = plain.init(jax.random.key(0), WINDOWS)["params"]
        return [value_and_gradients_at_positions(model, params, batch) for model, batch in cases]

    expected, *others = found()
    for actual in others:
        jax.tree.map(assert_close, actual, expected)


def test_evaluation_at_positions_sums_over_them():
    model, weights = models.build(CONFIG), np.float32([[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0]])
    tallies = {"right_at": lambda correct, targets, weights: correct * weights}
    step = jax.jit(make_eval_step(model, tallies=tallies))
    sums = step(PARAMS, {**AT_POSITIONS, "weights": weights})
    logits = np.asarray(jax.jit(model.apply)({"params": PARAMS}, BATCH["inputs"]))
    picked = np.take_along_axis(logits, POSITIONS[..., None], 1)
    right = (picked.argmax(-1) == AT_POSITIONS["targets"]) * weights
    np.testing.assert_array_equal(sums["count"], [4, 1, 2])
    np.testing.assert_array_equal(sums["correct"], right.sum(-1))
    np.testing.assert_array_equal(sums["right_at"], right)


def logits_in(config, batch) -> set[str]:
    """The logits that the loss and its gradient compute."""
    model = models.build(config)
    program = jax.make_jaxpr(partial(value_and_gradients_at_positions, model, batch=batch))(PARAMS)
    return {*re.findall(r"f32\[3,\d+,13\]", str(program))}


def test_logits_exist_at_the_positions_or_in_parts_alone():
    assert "f32[3,11,13]" in logits_in(CONFIG, BATCH)
    assert logits_in(CONFIG, AT_POSITIONS) == {"f32[3,4,13]"}
    assert logits_in(dataclasses.replace(CONFIG, loss_chunk=4), BATCH) == {"f32[3,4,13]"}


def test_parts_are_taken_where_the_logits_would_be_many(monkeypatch):
    model = models.build(CONFIG)
    assert loss.chunk_tokens(model, (3, 11)) is None
    monkeypatch.setattr(loss, "MAX_LOGITS", 3 * 13 * 5)
    monkeypatch.setattr(loss, "LEAST_TOKENS", 1)
    assert loss.chunk_tokens(model, (3, 11)) == 5
    assert loss.chunk_tokens(model, (3,)) is None
    assert loss.chunk_tokens(model, (1000, 11)) == 1
    assert loss.chunk_tokens(models.build(dataclasses.replace(CONFIG, loss_chunk=11)), (3, 11)) is None
