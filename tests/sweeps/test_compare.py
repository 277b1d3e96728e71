"""Comparisons: which runs form a group, what the table says of them, and the figure."""

import csv
import dataclasses
import json
import math
from types import SimpleNamespace

import pytest

import hyena_jax
from hyena_jax import cli
from hyena_jax.config import (
    AttentionConfig,
    Experiment,
    HawkConfig,
    HyenaConfig,
    LanguageModelConfig,
    TextConfig,
)
from hyena_jax.data.tokenizers import BytesTokenizer
from hyena_jax.sweeps import figure
from hyena_jax.sweeps.compare import summarise, text_table
from hyena_jax.sweeps.figure import draw_curves, in_legend
from hyena_jax.sweeps.runs import group, is_better, read_runs
from hyena_jax.system.errors import UserError
from hyena_jax.tasks.recall import MQARConfig
from hyena_jax.training.folder import write_description

ACCURACY = {0: (0.2, 0.5, 0.4), 1: (0.3, 0.6, 0.8)}
"""At steps 10, 20 and 30, by seed."""


def experiment(mixer, seed=0, max_len=16, data=None):
    return Experiment(
        model=LanguageModelConfig(
            pattern=(mixer,), n_layers=1, d_model=8, d_ff=8, max_len=max_len, vocab_size=256
        ),
        data=data or MQARConfig(n_pairs=2, seq_len=16, batch_size=4),
        seed=seed,
    )


def write_run(workdir, experiment, values, begun=1000.0, pause_at=None):
    """A run folder without checkpoints: a row of training and one of evaluation at steps 10, 20, ..."""
    workdir.mkdir(parents=True)
    data = {"fingerprint": "f" * 64, "tokenizer": BytesTokenizer().to_json()}
    write_description(workdir, experiment, data)
    rows, now = [], begun
    for i, value in enumerate(values, start=1):
        now += 5.0 + (10_000.0 if i == pause_at else 0.0)
        rows.append({"step": 10 * i - 5, "time": now, "train/loss": 1.0})
        now += 5.0
        held_out = {"validation/loss": 1 - value, "validation/accuracy": value}
        rows.append({"step": 10 * i, "time": now, **held_out})
    return with_rows(workdir, rows)


def with_rows(workdir, rows):
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return workdir


@pytest.fixture
def run(tmp_path):
    """A run that has no rows yet."""
    return write_run(tmp_path / "run", experiment(HawkConfig()), ())


@pytest.fixture
def sweep(tmp_path):
    """Two seeds of attention and one of Hawk, which stopped early."""
    root = tmp_path / "sweep"
    for seed, values in ACCURACY.items():
        name = f"variant=attention,n_heads=2,seed={seed}"
        write_run(root / name, experiment(AttentionConfig(2), seed), values, pause_at=2 if seed else None)
    write_run(root / "variant=hawk,n_heads=2,seed=0", experiment(HawkConfig()), (0.9,))
    return root


def test_a_run_that_stopped_early_keeps_its_last_value_in_a_figure():
    values = {1: 3.0, 2: 2.0, 3: 1.0}, {2: 5.0}
    runs = [SimpleNamespace(tokens_per_step=10, held_out=lambda _, of=of: of) for of in values]
    found = figure._points(SimpleNamespace(runs=runs), "loss", "tokens")
    assert found == {10: [3.0], 20: [2.0, 5.0], 30: [1.0, 5.0]}


def test_runs_that_differ_in_their_seed_are_a_row(sweep):
    hawk, attention = hyena_jax.compare([sweep])
    assert [row.label for row in (hawk, attention)] == [
        "variant=hawk,n_heads=2",
        "variant=attention,n_heads=2",
    ]
    assert attention.last == (0.4, 0.8)
    assert attention.mean == pytest.approx(0.6)
    assert dataclasses.replace(attention, last=(0.1, 0.2, 0.6)).mean == pytest.approx(0.3)
    assert (attention.best, hawk.best) == (0.8, 0.9)
    assert (attention.n_runs, attention.steps, hawk.steps) == (2, (30, 30), (10,))
    # 30 steps of a second; the pause of one of them does not count, beyond the usual time of its steps.
    assert attention.seconds == pytest.approx(30.0)
    assert hawk.seconds == pytest.approx(10.0)


def test_sizes_are_those_of_one_sequence(sweep):
    """Attention keeps a key and a value of width 8 for each of 16 tokens, Hawk a state and some inputs."""
    hawk, attention = hyena_jax.compare([sweep])
    assert 0 <= attention.state_bytes - 2 * 16 * 8 * 4 <= 17 * 4  # positions may be part of it
    assert hawk.state_bytes < attention.state_bytes
    run = write_run(sweep.parent / "longer", experiment(AttentionConfig(2), max_len=32), (0.5,))
    (twice,) = hyena_jax.compare([run])
    assert twice.state_bytes - attention.state_bytes >= 2 * 16 * 8 * 4


def test_filters_that_all_sequences_share_are_not_state(tmp_path):
    """Hyena's evaluated filter is as long as the context, but the same for all sequences."""
    run = write_run(tmp_path / "hyena", experiment(HyenaConfig()), (0.5,))
    (row,) = hyena_jax.compare([run])
    inputs = 16 * 8 * 4
    assert inputs <= row.state_bytes < 3 * inputs


def test_of_losses_and_perplexities_the_smaller_is_better():
    assert [is_better(name, 1.0, 2.0) for name in ("loss", "perplexity", "accuracy")] == [True, True, False]


def test_a_loss_is_better_below(sweep):
    rows = hyena_jax.compare([sweep], metric="loss")
    assert [row.label[:12] for row in rows] == ["variant=hawk", "variant=atte"]
    assert rows[1].best == pytest.approx(0.2)


def test_groups_by_a_setting(sweep):
    for by, labels in (
        ("seed", ["seed=0", "seed=1"]),
        ("variant", ["variant=attention", "variant=hawk"]),
        ("model.pattern", ["model.pattern=attention", "model.pattern=hawk"]),
        ("n_heads", ["n_heads=2"]),
        ("--data.batch-size", ["data.batch_size=4"]),
    ):
        assert [members.label for members in group(read_runs([sweep])[0], (by,))] == labels
    rows = hyena_jax.compare([sweep], by="n_heads")
    assert rows[0].n_runs == 3


def test_folders_with_the_same_settings_keep_apart_by_their_paths(tmp_path):
    for folder, max_len in (("a", 16), ("b", 32)):
        write_run(tmp_path / folder / "run", experiment(AttentionConfig(2), max_len=max_len), (0.5,))
    rows = hyena_jax.compare([tmp_path / "a", tmp_path / "b" / "run", tmp_path / "a" / "run"])
    assert sorted(row.label for row in rows) == [str(tmp_path / "a" / "run"), str(tmp_path / "b" / "run")]


def test_tables_say_the_same(sweep, tmp_path, capsys):
    path = tmp_path / "figure.png"
    assert cli.main(["compare", str(sweep), "--output", str(path), "--x", "tokens"]) == 0
    out = capsys.readouterr().out
    assert "0.4000-0.8000" in out
    assert path.read_bytes().startswith(b"\x89PNG")
    lines = list(csv.DictReader((tmp_path / "figure.csv").read_text().splitlines()))
    assert [line["group"] for line in lines] == ["variant=hawk,n_heads=2", "variant=attention,n_heads=2"]
    assert float(lines[1]["mean accuracy"]) == pytest.approx(0.6)
    markdown = (tmp_path / "figure.md").read_text().splitlines()
    cells = [cell.strip() for cell in markdown[3].split("|")]
    assert cells[1:7] == ["variant=attention,n_heads=2", "2", "0.6000", "0.4000-0.8000", "0.8000", "30"]


@pytest.mark.grid
@pytest.mark.parametrize("n_groups", [1, 8, 9])
@pytest.mark.parametrize("x", ["step", "seconds"])
def test_a_figure_of_any_number_of_groups(tmp_path, n_groups, x):
    for i in range(n_groups):
        wider = experiment(AttentionConfig(2), max_len=16 + i)
        write_run(tmp_path / "runs" / f"$max_len={i}", wider, (0.1 * i, 0.5))
    groups = group(read_runs([tmp_path / "runs"])[0])
    draw_curves(tmp_path / "figure.svg", groups, "accuracy", x)
    text = (tmp_path / "figure.svg").read_text()
    assert text.count('<g id="axes_') >= (9 if n_groups == 9 else 1)
    assert len(text_table([summarise(members, "loss") for members in groups[:2]]).rows) == min(2, n_groups)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "DIR must be a folder"),
        (["empty"], "DIR must be the folder of a run"),
        ([], "DIR... must be given"),
        (["sweep", "--by", "varant"], "did you mean 'variant'"),
        (["sweep", "--best-by", "varant"], "did you mean 'variant'"),
        (["sweep", "--metric", "acuracy"], "did you mean 'accuracy'"),
        (["sweep", "--x", "time"], "--x 'time' is unknown"),
        (["sweep", "--output", "figure.gif"], "--output must be a file that ends in .png, .pdf, .svg"),
        (["sweep", "--output", "no/figure.png"], "--output must be a file in an existing folder"),
        (["sweep", "--output", "taken.png"], "--output must be a file that does not exist yet"),
        (["started"], "DIR must be a run with at least one evaluation"),
    ],
)
def test_wrong_commands_write_nothing(sweep, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "taken.md").write_text("mine")
    write_run(tmp_path / "started", experiment(AttentionConfig(2)), ())
    before = sorted(tmp_path.rglob("*"))
    assert cli.main(["compare", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("hyena-jax: error: ")
    assert error.count("\n") == 1
    assert message in error
    assert sorted(tmp_path.rglob("*")) == before


def test_runs_without_an_evaluation_are_left_out_of_a_sweep(sweep, capsys):
    """Such as one that diverged early, or has just begun."""
    write_run(sweep / "seed=7", experiment(AttentionConfig(2), seed=7), ())
    null = write_run(sweep / "seed=8", experiment(AttentionConfig(2), seed=8), ())
    with_rows(null, [{"step": 1, "time": 2.0, "validation/accuracy": None}])
    assert cli.main(["compare", str(sweep)]) == 0
    captured = capsys.readouterr()
    assert captured.err == "hyena-jax: not evaluated yet, and left out: seed=7, seed=8\n"
    assert "0.4000-0.8000" in captured.out


def test_a_name_that_is_not_utf_8_leaves_the_others(sweep, capsys):
    (sweep / "\udcff").mkdir()
    assert cli.main(["compare", str(sweep)]) == 0
    assert r"'\udcff' (a name that is not UTF-8)" in capsys.readouterr().err


def test_rows_without_a_loss(run):
    """The first value that all runs have is compared."""
    (row,) = hyena_jax.compare(with_rows(run, [{"step": 1, "time": 1.0, "validation/other": 2.5}]))
    assert (row.metric, row.last) == ("other", (2.5,))


@pytest.mark.grid
def test_many_evaluations_and_the_largest_numbers_are_drawn(run, tmp_path):
    losses = [1e308, -1e308, *range(50_000)]
    rows = [{"step": i + 1, "time": 1.0 + i, "validation/loss": loss} for i, loss in enumerate(losses)]
    hyena_jax.compare(with_rows(run, rows), output=tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000


@pytest.mark.parametrize("last", [430.0, -3600.0], ids=["a pause", "a clock set back"])
def test_a_jump_between_few_rows_does_not_count(run, last):
    times = {5: 100.0, 10: 105.0, 14: last}
    rows = [{"step": step, "time": time, "validation/loss": 1.0} for step, time in times.items()]
    (row,) = hyena_jax.compare(with_rows(run, rows))
    assert row.seconds == pytest.approx(14)


def test_rows_without_a_time_have_no_seconds(run):
    (row,) = hyena_jax.compare([with_rows(run, [{"step": 1, "validation/loss": 1.0}])])
    assert row.cells["seconds"] == "nan"


def test_a_last_value_that_is_not_finite_is_said_and_comes_last(sweep):
    row = {"step": 40, "time": 1e6, "validation/accuracy": None, "validation/loss": None}
    with (sweep / "variant=hawk,n_heads=2,seed=0" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    rows = hyena_jax.compare(sweep)
    assert [row.cells["mean"] for row in rows] == ["0.6000", "nan"]
    assert (rows[1].best, rows[1].steps) == (0.9, (40,))


def test_the_range_of_values_that_are_not_all_finite_is_not_known(tmp_path):
    for seed, last in enumerate((0.4, math.nan, 0.8)):
        write_run(tmp_path / f"_mixer,seed={seed}", experiment(HawkConfig(), seed), (last,))
    (row,) = hyena_jax.compare(tmp_path)
    assert row.cells["spread"] == "nan-nan"
    assert in_legend("_mixer").strip() == "_mixer"
    assert not in_legend("_mixer").startswith("_")


def test_no_folders_and_too_many_groups_are_refused(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="DIR must be at least one folder"):
        hyena_jax.compare([])
    assert figure.MAX_DRAWN == 64
    monkeypatch.setattr(figure, "MAX_DRAWN", 2)  # each group's model is traced
    for i in range(3):
        write_run(tmp_path / "runs" / f"max_len={i}", experiment(AttentionConfig(2), max_len=16 + i), (0.5,))
        if i == 1:
            hyena_jax.compare(tmp_path / "runs", output=tmp_path / "two.png")
    with pytest.raises(UserError, match="the groups of a figure must be at most 2: .*, got 3"):
        hyena_jax.compare(tmp_path / "runs", output=tmp_path / "figure.png")


def test_axes_without_a_place_for_a_run_are_refused(tmp_path):
    for size in (8, 64):
        usual = experiment(AttentionConfig(2))
        data = dataclasses.replace(usual.data, batch_size=size)
        write_run(tmp_path / "runs" / f"batch_size={size}", dataclasses.replace(usual, data=data), (0.5,))
    with pytest.raises(UserError, match="the runs of seed=0 differ in their tokens per step"):
        hyena_jax.compare(tmp_path / "runs", by="seed", x="tokens", output=tmp_path / "figure.png")
    (run,) = read_runs([tmp_path / "runs" / "batch_size=8"])[0]
    with_rows(run.workdir, run.rows[-1:])
    with pytest.raises(UserError, match="x must be 'step' where a run of .* has logged one step only"):
        hyena_jax.compare(run.workdir, x="seconds", output=tmp_path / "figure.png")


def test_a_run_of_another_metric_is_refused(sweep, run):
    with_rows(run, [{"step": 1, "time": 2.0, "validation/loss": 1.0}])
    assert {row.metric for row in hyena_jax.compare([sweep, run])} == {"loss"}
    with pytest.raises(UserError, match="metric 'accuracy' is unknown"):
        hyena_jax.compare([sweep, run], metric="accuracy")


def test_several_settings_make_groups_and_those_of_different_models_are_told(sweep, capsys):
    assert cli.main(["compare", str(sweep), "--by", "variant", "--by", "data.batch-size"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "variant=hawk,data.batch_size=4" in captured.out
    assert cli.main(["compare", str(sweep), "--by", "n_heads"]) == 0
    said = "n_heads=2 has runs of different models: sizes are those of variant=attention,n_heads=2,seed=0"
    assert capsys.readouterr().err == f"hyena-jax: {said}\n"


@pytest.mark.parametrize(("by", "end"), [(None, "learning_rate"), ("variant", "optimizer.learning_rate")])
def test_only_the_best_value_of_a_setting_is_shown(tmp_path, by, end):
    """Of each mixer that of the best mean over seeds, and not the one of the best run."""
    values = {("hawk", 1e-3): (0.5, 0.6), ("hawk", 2e-3): (0.2, 0.8), ("attention", 2e-3): (0.4, 0.3)}
    for (variant, rate), accuracies in values.items():
        for seed, accuracy in enumerate(accuracies):
            one = experiment({"hawk": HawkConfig(), "attention": AttentionConfig(2)}[variant], seed)
            one = dataclasses.replace(one, optimizer=dataclasses.replace(one.optimizer, learning_rate=rate))
            name = f"variant={variant},{end}={rate},seed={seed}"
            write_run(tmp_path / "runs" / name, one, (accuracy,))
    rows = hyena_jax.compare(tmp_path / "runs", by=by, best_by="optimizer.learning-rate")
    assert [row.label for row in rows] == [
        f"variant=hawk,{end}=0.001",
        f"variant=attention,{end}=0.002",
    ]
    assert [row.mean for row in rows] == pytest.approx([0.55, 0.35])


def test_figures_beside_each_other_share_their_tables_and_overwriting_is_asked_for(
    sweep, tmp_path, monkeypatch, capsys
):
    for name in ("a.png", "a.svg"):
        assert cli.main(["compare", str(sweep), "--output", str(tmp_path / name)]) == 0
    table = (tmp_path / "a.csv").read_text()
    other = ["compare", str(sweep), "--metric", "loss", "--output"]
    assert cli.main([*other, str(tmp_path / "a.pdf")]) == 2
    assert "a.csv'" in capsys.readouterr().err
    assert (tmp_path / "a.csv").read_text() == table
    assert not (tmp_path / "a.pdf").exists()
    assert cli.main([*other, str(tmp_path / "a.png")]) == 2
    assert cli.main([*other, str(tmp_path / "a.png"), "--overwrite"]) == 0
    assert "mean loss" in (tmp_path / "a.csv").read_text()
    meanwhile = lambda *_, **__: (tmp_path / "b.png").write_text("another's")  # noqa: E731
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", meanwhile)
    assert cli.main([*other, str(tmp_path / "b.png")]) == 2
    assert (tmp_path / "b.png").read_text() == "another's"


def test_language_models_are_compared_by_their_loss(tmp_path):
    text = TextConfig(path="text.txt", seq_len=16, batch_size=4)
    run = write_run(tmp_path / "run", experiment(HawkConfig(), data=text), (0.75,))
    (row,) = hyena_jax.compare(run)
    assert (row.metric, row.last) == ("loss", (0.25,))
