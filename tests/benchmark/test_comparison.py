"""`hyena-jax bench compare`: verdicts on synthetic times of known ratio and noise, and real commits."""

import json
import math
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from hyena_jax.benchmark import comparison
from hyena_jax.benchmark.timing import summarize
from hyena_jax.cli import main

MACHINE = {"device": "a chip", "cores": 2, "system": "one"}
SETTINGS = {"d_model": 8, "dtype": "float32", "seconds": 1.0, "mixers": ["hyena"]}


def made(medians, noise=0.0, runs=9, rng=None, **changes):
    """Results of one process, whose rows have normally distributed logarithms of times."""
    rows = []
    for length, median in enumerate(medians, start=1):
        logs = np.log(median) + (noise * rng.standard_normal(runs) if noise else np.zeros(runs))
        seconds = summarize(np.exp(logs).tolist()).__dict__
        rows.append({"method": "hyena", "length": length, "passes": {"forward": {"seconds": seconds}}})
    results = {"benchmark": "operators", "settings": SETTINGS, "machine": MACHINE, "rows": rows}
    return {**results, "versions": {"jax": "1", "jaxlib": "1", "flax": "1"}, **changes}


def written(folder, *processes):
    for i, results in enumerate(processes, start=1):
        place = folder if len(processes) == 1 else folder / str(i)
        place.mkdir(parents=True)
        (place / "results.json").write_text(json.dumps(results))
    return folder


def run(*arguments) -> int:
    return main(["bench", "compare", *map(str, arguments)])


def compared(ratio, n_processes, n_rows, n_comparisons, runs):
    """The rows of every comparison. Several processes also differ from one another."""
    rng, found = np.random.default_rng(0), []
    between = 0.03 if n_processes > 1 else 0.0
    for _ in range(n_comparisons):
        sides = []
        for factor in (1.0, ratio):
            each = between * rng.standard_normal((n_processes, n_rows))
            sides.append([made(factor * np.exp(logs), 0.02, runs, rng) for logs in each])
        found.append(comparison.differences(*sides))
    return found


def verdicts(*arguments):
    return [[one.verdict for one in rows] for rows in compared(*arguments)]


@pytest.mark.wide
@pytest.mark.parametrize(("n_processes", "runs"), [(1, 5), (1, 40), (5, 5)])
def test_equal_programs_differ_in_five_percent_of_tables(n_processes, runs):
    found = verdicts(1.0, n_processes, 3, 400, runs)
    wrong = np.mean([set(rows) != {comparison.UNSEEN} for rows in found])
    # 0.05 is allowed; three standard deviations of a rate of 0.05 in 400 are 0.033.
    assert wrong < 0.083
    for kind in (comparison.SLOWER, comparison.FASTER):
        assert np.mean([kind in rows for rows in found]) < 0.06


@pytest.mark.parametrize(("n_processes", "runs"), [(1, 20), (5, 5)])
def test_a_difference_as_large_as_the_visible_one_is_seen_in_four_of_five(n_processes, runs):
    visible = np.median([row.visible for (row,) in compared(1.0, n_processes, 1, 20, runs)])
    found = verdicts(visible, n_processes, 1, 100, runs)
    seen = np.mean([rows == [comparison.SLOWER] for rows in found])
    assert 0.65 < seen < 0.95
    assert all(rows != [comparison.FASTER] for rows in found)


def test_a_known_ratio_has_its_interval_and_its_exit_code(tmp_path, capsys):
    rng = np.random.default_rng(2)
    a = written(tmp_path / "a", *(made([1.0, 1.0], 0.01, 9, rng) for _ in range(5)))
    b = written(tmp_path / "b", *(made([1.1, 0.8], 0.01, 9, rng) for _ in range(5)))
    assert run(a, b) == 1
    captured = capsys.readouterr()
    assert "1 of 2 programs slower by more than 0.05: hyena, length 1, forward takes 1.0" in captured.err
    assert "slower" in captured.out
    assert "faster" in captured.out
    assert "or the machine was" not in captured.out + captured.err
    assert run(a, b, "--threshold", 0.2, "--json") == 0
    slow, quick = json.loads(capsys.readouterr().out)
    assert f"{1000 * slow['a']:.4g} " in captured.out  # ms
    assert slow["lower"] < 1.1 < slow["upper"]
    assert slow["verdict"] == "slower"
    assert quick["lower"] < 0.8 < quick["upper"]
    assert 1 < slow["visible"] < 1.1


def test_rows_are_matched_by_what_they_measure(tmp_path, capsys):
    more = made([1.0, 1.0], settings={**SETTINGS, "seconds": 2.0, "mixers": ["hawk", "hyena"]})
    more["rows"].reverse()
    more["rows"].insert(0, {**more["rows"][0], "method": "hawk"})
    a, b = written(tmp_path / "a", made([1.0, 2.0])), written(tmp_path / "b", more)
    assert run(a, b, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [(one["row"], one["ratio"]) for one in found] == [
        ("hyena, length 1", 1.0),
        ("hyena, length 2", 0.5),
    ]


def test_what_cannot_be_compared_is_refused(tmp_path, capsys):
    a = written(tmp_path / "a", made([1.0]))
    others = {
        "machine": (made([1.0], machine={**MACHINE, "cores": 4, "system": "two"}), "machine.cores is 2 in A"),
        "jax": (made([1.0], versions={"jax": "2", "jaxlib": "1"}), "versions.jax is '1' in A and '2' in B"),
        "width": (made([1.0], settings={**SETTINGS, "d_model": 16}), "d_model is 8 in A and 16 in B"),
        "kind": (made([1.0], benchmark="decode"), "A is of `bench operators` and B of `bench decode`"),
        "rows": (made([]), "have no row in common"),
        "roofline": (made([1.0], roofline={"flops_per_second": 0}), "is not the results of a benchmark"),
        "broken": ({"rows": [{"passes": 1}]}, "is not the results of a benchmark"),
    }
    for name, (results, message) in others.items():
        b = written(tmp_path / name, results)
        assert run(a, b) == 2
        assert message in capsys.readouterr().err
        assert run(a, b, "--allow-different") == (0 if name in ("machine", "jax") else 2)
        capsys.readouterr()
    good = made([1.0])
    seconds = good["rows"][0]["passes"]["forward"]["seconds"]
    row = {"method": "hyena", "length": 1}
    hostile = [
        *({**good, name: value} for name in ("settings", "machine", "versions") for value in (None, 5, [])),
        *({**good, "benchmark": value} for value in (5, {}, None)),
        *(
            {**good, "rows": [{**row, "passes": {"forward": {"seconds": {**seconds, **wrong}}}}]}
            for wrong in ({"median": math.nan}, {"upper": 10**400}, {"lower": 5e-324}, {"runs": 10**400})
        ),
        {**good, "rows": [{**row, "method": {}, "passes": {}}], "roofline": 5},
        *({name: value for name, value in good.items() if name != left_out} for left_out in good),
    ]
    for i, results in enumerate(hostile):
        b = written(tmp_path / f"hostile{i}", results)
        assert run(a, b) == run(b, a, "--allow-different") == 2
        error = capsys.readouterr().err
        assert error.count("\n") == error.count("hyena-jax: error: ") == 2
    (tmp_path / "odd" / "²").mkdir(parents=True)
    assert run(a, tmp_path / "odd") == 2
    clears = made([1.0])
    clears["rows"][0]["method"] = "\x1b[2J"
    assert run(written(tmp_path / "clears", clears), tmp_path / "clears") == 0
    assert "\x1b" not in capsys.readouterr().out
    (tmp_path / "empty").mkdir()
    assert run(a, tmp_path / "empty") == 2
    assert "has no results.json" in capsys.readouterr().err
    assert run(a, a, "--bench", "operators") == 2
    assert "--bench must be absent with folders" in capsys.readouterr().err


def test_one_process_each_cannot_tell_a_slower_program_from_a_slower_machine(tmp_path, capsys):
    rates = [{"flops_per_second": rate, "bytes_per_second": 1e9} for rate in (2e9, 1e9)]
    a = written(tmp_path / "a", made([1.0, 1.0], roofline=rates[0]))
    b = written(tmp_path / "b", made([1.1, 1.0], roofline=rates[1]))
    assert run(a, b) == 1
    captured = capsys.readouterr()
    assert captured.out.count("slower, or the machine was") == 1
    assert "(or the machine was slower: each side is one process)" in captured.err
    assert "the machine took 2.000 of A's time for a matrix product, and 1.000 for a copy" in captured.err
    assert run(a, b, "--json") == 1
    assert [one["processes"] for one in json.loads(capsys.readouterr().out)] == [1, 1]


def test_few_runs_have_no_verdict():
    (one,) = comparison.differences([made([1.0], runs=1)], [made([2.0], runs=1)])
    assert (one.verdict, one.ratio) == (comparison.TOO_FEW, pytest.approx(2.0))


def test_results_of_earlier_versions_are_read():
    """A row of `decode` without passes, one of `model` without its method, and a file without its kind."""
    seconds = summarize([1.0, 1.0, 1.0]).__dict__
    row = {"method": "hawk", "context": 1024, "batch": 1, "prefill": {"seconds": seconds}, "step": seconds}
    name = "hawk, context 1,024, batch 1"
    assert list(comparison.times_by_program({"rows": [row]})) == [(name, "prefill"), (name, "step")]
    rows = [{"length": 8, "passes": {"f": {"seconds": seconds}}}]
    model = {"settings": {"config": "quickstart"}, "rows": rows}
    assert list(comparison.times_by_program(model)) == [("quickstart, length 8", "f")]
    old = made([1.0], command="hyena-jax bench operators")
    del old["benchmark"]
    comparison.require_comparable(old, made([1.0]), False)


def test_commits_that_are_not_there(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run("HEAD", "nowhere") == 2
    assert "is neither a folder nor a commit" in capsys.readouterr().err


def test_a_quotation_that_is_not_closed_is_refused_before_a_work_tree_is_made(tmp_path, capsys):
    assert run("HEAD", "HEAD", "--bench", "operators 'x", "--output", tmp_path / "new") == 2
    assert 'bench must be a command line, got "operators \'x": No closing quot' in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


OWN = """
import jax
import jax.numpy as jnp


def make_inputs(size):
    return (jnp.ones((size, 16)),)


def quick(x):
    return 2 * x


def slow(x):
    return jax.lax.fori_loop(0, 500, lambda i, y: jnp.sort(-y, axis=0), x)
"""


@pytest.mark.grid
def test_functions_of_files_and_commits_of_ones_own_repository(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a"]

    def commit(name, text):
        Path(name).write_text(text)
        subprocess.run([*git, "add", name], check=True)
        subprocess.run([*git, "commit", "--quiet", "-m", "a step"], check=True)

    subprocess.run([*git, "init", "--quiet"], check=True)
    commit("own.py", OWN)
    commit("own.py", OWN.replace("return 2 * x", "return slow(x)"))
    sizes = "--sizes 256 --no-gradients --seconds 0.02 --least-runs 5"
    shared = ("--rounds", 2, "--threshold", 0.5, "--json")
    shutil.copy("own.py", "slow.py")
    Path("own.py").write_text(OWN)
    kept = Path("kept")  # of the caller, not of a work tree
    for asked in (
        ("own.py:quick", "slow.py:slow", f"--bench={sizes}"),
        ("HEAD~1", "HEAD", "--bench", f"function own.py:quick {sizes}", "--output", kept),
    ):
        assert run(*asked, *shared) in (0, 1)  # two rounds see only much
        (row,) = json.loads(capsys.readouterr().out)
        assert row["row"] == "quick, size 256"
        assert row["ratio"] > 2
    assert sorted(path.name for path in kept.iterdir()) == ["a", "b"]
    assert {path.name for path in (kept / "a").iterdir()} == {"1", "2"}
    listed = subprocess.run([*git, "worktree", "list"], check=True, capture_output=True, text=True).stdout
    assert len(listed.splitlines()) == 1
    assert run("own.py:quick", "slow.py:slow,quick", f"--bench={sizes}") == 2
    assert "as many functions as A='own.py:quick'" in capsys.readouterr().err
    Path("hyena_jax").mkdir()
    commit("hyena_jax/__init__.py", "raise SystemExit('the package of a commit')")
    assert run("HEAD", "HEAD", "--bench", "operators --mixers fir --lengths 64") == 2
    assert capsys.readouterr().err.endswith(": the package of a commit\n")
