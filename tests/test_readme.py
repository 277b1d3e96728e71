"""The README and the pages it links to are true: examples run, links, flags and modules exist."""

import re
from pathlib import Path

import modules
import pytest
from grid import grid_but

from hyena_jax import cli, config

ROOT = Path(__file__).parents[1]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for folder in ("hyena_jax", "configs", "experiments", "tests")
    for path in (ROOT / folder).rglob("*.md")
} | {"README.md": (ROOT / "README.md").read_text(encoding="utf-8")}


@pytest.mark.wide
@pytest.mark.parametrize(
    "page",
    grid_but(
        (name for name, text in PAGES.items() if "```python\n" in text), "README.md", "configs/README.md"
    ),
)
def test_examples_run(page, own_parts):
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGES[page], flags=re.S))
    exec(compile(code, page, "exec"), {"__name__": "readme"})


def test_the_readme_is_short():
    assert len(PAGES["README.md"].splitlines()) <= 220


def test_links_lead_to_files():
    for page, text in PAGES.items():
        links = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
        assert [link for link in links if not ((ROOT / page).parent / link).exists()] == [], page


def test_the_mixer_is_the_example_without_its_oracle():
    """`test_plugins.py` puts the example through the contract."""
    example = (ROOT / "tests" / "extensions" / "token_shift.py").read_text()
    _, _, code = example.partition('"""\n\n')
    code = re.sub(r"def oracle.*?\n\n\n", "", code, flags=re.S).replace("import numpy as np\n", "")
    assert code.replace(", oracle)", ")") in PAGES["README.md"]


def test_the_list_of_modules_is_the_docstrings():
    assert modules.page() == PAGES["hyena_jax/README.md"], "run: python tests/programs/modules.py"


def test_every_config_is_in_the_table():
    assert all(f"`{name}`" in PAGES["configs/README.md"] for name in config.config_files())


COMMANDS = [*"train eval score generate show export convert distill prepare task".split(), "bench operators"]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_flags_of_the_commands_exist(command, capsys):
    page = PAGES["hyena_jax/cli/README.md"]
    usage = page[page.index(f"hyena-jax {command} ") :]
    usage = usage[: usage.index("hyena-jax", 1)]
    assert cli.main([*command.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    flags = set(re.findall(r"--[a-z][a-z-]+", usage))
    assert flags
    assert {flag for flag in flags if flag not in shown} == set()
