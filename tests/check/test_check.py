"""The check finds wrong values, and says so in its exit code, its lines and its file."""

import json
import os
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import in_grid

from hyena_jax import check, cli
from hyena_jax.check.facts import BOUNDS, Fact, against_oracle, largest
from hyena_jax.check.training import training_cases
from hyena_jax.config import FILTER_CONFIGS, MIXER_CONFIGS
from hyena_jax.ops import online_conv
from hyena_jax.training import step


def errors(case) -> dict[str, Fact]:
    (outcome,) = check.run({"case": case}, 60)
    assert outcome.fault is None
    return {fact.what: fact for fact in outcome.facts}


def exact(x):
    return np.sin(np.float64(x)) * np.arange(x.size)


@pytest.mark.parametrize(
    ("form", "wrong"),
    [
        (lambda x: jnp.sin(x) * jnp.arange(x.size), set()),
        (lambda x: jnp.sin(x) * jnp.arange(x.size) * (1 + 1e-4), {"value", "gradient", "forward mode"}),
        (lambda x: jnp.sin(x) * jnp.nan, {"value", "gradient", "forward mode"}),
        (lambda x: jax.lax.stop_gradient(jnp.sin(x)) * jnp.arange(x.size), {"gradient", "forward mode"}),
    ],
)
def test_values_and_derivatives_of_both_modes_are_compared(form, wrong):
    x = np.random.default_rng(0).standard_normal(5).astype(np.float32)
    found = errors(partial(against_oracle, form, exact, (x,)))
    assert {what for what, fact in found.items() if not fact.holds} == wrong
    assert found.keys() == {"value", "gradient", "forward mode"}


def test_a_wrong_reverse_mode_alone_is_found():
    @jax.custom_vjp
    def form(x):
        return jnp.sin(x) * jnp.arange(x.size)

    form.defvjp(lambda x: (form(x), x), lambda x, y_bar: (2 * y_bar * jnp.cos(x) * jnp.arange(x.size),))
    x = np.random.default_rng(0).standard_normal(5).astype(np.float32)
    found = errors(partial(against_oracle, form, exact, (x,), has_forward_mode=False))
    assert [what for what, fact in found.items() if not fact.holds] == ["gradient"]


def test_every_mixer_config_and_layout_has_a_case():
    names = check.cases().keys()
    assert names >= MIXER_CONFIGS.keys() | {f"filter: {name}" for name in FILTER_CONFIGS}
    assert {"fused_conv", "gpu_recurrence", "fused_delta_rule with decays of each channel"} <= names
    not_causal = {name.partition(",")[0] for name in names if name.endswith(", not causal")}
    assert not_causal == {"hyena", "gated_hyena", "attention", "fastmax"}
    assert {"training: pmap over 4 devices", "training: fsdp 4", "training: data 2 x sequence 2"} <= names
    blocks = {name.removeprefix("model: ") for name in names if name.startswith("model: ")}
    assert {"griffin", "olmo_hybrid", "images", "griffin:recurrentgemma_2b"} <= blocks


@pytest.mark.wide
@pytest.mark.parametrize("name", ["online_conv", "online_conv in blocks of 48"])
def test_tiles_that_come_too_late_are_found(name, monkeypatch):
    assert errors(check.cases()[name])["decoding"].holds
    monkeypatch.setattr(online_conv, "due_size", lambda n: 0)
    assert not errors(check.cases()[name])["decoding"].holds


@pytest.mark.wide
@pytest.mark.parametrize("name", ["attention", *in_grid("hawk", "fir")])
def test_a_right_mixer_holds_and_all_its_properties_are_compared(name):
    found = errors(check.cases()[name])
    assert all(fact.holds for fact in found.values())
    kept_apart = {"documents"} if name != "fir" else set()
    assert found.keys() == {"value", "gradient", "bfloat16", "decoding", "bfloat16 decoding"} | kept_apart


@pytest.mark.wide
def test_one_mask_of_dropout_on_two_devices_is_found(monkeypatch):
    case = dict(training_cases())["training: dropout on two devices"]
    assert errors(case)["value"].holds
    monkeypatch.setattr(step.jax.lax, "axis_index", lambda axis: 0)
    assert errors(case)["value"].note == "both devices drop the same activations"


@pytest.mark.grid
@pytest.mark.parametrize("name", ["pmap over 4 devices", "fsdp 4", "data 2 x sequence 2"])
def test_a_step_on_several_devices_moves_parameters_as_on_one(name):
    found = errors(dict(training_cases())[f"training: {name}"])
    assert all(fact.holds for fact in found.values())
    assert found.keys() == {"value", "update"}


def test_the_worst_comes_first_and_the_rest_is_named(monkeypatch, tmp_path, capsys):
    def fails():
        raise RuntimeError("Mosaic refuses this\nand says why")

    found = {
        "right": lambda: iter([Fact("value", 1e-9), Fact("same bits", 0.0, "an operation is random here")]),
        "wrong": lambda: iter([Fact("value", 1e-3)]),
        "worse": lambda: iter([Fact("gradient", 1.0)]),
        "nan": lambda: iter([Fact("decoding", float("nan"))]),
        "broken": fails,
    }
    monkeypatch.setattr(check, "cases", lambda: found)
    assert cli.main(["check", "--output", str(tmp_path / "a")]) == 1
    out, err = capsys.readouterr()
    lines = [line.removeprefix("hyena-jax: error: ").split(":")[0] for line in err.splitlines()]
    assert {*lines[:2]} == {"nan", "broken"}
    assert lines[2:] == ["worse", "wrong"]
    assert "broken: Mosaic refuses this\n" in err
    assert f"wrong: value is wrong by 1.0e-03, more than {BOUNDS['value']:g}\n" in err
    assert "right: an operation is random here\n" in out
    assert "1 of 5 cases are right" in out
    kept = json.loads((tmp_path / "a" / "check.json").read_text())["cases"]
    assert [case["name"] for case in kept] == [*found]
    assert [case["errors"] for case in kept][3:] == [{"decoding": None}, {}]
    assert cli.main(["check", "--only", "right", "--output", str(tmp_path / "a")]) == 0
    assert cli.main(["check", "--minutes", "1e-9"]) == 0
    assert "left out after 1e-09 minutes: right, wrong, worse, nan, broken" in capsys.readouterr().out


def test_a_process_that_dies_ends_the_check():
    with pytest.raises(OSError, match="a process of the check died"):
        list(check.run_beside(["fft_conv"], 60, 1, partial(os._exit, 1)))


@pytest.mark.grid
@pytest.mark.faults
def test_processes_beside_each_other_find_the_same(tmp_path):
    command = [sys.executable, "-m", "hyena_jax", "check", "--only", "recurrence", "--output", tmp_path]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stderr) == (0, "")
    names = [name for name in check.cases() if "recurrence" in name]
    found = json.loads((tmp_path / "check.json").read_text())["cases"]
    assert [case["name"] for case in found] == names
    (direct,) = check.run({"loop_recurrence": check.cases()["loop_recurrence"]}, 60)
    theirs = next(case["errors"] for case in found if case["name"] == "loop_recurrence")
    assert theirs.keys() == {fact.what for fact in direct.facts}


def test_wrong_arguments_are_refused(tmp_path, capsys):
    (tmp_path / "mine").write_text("")
    assert cli.main(["check", "--only", "hyenna"]) == 2
    assert "--only 'hyenna' is unknown (did you mean 'hyena'?)" in capsys.readouterr().err
    assert cli.main(["check", "--output", str(tmp_path)]) == 2
    assert "--output" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_an_error_that_is_not_a_number_is_the_largest():
    assert np.isnan(largest([1.0, np.nan, 2.0]))
