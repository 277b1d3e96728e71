"""Parts from outside the package are trained, killed, resumed and evaluated by the same commands."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hyena_jax import cli
from hyena_jax.training.metrics import read_rows

EXTENSIONS = Path(__file__).parent / "extensions"
pytestmark = pytest.mark.usefixtures("own_parts")
SMALL = """
    --data.batch-size 4 --training.steps 6 --training.eval-every 3 --training.eval-windows 4
    --training.checkpoint-every 2 --training.log-every 1 --no-logging.tensorboard
""".split()
NARROW = "--model.n-layers 1 --model.d-model 8 --model.d-ff 16 --model.max-len 16".split()
ATTENTION = [*NARROW, "--model.pattern", "attention", "--model.pattern.0.n-heads", "2"]  # compiles fastest
# The flags that choose the part of each file.
FLAGS = {
    "token_shift": ["--model.pattern", "token_shift,hawk", "--model.n-layers", "2", *NARROW[2:]],
    "ema": ["--model.pattern", "ema", "--model.pattern.0.decay", "0.8", *NARROW],
    "ema_by_hand": ["--model.pattern", "ema_by_hand", *NARROW],
    "gru_cell": ["--model.pattern", "gru_cell", *NARROW],
    "running_maximum": ["--model.pattern", "running_maximum", *NARROW],
    "power_law": ["--model.pattern.0.filter", "power_law", *NARROW],
    "sign_descent": ["--optimizer", "sign_descent", "--optimizer.learning-rate", "1e-3", *ATTENTION],
    "word_starts": ["--data", "word_starts", *ATTENTION],
    "gru": ["--model", "gru", "--model.width", "8", "--model.max-len", "16"],
    "csv_file": ["--logging.trackers", "csv_file", *ATTENTION],
    "focal": ["--loss", "focal", "--loss.gamma", "1", "--metrics", "accuracy,margin", *ATTENTION],
    "drawn_rows": ["--data", "drawn_rows", *ATTENTION],
    "spelled_numbers": ["--data", "spelled_numbers", *ATTENTION],
    "sort_digits": ["--model.n-layers", "1", "--model.d-model", "8"],
}
TEXT = ["--logging.sample-tokens", "0", "--data.seq-len", "16", "--data.path"]
# The flags that follow SMALL, where they are not those of a text.
OTHERS = {
    "drawn_rows": ["--logging.sample-tokens", "0"],
    "spelled_numbers": ["--logging.sample-tokens", "5"],  # continues the first held-out row
    "sort_digits": [],
}
# The command, killed while it logs the fourth step, after the checkpoint of the second was begun.
KILLED = """
import os, signal, sys
from hyena_jax import cli
from hyena_jax.training.metrics import MetricsLog

write = MetricsLog.write
def write_or_die(self, step, values):
    if step == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    write(self, step, values)
MetricsLog.write = write_or_die
cli.main(sys.argv[1:])
"""


def losses(run: Path) -> list[float]:
    return [row["train/loss"] for row in read_rows(run / "metrics.jsonl") if "train/loss" in row]


@pytest.fixture
def file(request, tmp_path) -> Path:
    """A copy of the file of a part."""
    copy = tmp_path / "my parts" / f"{request.param}.py"
    copy.parent.mkdir()
    shutil.copy(EXTENSIONS / copy.name, copy)
    return copy


def command(file: Path, run: str) -> list[str]:
    """Trains with the part in a file, in a folder beside its own."""
    text = file.parents[1] / "text.txt"
    text.write_text("the wall is white and the hall is wide, said the owl. " * 40)
    config = "tasks:sort_digits" if file.stem == "sort_digits" else "quickstart"
    others = OTHERS.get(file.stem, [*TEXT, str(text)])
    flags = ["--plugin", str(file), *FLAGS[file.stem], *SMALL, *others]
    return ["train", config, *flags, "--workdir", str(text.parent / run)]


@pytest.mark.grid
@pytest.mark.parametrize("file", FLAGS, indirect=True)
def test_a_part_trains_and_is_evaluated(file, tmp_path, capsys, monkeypatch):
    assert cli.main(command(file, "run")) == 0
    run = str(tmp_path / "run")
    assert cli.main(["eval", run, "--plugin", str(file)]) == 0
    captured = capsys.readouterr()
    assert "loss" in captured.out
    assert "changed" not in captured.err

    monkeypatch.undo()  # as in a new process, no part of the user's is registered
    trains_with_it = file.stem == "csv_file"  # a tracker
    needs_it = ["train", "--resume"] if trains_with_it else ["eval"]
    assert cli.main([*needs_it, run]) == 2
    message = f"must be registered: add --plugin '{file}' (in Python, import it first)"
    assert message in capsys.readouterr().err


@pytest.mark.grid
@pytest.mark.parametrize("file", ["sign_descent", "csv_file", "drawn_rows"], indirect=True)
def test_a_part_continues_after_a_kill_as_if_it_had_not_been(file, tmp_path, capsys):
    """An optimizer with a state, a tracker, and rows that are drawn."""
    assert cli.main(command(file, "whole")) == 0
    killed = subprocess.run([sys.executable, "-c", KILLED, *command(file, "killed")], capture_output=True)
    assert killed.returncode == -9, killed.stderr.decode()
    assert len(losses(tmp_path / "killed")) < 6
    assert cli.main(command(file, "killed")) == 0
    assert "continuing after step 2" in capsys.readouterr().out
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    file.write_text(file.read_text() + "# The same code, in other bytes.\n")
    assert cli.main(["eval", str(tmp_path / "killed"), "--plugin", str(file)]) == 0
    assert f"changed since the run was trained: the code of plugin '{file}'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("return state, y[:, 0]", "return y[:, 0], state", r"mixer EMA must be an array .*, got 'EMAState'"),
        ("return state, y[:, 0]", "return state, y", "of mixer EMA must be of the shape of its input"),
        ("last), y.astype", "last.astype(jnp.bfloat16)), y.astype", "the state that prefill returns must be"),
        (
            "return self.prefill(self.init_state(len(x), self.max_len), x)[1]",
            "self.prefill(self.init_state(len(x), self.max_len), x)",
            r"the output of mixer EMA must be an array \[B, L, D\], got 'NoneType'",
        ),
        ("x)[1]", "x)[1].astype(int)", "the output of mixer EMA must be real floating point, got 'int32'"),
        (
            "constant(self.config.decay), (self.d_model,))",
            "zeros, (self.d_model,), complex).real",
            "the dtype of parameter blocks_0/mixer/decay must be real floating point .*, got 'complex64'",
        ),
    ],
)  # fmt: skip
def test_a_faulty_mixer_is_one_line_before_anything_is_trained(right, wrong, message, tmp_path, capsys):
    """Also the faults of its decoding, which would else appear after the training."""
    file, text = tmp_path / "ema_by_hand.py", (EXTENSIONS / "ema_by_hand.py").read_text()
    assert right in text
    file.write_text(text.replace(right, wrong))
    run = tmp_path / "run"
    flags = ["--plugin", str(file), "--model.pattern", "ema_by_hand", "--model.n-layers", "1"]
    assert cli.main(["train", "tasks:majority", *flags, "--workdir", str(run)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error)
    assert not run.exists()


def test_a_mixer_by_the_name_of_another_variant_is_refused(tmp_path, capsys):
    """The variant is a pattern of built-in mixers."""
    file = tmp_path / "ema.py"
    file.write_text((EXTENSIONS / "ema.py").read_text().replace('"ema"', '"griffin"'))
    command = ["train", "shakespeare_cpu:griffin", "--plugin", str(file), "--workdir", str(tmp_path / "run")]
    assert cli.main(command) == 2
    assert "'griffin' is this config's own; register your mixer by another name" in capsys.readouterr().err


def test_each_file_is_short():
    for file in EXTENSIONS.glob("*.py"):
        assert len(file.read_text().splitlines()) <= 60, file
