"""Counts against numbers made by hand."""

import jax
import jax.numpy as jnp
import pytest

from hyena_jax import config as configs
from hyena_jax.benchmark.counts import COUNTS, count, count_filter
from hyena_jax.benchmark.programs import jit_program
from hyena_jax.benchmark.work import Work, long_conv, pairs, transform
from hyena_jax.config import MIXER_CONFIGS
from hyena_jax.mixers import mixer_class


def test_every_mixer_is_counted():
    assert set(COUNTS) == set(MIXER_CONFIGS.values())
    for config_class in MIXER_CONFIGS.values():
        work = count(config_class(), 2, 96, 8)
        assert 0 < work.forward < work.forward_backward <= 3 * work.forward


def test_attention_by_hand():
    # x W_qkv and y W_o; scores and weighted values of 3 * 4 / 2 pairs; 5 operations a weight.
    work = count(configs.AttentionConfig(2), 1, 3, 4)
    assert work.products == 2 * 3 * 4 * 12 + 2 * 3 * 4 * 4 + 4 * 6 * 4
    assert work.other == 5 * 6 * 2
    assert work.activations == 3 * (4 + 12 + 4 + 4 + 4)
    assert work.forward_backward == 3 * work.forward
    assert work.forward_bytes(n_params=10, itemsize=2) == 40 + 2 * work.activations


def test_fir_by_hand():
    # Two dense layers; transforms of 8 points of 2 inputs, 2 filters, 2 outputs; products of 5 frequencies.
    work = count(configs.FIRConfig(), 1, 4, 2)
    assert work.products == 2 * (2 * 4 * 2 * 2)
    assert work.transforms == 6 * 2.5 * 8 * 3
    assert work.other == 6 * 2 * 5
    assert work.forward_backward == 3 * work.products + 2 * work.transforms + 3 * work.other


def test_the_implicit_filter_by_hand():
    config = configs.ImplicitFilterConfig(emb_dim=3, width=5, n_hidden=1)
    work = count_filter(config, n_filters=2, channels=7, length=11)
    assert work.products == 11 * 2 * (3 * 5 + 5 * 5 + 5 * 14)
    assert work.activations == 2 * 7 * 11


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, 15), ({"causal": False}, 25), ({"window": 1}, 9), ({"window": 0}, 5), ({"window": 9}, 15)],
)
def test_pairs_of_five_tokens(options, expected):
    assert pairs(5, **options) == expected


def test_convolutions_and_sums_of_work():
    assert long_conv(1, 4, 3, 3).transforms == 9 * transform(8)
    both = Work(1.0, 2.0, 3.0, 4.0) + Work(1.0, 1.0, 1.0, 1.0)
    assert both == Work(2.0, 3.0, 4.0, 5.0)


def test_the_products_of_attention_are_those_that_xla_counts():
    """Not causal, where both count all pairs; XLA also counts the elementwise part, in its own way."""
    config = configs.AttentionConfig(2, causal=False)
    module = mixer_class(config)(32, 48, config)
    x = jnp.ones((1, 48, 32))
    params = module.init(jax.random.key(0), x)
    program = jit_program(module.apply, params, x)
    assert program.xla_flops == pytest.approx(count(config, 1, 48, 32).products, rel=0.15)
