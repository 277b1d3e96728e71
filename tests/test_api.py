"""The API of `hyena_jax` as scripts and notebooks use it."""

import dataclasses
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

import hyena_jax
from hyena_jax import cli
from hyena_jax.system.errors import UserError

# Its tests share compiled programs, and a run with `test_cli`.
pytestmark = [pytest.mark.usefixtures("compiled_once"), pytest.mark.xdist_group("cli")]

TEXT = "the quick brown fox jumps over the lazy dog. " * 60
CELLS = [
    """
import sys
import hyena_jax
assert "jax" not in sys.modules
""",
    """
from dataclasses import dataclass
import flax.linen as nn
import jax.numpy as jnp

@dataclass(frozen=True)
class ShiftConfig(hyena_jax.MixerConfig):
    share: float = 0.5

class Shift(nn.Module):
    d_model: int
    max_len: int
    config: ShiftConfig
    n_layers: int = 1
    dtype: jnp.dtype | None = None

    @nn.compact
    def __call__(self, x, segment_ids=None, deterministic=True):
        before = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        return nn.Dense(self.d_model, name="out_proj")(x + self.config.share * (before - x))

hyena_jax.register("shift", ShiftConfig, Shift)
""",
    """
def experiment(steps):
    return hyena_jax.Experiment(
        model=hyena_jax.LanguageModelConfig(
            pattern=(ShiftConfig(share=0.25),), n_layers=1, d_model=8, d_ff=8, max_len=16
        ),
        data=hyena_jax.TextConfig(path="text.txt", seq_len=16, batch_size=4),
        training=hyena_jax.TrainingConfig(steps=steps, eval_every=2, checkpoint_every=2, log_every=1),
        parallel=hyena_jax.ParallelConfig(devices=1),
        logging=hyena_jax.LoggingConfig(tensorboard=False),
    )

made_before = experiment(4)
run = hyena_jax.train(made_before, "run")
""",
    """
run = hyena_jax.load_run("run")
assert run.step == 4
assert run.evaluate(batch_size=8)["loss"] > 0
for _ in range(2):
    (text,) = run.generate("the ", max_new_tokens=8, greedy=True)
    print("drawn:", repr(text))
assert [row["step"] for row in run.metrics() if "train/loss" in row] == [1, 2, 3, 4]
assert run.params["blocks_0"]["mixer"]["out_proj"]["kernel"].shape == (8, 8)
""",
]
AGAIN = """
run = hyena_jax.train(experiment(6), "run", quiet=True)
assert run.step == 6
assert run.experiment.model.pattern == (ShiftConfig(share=0.25),)
try:
    hyena_jax.train(made_before, "run", quiet=True)
except hyena_jax.UserError as error:
    print(error)
"""


def notebook(folder, *cells):
    """The output and standard error of cells, run in one `__main__` without a file."""
    code = "\n".join(f"exec({cell!r}, globals())" for cell in cells)
    done = subprocess.run([sys.executable, "-"], input=code, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.grid
def test_a_notebook_with_a_mixer_of_its_own(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    output, errors = notebook(tmp_path, *CELLS, CELLS[1], AGAIN)
    assert "this model has no decoding state (Shift): generate recomputes the context" in output
    assert "step      4   validation loss" in output
    assert "step      6" not in output
    drawn = [line for line in output.splitlines() if line.startswith("drawn:")]
    assert len(drawn) == 2
    assert len(set(drawn)) == 1
    assert "ShiftConfig was defined again since this config was made; make the config again" in output
    note = "hyena-jax: Shift has no decoding state: the context is recomputed for every token\n"
    assert errors == note
    with pytest.raises(UserError, match="mixer shift must be registered: register it before"):
        hyena_jax.load_run(tmp_path / "run")


@pytest.fixture
def run(command_run):
    return hyena_jax.load_run(command_run / "run")


@pytest.mark.wide
def test_a_run_outside_the_main_thread_is_quiet_when_asked_and_loads_by_step(tmp_path, capsys):
    """There, where some notebooks run, signals cannot be handled."""
    (tmp_path / "text.txt").write_text(TEXT)
    experiment = hyena_jax.Experiment(
        model=hyena_jax.LanguageModelConfig(
            pattern=(hyena_jax.FIRConfig(),), n_layers=1, d_model=8, d_ff=8, max_len=16
        ),
        data=hyena_jax.TextConfig(path=str(tmp_path / "text.txt"), seq_len=16, batch_size=4),
        training=hyena_jax.TrainingConfig(steps=4, eval_every=2, checkpoint_every=2, log_every=2),
        parallel=hyena_jax.ParallelConfig(devices=1),
        logging=hyena_jax.LoggingConfig(tensorboard=False),
    )
    with ThreadPoolExecutor(1) as thread:
        run = thread.submit(hyena_jax.train, experiment, str(tmp_path / "run"), quiet=True).result()
    assert (run.step, run.experiment.model.vocab_size) == (4, 256)
    earlier = hyena_jax.load_run(run.workdir, 2)
    assert (earlier.step, hyena_jax.load_run(run.workdir, "best").step) == (2, 4)
    assert jax.tree.map(np.shape, earlier.params) == jax.tree.map(np.shape, run.params)
    assert capsys.readouterr() == ("", "")


def test_evaluate_and_metrics_agree(run, tmp_path):
    values = run.evaluate()
    (row,) = [row for row in run.metrics() if row["step"] == 6 and "validation/loss" in row]
    assert values["loss"] == pytest.approx(row["validation/loss"], abs=1e-6)
    assert values["tokens"] == run.data.n_held_out
    assert run.data is run.data
    (tmp_path / "other.txt").write_text("a quick dog " * 30)
    assert run.evaluate(tmp_path / "other.txt", batch_size=3)["tokens"] == 12 * 30 - 1


@pytest.mark.wide
def test_generate_is_the_command(run, tmp_path, capsys):
    output = tmp_path / "out.jsonl"
    arguments = "--max-new-tokens 6 --seed 3 --num-samples 2 --top-k 5 --top-p 0.5 --stop z --output".split()
    command = ["generate", str(run.workdir), "--prompt", "the", "a q", *arguments, str(output)]
    assert cli.main(command) == 0
    capsys.readouterr()
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    options = {"top_k": 5, "top_p": 0.5, "seed": 3, "num_samples": 2, "stop": "z"}
    assert run.generate(["the", "a q"], 6, **options) == [line["text"] for line in lines]
    rule = hyena_jax.SamplingRule(top_k=5, top_p=0.5)
    request = hyena_jax.Request(6, rule, seed=3, n_samples=2, stop_tokens=(ord("z"),))
    rows = run.continuations([list(b"the"), "a q"], request)
    assert [row.tokens.tolist() for row in rows] == [line["tokens"] for line in lines]
    for row, line in zip(rows, lines, strict=True):
        np.testing.assert_allclose(row.log_probs, line["log_probs"], atol=1e-5)


def without_tokenizer(run):
    return dataclasses.replace(run, folder=run.folder._replace(encoding=None))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda run: hyena_jax.load_run(run.workdir / "none"), "holds no run: there is no config.json"),
        (lambda run: hyena_jax.load_run(run.workdir, "lates"), "step must be 'latest', 'best' or one of"),
        (lambda run: hyena_jax.load_run(run.workdir, 4), r"one of the saved \[6, 3\], got '4'"),
        (lambda run: hyena_jax.load_run(run.workdir, -1), "step must be 'latest', 'best' or one of"),
        (lambda run: hyena_jax.train("quickstart", run.workdir), "experiment must be an .*, got 'str'"),
        (lambda run: run.generate("the", 0), "max_new_tokens must be at least 1, got 0"),
        (lambda run: run.generate([], 2), "prompts must be at least one"),
        (lambda run: run.generate("the", 2, stop=""), "stop must be at least one character"),
        (lambda run: run.generate("the", 2, top_p=2.0), r"top_p must be in \(0, 1\], got 2.0"),
        (lambda run: run.generate("the", 2, greedy=True, top_k=2), "greedy must be given without"),
        (lambda run: without_tokenizer(run).generate("the"), "workdir must be a run on text, or"),
        (lambda run: run.generate([1, 2], 2), "prompt must be integers .length."),
        (lambda run: run.evaluate(run.workdir / "none"), "path must be an existing .*none'"),
        (lambda run: hyena_jax.load_config("quickstar"), "did you mean 'quickstart'"),
    ],
)
def test_what_is_wrong_is_one_line(run, call, message):
    with pytest.raises(UserError, match=message) as found:
        call(run)
    assert "\n" not in str(found.value)


def test_names():
    names = dir(hyena_jax)
    assert {"train", "load_run", "register", "HyenaConfig", "HYENA_GROUPS", "UserError"} <= set(names)
    assert {"require", "load", "models"}.isdisjoint(hyena_jax.__all__)
    assert all(getattr(hyena_jax, name) is not None for name in hyena_jax.__all__)
    assert hyena_jax.load_config("quickstart") == hyena_jax.load_config("quickstart")
    with pytest.raises(AttributeError, match="no attribute 'HyenaConfigs'"):
        _ = hyena_jax.HyenaConfigs
    with pytest.raises(ImportError):
        from hyena_jax import nothing  # noqa: F401
