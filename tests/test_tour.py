"""The notebooks of the guided tour are those of their sources, and their assertions hold."""

import importlib.util
import json
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

TOUR = Path(__file__).parents[1] / "experiments" / "tour"
MAX_BYTES = 500_000
LINK = re.compile(r"\[([^][]+)\]\(([^()]+)\)")
SHOWN = re.compile(r"^# ((?:hyena_jax[\w.]*|loops):[\w.]+)$", re.MULTILINE)


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tour_{name}", TOUR / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


run, show = load("run"), load("show")


def read(folder: Path, name: str) -> list[dict]:
    return json.loads((folder / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]


def kinds(cells: list[dict]) -> list[list[str]]:
    """The types of each cell's outputs: all that does not depend on rounding."""
    return [[output["output_type"] for output in cell.get("outputs", [])] for cell in cells]


@pytest.mark.parametrize("name", run.names())
def test_the_notebook_is_of_its_source(name):
    cells = read(TOUR, name)
    found = [run.Cell("".join(cell["source"]), cell["cell_type"] == "markdown") for cell in cells]
    assert found == run.cells(name), f"run: python experiments/tour/run.py {name}"
    assert (TOUR / f"{name}.ipynb").stat().st_size < MAX_BYTES


@pytest.mark.parametrize("name", run.names())
def test_claims_are_checked_in_the_last_cell(name):
    *before, last = (cell.text for cell in run.cells(name) if not cell.is_prose)
    assert "assert " in last
    assert [text for text in before if "assert " in text or "matplotlib" in text] == []


@pytest.mark.parametrize("name", run.names())
def test_equations_name_their_paper_oracle_and_code(name):
    for cell in run.cells(name):
        if not cell.is_prose or "$$" not in cell.text:
            continue
        links = [link for _, link in LINK.findall(cell.text)]
        for kind in ("https://(arxiv|doi).org/", "hyena_jax/reference/|^loops.py", "hyena_jax/(?!reference)"):
            assert any(re.search(kind, link) for link in links), f"no link to {kind} in:\n{cell.text}"


@pytest.mark.parametrize("name", run.names())
def test_shown_code_is_the_package_s(name):
    for cell in read(TOUR, name):
        for output in cell.get("outputs", []):
            text = "".join(output.get("data", {}).get("text/markdown", []))
            functions = [pkgutil.resolve_name(found) for found in SHOWN.findall(text)]
            message = f"run: python experiments/tour/run.py {name}"
            assert not text or text == show.code(*functions)._repr_markdown_(), message


def test_the_page_lists_every_notebook():
    page = (TOUR / "README.md").read_text(encoding="utf-8")
    lines = [line for line in page.splitlines() if line.startswith("| [")]
    titles = [read(TOUR, name)[0]["source"][0].removeprefix("# ").strip() for name in run.names()]
    expected = [f"| [{title}]({name}.ipynb)" for title, name in zip(titles, run.names(), strict=True)]
    assert [line[: line.index(")") + 1] for line in lines] == expected


def test_links_lead_to_files_and_to_what_they_name():
    links = [
        link
        for name in run.names()
        for cell in run.cells(name)
        if cell.is_prose
        for link in LINK.findall(cell.text)
        if not link[1].startswith("https://")
    ]
    assert links
    assert [link for _, link in links if not (TOUR / link).exists()] == []
    named = [(text.strip("`"), link) for text, link in links if text.startswith("`")]
    assert [
        (name, link)
        for name, link in named
        if not re.search(rf"^ *(def|class) {name}\b", (TOUR / link).read_text(encoding="utf-8"), re.MULTILINE)
    ] == []


@pytest.mark.grid
@pytest.mark.parametrize("name", run.names())
def test_the_notebook_runs(name, tmp_path):
    """In its own process, with one device and compiled as a reader's would be."""
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    command = [sys.executable, str(TOUR / "run.py"), name, "--output", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert kinds(read(tmp_path, name)) == kinds(read(TOUR, name))
