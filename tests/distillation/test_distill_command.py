"""The command line, on a run that trains for a second."""

import json

import pytest

from hyena_jax import cli

pytestmark = pytest.mark.xdist_group("distill_command")  # its tests share a run
TEXT = "the quick brown fox jumps over the lazy dog. " * 60
SMALL = """
    --model.n-layers 1 --model.d-model 8 --model.d-ff 8 --model.max-len 16
    --data.seq-len 16 --data.batch-size 4 --parallel.devices 1
    --training.steps 6 --training.eval-every 3 --training.checkpoint-every 3 --training.log-every 2
    --logging.sample-tokens 0 --no-logging.tensorboard
""".split()


def run(*arguments: object) -> int:
    return cli.main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def workdir(tmp_path_factory, text):
    folder = tmp_path_factory.mktemp("runs") / "run"
    width = ["--model.pattern.0.filter.width", 4]
    assert run("train", "quickstart", "--workdir", folder, "--data.path", text, *SMALL, *width) == 0
    return folder


def evaluated(folder, capsys) -> dict[str, float]:
    capsys.readouterr()
    assert run("eval", folder) == 0
    words = capsys.readouterr().out.split()
    return {name: float(words[words.index(name) + 1]) for name in ("loss", "accuracy")}


@pytest.mark.grid
def test_the_new_folder_is_a_run(workdir, tmp_path, capsys):
    folder = tmp_path / "new" / "small"
    assert run("distill", workdir, "--output", folder, "--state-size", 8, "--max-filter-error", 0) == 0
    printed = capsys.readouterr().out
    for words in ("Hankel singular values", "Validation loss and KL", "layer 0, filter 0", "state size 8"):
        assert words in printed
    assert "state size 8 keeps to the bound: the loss changes by" in printed
    off = "1 of 1 filter is off by more than 0 (the model hardly uses what is lost): layer 0, filter 0"
    assert off in printed
    results = json.loads((folder / "distillation.json").read_text())
    assert results["keeps_to_the_bound"]
    assert (results["state_size"], results["n_modes"], results["step"]) == (8, 4, 6)
    assert results["command"].startswith(f"hyena-jax distill {workdir}")
    assert results["after"]["kl"] >= 0
    assert (folder / "distillation.png").stat().st_size > 1000
    assert [path.name for path in folder.parent.iterdir()] == ["small"]  # no draft is left
    for which, at in (("before", workdir), ("after", folder)):
        assert evaluated(at, capsys)["loss"] == pytest.approx(results[which]["loss"], rel=1e-5)
    assert run("generate", folder, "--prompt", "the", "--max-new-tokens", 20, "--greedy") == 0
    assert capsys.readouterr().out.startswith("the")
    assert run("train", folder / "config.py", "--workdir", folder, "--training.steps", 2) == 0
    assert "step      2   validation loss" in capsys.readouterr().out
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"0", "2"}


@pytest.mark.grid
def test_auto_takes_the_smallest_size_within_the_bound(workdir, tmp_path, capsys):
    def results(name):
        return json.loads((tmp_path / name / "distillation.json").read_text())

    assert run("distill", workdir, "--output", tmp_path / "a", "--max-loss-increase", 10) == 0
    assert results("a")["state_size"] == 4
    code = run("distill", workdir, "--output", tmp_path / "b", "--max-loss-increase", 0, "--step", "best")
    captured = capsys.readouterr()
    assert "Validation loss and KL" in captured.out
    if code == 0:  # rounding may go either way
        assert results("b")["after"]["loss"] <= results("a")["before"]["loss"]
    else:
        assert code == 1
        assert "no state size up to 16 keeps the loss within 0 nats" in captured.err
        assert not (tmp_path / "b").exists()


@pytest.mark.grid
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("{run} --output {new} --state-size 7", "--state-size must be even and at least 2, or 'auto', got 7"),
        ("{run} --output {new} --state-size 18", "--state-size must be at most the run's max_len=16, got 18"),
        ("{run} --output {new} --state-size few", "few"),
        ("{run} --output {run}", "--output must be a new or an empty folder"),
        ("{run} --output {text}", "--output must be a new or an empty folder"),
        ("{run} --output {text}/new", "in a folder that can be written, but '{text}' is none"),
        ("{run} --output {new} --step 5", "or one of the saved [6, 3], got '5'"),
        ("{run} --output {new} --max-loss-increase -1", "--max-loss-increase must be at least 0, got -1.0"),
        ("{run} --output {new} --path {new}", "--path must be an existing"),
        ("{tmp} --output {new}", "holds no run"),
        ("{run}", "--output"),
    ],
)
def test_wrong_input_is_one_line_and_code_2(arguments, message, workdir, text, tmp_path, capsys):
    names = {"run": workdir, "text": text, "new": tmp_path / "new", "tmp": tmp_path}
    capsys.readouterr()
    assert run("distill", *(argument.format(**names) for argument in arguments.split())) == 2
    captured = capsys.readouterr()
    output = " ".join((captured.out + captured.err).split())
    assert message.format(**names) in output
    assert "Traceback" not in output
    assert list(tmp_path.iterdir()) == []
