"""Grids: which runs they describe, and what is refused."""

from pathlib import Path

import pytest

import hyena_jax
from hyena_jax.sweeps.grid import make_runs, parse_axis
from hyena_jax.system.errors import UserError

FOCAL = Path(__file__).parents[1] / "extensions" / "focal.py"
GET_CONFIG = """

def get_config():
    from hyena_jax.config import Experiment

    return Experiment(loss=FocalConfig())
"""


def test_every_combination_is_a_run():
    axes = {"seed": [0, 1], "variant": ["recall", "mqar"], "optimizer.learning_rate": [1e-3, "3e-3"]}
    runs = hyena_jax.make_runs("tasks", axes, ["--training.steps", "20", "--model.n-layers=1"])
    assert list(runs)[:3] == [
        "variant=recall,learning_rate=0.001,seed=0",
        "variant=recall,learning_rate=0.001,seed=1",
        "variant=recall,learning_rate=3e-3,seed=0",
    ]
    assert len(runs) == 8
    for name, run in runs.items():
        assert type(run.data).__name__.lower().startswith(name.partition("=")[2].partition(",")[0])
        assert f"{run.optimizer.learning_rate:g}" == ("0.003" if "3e-3" in name else "0.001")
        assert (run.seed, run.training.steps, run.model.n_layers) == (int(name[-1]), 20, 1)


def test_names_do_not_depend_on_the_order_of_the_axes():
    a, b = {"seed": [0], "model.d_model": [8], "data.seq_len": [12]}, {"data.seq_len": [12], "seed": [0]}
    assert list(make_runs("tasks:recall", a)) == ["seq_len=12,d_model=8,seed=0"]
    assert list(make_runs("tasks:recall", {**b, "model.d_model": [8]})) == list(make_runs("tasks:recall", a))


def test_fields_with_the_same_last_part_are_named_in_full():
    axes = {"optimizer.learning_rate": [1e-3], "optimizer.groups.0.learning_rate": [1e-4]}
    (name,) = make_runs("tasks:recall", axes)
    assert name == "optimizer.groups.0.learning_rate=0.0001,optimizer.learning_rate=0.001"


def test_an_axis_can_choose_parts_and_switches():
    name, values = parse_axis("model.pattern=hyena;hawk,hyena")
    assert (name, values) == ("model.pattern", ("hyena", "hawk,hyena"))
    runs = make_runs("tasks:recall", {name: values, "model.tied-head": ["true", "False"]})
    assert list(runs)[3] == "pattern=hawk_hyena,tied_head=False"
    assert [len(run.model.pattern) for run in runs.values()] == [1, 1, 2, 2]
    assert [run.model.tied_head for run in runs.values()] == [True, False, True, False]
    assert list(make_runs("tasks:recall", {name: [("hawk", "hyena")]})) == ["pattern=hawk_hyena"]


def test_a_config_file_with_its_own_parts_is_loaded_once(tmp_path, own_parts):
    """Loading it again would define its classes anew, and the runs before would hold the old ones."""
    file = tmp_path / "mine.py"
    file.write_text(FOCAL.read_text() + GET_CONFIG)
    runs = make_runs(str(file), {"seed": [0, 1]})
    assert [run.seed for run in runs.values()] == [0, 1]
    assert [run.loss for run in runs.values()] == [runs["seed=0"].loss] * 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed", "grid must be FIELD=VALUE"),
        ("seed=", "grid must be FIELD=VALUE"),
        ("seed=0,,1", "grid must be FIELD=VALUE"),
        ("=1", "grid must be FIELD=VALUE"),
        ("seed=1,1", "grid must be different values"),
        ("seed=1,01", "the grid describes the run 'seed=01' twice"),
        ("seed=a", "seed must be an int"),
        ("sed=1", "sed is not a flag of sweep; did you mean --seed"),
        ("model.d-model=0", "d-model must be"),
        ("model.pattern=hyenna", "'hyenna' is unknown .did you mean 'hyena'"),
        ("variant=hyena", "without a variant if variant is an axis"),
        ("data.vocab-size=2,12", "vocab-size must be"),
    ],
)
def test_wrong_axes_are_refused(text, message):
    with pytest.raises(UserError, match=message):
        make_runs("tasks:recall", dict([parse_axis(text)]))


def test_wrong_grids_are_refused():
    for axes, message in (
        ({}, "grid must be given"),
        ({"seed": []}, "seed must be at least one value"),
        ({"seed": 3}, "seed must be a list of values, got 3"),
        ({"seed": "012"}, "seed must be a list of values, got '012'"),
        ({"logging.sample_prompt": ["a b", "a_b"]}, "would have the same name, 'sample_prompt=a_b'"),
        ({"seed": range(20_000)}, "grid must be at most"),
    ):
        with pytest.raises(UserError, match=message):
            make_runs("tasks:recall", axes)
