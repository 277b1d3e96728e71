"""Imports go one way, and commands start fast."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "hyena_jax"

# What every part but the reference may import.
BELOW = {"errors", "files"}
# Other parts of this package that each part may import, besides itself.
ALLOWED = {
    "errors": set(),
    "files": set(),
    "storage": set(),
    "counts": set(),
    "chips": set(),
    "config": set(),
    "flags": {"config", "storage"},
    "reference": set(),
    "ops": set(),
    "tasks": {"config"},
    "data": {"config", "signals", "storage", "tasks"},
    "initializers": {"config"},
    "filters": {"config", "initializers", "ops"},
    "mixers": {"config", "initializers", "ops", "filters"},
    "layout": set(),
    "models": {"config", "initializers", "layout", "ops", "filters", "mixers"},
    "trees": set(),
    "parallel": {"config", "layout", "ops", "trees"},
    "training": {
        "chips",
        "config",
        "counts",
        "data",
        "signals",
        "layout",
        "models",
        "ops",
        "parallel",
        "storage",
        "trees",
    },
    "generation": {"config", "data", "mixers", "models", "ops", "training", "trees"},
    "scoring": {"config", "data", "parallel", "training"},
    "benchmark": {
        "comparison",
        "counts",
        "flags",
        "signals",
        "config",
        "data",
        "filters",
        "generation",
        "mixers",
        "models",
        "ops",
        "output",
        "parallel",
        "training",
    },
    "plan": {"benchmark", "chips", "config", "counts", "layout", "models", "parallel", "training"},
    "output": set(),
    "sweeps": {
        "config",
        "data",
        "flags",
        "memory",
        "signals",
        "output",
        "parallel",
        "startup",
        "storage",
        "training",
    },
    "comparison": {"config", "models", "training"},
    "distillation": {"config", "data", "models", "parallel", "training"},
    "inspect": {"config", "data", "distillation", "mixers", "models", "output", "training"},
    "interop": {"config", "data", "filters", "models", "training", "trees"},
    "api": {"config", "data", "generation", "models", "output", "scoring", "startup", "training"},
    "harness": {
        "api",
        "config",
        "data",
        "generation",
        "interop",
        "output",
        "parallel",
        "scoring",
        "training",
    },
    "__main__": {"cli", "memory", "signals"},
    "memory": set(),
    "signals": set(),
    "startup": {"config", "storage"},
    "cli": {
        "__version__",
        "flags",
        "__main__",
        "api",
        "benchmark",
        "comparison",
        "config",
        "data",
        "distillation",
        "generation",
        "harness",
        "inspect",
        "interop",
        "memory",
        "models",
        "output",
        "parallel",
        "plan",
        "scoring",
        "signals",
        "startup",
        "storage",
        "sweeps",
        "tasks",
        "training",
    },
}
# The parts of training that know pytrees, not models, as all of `parallel` does.
TREES_ONLY = (
    "bucket_steps",
    "checkpoint",
    "checkpoint_files",
    "export",
    "local_steps",
    "lora",
    "optimizer",
)


def imports(path: Path) -> set[str]:
    """Dotted names of this package that a file imports anywhere."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name.removeprefix("hyena_jax.") for name in found if name.startswith("hyena_jax.")}


def part_of(name: str) -> str:
    """The part of the package that a dotted name belongs to; the flags are a part that others read too."""
    return "flags" if name.startswith("cli.flags") else name.split(".")[0]


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_one_way(path):
    part = part_of(".".join(path.relative_to(PACKAGE).with_suffix("").parts))
    if part == "__init__":
        return  # the public API, which imports names on first use
    below = set() if part in ("errors", "reference") else BELOW
    assert set(map(part_of, imports(path))) <= ALLOWED[part] | below | {part}


@pytest.mark.parametrize("name", TREES_ONLY)
def test_trees_only(name):
    ours = {name.split(".")[0] for name in imports(PACKAGE / "training" / f"{name}.py")}
    assert ours <= BELOW | {"config", "parallel", "storage", "training", "trees"}


@pytest.mark.parametrize("path", sorted((PACKAGE / "reference").glob("*.py")), ids=lambda p: p.name)
def test_the_reference_needs_numpy_alone(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert {alias.name for alias in node.names} <= {"numpy", "math"}
        if isinstance(node, ast.ImportFrom):
            of_python = node.module in ("functools", "math", "typing", "collections.abc")
            assert of_python or node.module.startswith("hyena_jax.reference")


@pytest.mark.parametrize(
    "module",
    ["hyena_jax", "hyena_jax.config", "hyena_jax.cli.commands", "hyena_jax.data.dataset"],
)
def test_light_modules_import_nothing_heavy(module):
    heavy = "{'jax', 'flax', 'orbax', 'tensorflow', 'tensorflow_datasets', 'matplotlib', 'grain', 'sklearn'}"
    code = f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_public_names_need_nothing_heavy():
    """Nothing is imported before a name is used, and then only what that name needs."""
    code = (
        "import sys, hyena_jax; print([name for name in sys.modules if name.startswith('hyena_jax.')]);"
        "hyena_jax.HyenaConfig, hyena_jax.register, hyena_jax.load_config('quickstart'), dir(hyena_jax);"
        "print('jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\nFalse\n"
