"""The first day on an accelerator, tried on CPUs: the script of measurements, and the notebook."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hyena_jax.system.errors import UserError

FOLDER = Path(__file__).parents[1] / "experiments" / "accelerators"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("accelerators_run", FOLDER / "run.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_results_say(script):
    """Before the first device: empty tables, beside what `plan` expects."""
    path = FOLDER / "results.json"
    results = json.loads(path.read_text()) if path.exists() else {"steps": {}}
    assert script.tables(results) in (FOLDER / "README.md").read_text()


def test_a_cut_off_step_is_made_the_next_time_and_the_others_are_kept(script, monkeypatch, tmp_path):
    made, fails = [], {"recurrence"}

    def run(command, timeout):
        folder = Path(command[-1] if command[-2] in ("--output", "--workdir") else command[-3])
        made.append(folder.name)
        if folder.name in fails:
            raise subprocess.TimeoutExpired(command, timeout)
        folder.mkdir(exist_ok=True)
        for name in ("results.json", "check.json"):
            (folder / name).write_text(json.dumps({"rows": [], "cases": []}))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(script.subprocess, "run", run)
    flags = script.Flags(minutes=5, small=True, output=tmp_path)
    names = [step.name.replace(" ", "_").replace("'", "") for step in script.steps(True, None)]
    script.measure(flags)
    assert made == names
    fails.clear()
    results = script.measure(flags)
    assert made == [*names, "recurrence"]
    assert {name.replace(" ", "_").replace("'", "") for name in results["steps"]} == {*names}
    results["steps"]["decoding"]["is_whole"] = False  # it was cut off, with some of its rows
    (tmp_path / "results.json").write_text(json.dumps(results))
    script.measure(flags)
    assert made[-1] == "decoding"
    with pytest.raises(UserError, match="small must be True, as in"):
        script.measure(script.Flags(minutes=5, output=tmp_path))


def test_tables_have_the_measured_values(script):
    passes = {name: {"seconds": {"median": 0.002}} for name in ("forward", "forward_backward", "train_step")}
    machine = {"devices": 2, "device": "TPU v5 lite"}
    model = {"n_params": 197_000_000, "units": 1000, "passes": passes}
    decoded = {"prefill": {"seconds": {"median": 0.003}}, "step": {"seconds": {"median": 0.0004}}}
    about = {"machine": machine, "versions": {"jax": "9", "python": "8"}}
    rates = {"flops_per_second": 98.5e12, "bytes_per_second": 819e9}  # half of the products' peak
    kinds = [{"products": 1e-4, "memory": 3e-4}, {"products": 7e-4, "memory": 0.0}]
    plan = {"kinds": kinds, "seconds": {"roofline": 8e-4, "pessimistic": 1e-3}}
    steps = {
        "check": {"cases": [{"name": "a", "wrong": ""}, {"name": "b", "wrong": "value"}]},
        "operators": about | {"rows": [{"method": "hawk", "length": 2048, "passes": passes}]},
        "decoding": about | {"rows": [{"method": "hawk", "context": 4096, "batch": 64, "passes": decoded}]},
        "model pile_hyena:153m": about | {"rows": [model], "roofline": rates},
        "plan pile_hyena:153m": {"plans": [plan]},
    }
    whole = {"steps": {name: {"results": found} for name, found in steps.items()}}
    shown = script.tables(whole)
    assert "2 x TPU v5 lite, JAX 9, Python 8." in shown
    assert "1 of 2 right; wrong: b" in shown
    assert "| hawk | 2,048 | 2 | 2 |" in shown
    assert "| hawk | 4,096 | 64 | 3 | 0.4 |" in shown
    line = next(
        line for line in shown.splitlines() if line.startswith("| pile_hyena:153m | 2 | 500,000 | 1.50")
    )
    assert line.endswith("| 0.8 to 1; differs most by products (+0.8 ms) |")  # 6 x 197e6 x 5e5 / (2 x 197e12)
    assert script._chip(whole) == "v5e"
    names = [step.name for step in script.steps(False, "v5e")]
    assert names.index("plan mamba2_130m") == names.index("model mamba2_130m") + 1
    started = {"start": {"seconds": 61.2}, "second start": {"seconds": 20.4}}
    assert "`): 61 s, and 20 s with its programs cached." in script.tables({"steps": started})


@pytest.mark.grid
@pytest.mark.packages
def test_the_notebook_runs(tmp_path):
    """Its cells in their order, small: a line after `!` is a command, in which {NAME} is a variable."""
    small = {"MINUTES = 5": "MINUTES = 0.05", "STEPS = 2000": "STEPS = 2"}
    cells = json.loads((FOLDER / "tpu.ipynb").read_text())["cells"]
    found: dict = {}
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment |= {"PYTHONPATH": str(FOLDER.parents[1])}
    before = os.getcwd()
    os.chdir(tmp_path)
    try:
        for cell in (cell for cell in cells if cell["cell_type"] == "code"):
            text = "".join(cell["source"])
            for name, value in small.items():
                text = text.replace(name, value)
            lines = [
                line for line in text.splitlines() if "IPython" not in line and not line.startswith("Image(")
            ]
            exec("\n".join(line for line in lines if not line.startswith("!")), found)
            for line in (line[1:] for line in lines if line.startswith("!") and "pip install" not in line):
                done = subprocess.run(
                    line.format(**found), shell=True, env=environment, capture_output=True, text=True
                )
                assert done.returncode == 0, done.stderr
    finally:
        os.chdir(before)
    assert (tmp_path / "constraints.txt").read_text().startswith("jax==")
    assert (tmp_path / "runs" / "loss.png").exists()
