"""The experiments on tasks: descriptions fit their runs, results are of those runs, and pages say so."""

import dataclasses
import json
import math
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pages
import protocol
import pytest
import reproduce
import study
from grid import grid_but, in_grid
from results import faults_in_a_line, fill
from study import Study

from hyena_jax import config
from hyena_jax.cli import base
from hyena_jax.config.flags import read_flags
from hyena_jax.sweeps.compare import n_params
from hyena_jax.sweeps.runs import without_seed
from hyena_jax.system.errors import UserError
from hyena_jax.system.signals import Interrupted

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
    folder=EXPERIMENTS / "x",
    title="A title",
    source="A paper",
    message="Hyena recalls",
    claim="A claim.",
    limits="All else.",
    runs=(RUNS := reproduce.load("copying").runs)
    | dict.fromkeys(RESULTS["runs"], RUNS["pattern=hawk,seed=0"]),
    metric="accuracy",
    solved=0.99,
    published={"pattern=hyena,width=1": 1.0, "pattern=fir,width=1": 0.2, "pattern=hawk,width=1": 0.3},
    above=[
        (("pattern=hyena,width=1",), ("pattern=fir,width=1", "pattern=hawk,width=1")),
        (("pattern=hawk,width=1",), ("pattern=fir,width=1",)),
    ],
)


@pytest.mark.wide
def test_the_published_windows_of_tiny_shakespeare():
    starts = runpy.run_path(str(EXPERIMENTS / "shakespeare_cpu" / "windows.py"))["starts"]
    found = starts(111_540)
    assert found.shape == (1024,)
    assert found[:3].tolist() == [35957, 30499, 53228]
    assert starts(111_540, partitionable=True)[:3].tolist() == [32192, 6459, 39596]


@pytest.mark.wide
@pytest.mark.parametrize("name", grid_but(reproduce.STUDIES, "recall_by_mixer", "copying"))
def test_a_study_describes_its_runs(name):
    here = reproduce.load(name)
    for found in (here, here.at_paper_scale()) if here.paper else (here,):
        groups = {without_seed(run) for run in found.runs}
        assert {*found.published} <= groups
        assert {group for side in found.above for names in side for group in names} <= groups
        assert {found.searched_at(group) for group in groups} <= groups
        assert all(run.data.n_symbols for run in found.runs.values())


def test_the_setting_of_the_source_has_results_of_its_own():
    here = reproduce.load("copying")
    paper = here.at_paper_scale()
    assert paper.folder == here.folder / "paper"
    assert paper.command == ["python", "experiments/copying/run.py", "--scale", "paper"]
    assert {run.data.n_data for run in paper.runs.values()} == {1024}
    assert {*here.runs} == {*paper.runs}
    end = "run.py --scale paper\n```\n\nNot run yet: it takes an accelerator.\n"
    assert pages.page(here, study.results_of(here)).endswith(end)
    with pytest.raises(UserError, match="scale must be here: the source of extrapolation does not give its"):
        reproduce.load("extrapolation").at_paper_scale()


@pytest.mark.wide
@pytest.mark.parametrize("name", reproduce.STUDIES)
def test_results_are_those_of_the_settings(name):
    found = reproduce.load(name)
    results = study.results_of(found)
    if results is None:
        pytest.skip(f"experiments/{name} has not been run")
    assert results["digest"] == study.digest(found, results["runs"])
    assert {*results["runs"]} <= {*found.runs}
    assert (found.folder / "README.md").read_text(encoding="utf-8") == pages.page(found, results)


@pytest.mark.wide
def test_the_page_of_all_experiments_is_generated():
    studies = [reproduce.load(name) for name in reproduce.STUDIES]
    assert (EXPERIMENTS / "README.md").read_text(encoding="utf-8") == reproduce.page(studies)


class Flags(Exception):
    """Ends a script once it has read its flags."""


SCRIPTS = (
    "copying/run distillation/run faults/run fine_tuning/run generation/run generation/tokens images/run"
    " long_context/run mad/run pictures/run reproduce scaling/run shakespeare_cpu/run shakespeare_cpu/windows"
    " signed/run tour/run accelerators/run"
).split()


@pytest.mark.wide
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_commands_that_pages_show_are_read(name, monkeypatch):
    def stop(kind):
        raise Flags(read_flags(kind, *sys.argv[:1], sys.argv[1:], program="python"))

    for module in (base, study):
        monkeypatch.setattr(module, "script_flags", stop)
    monkeypatch.syspath_prepend((EXPERIMENTS / name).parent)
    texts = [path.read_text(encoding="utf-8") for path in EXPERIMENTS.glob("**/*.md")]
    pattern = rf"^python (experiments/{name}\.py[^\n#]*)"
    commands = [found for text in texts for found in re.findall(pattern, text, re.MULTILINE)]
    for command in commands or [f"experiments/{name}.py"]:
        monkeypatch.setattr(sys, "argv", shlex.split(command))
        with pytest.raises(Flags):
            runpy.run_path(str(EXPERIMENTS / f"{name}.py"), run_name="__main__")


FOLLOWED = {
    **RESULTS,
    "search": {},
    "runs": {name: {**row, "learning_rate": 1e-3} for name, row in RESULTS["runs"].items()},
    "longer": {
        "pattern=fir,width=1": {"value": 0.51, "gain": 0.01, "rows": 12800},
        "pattern=hawk,width=1": {"value": 0.7, "gain": 0.3, "rows": 12800},
    },
}


@pytest.mark.wide
@pytest.mark.parametrize("is_traced", [{"hawk", "mamba2"}.__contains__, *in_grid(lambda mixer: True)])
def test_the_page_of_all_mixers_is_made_from_the_results(is_traced):
    """By default two sizes of a state are traced, and the others are read from the page."""
    page = (EXPERIMENTS / "which_mixer" / "README.md").read_text(encoding="utf-8")
    shown = dict(re.findall(r"^\| `(\w+)` \|(?: [^|]+ \|){2} ([\d.,]+) \|", page, re.MULTILINE))
    program = runpy.run_path(str(EXPERIMENTS / "which_mixer" / "run.py"))
    assert sorted(shown) == sorted(program["MIXERS"])
    state_of = program["state_of"]
    program["page"].__globals__["state_of"] = lambda mixer: (
        state_of(mixer) if is_traced(mixer) else float(shown[mixer].replace(",", ""))
    )
    assert page == program["page"]()


def test_the_page_of_signed_is_made_from_its_results():
    signed = runpy.run_path(str(EXPERIMENTS / "signed" / "run.py"))
    results = json.loads((EXPERIMENTS / "signed" / "results.json").read_text())
    assert (EXPERIMENTS / "signed" / "README.md").read_text(encoding="utf-8") == signed["page"](results)


@pytest.mark.parametrize(
    ("script", "kept"), [("faults/run", "results"), ("scaling/run", "results"), ("scaling/bucket", "bucket")]
)
def test_tables_of_pages_are_made_from_their_results(script, kept):
    path = EXPERIMENTS / f"{script}.py"
    made, results = runpy.run_path(str(path)), json.loads((path.parent / f"{kept}.json").read_text())
    table = made["table"](results.get("faults", results))
    assert f"-->\n{table}\n<!--" in (path.parent / "README.md").read_text(encoding="utf-8")


def test_what_stands_between_the_marks_of_a_page_is_replaced(tmp_path):
    path = tmp_path / "README.md"
    path.write_text("# A\n<!-- a -->\nold\n<!-- end -->\nB\n<!-- b -->\n<!-- end -->\n")
    for name in ("a", "b"):
        fill(path, name, f"new {name}\n")
    page = "# A\n<!-- a -->\nnew a\n<!-- end -->\nB\n<!-- b -->\nnew b\n<!-- end -->\n"
    assert path.read_text() == page
    with pytest.raises(UserError, match="has no marks <!-- c -->"):
        fill(path, "c", "lost")
    assert path.read_text() == page


def test_images_are_compared_at_equal_parameters():
    widths = runpy.run_path(str(EXPERIMENTS / "images" / "run.py"))["D_FF"]
    for prefix, size in (("", 8), ("mnist_", 28)):
        counts = {}
        for variant, d_ff in widths[prefix].items():
            model = config.load(f"images:{prefix}{variant}").model
            data = {"image_size": (size, size), "channels": 1, "n_classes": 10}
            counts[variant] = n_params(dataclasses.replace(model, d_ff=d_ff, **data))
        assert all(abs(count / counts["gated"] - 1) < 0.003 for count in counts.values()), counts


def test_a_page_begins_with_what_came_out_and_shows_little():
    page = pages.page(EXAMPLE, FOLLOWED)
    assert page.startswith("# A title\n\n**Hyena recalls.**")
    assert "| hyena, width 1 | 1.00 | 0.990 | 0.980 to 1.000 | 0.980 | 0.490 | 100 | 2.0 |" in page
    assert "\n\n## How it was made\n\nA paper. A claim.\n" in page
    assert page.endswith("## What it does not show\n\nAll else.\n")
    shown = dataclasses.replace(EXAMPLE, shown=["pattern=hawk,width=2"])
    assert pages.page(shown, FOLLOWED).count("\n| ") == 2
    searches = {"pattern=fir,width=1": {"steps": 5, "values": {}}, "pattern=hawk,width=1": {"losses": {}}}
    text = " 1 of the 2 rates were chosen by accuracy, not by loss."
    assert text in pages.page(EXAMPLE, {**FOLLOWED, "search": searches})


@pytest.mark.wide
@pytest.mark.parametrize("name", reproduce.STUDIES)
def test_a_page_is_short(name):
    found = reproduce.load(name)
    rows = [line for line in (found.folder / "README.md").read_text().splitlines() if line.startswith("| ")]
    assert len(rows) <= pages.MAX_ROWS + 1
    assert max(row.count("|") for row in rows) <= pages.MAX_COLUMNS + 2
    assert len(found.drawn) <= 7


def test_an_ordering_holds_if_the_ranges_of_three_seeds_are_apart():
    groups = pages.groups_of(EXAMPLE, FOLLOWED)
    assert [one.how for one in pages.orderings(EXAMPLE, groups)] == ["holds, also at 2N", "not shown"]
    assert pages.verdict(EXAMPLE, groups) == "1 of 2 hold, 1 also at 2N"
    text = "- **not shown**: hawk, width 1 above fir, width 1, in at most 256,000 rows (the seeds"
    page = pages.page(EXAMPLE, FOLLOWED)
    assert f"{text} overlap: worst seed 0.400 of hawk, width 1, best seed 0.520 of fir, width 1)" in page

    def first(results=FOLLOWED, **changed):
        here = dataclasses.replace(EXAMPLE, **changed)
        return pages.orderings(here, pages.groups_of(here, results))[0]

    late = {**FOLLOWED["longer"], "pattern=fir,width=1": {"value": 0.99, "gain": 0.5, "rows": 12800}}
    found = first({**FOLLOWED, "longer": late}), first(RESULTS), first(above_at=32)  # no doubled run there
    assert [one.how for one in found] == ["holds"] * 3
    once = {name: row for name, row in FOLLOWED["runs"].items() if "fir" not in name or "seed=0" in name}
    assert first({**FOLLOWED, "runs": once}).why == "fewer than 3 seeds: fir, width 1"
    assert "the first side by step 100, the other from 100 on" in first(solved=0.1).why
    soon = {n: {**row, "step": 50 if "hyena" in n else 100} for n, row in FOLLOWED["runs"].items()}
    assert first({**FOLLOWED, "runs": soon}, solved=0.1)[1:4:2] == ("holds", "by step 50 against 100")
    high = {**FOLLOWED["runs"]["pattern=fir,width=1,seed=0"], "value": 0.985}
    touching = {**FOLLOWED["runs"], "pattern=fir,width=1,seed=0": high}
    assert first({**FOLLOWED, "runs": touching}).how == "not shown"
    near = {**FOLLOWED["runs"], "pattern=fir,width=1,seed=0": {**high, "value": 0.965}}
    assert first({**FOLLOWED, "runs": near}).why.startswith("less than 0.02 apart: worst seed 0.980")
    double = protocol.shortened_by(EXAMPLE.runs["pattern=hawk,seed=0"], 1 / 2)
    unequal = first(runs={name: double if "hyena" in name else run for name, run in EXAMPLE.runs.items()})
    assert unequal.why == "unequal budgets: 512,000 rows against 256,000"


def test_beyond_the_trained_positions_is_what_a_length_adds_to_the_one_before():
    """0.5 of 31 positions, 0.75 of 63: all of the 32 that were added."""
    rows = {name: {**row, "by_length": {"32": 0.5, "64": 47 / 63}} for name, row in RESULTS["runs"].items()}
    lengths = dict.fromkeys((32, 64), lambda data: data)
    beyond = dataclasses.replace(
        EXAMPLE, n_scored=lambda length: length - 1, above_at=64, unit="bits", lengths=lengths
    )
    group = pages.groups_of(beyond, {**FOLLOWED, "runs": rows})["pattern=fir,width=1"]
    assert group.by_length == {64: pytest.approx((31.5 / 32,) * 3)}
    assert group.last == group.by_length[64]
    assert group.later is None
    page = pages.page(beyond, {**FOLLOWED, "runs": rows})
    assert "| bits 32 to 63 |" in page
    assert "in at most 256,000 rows, bits 32 to 63" in page


def test_a_search_goes_on_while_the_best_rate_is_the_outermost():
    assert protocol.first_rates(1e-3) == (3.2e-4, 1e-3, 3.2e-3)
    next_rate = partial(protocol.next_rate, own=1e-3)
    assert next_rate({1e-3: 0.5, 3.2e-4: 0.6, 3.2e-3: None}) is None
    assert next_rate({1e-3: 0.5, 3.2e-4: 0.4, 3.2e-3: 0.9}) == 1e-4
    assert next_rate({1e-3: 0.5, 3.2e-4: 0.6, 3.2e-3: 0.1}) == 1e-2
    rates = dict.fromkeys((1e-5, 3e-5, 1e-4, 3e-4), 0.9)
    assert next_rate({**rates, 1e-3: 0.1}) is None


def test_of_rates_that_solve_the_task_the_nearest_to_the_mixers_own_is_the_best():
    best = partial(protocol.best_rate, own=1e-3)
    assert best({3.2e-4: 0.0, 1e-3: 0.0, 3.2e-3: 0.0}) == 1e-3
    assert best({3.2e-4: 0.5, 1e-3: 0.02, 3.2e-3: 0.0}) == 3.2e-3
    assert best({3.2e-4: 0.5, 1e-3: 0.5, 3.2e-3: None}) == 1e-3


def test_the_run_that_is_trained_longer_is_that_of_the_median():
    values = {"seed=0": 0.9, "seed=1": 0.2, "seed=2": 0.5}
    assert protocol.median_run(values) == "seed=2"
    assert protocol.median_run({"seed=0": 0.9, "seed=1": 0.2}) == "seed=1"


def test_a_search_that_is_continued_asks_for_the_same_sweeps(monkeypatch):
    """A sweep refuses to be continued with fewer runs: further rates have sweeps of their own."""
    base = next(iter(reproduce.load("copying").runs.values()))
    own, asked = base.optimizer.learning_rate, []

    def trained(runs, workdir, jobs, may_diverge):
        asked.append((workdir.name, [run.optimizer.learning_rate for run in runs.values()]))
        rates = {name: run.optimizer.learning_rate for name, run in runs.items()}
        return {
            name: SimpleNamespace(status="done", values={"loss": 1 - rate}, seconds=1.0)
            for name, rate in rates.items()
        }

    monkeypatch.setattr(protocol, "trained", trained)
    found, seconds = protocol.search({"a": base}, lambda values: values["loss"], Path("search"), 1)
    first = protocol.first_rates(own)
    assert asked[0] == ("round_1", list(first))
    assert [name for name, _ in asked] == ["round_1", "round_2", "round_3"]
    assert all(len(rates) == 1 for _, rates in asked[1:])
    assert list(found["a"]) == [rate for _, rates in asked for rate in rates]
    assert seconds == 5


def test_runs_of_another_length_have_its_schedule():
    run = next(iter(reproduce.load("copying").runs.values()))
    own = run.training.steps
    for factor, steps in ((4, own // 4), (1 / 2, 2 * own)):
        other = protocol.shortened_by(run, factor)
        assert (other.training.steps, other.training.checkpoint_every) == (steps, steps)
        assert (other.training.eval_every, other.optimizer.schedule) == (200, run.optimizer.schedule)


def test_groups_are_chosen_by_their_settings():
    found = reproduce.load("recall")
    both = {"pattern=kda,pairs=8", "pattern=mamba3,pairs=8"}
    assert study.chosen_groups(found, ["pattern=kda", "pattern=mamba3,pairs=8"]) == both
    assert study.chosen_groups(found, []) == {without_seed(name) for name in found.runs}
    assert len(study.chosen_groups(found, ["pattern=attention"])) == 4
    assert len(study.chosen_groups(found, ["pairs=8"])) > 9
    with pytest.raises(UserError, match=r"only must be settings of a group, such as .*, got 'pattern=kdb'"):
        study.chosen_groups(found, ["pattern=kdb"])


def test_what_is_missing_is_trained_and_nothing_else(monkeypatch):
    found = reproduce.load("copying")
    kept = study.results_of(found)
    assert reproduce.missing(found) == []
    old = {name: {**row} for name, row in kept["runs"].items() if not name.startswith("pattern=s4d")}
    del old["pattern=hawk,seed=1"]["learning_rate"]
    monkeypatch.setattr(
        reproduce, "results_of", lambda _: {**kept, "runs": old, "digest": study.digest(found, old)}
    )
    assert reproduce.missing(found) == ["pattern=s4d", "pattern=hawk"]
    assert reproduce.cost(found, ["pattern=s4d"]).startswith("3 of 9 runs, of at most 768,000 rows in all, ")
    monkeypatch.setattr(reproduce, "results_of", lambda _: {**kept, "digest": "of other settings"})
    assert reproduce.missing(found) == ["pattern=hyena", "pattern=s4d", "pattern=hawk"]


def test_groups_that_are_trained_later_leave_the_others_as_they_are():
    hyena = {name: row for name, row in RESULTS["runs"].items() if name.startswith("pattern=hyena,width=1")}
    kept = {**RESULTS, "runs": {name: row for name, row in RESULTS["runs"].items() if name not in hyena}}
    made = {"command": "python x --only pattern=hyena", "seconds": 60, "longer": {}}
    for value in (0.5, 0.7):  # a group trained once more replaces its earlier rows
        runs = {name: {**row, "value": value, "learning_rate": 1e-3} for name, row in hyena.items()}
        kept = study.joined(kept, {**RESULTS, **made, "search": {"pattern=hyena,width=1": {}}, "runs": runs})
    page = pages.page(EXAMPLE, kept)
    assert [made["command"] for made in kept["later"]] == ["python x --only pattern=hyena"]
    assert pages.seconds(kept) == 150
    assert "2 minutes on 2 cores (a processor); " in page  # of both commands
    assert "| hyena, width 1 | 1.00 | 0.700 |" in page
    assert {name: kept["runs"][name] for name in RESULTS["runs"] if name not in hyena} == {
        name: row for name, row in RESULTS["runs"].items() if name not in hyena
    }
    whole = study.joined(kept, {**RESULTS, **made, "command": "python x", "search": {}})
    assert (whole["command"], whole["later"]) == ("python x", [])  # nothing of the first command is left
    assert "Not run yet, or not with all seeds: " in page


def test_rates_are_not_searched_again():
    searches = {"a": {"steps": 5, "losses": {"0.001": 0.5, "0.0032": None}}, "b": {"steps": 5, "values": {}}}
    assert study.searches_of({"search": searches}) == {"a": {1e-3: 0.5, 3.2e-3: None}}
    assert study.searches_of({}) == {}


@pytest.mark.parametrize("x", [None, "width", *in_grid("length", "task")])
def test_figures_are_drawn(tmp_path, x):
    pages.draw(
        dataclasses.replace(EXAMPLE, x=x, lengths={32: str, 64: str}),
        pages.groups_of(EXAMPLE, RESULTS),
        tmp_path / "plot.png",
    )
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


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("steps must be at least 1,\ngot 0"), 2, "error: steps must be at least 1, got 0"),
        (json.JSONDecodeError("no value", "", 0), 2, "error: results.json is damaged: no value"),
        (PermissionError("results.json cannot be written"), 3, "error: results.json cannot be written"),
        (Interrupted("stopped by SIGTERM"), 75, "stopped by SIGTERM"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (subprocess.CalledProcessError(2, ["hyena-jax"]), 2, None),  # the command has said why
    ],
)
def test_faults_end_in_a_line_and_the_exit_codes_of_the_command_line(capsys, error, code, line):
    with pytest.raises(SystemExit) as ended, faults_in_a_line():
        raise error
    assert ended.value.code == code
    said = capsys.readouterr().err
    assert said == "" if line is None else said.startswith(f"hyena-jax: {line}")


@pytest.mark.grid
def test_a_quick_run_ends_with_a_page_and_is_not_stale(tmp_path):
    found = reproduce.load("copying")
    found = dataclasses.replace(found, runs=study.shortened(found.runs, most=2, steps=8))
    results = study.run(found, tmp_path / "runs", jobs=1, quick=True)
    assert json.loads((tmp_path / "runs" / "results.json").read_text()) == json.loads(json.dumps(results))
    assert len(results["runs"]) == 2
    assert all(len(group["losses"]) >= 3 for group in results["search"].values())
    assert found.title in (tmp_path / "runs" / "README.md").read_text()
    assert (tmp_path / "runs" / "plot.png").exists()
    quick = dataclasses.replace(found, runs=study.shortened(found.runs))
    assert protocol.stale(quick, results) == []
    first, second = results["runs"].values()
    first["losses"][3] += 1e-3
    second["losses"][3] = math.nan
    results["runs"]["pattern=gone,seed=0"] = first
    *differ, gone = protocol.stale(quick, results)
    assert len(differ) == 2
    assert gone == "pattern=gone,seed=0: no longer a run of the study"


def test_a_signal_between_two_sweeps_ends_a_study_in_order():
    with pytest.raises(Interrupted, match="Rerun the command to continue"), protocol.ended_after(60.0):
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
