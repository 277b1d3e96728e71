"""The README: its examples run, its layout matches the tree, its commands exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from hyena_jax import config

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON = "\n".join(re.findall(r"```python\n(.*?)```", README, flags=re.S))


def test_the_examples_run(monkeypatch):
    """Also the mixer, which `test_plugins.py` runs through the contract."""
    for registry in config.REGISTRIES:
        monkeypatch.setattr(registry, "_parts", dict(registry._parts))
    exec(compile(PYTHON, "README.md", "exec"), {"__name__": "readme"})


def test_the_mixer_is_the_file_that_it_links_to():
    assert (ROOT / "tests" / "extensions" / "token_shift.py").read_text() in README


def test_the_layout_names_every_module():
    """Except modules of registered parts, which have the parts' names."""
    layout = README[README.index("## Layout") : README.index("## Parts of your own")]
    modules = {path.name for path in (ROOT / "hyena_jax").rglob("*.py")} - {"__init__.py"}
    parts = [part for registry in config.REGISTRIES for part in registry.parts.values()]
    targets = [part.target for part in parts if isinstance(part.target, str)]
    of_parts = {target.partition(":")[0].split(".")[-1] + ".py" for target in targets}
    named = set(re.findall(r"\w+\.py", layout)) - {"test_contract.py"}
    assert modules - of_parts <= named <= modules


def test_every_config_is_in_the_table():
    table = README[README.index("| config | what |") : README.index("## As a library")]
    assert all(f"`{name}`" in table for name in config.config_files())


@pytest.mark.parametrize("command", ["train", "eval", "generate"])
def test_the_flags_of_the_commands_exist(command):
    line = next(
        line for line in README.splitlines() if line.startswith(f"hyena-jax {command} ") and "[" in line
    )
    done = subprocess.run(
        [sys.executable, "-m", "hyena_jax", command, "--help"], capture_output=True, text=True, check=True
    )
    for flag in re.findall(r"--[a-z][a-z-]+", line):
        assert flag in done.stdout or flag == "--section"
