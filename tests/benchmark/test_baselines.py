"""The plain PyTorch and naive Flax mixers of `experiments/benchmarks` compute what ours do."""

import importlib
import json
import sys
from pathlib import Path

import pytest
from grid import grid_but, in_grid

from hyena_jax.benchmark import timing
from hyena_jax.config.flags import read_flags
from hyena_jax.system.errors import UserError

sys.path.append(str(Path(__file__).parents[2] / "experiments" / "benchmarks"))

import baselines
import flax_baseline


@pytest.mark.grid
@pytest.mark.parametrize("name", grid_but(flax_baseline.MIXERS, "hyena"))
def test_the_naive_flax_versions_pass(name):
    baselines.verify_baseline(name, name, flax_baseline, d_model=8, dtype="float32")


@pytest.mark.parametrize("name", ["hyena", *in_grid("fir", "attention", "hawk")])
def test_the_torch_versions_pass(name):
    pytest.importorskip("torch", reason="needs PyTorch")
    import torch_baseline

    assert name in torch_baseline.MIXERS
    baselines.verify_baseline(name, name, torch_baseline, d_model=8, dtype="float32")


def run(*arguments) -> int:
    quick = ["--lengths", "8", "--d-model", "8", "--seconds", "0.01", "--least-runs", "2"]
    return read_flags(baselines.BenchBaselines, "baselines.py", [*arguments, *quick]).run([])


@pytest.fixture(autouse=True)
def _small_roofline(monkeypatch):
    monkeypatch.setattr(timing, "MATMUL_SIZE", {"cpu": 8})
    monkeypatch.setattr(timing, "COPY_BYTES", {"cpu": 1024})
    monkeypatch.setattr(timing, "ROOFLINE_SECONDS", 0.01)


@pytest.mark.grid
def test_naive_flax_beside_ours(tmp_path, capsys):
    folder = tmp_path / "new"
    assert run("--mixers", "attention", "aft_simple", "--baseline", "flax", "--output", str(folder)) == 0
    assert "attention (flax)" in capsys.readouterr().out
    results = json.loads((folder / "results.json").read_text())
    assert results["command"].startswith("python ")
    ours, naive, other = results["rows"]
    assert [row["method"] for row in (ours, naive, other)] == ["attention", "attention (flax)", "aft_simple"]
    assert naive["mixer"] == "attention"
    assert naive["n_params"] == ours["n_params"]
    for part, measured in naive["passes"].items():
        assert measured["flops"] == ours["passes"][part]["flops"]
        assert measured["compiled_bytes"] > 0


def test_torch_beside_ours(capsys):
    pytest.importorskip("torch", reason="needs PyTorch")
    assert run("--mixers", "attention", "aft_simple", "--baseline", "torch") == 0
    out = capsys.readouterr().out
    assert "attention (torch)" in out
    assert "aft_simple (torch)" not in out


def test_torch_that_is_not_installed_is_named(monkeypatch):
    def absent(name):
        raise ModuleNotFoundError(name="torch")

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(UserError, match="torch is not installed: pip install torch"):
        run("--baseline", "torch")
