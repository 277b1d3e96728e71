"""Imports go one way, and commands start fast."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "hyena_jax"

# Other parts of this package that each part may import, besides itself.
ALLOWED = {
    "system": "",
    "reference": "",
    "config": "system",
    "ops": "system",
    "tasks": "config system",
    "data": "config system tasks",
    "filters": "config ops system",
    "mixers": "config filters ops system",
    "models": "config filters mixers ops system",
    "parallel": "config ops system",
    "training": "config data models ops parallel system",
    "generation": "config data mixers models ops system training",
    "scoring": "api config data generation interop parallel system training",
    "sweeps": "config data models parallel system training",
    "benchmark": "config data filters generation mixers models ops parallel sweeps system training",
    "check": "benchmark config mixers models ops parallel reference system training",
    "plan": "config data models ops parallel system training",
    "distillation": "config data models ops parallel system training",
    "inspect": "config data mixers models ops system training",
    "interop": "config data filters models ops system training",
    "api": "config data generation models scoring system training",
    "__main__": "cli system",
    "cli": "__main__ __version__ api benchmark check config data distillation generation inspect interop"
    " models parallel plan scoring sweeps system tasks training",
}
# The parts of training that know pytrees, not models, as all of `parallel` does.
TREES_ONLY = ("checkpoint", "checkpoint_files", "export", "lora", "optimizer")


def imports(path: Path) -> set[str]:
    """Dotted names of this package that a file imports anywhere."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name.removeprefix("hyena_jax.") for name in found if name.startswith("hyena_jax.")}


def test_imports_go_one_way():
    for path in PACKAGE.rglob("*.py"):
        place = path.relative_to(PACKAGE).with_suffix("")
        part = place.parts[0]
        if part == "__init__":
            continue  # the public API, which imports names on first use
        allowed = {part, *ALLOWED[part].split()}
        if part == "training" and place.name in TREES_ONLY:
            allowed &= {"config", "parallel", "system", "training"}
        assert {name.split(".")[0] for name in imports(path)} <= allowed, path


def test_the_reference_needs_numpy_alone():
    for path in (PACKAGE / "reference").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert {alias.name for alias in node.names} <= {"numpy", "math"}, path
            if isinstance(node, ast.ImportFrom):
                of_python = node.module in ("functools", "math", "typing", "collections.abc")
                assert of_python or node.module.startswith("hyena_jax.reference"), path


def test_light_modules_and_the_public_names_import_nothing_heavy():
    """Nothing is imported before a name is used, and then only what that name needs."""
    code = """
import sys, hyena_jax
print([name for name in sys.modules if name.startswith("hyena_jax.")])
hyena_jax.HyenaConfig, hyena_jax.register, hyena_jax.load_config("quickstart"), dir(hyena_jax)
import hyena_jax.cli.commands, hyena_jax.data.dataset
heavy = {"jax", "flax", "orbax", "tensorflow", "tensorflow_datasets", "matplotlib", "grain", "sklearn"}
print(sorted(heavy & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n[]\n"


@pytest.mark.parametrize(
    ("code", "place"),
    [
        ("import hyena_jax.errors", "hyena_jax.system.errors"),
        ("from hyena_jax.comparison.compare import compare", "hyena_jax.sweeps"),
        ("from hyena_jax import layout", "hyena_jax.ops.forms"),
    ],
)
def test_an_earlier_place_names_the_new_one(code, place):
    with pytest.raises(ImportError, match=rf"{place} now$"):
        exec(code, {})
