"""The three benchmark commands at tiny sizes, and their errors."""

import dataclasses
import json
import signal
import sys
from functools import partial

import jax
import numpy as np
import pytest

from hyena_jax.benchmark import model as benchmark_model
from hyena_jax.benchmark import results, runner, timing, verify
from hyena_jax.benchmark.decode import DecodeBenchmark
from hyena_jax.benchmark.model import ModelBenchmark
from hyena_jax.benchmark.settings import Decode, Operators, flags
from hyena_jax.benchmark.timing import Runnable
from hyena_jax.cli import main
from hyena_jax.config import (
    MIXER_CONFIGS,
    AttentionConfig,
    CrossEntropyConfig,
    Experiment,
    ImageClassifierConfig,
    ImagesConfig,
    LanguageModelConfig,
)
from hyena_jax.data.examples import examples_of
from hyena_jax.mixers import mixer_oracle
from hyena_jax.system import machine
from hyena_jax.system.errors import UserError
from hyena_jax.system.signals import EndAtOnce
from hyena_jax.tasks.arithmetic import CountingConfig
from hyena_jax.training.loss import cross_entropy

QUICK = ["--seconds", "0.01", "--least-runs", "2"]
ATTENTION = {"pattern": (AttentionConfig(2),), "n_layers": 1, "d_model": 8, "d_ff": 8}
SMALL = ["--model.pattern", "attention", "--model.pattern.0.n-heads", 2, "--parallel.devices", 1]
SMALL += ["--model.n-layers", 1, "--model.d-model", 8, "--model.d-ff", 8]

PLUGIN = """
from dataclasses import dataclass

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from hyena_jax import config
from hyena_jax.config import register
from hyena_jax.data.dataset import Dataset


@dataclass(frozen=True)
class MeanConfig(config.MixerConfig):
    eps: float = 0.0


class Mean(nn.Module):
    d_model: int
    max_len: int
    config: MeanConfig
    n_layers: int
    dtype: object

    def __call__(self, x, segment_ids, deterministic):
        return jnp.cumsum(x, axis=1) / (self.config.eps + jnp.arange(1, x.shape[1] + 1)[:, None])


@dataclass(frozen=True)
class SlopesConfig(config.DataConfig):
    inputs = "points"


class Slopes(Dataset):
    inputs, unit, fingerprint, n_train_rows, n_held_out_rows = "points", "slope", "8 of ones", 8, 8

    def train_rows(self, indices):
        n_rows = len(indices)
        return {"inputs": np.ones((n_rows, 5, 2), np.float32), "targets": np.ones(n_rows, np.int32)}

    held_out_rows = train_rows


@dataclass(frozen=True)
class PointsConfig(config.ModelConfig):
    inputs = "points"

    def input_row(self):
        return (5, 2), "float32"


class Points(nn.Module):
    config: PointsConfig

    @nn.compact
    def __call__(self, inputs, segment_ids=None, deterministic=True):
        return nn.Dense(3)(inputs.reshape(len(inputs), -1))


register("mean", MeanConfig, Mean)
register("slopes", SlopesConfig, lambda config, encoding: Slopes())
register("points", PointsConfig, Points)


def get_config():
    parallel = config.ParallelConfig(devices=1)
    return config.Experiment(PointsConfig(), SlopesConfig(batch_size=4), parallel=parallel)
"""


def run(*arguments) -> int:
    return main(["bench", *map(str, arguments)])


@pytest.fixture(autouse=True)
def _small_roofline(monkeypatch):
    """The machine's limits do not matter here."""
    monkeypatch.setattr(timing, "MATMUL_SIZE", {"cpu": 8})
    monkeypatch.setattr(timing, "COPY_BYTES", {"cpu": 1024})
    monkeypatch.setattr(timing, "ROOFLINE_SECONDS", 0.01)


@pytest.fixture
def plugin(tmp_path, own_parts):
    """A file that registers parts."""
    path = tmp_path / "mine.py"
    path.write_text(PLUGIN)
    return path


def results_of(folder):
    assert (folder / "plot.png").read_bytes().startswith(b"\x89PNG")
    results = json.loads((folder / "results.json").read_text())
    assert results["command"].startswith("hyena-jax bench ")
    assert results["machine"]["cores"] >= 1
    assert results["versions"]["jax"]
    return results


@pytest.mark.grid
def test_operators_write_a_table_numbers_and_a_plot(tmp_path, capsys):
    folder, names = tmp_path / "new", ["fir", "attention"]
    sizes = ["--lengths", 32, 16, "--d-model", 8, "--batch-size", 2]
    assert run("operators", "--mixers", *names, *sizes, *QUICK, "--output", folder) == 0
    captured = capsys.readouterr()
    rows = results_of(folder)["rows"]
    expected = [(name, length) for length in (16, 32) for name in names]
    assert [(row["method"], row["length"]) for row in rows] == expected
    for row in rows:
        long = row["method"] == "fir"
        assert list(row["passes"]) == ["forward", "forward_backward"] + ["filter"] * long
        for measured in row["passes"].values():
            seconds = measured["seconds"]
            assert 0 < seconds["lower"] <= seconds["median"] <= seconds["upper"]
            assert seconds["runs"] >= 2
            assert all(measured[f"{part}_seconds"] > 0 for part in ("trace", "lower", "compile", "first"))
            assert 0 < seconds["dispatch"] <= seconds["upper"]
            assert measured["compiled_bytes"] > 0
            assert measured["flops"] >= 0
            assert measured["roofline_share"] > 0
        assert row["method"] in captured.out
    assert "faster than attention, forward and backward, from length: fir" in captured.out
    assert "GFLOP/s in a matrix product" in captured.out


@pytest.mark.grid
def test_rows_are_kept_when_a_benchmark_is_interrupted(tmp_path, capsys, monkeypatch):
    folder, first, said = tmp_path / "new" / "er", [], []
    usual, handler = runner.measure, signal.signal(signal.SIGINT, EndAtOnce(130, "interrupted"))

    def interrupt(programs, *others):
        if first:
            said.append(signal.getsignal(signal.SIGINT).line)
            raise KeyboardInterrupt
        first.append(usual(programs, *others))
        return first[0]

    monkeypatch.setattr(runner, "measure", interrupt)
    arguments = ["--mixers", "fir", "--lengths", 16, 32, "--d-model", 8, *QUICK, "--output", folder]
    try:
        assert run("operators", *arguments) == 130
    finally:
        signal.signal(signal.SIGINT, handler)
    captured = capsys.readouterr()
    header, row = captured.out.splitlines()
    assert header.split()[:2] == ["method", "length"]
    assert row.split()[:2] == ["fir", "16"]
    assert captured.err == "hyena-jax: interrupted\n"  # a process ends before, with this:
    assert said == [f"interrupted; the row measured so far is in {folder}"]
    results = json.loads((folder / "results.json").read_text())
    assert [row["length"] for row in results["rows"]] == [16]


def test_a_folder_that_cannot_be_written_is_found_before_anything_is_measured(tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(verify, "verify_mixer", lambda *_: pytest.fail("measured"))
    assert run("operators", "--mixers", "fir", "--output", tmp_path / "file" / "inner") == 2
    assert "--output must be a folder that can be written ('" in capsys.readouterr().err


def test_no_speed_of_what_is_wrong(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        verify, "mixer_oracle", lambda config: lambda *args: 1.001 * mixer_oracle(config)(*args)
    )
    arguments = ["--mixers", "attention", "--lengths", 16, "--d-model", 8, "--output", tmp_path / "new"]
    assert run("operators", *arguments, *QUICK) == 1
    captured = capsys.readouterr()
    assert captured.out.strip() == ""
    assert "error: attention differs from its oracle by 0.001" in captured.err
    assert not (tmp_path / "new").exists()


def test_what_memory_cannot_hold_and_what_takes_too_long_is_left_out_at_all_larger_sizes(monkeypatch):
    notes, done = [], []

    def bench(sizes_, **limits):
        class OfNothing(runner.Benchmark):
            methods = ("a",)
            sizes = tuple({"length": x, "batch": y} for x, y in sizes_)
            check = cells = picture = None

            def build(self, method, size):
                needed = 2**60 if size["batch"] == 9 else 1
                return runner.Case({"run": Runnable(lambda: None)}, {}, estimated_bytes=needed)

        settings = Operators(0.0, 1, **limits)
        rows = runner.measure_rows(OfNothing(), settings, None, partial(done.append, 1), notes.append)
        return [(row["length"], row["batch"]) for row in rows]

    assert bench([(8, 1), (8, 2), (16, 1)], max_seconds=-1.0) == [(8, 1)]
    assert notes == ["a: a run at length 8, batch 1 took over -1 s; no longer"]
    assert len(done) == 3
    assert bench([(8, 9), (16, 1), (16, 9)]) == [(16, 1)]
    assert notes[1:] == ["a: 1,073,741,824.0 GiB at length 8, batch 9 are more than is available"]


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_live_memory_sees_what_a_run_takes():
    seen = machine.live_memory(lambda: np.ones(2**23))
    # The allocator cannot return pages of which only parts are free.
    assert seen is None or 0.98 * 2**26 <= seen < 2**27
    assert machine.fits(1)
    assert not machine.fits(2**60)


@pytest.mark.grid
def test_a_model_of_text(tmp_path, capsys):
    folder = tmp_path / "new"
    assert run("model", "quickstart", *SMALL, "--seq-len", 8, *QUICK, "--output", folder) == 0
    rows = results_of(folder)["rows"]
    assert [row["length"] for row in rows] == [8]
    assert list(rows[0]["passes"]) == ["forward", "loss_and_gradient", "train_step"]
    assert "tokens/s" in capsys.readouterr().out


def test_flags_change_the_model_that_is_timed(monkeypatch):
    seen = []
    monkeypatch.setattr(runner, "run", lambda benchmark, settings, report: seen.append(settings))
    assert run("model", "quickstart", "--model.pattern", "hawk,attention", "--model.d-model", 16) == 0
    model = seen[0].experiment.model
    assert [type(mixer).__name__ for mixer in model.pattern] == ["HawkConfig", "AttentionConfig"]
    assert model.d_model == 16
    assert ModelBenchmark(seen[0]).examples.experiment.model.pattern == model.pattern
    assert flags(seen[0])["experiment"]["model"]["d_model"] == 16


@pytest.mark.grid
def test_a_model_of_images(capsys):
    assert run("model", "images:softmax", "--parallel.devices", 1, "--batch-size", 8, *QUICK) == 0
    assert "images/s" in capsys.readouterr().out


def test_images_have_the_sizes_that_the_config_says(tmp_path):
    """A known data set fills in and refuses as in training; a folder is read where the model lacks sizes."""
    data, model = ImagesConfig(batch_size=4), ImageClassifierConfig(**ATTENTION)
    found = examples_of(Experiment(model=model, data=data), (), 256)
    known = found.experiment.model
    assert (found.unit, known.image_size, known.channels, known.n_classes) == ("image", (8, 8), 1, 10)
    large = dataclasses.replace(model, image_size=(32, 16), channels=3, n_classes=7)
    with pytest.raises(UserError, match=r"model.image_size must be the data's \(8, 8\), got \(32, 16\)"):
        examples_of(Experiment(model=large, data=data), (), 256)
    absent = dataclasses.replace(data, path=str(tmp_path / "absent"))
    found = examples_of(Experiment(model=large, data=absent), (), 256)
    assert found.experiment.model == large
    (make,) = found.batches.values()
    assert make()["inputs"].shape == (4, 32, 16, 3)
    with pytest.raises(UserError, match="absent"):
        examples_of(Experiment(model=model, data=absent), (), 256)


@pytest.mark.grid
def test_decoding(tmp_path, capsys):
    folder = tmp_path / "new"
    sizes = ["--contexts", 16, 24, "--batch", 2, "--n-new", 5, "--d-model", 8, "--n-layers", 1]
    assert run("decode", "--mixers", "aft_simple", *sizes, *QUICK, "--output", folder) == 0
    rows = results_of(folder)["rows"]
    assert [(row["context"], row["batch"]) for row in rows] == [(16, 2), (24, 2)]
    for row in rows:
        assert list(row["passes"]) == ["prefill", "step"]
        prefill, step = row["passes"].values()
        assert prefill["seconds"]["runs"] >= 2
        assert step["first_seconds"] > step["seconds"]["median"]  # all new tokens against one
    assert rows[0]["state_bytes"] == rows[1]["state_bytes"] > 0
    assert "ms/token" in capsys.readouterr().out


def test_the_table_of_decoding_has_milliseconds_a_token_and_tokens_of_all_sequences():
    parts = ("trace_seconds", "lower_seconds", "compile_seconds", "compiled_bytes", "live_bytes")
    measured = dict.fromkeys(parts)
    seconds = {"median": 0.02, "lower": 0.0185, "upper": 0.25, "runs": 5, "dispatch": None}
    passes = {key: {**measured, "seconds": seconds} for key in ("prefill", "step")}
    row = {"method": "hyena", "context": 1024, "batch": 3, "passes": passes, "state_bytes": 3 * 2**19}
    (cells,) = DecodeBenchmark(Decode(mixers=("hyena",))).cells(row)
    assert cells["ms/token"] == "20 (18.5-250)"
    assert (cells["tokens/s"], cells["state MiB"]) == ("150", "1.50")


@pytest.mark.grid
def test_a_mixer_of_the_users_is_timed_and_said_not_to_be_checked(plugin, tmp_path, capsys):
    folder = tmp_path / "new"
    arguments = ["--mixers", "mean", "--lengths", 16, "--d-model", 8, "--plugin", plugin, "--output", folder]
    assert run("operators", *arguments, *QUICK) == 0
    assert "values not checked: mean has no oracle" in capsys.readouterr().out
    (row,) = results_of(folder)["rows"]
    # The running sum, and the division by the counts, which are computed once.
    assert row["passes"]["forward"]["flops"] == 2 * 16 * 8 + 16
    assert row["passes"]["forward"]["roofline_share"] > 0
    model = LanguageModelConfig(pattern=(MIXER_CONFIGS["mean"](),), vocab_size=5)
    assert not verify.verify_model("a model of it", model)


def test_a_model_s_gradient_drops_out_and_its_units_are_tokens(monkeypatch):
    scores = []

    def score_of(config):
        scores.append(config)
        return cross_entropy

    monkeypatch.setattr(benchmark_model, "loss_function", score_of)
    monkeypatch.setattr(benchmark_model, "jit_program", lambda *program: program)
    monkeypatch.setattr(benchmark_model, "_train_step", lambda *_: None)
    smooth, data = CrossEntropyConfig(0.2), CountingConfig(seq_len=8, batch_size=4)
    model = LanguageModelConfig(**ATTENTION, max_len=16, dropout=0.5)
    benchmark = ModelBenchmark.__new__(ModelBenchmark)
    benchmark.examples = examples_of(Experiment(model=model, data=data, loss=smooth), None, None)
    assert [*benchmark.examples.batches] == [8]
    case = benchmark.build("counting", {"length": 8})
    assert (case.facts["units"], case.facts["batch"]) == (4 * 8, 4)
    assert scores == [smooth]
    (forward, *inputs), (gradient, *batch) = (
        case.programs[name] for name in ("forward", "loss_and_gradient")
    )

    @jax.jit
    def losses():
        return gradient(*batch)[0], cross_entropy(forward(*inputs), batch[1]["targets"]).mean()

    found, without_dropout = map(float, losses())
    assert found != pytest.approx(without_dropout, rel=1e-5)
    assert found == pytest.approx(without_dropout, rel=0.5)  # of a token, not of a row or of all


@pytest.mark.wide
def test_a_model_on_data_of_the_users_is_timed_on_its_first_batch(plugin, tmp_path, capsys):
    folder = tmp_path / "new"
    assert run("model", plugin, *QUICK, "--output", folder) == 0
    out = capsys.readouterr().out
    assert f"values not checked: {plugin} has no oracle" in out
    assert "slopes/s" in out
    (row,) = results_of(folder)["rows"]
    assert (row["length"], row["batch"], row["units"], row["n_params"]) == (5, 4, 4, 10 * 3 + 3)
    assert run("model", plugin, "--seq-len", 3) == 2
    assert "--seq-len must be absent with slopes" in capsys.readouterr().err


def test_a_mixer_without_state_cannot_be_timed_decoding(plugin, capsys):
    assert run("decode", "--mixers", "mean", "--plugin", plugin) == 2
    error = capsys.readouterr().err
    assert "mixers must be causal and have init_state, prefill and step, which are timed; 'mean'" in error
    assert len(error.splitlines()) == 1
    benchmark = DecodeBenchmark(Decode(mixers=("all",)))
    assert benchmark.methods == [name for name in MIXER_CONFIGS if name != "mean"]
    assert benchmark.lines({}) == ["mean: not causal, or without init_state, prefill and step"]


FUNCTIONS = """
import jax.numpy as jnp
import numpy as np


def make_inputs(size):
    return np.ones((size, 3), np.float32), np.arange(size)


def right(x, i):
    return jnp.sin(x) * i[:, None]


def wrong(x, i):
    return jnp.cos(x)


def fails(x, i):
    raise ValueError("mine")


def counted(x, i):
    return i


def oracle(x, i):
    assert x.dtype == np.float64
    return np.sin(x) * i[:, None]
"""


@pytest.fixture
def functions(tmp_path):
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return object()", "TypeError: "),
        ("raise SystemExit(0)", "SystemExit: 0 ("),
        ("raise GeneratorExit", "GeneratorExit: ("),
    ],
)
def test_a_mixer_that_gives_no_array_or_ends_the_process_is_one_line(plugin, capsys, body, said):
    plugin.write_text(PLUGIN.replace("return jnp.cumsum", f"{body}\n        return jnp.cumsum"))
    arguments = ["--mixers", "mean", "--lengths", 16, "--d-model", 8, "--plugin", plugin]
    assert run("operators", *arguments, *QUICK) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"hyena-jax: error: your plugin failed: {said}")


@pytest.mark.grid
def test_functions_of_the_users(functions, tmp_path, capsys):
    folder, traces = tmp_path / "new", tmp_path / "traces"
    more = ["--sizes", 16, 8, "--output", folder, "--json", "--profile", traces]
    assert run("function", f"{functions}:right", *more, *QUICK) == 0
    found = results_of(folder)
    assert json.loads(capsys.readouterr().out)["rows"] == found["rows"]
    assert found["benchmark"] == "function"
    assert [(row["method"], row["size"]) for row in found["rows"]] == [("right", 8), ("right", 16)]
    assert found["rows"][0]["passes"]["forward"]["flops"] == 2 * 8 * 3
    # The sine and the product; the cosine, and its product with the cotangent times i.
    assert found["rows"][0]["passes"]["forward_backward"]["flops"] == 5 * 8 * 3
    names = {path.name for path in traces.iterdir()}
    assert names == {f"right_size_{n}_{part}" for n in (8, 16) for part in ("forward", "forward_backward")}
    assert list(traces.rglob("*.xplane.pb"))


def test_a_function_is_checked_before_it_is_timed(functions, capsys):
    assert run("function", f"{functions}:right,wrong", "--sizes", 4, *QUICK) == 1
    captured = capsys.readouterr()
    assert "wrong differs from its oracle" in captured.err
    assert captured.out == ""
    functions.write_text(FUNCTIONS[: FUNCTIONS.index("def oracle")])
    assert run("function", f"{functions}:wrong", "--no-gradients", "--sizes", 4, *QUICK) == 0
    out = capsys.readouterr().out
    assert "values not checked: wrong has no oracle" in out
    assert "backward" not in out
    assert run("function", f"{functions}:counted", "--sizes", 4, *QUICK) == 2
    assert "--gradients must be off (--no-gradients): a result is int32" in capsys.readouterr().err
    assert run("function", f"{functions}:fails", "--sizes", 4, *QUICK) == 2
    assert "functions.py:19" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("definition", "said"),
    [
        ("def right(x, i): return 'text'", "your plugin failed: TypeError"),
        ("def make_inputs(size): return 'text', None", "must be a tuple of arrays of numbers, got 'str'"),
        ("def oracle(x, i): return x[:1]", "a result of oracle must be of the shape (4, 3), got (1, 3)"),
        ("def oracle(x, i): return np.full(x.shape, object())", "error: oracle failed: TypeError"),
        ("def oracle(x, i): raise SystemExit(0)", "error: oracle failed: SystemExit: 0 ("),
        ("def make_inputs(size): raise GeneratorExit", "make_inputs(4) failed: GeneratorExit: ("),
        ("def make_inputs(size): return (np.zeros(3, 'f4,f4'),)", "make_inputs(4) failed: TypeError"),
    ],
)
def test_functions_of_other_values_are_refused(functions, capsys, definition, said):
    functions.write_text(f"{FUNCTIONS}\n\n{definition}\n")
    assert run("function", f"{functions}:right", "--sizes", 4, *QUICK) == 2
    assert said in capsys.readouterr().err


WRONG = {
    "function": ("function {tmp}/absent.py:f", "is not a file"),
    "no name": ("function {tmp}/absent.py", "target must be FILE.py:NAME, or FILE.py:NAME,NAME, got"),
    "size": ("function {tmp}/absent.py:f --sizes 0", "--sizes must be at least 1, got 0"),
    "profile": ("operators --profile {tmp}/notes.txt", "--profile must be a folder that can be written ('"),
    "mixer": ("operators --mixers hynea", "mixer 'hynea' is unknown (did you mean 'hyena'?"),
    "length": ("operators --lengths 0", "lengths must be at least 1, got 0"),
    "batch": ("operators --batch-size -1", "--batch-size must be at least 1, got -1"),
    "width": ("operators --mixers attention --d-model 6", "n_heads must be a divisor of d_model=6, got 4"),
    "dtype": ("operators --dtype float31", "dtype 'float31' is unknown (did you mean 'float32'?)"),
    "no baseline": ("operators --baseline torch", "--baseline is not a flag of bench operators"),
    "seconds": ("operators --seconds 0", "seconds must be in (0, 600], got 0.0"),
    "runs": ("operators --least-runs 0", "--least-runs must be at least 1"),
    "output": ("operators --output {tmp}", "new, empty, or of an earlier benchmark"),
    "config": ("model quickstrat", "did you mean 'quickstart'?"),
    "sequence": ("model quickstart --seq-len 129", "--seq-len must be at most model.max_len=128, got 129"),
    "rows": ("model quickstart --batch-size 0", "--batch-size must be at least 1"),
    "sequence of images": ("model images --seq-len 9", "--seq-len must be absent with images"),
    "new tokens": ("decode --contexts 16 64 --n-new 16", "must be in 2..15, below every context, got 16"),
    "layers": ("decode --n-layers 0", "--n-layers must be at least 1"),
}


@pytest.mark.parametrize(("arguments", "message"), WRONG.values(), ids=WRONG)
def test_wrong_input_is_one_line_and_code_2(arguments, message, tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    assert run(*arguments.format(tmp=tmp_path).split()) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1
    assert captured.out == ""


def test_the_plot_takes_what_was_not_measured(tmp_path):
    times = results.Panel("time", "ms", {"a": {8: 1.0}, "b": {}})
    memory = results.Panel("memory", "MiB", {"a": {8: 0.0}})
    picture = results.Picture("title", "length", [times, memory])
    results.draw_picture(tmp_path / "plot.png", picture, machine.describe_machine())
    assert (tmp_path / "plot.png").exists()
