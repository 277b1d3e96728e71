"""Numbers too extreme to compute with are refused by name in one line, in every field."""

import typing
from types import SimpleNamespace

import pytest

from hyena_jax import config
from hyena_jax.config import (
    Cluster,
    Experiment,
    LanguageModelConfig,
    LoggingConfig,
    ParallelConfig,
    TrainingConfig,
)
from hyena_jax.config.checks import field_types
from hyena_jax.generation.decoding import Request, proceed
from hyena_jax.system.errors import UserError

MODEL = SimpleNamespace(config=LanguageModelConfig(vocab_size=11))
CONFIGS = [kind for registry in config.REGISTRIES for kind in registry.values()]
CONFIGS += [Experiment, TrainingConfig, ParallelConfig, LoggingConfig, Cluster]
HUGE = [2**63, -(2**63) - 1, 10**30, 10**400]


def numbers(hint) -> tuple[bool, bool]:
    """Whether values of a type are numbers, and whether they are tuples of numbers."""
    hints = [hint, *typing.get_args(hint)]
    tuples = [inner for inner in hints if typing.get_origin(inner) is tuple and int in typing.get_args(inner)]
    return int in hints or float in hints or bool(tuples), bool(tuples)


@pytest.mark.parametrize("kind", CONFIGS)
def test_no_field_takes_a_number_beyond_64_bits(own_parts, kind):
    for name, hint in field_types(kind).items():
        is_number, is_tuple = numbers(hint)
        is_float = float in (hint, *typing.get_args(hint))
        for number in ([10**400] if is_float else HUGE) if is_number else ():
            with pytest.raises(UserError, match=rf"\b{name}\b") as refused:
                kind(**{name: (number, number) if is_tuple else number})
            assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(2**31), "max_new_tokens must be in 0..2147483647"),
        (Request(1, n_samples=10**30), "num_samples must be in"),
        (Request(1, seed=2**32), "seed must be in"),
    ],
)
def test_requests_with_huge_numbers_are_refused(request_, message):
    with pytest.raises(UserError, match=message):
        proceed(MODEL, None, None, request_)
