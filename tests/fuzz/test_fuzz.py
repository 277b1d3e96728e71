"""Generated configs and command lines: each builds, or is refused in a line. Run with -m fuzz."""

import contextlib
import io
import signal
from collections.abc import Iterable, Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fuzz.command_lines import command_lines
from fuzz.experiments import Plan, experiments
from hypothesis import HealthCheck, given, settings
from tolerances import assert_close

from hyena_jax import cli, models
from hyena_jax.config import Experiment, ImageClassifierConfig, decode, encode
from hyena_jax.system.errors import UserError
from hyena_jax.training import setup
from hyena_jax.training.optimizer import make_optimizer
from hyena_jax.training.step import init_params, init_state, make_train_step

pytestmark = [pytest.mark.fuzz, pytest.mark.xdist_group("fuzz")]

CONFIGS, COMMANDS, STEPS = 50, 100, 12
SECONDS = 180
"""Longest that a case may take."""
MAX_PARAMETERS = 200_000
FUZZ = settings(
    deadline=None,
    derandomize=True,
    database=None,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)


class Hangs(BaseException):
    """A case took too long. A BaseException, so that the code under test does not catch it."""


class Reached(BaseException):
    """A command came as far as a stub."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Hangs(f"more than {seconds} s")

    usual = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, usual)


def assert_clear(message: str) -> None:
    assert message.strip()
    assert "Traceback" not in message
    assert len(message) < 3000


def outcome_of(command: Iterable, seconds: float = SECONDS) -> tuple[int | str, str]:
    """The exit code of a command, or `reached`, and what it printed: one line of error if it failed."""
    output = io.StringIO()
    with time_limit(seconds), contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            code = cli.main([str(word) for word in command])
        except Reached:
            code = "reached"
    printed = output.getvalue()
    assert "Traceback" not in printed, printed
    errors = [line for line in printed.splitlines() if line.startswith("hyena-jax: error: ")]
    assert code in ((2, 3) if errors else (0, "reached")), printed
    assert len(errors) <= 1, printed
    for line in errors:
        assert_clear(line)
    return code, printed


def shapes_of(experiment: Experiment) -> tuple:
    """The shapes of parameters and logits of one batch."""
    model = models.build(experiment.model)
    params = jax.eval_shape(lambda: init_params(model, experiment.seed))
    logits = jax.eval_shape(
        lambda p, x: model.apply({"params": p}, x), params, batch_of(experiment)["inputs"]
    )
    return params, logits


def batch_of(experiment: Experiment) -> dict:
    """The shapes of two rows as a model of this experiment reads them."""
    config = experiment.model
    if isinstance(config, ImageClassifierConfig):
        inputs = jax.ShapeDtypeStruct((2, *config.image_size, config.channels), jnp.float32)
        return {"inputs": inputs, "targets": jax.ShapeDtypeStruct((2,), jnp.int32)}
    tokens = jax.ShapeDtypeStruct((2, experiment.data.seq_len), jnp.int32)
    return {"inputs": tokens, "targets": tokens}


def complete(experiment: Experiment) -> bool:
    """Whether the model needs nothing of the data."""
    config = experiment.model
    if isinstance(config, ImageClassifierConfig):
        return None not in (config.image_size, config.channels, config.n_classes)
    return config.vocab_size is not None


def train_one_step(experiment: Experiment) -> dict:
    """The metrics of the first step on random data, in documents if the mixers keep them apart."""
    model = models.build(experiment.model)
    params = init_params(model, experiment.seed)
    optimizer = make_optimizer(experiment.optimizer, params, experiment.training.steps)
    generator = np.random.default_rng(0)
    shapes = batch_of(experiment)
    classes = getattr(experiment.model, "vocab_size", None) or experiment.model.n_classes
    batch = {
        name: generator.integers(0, classes, shape.shape).astype(np.int32)
        if shape.dtype == jnp.int32
        else generator.standard_normal(shape.shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    step = jax.jit(make_train_step(model, optimizer, experiment.seed))
    if experiment.model.inputs == "tokens":
        documents = np.arange(experiment.data.seq_len, dtype=np.int32) // 5
        apart = {**batch, "segment_ids": np.broadcast_to(documents, shapes["inputs"].shape)}
        with contextlib.suppress(UserError):
            jax.eval_shape(model.apply, {"params": params}, batch["inputs"], apart["segment_ids"])
            batch = apart
    return jax.device_get(step(init_state(params, optimizer), batch)[1])


class Tried:
    """Experiments that were built or refused, and the first `steps` of them trained for a step."""

    def __init__(self, steps: int):
        self.steps, self.trained, self.outcomes = steps, 0, {"built": 0, "refused": 0}

    def add(self, plan: Plan) -> None:
        with time_limit(SECONDS):
            try:
                experiment = plan.make()
                if not complete(experiment):
                    self.outcomes["built"] += 1
                    return
                params, logits = shapes_of(experiment)
            except UserError as error:
                assert_clear(str(error))
                self.outcomes["refused"] += 1
                return
            assert decode(encode(experiment)) == experiment
            self.outcomes["built"] += 1
            size = sum(leaf.size for leaf in jax.tree.leaves(params))
            if self.trained < self.steps and size < MAX_PARAMETERS and logits.size < MAX_PARAMETERS:
                try:
                    metrics = train_one_step(experiment)
                    remat = "block" if experiment.model.remat == "none" else "none"
                    other = train_one_step(replace(experiment, model=replace(experiment.model, remat=remat)))
                except UserError as error:  # a group of the optimizer that matches nothing
                    assert_clear(str(error))
                    return
                finite = {name: bool(np.isfinite(metrics[name])) for name in ("loss", "grad_norm")}
                assert all(finite.values()), metrics
                for name in finite:
                    assert_close(other[name], metrics[name], experiment.model.dtype)
                self.trained += 1
                if self.trained % 20 == 0:
                    jax.clear_caches()


def test_configs():
    tried = Tried(STEPS)
    settings(FUZZ, max_examples=CONFIGS)(given(experiments())(tried.add))()
    assert tried.trained == STEPS, tried.outcomes
    assert min(tried.outcomes.values()) > CONFIGS // 5, tried.outcomes


TRAIN = """
    train quickstart --model.n-layers 1 --model.d-model 8 --model.d-ff 8 --model.max-len 16
    --model.pattern.0.filter.width 4 --data.seq-len 16 --data.batch-size 4 --parallel.devices 1
    --logging.sample-tokens 4 --no-logging.tensorboard
""".split()


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A finished run, a text, another folder, and files that must not change."""
    root = tmp_path_factory.mktemp("fuzz")
    (root / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    (root / "other").mkdir()
    (root / "other" / "thesis.tex").write_text("precious")
    flags = ["--workdir", str(root / "run"), "--data.path", str(root / "text.txt")]
    assert cli.main([*TRAIN, "--training.steps", "2", *flags]) == 0
    return root


def contents(root):
    return {path: path.read_bytes() if path.is_file() else None for path in root.rglob("*")}


def test_command_lines(places, monkeypatch):
    from hyena_jax.benchmark import verify
    from hyena_jax.generation import decoding, programs

    def build(model, seed):
        jax.eval_shape(lambda: init_params(model, seed))
        raise Reached

    def reached(*_: object) -> None:
        raise Reached

    monkeypatch.setattr(setup, "init_params", build)
    monkeypatch.setattr(programs, "empty_state", lambda *_: None)
    monkeypatch.setattr(programs, "read", lambda model, params, state, *_: (state, np.zeros((1, 1))))
    monkeypatch.setattr(decoding, "_chunks", lambda *_: iter(()))
    for name in ("verify_model", "verify_mixer"):
        monkeypatch.setattr(verify, name, reached)
    monkeypatch.chdir(places)
    before = contents(places)
    outcomes = {"reached": 0, 0: 0, 2: 0}

    @settings(FUZZ, max_examples=COMMANDS)
    @given(command_lines())
    def check(arguments):
        outcomes[outcome_of(arguments)[0]] += 1
        assert contents(places) == before

    check()
    assert min(outcomes.values()) > COMMANDS // 100, outcomes
