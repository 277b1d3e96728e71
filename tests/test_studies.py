"""The experiments on tasks: descriptions fit their runs, results are of those runs, and pages say so."""

import dataclasses
import json
from pathlib import Path

import pytest
import reproduce
import study
from study import Study

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
RESULTS = {
    "digest": "0",
    "command": "python experiments/x/run.py",
    "seconds": 90,
    "hardware": {"cores": 2, "device": "a processor"},
    "versions": {"python": "3.11", "jax": "0.10.1"},
    "runs": {
        f"pattern={mixer},width={width},seed={seed}": {
            "value": value + 0.01 * seed,
            "step": 100,
            "seconds": 3.0,
            "n_params": 1000,
            "state_bytes": 2048 * width,
            "by_length": {"32": value, "64": value / 2},
        }
        for mixer, value in (("hyena", 0.98), ("fir", 0.5), ("hawk", 0.4))
        for width in (1, 2)
        for seed in (0, 1, 2)
    },
}
EXAMPLE = Study(
    folder=Path("x"),
    title="A title",
    source="A paper",
    claim="A claim.",
    runs={},
    metric="accuracy",
    solved=0.99,
    published={"pattern=hyena,width=1": 1.0, "pattern=fir,width=1": 0.2, "pattern=hawk,width=1": 0.3},
    above=[
        (("pattern=hyena,width=1",), ("pattern=fir,width=1", "pattern=hawk,width=1")),
        (("pattern=hawk,width=1",), ("pattern=fir,width=1",)),
    ],
)


@pytest.mark.parametrize("name", reproduce.STUDIES)
def test_a_study_describes_its_runs(name):
    found = reproduce.load(name)
    groups = {study.without_seed(run) for run in found.runs}
    assert {*found.published} <= groups
    assert {group for side in found.above for names in side for group in names} <= groups
    assert all(run.data.n_symbols for run in found.runs.values())


@pytest.mark.parametrize("name", reproduce.STUDIES)
def test_results_are_those_of_the_settings(name):
    found = reproduce.load(name)
    results = reproduce.results_of(found)
    if results is None:
        pytest.skip(f"experiments/{name} has not been run")
    assert results["digest"] == study.digest(found)
    assert {*results["runs"]} == {*found.runs}
    assert (found.folder / "README.md").read_text(encoding="utf-8") == study.page(found, results)


def test_the_page_of_all_experiments_is_generated():
    studies = [reproduce.load(name) for name in reproduce.STUDIES]
    assert (EXPERIMENTS / "README.md").read_text(encoding="utf-8") == reproduce.page(studies)


def test_a_page_compares_with_what_was_published():
    page = study.page(EXAMPLE, RESULTS)
    assert "| hyena, width 1 | 1.000 | **0.990** | 0.980 to 1.000 | 2 of 3 | 0.980 | 0.490 | 100 |" in page
    assert "- holds: hyena, width 1 above fir, width 1; hawk, width 1" in page
    assert "- **does not hold**: hawk, width 1 above fir, width 1" in page
    assert "Spearman's rank correlation with the 3 published values: 0.50" in page
    assert study.verdict(EXAMPLE, study.groups_of(EXAMPLE, RESULTS)) == "1 of 2 hold"


@pytest.mark.parametrize("x", [None, "width", "state", "length"])
def test_figures_are_drawn(tmp_path, x):
    study.draw(dataclasses.replace(EXAMPLE, x=x), study.groups_of(EXAMPLE, RESULTS), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_new_option_does_not_change_the_digest():
    @dataclasses.dataclass(frozen=True)
    class Before:
        width: int = 8
        depth: int = 1

    @dataclasses.dataclass(frozen=True)
    class After(Before):
        new: str | None = None

    After.__name__ = "Before"
    assert study._chosen((Before(depth=2),)) == study._chosen((After(depth=2),))
    assert study._chosen(After(new="x")) != study._chosen(Before())


@pytest.mark.grid
@pytest.mark.parametrize("name", ["copying", "extrapolation"])
def test_a_quick_run_ends_with_a_page(name, tmp_path):
    found = reproduce.load(name)
    results = study.run(found, tmp_path / "runs", jobs=1, quick=True)
    assert json.loads((tmp_path / "runs" / "results.json").read_text()) == results
    assert len(results["runs"]) == 3
    assert found.title in (tmp_path / "runs" / "README.md").read_text()
    assert (tmp_path / "runs" / "plot.png").exists()
