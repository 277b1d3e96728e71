"""What is public: its examples run, its docstrings say shapes, and its pages are made without warnings."""

import doctest
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import api_page
import jax
import numpy as np
import pytest

import hyena_jax

SHAPE = re.compile(r"\[[^\[\]]*\]")
OF_RUNS = tuple(f"hyena_jax.{name}" for name in ("train", "load_run", "compare", "sweep"))
"""Examples that train, in their order: the first trains the run that the next two read."""


def run_example(name: str, documented: object) -> None:
    place = documented if inspect.ismodule(documented) else importlib.import_module(documented.__module__)
    names = {"hyena_jax": hyena_jax, **vars(place)}
    test = doctest.DocTestParser().get_doctest(documented.__doc__, names, name, None, 0)
    said: list[str] = []
    failed, _ = doctest.DocTestRunner().run(test, out=said.append)
    assert failed == 0, "".join(said)


def with_examples() -> dict[str, object]:
    places = {place: importlib.import_module(place) for place in api_page.public_modules()}
    return {
        name: value
        for name, value in [*places.items(), *api_page.public_names()]
        if ">>>" in (getattr(value, "__doc__", None) or "")
    }


@pytest.mark.grid
def test_examples_run(tmp_path, monkeypatch, own_parts):
    monkeypatch.chdir(tmp_path)
    examples = with_examples()
    assert {*OF_RUNS, "hyena_jax.register", "hyena_jax.mixers"} < set(examples)
    for name in examples.keys() - OF_RUNS:
        run_example(name, examples[name])


@pytest.mark.grid
@pytest.mark.scale
def test_examples_that_train_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in OF_RUNS:
        run_example(name, getattr(hyena_jax, name.removeprefix("hyena_jax.")))


def array_arguments(function: object) -> list[str]:
    """Names of the arguments that are arrays, or None, by their annotations."""
    kinds = (jax.Array, np.ndarray)

    def is_array(hint: object) -> bool:
        parts = [part for part in get_args(hint) or [hint] if part is not type(None)]
        return parts != [] and all(part in kinds for part in parts)

    arguments = inspect.signature(function).parameters.values()
    return [argument.name for argument in arguments if is_array(argument.annotation)]


def test_docstrings_say_the_shapes_of_arrays():
    """A docstring names every argument that is an array, and gives shapes."""
    lacking = []
    for name, value in api_page.public_names():
        if inspect.isfunction(value) and (arrays := array_arguments(value)):
            text = inspect.getdoc(value) or ""
            unnamed = [argument for argument in arrays if not re.search(rf"\b{argument}\b", text)]
            if unnamed or not SHAPE.search(text):
                lacking.append(f"{name}: {', '.join(unnamed)}")
    assert lacking == []


@pytest.mark.packages
def test_pages_are_made_without_warnings(tmp_path):
    pytest.importorskip("pdoc")
    command = [sys.executable, "-W", "error", api_page.__file__, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    pages = {path.relative_to(tmp_path).with_suffix("") for path in tmp_path.rglob("*.html")}
    assert {Path(*place.split(".")) for place in api_page.public_modules()} <= pages
    page = (tmp_path / "hyena_jax" / "ops" / "long_conv.html").read_text()
    assert "direct_conv" in page
    assert "Wraps parent module" not in (tmp_path / "hyena_jax" / "mixers.html").read_text()
