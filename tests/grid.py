"""The markers `grid` and `wide`, for single values of a parameter."""

from collections.abc import Iterable

import pytest


def in_grid(*values) -> list:
    """Values for `pytest.mark.parametrize` that run under the marker `grid` alone."""
    return [pytest.param(value, marks=pytest.mark.grid) for value in values]


def in_wide(*values) -> list:
    """Values for `pytest.mark.parametrize` that run under the marker `wide` alone."""
    return [pytest.param(value, marks=pytest.mark.wide) for value in values]


def grid_but(names: Iterable, *by_default) -> list:
    """All names, of which those outside `by_default` run under the marker `grid` alone."""
    return [name if name in by_default else in_grid(name)[0] for name in names]
