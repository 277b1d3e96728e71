import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hyena_jax.generation.programs import Cursor, SamplingConfig, SamplingInputs, first_token
from hyena_jax.generation.sampling import SamplingRule, sample
from hyena_jax.system.errors import UserError

LOGITS = np.log(np.float32([0.05, 0.4, 0.3, 0.2, 0.05]))
COUNT = 20_000


def draws(rule: SamplingRule) -> np.ndarray:
    keys = jax.random.split(jax.random.key(0), COUNT)
    return np.bincount(sample(np.tile(LOGITS, (COUNT, 1)), keys, rule), minlength=5)


def grid(*values):
    return pytest.param(*values, marks=pytest.mark.grid)


@pytest.mark.parametrize(
    ("rule", "weights"),
    [
        (SamplingRule(), [0.05, 0.4, 0.3, 0.2, 0.05]),
        (SamplingRule(temperature=0.5), [0.0025, 0.16, 0.09, 0.04, 0.0025]),
        (SamplingRule(top_k=2), [0, 0.4, 0.3, 0, 0]),
        (SamplingRule(top_k=4), [0.05, 0.4, 0.3, 0.2, 0]),  # of equal ones the first
        grid(SamplingRule(top_k=99), [0.05, 0.4, 0.3, 0.2, 0.05]),
        (SamplingRule(top_p=0.65), [0, 0.4, 0.3, 0, 0]),
        (SamplingRule(top_p=0.71), [0, 0.4, 0.3, 0.2, 0]),
        grid(SamplingRule(top_p=1e-9), [0, 1, 0, 0, 0]),
        (SamplingRule(top_p=1e-38), [0, 1, 0, 0, 0]),  # 0 as a float32 that is not subnormal
        (SamplingRule(min_p=0.6), [0, 0.4, 0.3, 0, 0]),
        grid(SamplingRule(min_p=0.1), [0.05, 0.4, 0.3, 0.2, 0.05]),
        grid(SamplingRule(min_p=1.0), [0, 1, 0, 0, 0]),
        (SamplingRule(temperature=0.5, min_p=0.5), [0, 0.16, 0.09, 0, 0]),
        (SamplingRule(temperature=1e-45), [0, 1, 0, 0, 0]),
        (SamplingRule(greedy=True), [0, 1, 0, 0, 0]),
        grid(SamplingRule(top_k=1), [0, 1, 0, 0, 0]),
    ],
)
def test_draws_follow_the_rule(rule, weights):
    """Chi-square test; the 1 - 1e-5 quantile for 4 degrees of freedom is 28.5."""
    expected = COUNT * np.array(weights) / np.sum(weights)
    seen, possible = draws(rule), expected > 0
    assert np.all(seen[~possible] == 0)
    assert np.sum((seen - expected)[possible] ** 2 / expected[possible]) <= 28.5


def test_rows_do_not_depend_on_each_other():
    rule = SamplingRule(temperature=2.0, top_p=0.9)
    run = jax.jit(lambda logits: sample(logits, jax.random.split(jax.random.key(3), 40), rule))
    logits, other = np.random.default_rng(4).standard_normal((2, 40, 50)).astype(np.float32)
    other = np.concatenate([logits[:20], 3 * other[20:]])
    before, after = np.asarray(run(logits)), np.asarray(run(other))
    np.testing.assert_array_equal(before[:20], after[:20])
    assert not np.array_equal(before[20:], after[20:])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"temperature": -1.0}, "temperature must be above 0"),
        ({"temperature": float("nan")}, "temperature must be a finite float32, got nan"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"top_p": 1.5}, "top_p must be in .0, 1., got 1.5"),
        ({"top_p": 0.0}, "top_p must be in"),
        ({"min_p": -0.1}, "min_p must be in"),
        ({"greedy": True, "top_k": 3}, "greedy must be given without"),
        ({"greedy": True, "min_p": 0.5}, "greedy must be given without"),
    ],
)
def test_wrong_rules_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        SamplingRule(**options)


def test_log_probabilities_are_those_before_temperature_and_restrictions():
    rows = SamplingInputs(np.arange(3, dtype=np.uint32), np.zeros(0, np.int32))
    cursor = Cursor(None, np.zeros(3, np.int32), np.int32(0), np.zeros(3, bool))
    sampling = SamplingConfig(SamplingRule(temperature=0.3, top_k=3), None, lazy=True)
    _, drawn = first_token(sampling, rows, cursor, jnp.tile(LOGITS, (3, 1)))
    np.testing.assert_allclose(drawn.log_probs, LOGITS[drawn.tokens], rtol=1e-6)
