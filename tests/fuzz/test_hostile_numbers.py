"""Numbers too extreme to compute with are refused by name in one line, in every field and flag."""

import dataclasses
import json
import typing
from types import SimpleNamespace

import pytest
from fuzz.test_fuzz import time_limit

from hyena_jax import cli, config
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
from hyena_jax.generation.sampling import SamplingRule
from hyena_jax.system.errors import UserError

SECONDS = 90
MODEL = SimpleNamespace(config=LanguageModelConfig(vocab_size=11))
CONFIGS = [kind for registry in config.REGISTRIES for kind in registry.values()]
CONFIGS += [Experiment, TrainingConfig, ParallelConfig, LoggingConfig, Cluster]
HUGE = [2**63, -(2**63) - 1, 10**30, 10**400]


def numbers(hint) -> tuple[bool, bool]:
    """Whether values of a type are numbers, and whether they are tuples of numbers."""
    hints = [hint, *typing.get_args(hint)]
    tuples = [inner for inner in hints if typing.get_origin(inner) is tuple and int in typing.get_args(inner)]
    return int in hints or float in hints or bool(tuples), bool(tuples)


FIELDS = [
    (kind, name, numbers(hint)[1], float in (hint, *typing.get_args(hint)))
    for kind in CONFIGS
    for name, hint in field_types(kind).items()
    if numbers(hint)[0]
]


@pytest.mark.parametrize(("kind", "name", "is_tuple", "is_float"), FIELDS)
def test_no_field_takes_a_number_beyond_64_bits(own_parts, kind, name, is_tuple, is_float):
    for number in [10**400] if is_float else HUGE:
        with pytest.raises(UserError, match=rf"\b{name}\b") as refused:
            kind(**{name: (number, number) if is_tuple else number})
        assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("number", [2**31, 2**63, 10**30, 10**400, 2.5, "3", True, [3], None, -1])
@pytest.mark.parametrize(
    "place", ["training.steps", "data.batch_size", "model.n_layers", "model.max_len", "seed"]
)
def test_config_json_with_wrong_numbers_is_refused(tmp_path, place, number):
    values = config.encode(Experiment())
    inner, (*path, name) = values, place.split(".")
    for key in path:
        inner = inner[key]
    inner[name] = number
    (tmp_path / "config.json").write_text(json.dumps(values))
    if place == "seed" and number == 2**31:
        assert config.read(tmp_path / "config.json").seed == number
        return
    with pytest.raises(UserError, match=rf"\b{name}\b"):
        config.read(tmp_path / "config.json")


def flags(value, prefix=""):
    """The flags of all integers in an experiment."""
    for field in dataclasses.fields(value):
        child, name = getattr(value, field.name), f"{prefix}{field.name.replace('_', '-')}"
        if dataclasses.is_dataclass(child):
            yield from flags(child, f"{name}.")
        elif isinstance(child, tuple) and child and dataclasses.is_dataclass(child[0]):
            yield from flags(child[0], f"{name}.0.")
        elif numbers(field_types(type(value))[field.name])[0] and not isinstance(child, bool):
            yield f"--{name}"


@pytest.mark.fuzz
@pytest.mark.parametrize("number", ["2147483648" * 4, "1e400", "9" * 5000])
@pytest.mark.parametrize("flag", list(flags(Experiment())))
def test_flags_with_huge_numbers_are_refused(tmp_path, monkeypatch, capsys, flag, number):
    monkeypatch.chdir(tmp_path)
    try:
        with time_limit(SECONDS):
            code = cli.main(["train", "quickstart", "--workdir", "run", flag, number])
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.out + captured.err
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SamplingRule(top_k=10**30), "top_k must be at most 2147483647"),
        (lambda: proceed(MODEL, None, None, Request(2**31)), "max_new_tokens must be in 0..2147483647"),
        (lambda: proceed(MODEL, None, None, Request(1, n_samples=10**30)), "num_samples must be in"),
        (lambda: proceed(MODEL, None, None, Request(1, seed=2**32)), "seed must be in"),
    ],
)
def test_requests_with_huge_numbers_are_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()
