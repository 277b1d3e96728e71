"""Generated configs, derived from the fields of the dataclasses, and command lines for them."""

import dataclasses
import math
import types
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from hyena_jax.config import (
    Experiment,
    ImageClassifierConfig,
    ImagesConfig,
    LanguageModelConfig,
    TextConfig,
)
from hyena_jax.config.registry import is_kind

SMALL = (1, 2, 3, 4, 5, 7, 8, 16)
WILD_INTS = (0, -1, -7, 17, 1000, 2**31 - 1, 2**31, -(2**63), 2**64, 10**30)
FLOATS = (0.0, 1e-3, 0.1, 0.5, 0.9, 0.999, 1.0, 2.0, 100.0)
WILD_FLOATS = (-1.0, -0.0, 1e-320, 1e-30, 1e9, 1e30, 1e38, 1e300, math.nan, math.inf, -math.inf)
TEXTS = ("", "a", "bytes", "gate_first", "/filter/", "(", "ß", "\n", "--", "None", "0", "nan", "x" * 300)
WRONG = (None, "x", 1.5, -1, True, (), [1], {}, b"x")


class Plan(NamedTuple):
    """A config to be made, which may be refused."""

    config_class: type
    options: dict[str, Any]

    def make(self) -> Any:
        """The config."""
        return self.config_class(**{name: _make(value) for name, value in self.options.items()})


def _make(value: Any) -> Any:
    if isinstance(value, Plan):
        return value.make()
    return tuple(map(_make, value)) if type(value) is tuple else value


def values(hint: Any) -> st.SearchStrategy:
    """Values of an annotated type: mostly sensible, sometimes edge cases or wrong types."""
    return mostly(_typed(hint), st.sampled_from(WRONG), 15)


def mostly(usual: st.SearchStrategy, rare: st.SearchStrategy, odds: int) -> st.SearchStrategy:
    """`usual`, except once in `odds` draws. (`one_of` counts a repeated strategy only once.)"""
    return st.sampled_from([usual] * (odds - 1) + [rare]).flatmap(lambda strategy: strategy)


def _typed(hint: Any) -> st.SearchStrategy:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return st.one_of(*map(_typed, arguments))
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return st.lists(_typed(arguments[0]), max_size=3).map(tuple)
        return st.tuples(*map(_typed, arguments))
    if is_kind(hint):
        return st.one_of(*map(plans, hint.registry.values()))
    if dataclasses.is_dataclass(hint):
        return plans(hint)
    edges = {
        int: mostly(st.sampled_from(SMALL), st.sampled_from(WILD_INTS), 8),
        float: mostly(st.sampled_from(FLOATS), st.sampled_from(WILD_FLOATS) | st.floats(), 8),
        str: st.one_of(st.sampled_from(TEXTS), st.text(max_size=5)),
        bool: st.booleans(),
        type(None): st.none(),
    }
    return edges[hint]


@st.composite
def plans(draw: Callable, config_class: type, base: dict[str, Any] | None = None, most: int = 3) -> Plan:
    """`config_class` with `base`, and some of its fields at random."""
    hints = get_type_hints(config_class)
    fields = {field.name: hints[field.name] for field in dataclasses.fields(config_class)}
    required = [
        field.name
        for field in dataclasses.fields(config_class)
        if field.default is field.default_factory is dataclasses.MISSING
    ]
    chosen = draw(st.lists(st.sampled_from(sorted(fields)), max_size=most, unique=True)) if fields else []
    options = {name: draw(values(fields[name])) for name in [*required, *chosen]}
    return Plan(config_class, {**(base or {}), **options})


MODEL = {"n_layers": 1, "d_model": 8, "d_ff": 8}
LANGUAGE_MODEL = {**MODEL, "max_len": 16, "vocab_size": 11}
IMAGE_CLASSIFIER = {**MODEL, "image_size": (8, 8), "channels": 1, "n_classes": 3}
TEXT = {"seq_len": 16, "batch_size": 2}


@st.composite
def experiments(draw: Callable) -> Plan:
    """Experiments of small models, before the fields at random."""
    if draw(st.integers(0, 3)):
        of_data = (LanguageModelConfig, LANGUAGE_MODEL), (TextConfig, TEXT)
    else:
        of_data = (ImageClassifierConfig, IMAGE_CLASSIFIER), (ImagesConfig, {"batch_size": 2})
    (model_class, model), (data_class, data) = of_data
    pattern = get_args(get_type_hints(model_class)["pattern"])[0]
    mixers = tuple(draw(st.lists(_typed(pattern), min_size=1, max_size=2)))
    options = {
        "model": draw(plans(model_class, {**model, "pattern": mixers})),
        "data": draw(plans(data_class, data, most=1)),
    }
    rest = draw(plans(Experiment, most=1)).options
    return Plan(Experiment, {**rest, **options})
