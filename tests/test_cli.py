"""The commands as typed by a user; wrong input ends with one line and exit code 2."""

import html
import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from grid import in_wide
from idx_files import write_pair
from jax import monitoring

from hyena_jax import cli
from hyena_jax.cli.base import fail
from hyena_jax.cli.show import ShowRun

# Its tests share compiled programs, and a run with `test_api`.
pytestmark = [pytest.mark.usefixtures("compiled_once"), pytest.mark.xdist_group("cli")]

TEXT = "the quick brown fox jumps over the lazy dog. " * 60
SIZES = """
    --model.n-layers 1 --model.d-model 8 --model.d-ff 8 --model.max-len 16
    --data.seq-len 16 --data.batch-size 4 --parallel.devices 1
    --training.eval-every 3 --training.checkpoint-every 3 --training.log-every 2 --no-logging.tensorboard
""".split()
TINY = [*SIZES, "--model.pattern", "attention", "--model.pattern.0.n-heads", "2"]  # compiles fastest
SMALL = [*TINY, "--training.steps", "6", "--logging.sample-tokens", "20"]


def run(*arguments: object) -> int:
    return cli.main([str(argument) for argument in arguments])


def trained(folder: Path) -> Path:
    """Trains a run in a folder, beside its text and the programs that it compiled."""
    programs = []

    def count(event, _, **about):
        if event.endswith("backend_compile_duration"):
            programs.append(about)

    (folder / "text.txt").write_text(TEXT)
    arguments = ["--workdir", folder / "run", "--data.path", folder / "text.txt"]
    monitoring.register_event_duration_secs_listener(count)
    assert run("train", "quickstart", *arguments, *SMALL) == 0
    monitoring.unregister_event_duration_listener(count)
    (folder / "programs.txt").write_text("\n".join(map(str, programs)))
    return folder


@pytest.fixture
def text(command_run):
    """The text of the run, at its path; a test may move it."""
    yield command_run / "text.txt"
    (command_run / "text.txt").write_text(TEXT)


@pytest.fixture
def workdir(command_run, tmp_path):
    """A copy of the run."""
    return shutil.copytree(command_run / "run", tmp_path / "run")


@pytest.mark.wide
def test_a_run_compiles_few_programs(command_run):
    """Not one for each operation and shape: of the optimizer's state, the schedule, or sampling."""
    programs = (command_run / "programs.txt").read_text()
    assert 5 <= len(programs.splitlines()) <= 20, programs


def test_train_evaluate_generate(workdir, text, capsys):
    assert "def " in (workdir / "sample.txt").read_text()
    assert run("eval", workdir) == 0
    output = capsys.readouterr().out
    for name in ("loss", "perplexity", "bits_per_byte", "accuracy", "probability", "tokens"):
        assert name in output
    assert run("eval", workdir, "--batch-size", 7) == 0
    assert capsys.readouterr().out == output
    assert run("eval", workdir, "--path", text, "--step", 3) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "step 3 metric" in output
    assert output.endswith(f"tokens {len(TEXT) - 1:,}")
    generate = ["generate", workdir, "--prompt", "the", "--max-new-tokens", 12]
    assert run(*generate, "--greedy") == 0
    greedy = capsys.readouterr().out
    assert greedy.startswith("the")
    assert run(*generate, "--top-k", 1, "--num-samples", 2) == 0
    assert capsys.readouterr().out == f"--- sample 1\n{greedy}--- sample 2\n{greedy}"
    drawn = []
    for seed in (1, 2, 1):
        assert run(*generate, "--seed", seed) == 0
        drawn.append(capsys.readouterr().out)
    assert drawn[0] == drawn[2] != drawn[1]
    assert run(*generate, "--top-p", 2) == 2
    assert "--top-p must be in (0, 1], got 2.0" in capsys.readouterr().err


@pytest.mark.wide
def test_generate_many_save_and_go_on(workdir, tmp_path, capsys):
    output, state = tmp_path / "out.jsonl", tmp_path / "state"
    options = ["--max-new-tokens", 9, "--seed", 3]
    assert run("generate", workdir, "--prompt", "the", "a th", *options, "--output", output) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("--- prompt 1\nthe")
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["prompt"] for line in lines] == ["the", "a th"]
    assert all(len(line["tokens"]) == len(line["log_probs"]) == 9 for line in lines)
    assert run("generate", workdir, "--prompt", "the", "--max-new-tokens", 0, "--save-state", state) == 0
    capsys.readouterr()
    assert run("generate", workdir, "--load-state", state, *options) == 0
    assert capsys.readouterr().out.rstrip("\n") == "the" + lines[0]["text"].rstrip("\n")
    count, stop = next((i, chr(id)) for i, id in enumerate(lines[0]["tokens"], 1) if 32 < id < 127)
    stopped = tmp_path / "stopped.jsonl"
    options += ["--stop", stop, "--output", stopped]
    assert run("generate", workdir, "--load-state", state, *options) == 0
    assert json.loads(stopped.read_text())["tokens"] == lines[0]["tokens"][:count]
    stopped.unlink()
    two = bytes(lines[0]["tokens"]).decode(errors="replace")[2:4]
    both = ["--stop", two.replace("\\", "\\\\").replace("\n", "\\n"), "--stop", "\\n\\n\\n"]
    assert run("generate", workdir, "--load-state", state, *options[:4], *both, "--output", stopped) == 0
    text = json.loads(stopped.read_text())["text"]
    assert text.endswith(two)
    assert lines[0]["text"].startswith(text)
    capsys.readouterr()
    before = output.read_text()
    for arguments, message in (
        (["--prompt", "the", "--output", output], "output must be a file that does not exist yet"),
        (["--prompt", "the", "--save-state", tmp_path / "no" / "state"], "in an existing folder"),
        (["--prompt", "the", "--output", "same", "--save-state", "same"], "another file than --save-state"),
        (["--prompt", "the", "--stop", ""], "--stop must be at least one character, got ''"),
        (
            ["--prompt", "the", "--on-full", "error", "--max-new-tokens", 10**6],
            "--max-new-tokens must be at most",
        ),
        ([], "prompt must be given"),
    ):
        assert run("generate", workdir, *arguments) == 2
        assert message in capsys.readouterr().err
    assert output.read_text() == before


def page_data(path):
    text = path.read_text(encoding="utf-8")
    return json.loads(text.partition('id="data">')[2].partition("</script>")[0])


@pytest.mark.grid
def test_show(text, tmp_path, capsys):
    workdir, page = tmp_path / "run", tmp_path / "page.html"
    hyena = ["--model.pattern.0.filter.width", 4, "--training.steps", 3, "--logging.sample-tokens", 5]
    assert run("train", "quickstart", "--workdir", workdir, "--data.path", text, *SIZES, *hyena) == 0
    capsys.readouterr()
    assert run("show", workdir, "--text", "the </script>" * 3, "--output", page) == 0
    assert f"page: {page}" in capsys.readouterr().out
    data = page_data(page)
    assert "".join(data["labels"]) == ("the </script>" * 3)[:16]  # as far as the model reads
    assert [layer["name"] for layer in data["layers"]] == ["layer 1: hyena"]
    assert data["layers"][0]["besideTitle"].startswith("softmax attention")
    assert len(data["filters"]) == 1
    measured = {"curve-loss", "curve-accuracy", "curve-learning_rate", "curve-grad_norm"}
    assert data["charts"].keys() == {*measured, "activations"}
    assert html.escape((workdir / "sample.txt").read_text()) in page.read_text()
    assert run("show", workdir, "--max-tokens", 3, "--index", 1, "--beside", workdir) == 0
    data = page_data(workdir / "show.html")
    assert len(data["labels"]) == 3
    assert data["layers"][0]["besideTitle"] == "run run, layer 1, hyena: mixing matrix"
    assert data["layers"][0]["views"] == data["layers"][0]["beside"]
    before = {path: path.read_bytes() for path in (page, workdir / "show.html")}
    for arguments, message in (
        (["--text", "the", "--output", page], "output must be a file that does not exist yet"),
        (["--text", "the", "--path", "a"], "--path must be None together with text"),
        (["--text", ""], "--text must be at least one token long"),
        (["--max-tokens", 513], "--max-tokens must be in 1..512"),
        (["--index", 10**6], "--index must be in 0.."),
        (["--path", tmp_path / "none"], "cannot be read"),
        (["--text", "the", "--step", "7"], "--step must be 'latest'"),
    ):
        assert run("show", workdir, *arguments) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert {path: path.read_bytes() for path in before} == before
    assert {path.name for path in tmp_path.iterdir()} == {"run", "page.html"}


def test_show_says_how_large_its_page_is(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("hyena_jax.inspect.content.content", lambda *_: None)
    monkeypatch.setattr("hyena_jax.inspect.page.page", lambda _: 1_250_000 * "é")
    monkeypatch.setattr(ShowRun, "_example", lambda self: None)
    assert ShowRun(workdir=tmp_path).run([]) == 0
    assert "2.5 MB, to be opened in a browser" in capsys.readouterr().out


SMALL_IMAGES = """
    --model.n-layers 1 --model.d-model 10 --model.d-ff 8 --model.dtype float32
    --data.batch-size 4 --parallel.devices 1 --logging.sample-images 3 --no-logging.tensorboard
    --training.steps 4 --training.eval-every 2 --training.checkpoint-every 2 --training.log-every 2
""".split()


@pytest.mark.grid
def test_train_evaluate_images(tmp_path, capsys):
    path, other = (write_pair(tmp_path / name, n) for name, n in (("some", 40), ("other", 7)))
    folder = tmp_path / "run"
    assert run("train", "images:softmax", "--workdir", folder, "--data.path", path, *SMALL_IMAGES) == 0
    assert "of 3 right, drawn in" in capsys.readouterr().out
    assert (folder / "predictions.png").exists()
    assert run("eval", folder) == 0
    output = capsys.readouterr().out.split()
    assert output[output.index("images") + 1] == "4"
    assert "accuracy" in output
    assert "perplexity" not in output
    assert run("show", folder, "--index", 2, "--path", other) == 0
    data = page_data(folder / "show.html")
    assert len(data["labels"]) == data["image"]["grid"][0] * data["image"]["grid"][1]
    assert not data["layers"][0]["views"][0]["triangle"]
    assert run("show", folder, "--text", "a") == 2
    assert "workdir must be a run on text" in capsys.readouterr().err
    assert run("generate", folder, "--prompt", "a") == 2
    assert "workdir must be a run on text" in capsys.readouterr().err


@pytest.mark.wide
def test_resume_takes_config_and_data_from_the_folder(workdir, text, tmp_path, capsys):
    before = json.loads((workdir / "config.json").read_text())
    assert run("train", "--resume", workdir, "--training.steps", 8) == 0
    assert "continuing after step 6" in capsys.readouterr().out
    after = json.loads((workdir / "config.json").read_text())
    assert after.pop("sha256") != before.pop("sha256")
    assert after.pop("training") == {**before.pop("training"), "steps": 8}
    assert after == before
    assert run("train", "--training.steps=8", f"--resume={workdir}") == 0
    assert "already trained to step 8" in capsys.readouterr().out
    assert run("train", "quickstart", "--workdir", workdir, *SMALL) == 2
    hint = f"data.path: {str(text)!r} -> None; hyena-jax train --resume {workdir} reads the earlier ones"
    assert hint in capsys.readouterr().err
    moved = ["--data.path", shutil.move(text, tmp_path / "moved.txt")]
    assert run("train", "--resume", workdir, "--training.steps", 9, *moved) == 0
    assert "continuing after step 8" in capsys.readouterr().out


NEW = "train quickstart --workdir {tmp}/new"
WRONG = {
    "broken config file": ("train {tmp}/broken.py --workdir x", "SyntaxError"),
    "batch and devices": (
        f"{NEW} --data.path {{tmp}}/text.txt --data.batch-size 3 --parallel.devices 2",
        "--data.batch-size must be a multiple of",
    ),
    "beyond Lmax": (f"{NEW} --data.seq-len 129", "--data.seq-len must be at most model.max_len=128 (or"),
    "unknown images": ("train images --workdir {tmp}/new --data.name cifar11", "cifar11"),
    "prompt for images": (
        "train images --workdir {tmp}/new --logging.sample-prompt a",
        "--logging.sample-prompt must be None with data that are not tokens",
    ),
    "long name": (f"train quickstart --workdir {{tmp}}/{'a' * 256}", "workdir must be a path"),
    "long workdir of a run": (f"eval {{tmp}}/{'a/' * 2000}", "workdir must be a path of at most 3800 bytes"),
    "prefix of other bytes": (
        "score {tmp} --path {tmp}/text.txt --prefix \udcff",
        r"--prefix must be text in UTF-8, got '\udcff'",
    ),
    "output of other bytes": ("distill {tmp} --output {tmp}/\udcff", "--output must be a path in UTF-8"),
    "control characters": ("eval {tmp}/\x1b[31mred", r"\x1b[31mred' holds no run"),
    "bucket": (
        "train quickstart --workdir gs://My/run",
        "--workdir must be gs://BUCKET/NAME, with 3 to 63 lower-case letters, digits and ._- in BUCKET",
    ),
    "output in a bucket": (
        "export {tmp} --output gs://mine/model.safetensors",
        "--output must be on this machine or a disk that it mounts; gs:// names runs and shards of data",
    ),
    "several token files": (
        "train quickstart --workdir {tmp}/new --data tokens --data.path {tmp}/*.bin",
        "--data shards reads several .bin files, and what hyena-jax prepare wrote",
    ),
    "folder of token files": (
        "train quickstart --workdir {tmp}/new --data tokens --data.path {tmp}/folder",
        "--data shards reads several .bin files",
    ),
    "config after the resumed": ("train --resume {tmp}/new quickstart", "leave out 'quickstart'"),
    "resumed workdir by =": ("train --resume={tmp}/new --workdir={tmp}/new", "leave out '--workdir"),
    "resumed file": ("train --resume {tmp}/text.txt", "holds no run: there is no config.json"),
    "nothing resumed": ("train --resume", "--resume must be followed by"),
    "unknown flag": (
        f"{NEW} --model.d-modle 3",
        "--model.d-modle is not a flag of train; did you mean --model.d-model?",
    ),
    "no config": (
        "train --workdir {tmp}/new quickstart",
        "CONFIG must come first after train (or --resume DIR, to continue a run), got '--workdir'",
    ),
    "unknown command": ("trian", "train"),
    "no prompt": ("generate x", "--prompt"),
}


@pytest.mark.parametrize(("arguments", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_input_is_one_line_and_code_2(arguments, message, tmp_path, capsys):
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "broken.py").write_text("def get_config(:")
    (tmp_path / "folder").mkdir()
    assert run(*arguments.format(tmp=tmp_path).split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert len(line) < 400
    assert "\x1b" not in line
    assert not (tmp_path / "new").exists()


def test_a_run_without_checkpoint(workdir, tmp_path, capsys):
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "data.json"):
        (bare / name).write_bytes((workdir / name).read_bytes())
    assert run("generate", bare, "--prompt", "a") == 2
    assert "holds no checkpoint" in capsys.readouterr().err


@pytest.mark.grid
def test_prompts_outside_the_vocabulary(tmp_path, text, capsys):
    folder = tmp_path / "letters"
    characters = ["--data.tokenizer", "characters", "--logging.sample-prompt", "the"]
    characters += ["--training.steps", 1, "--logging.sample-tokens", 0]
    assert run("train", "quickstart", "--workdir", folder, "--data.path", text, *TINY, *characters) == 0
    capsys.readouterr()
    assert run("generate", folder, "--prompt", "the ß") == 2
    assert "prompt 'the ß'" in capsys.readouterr().err
    assert run("generate", folder, "--prompt", "") == 2
    assert "prompt must hold at least one token" in capsys.readouterr().err


def test_a_different_experiment_names_the_fields(workdir, text, capsys):
    before = json.loads((workdir / "config.json").read_text())
    assert run("train", "quickstart", "--workdir", workdir, "--data.path", text, *SMALL, "--seed", 3) == 2
    error = capsys.readouterr().err
    assert "holds a different experiment: seed: 0 -> 3" in error
    assert f"hyena-jax train {workdir}/config.json --workdir NEW --init-from {workdir}" in error
    assert json.loads((workdir / "config.json").read_text()) == before


def test_a_full_disk_is_code_3(tmp_path, text, capsys, monkeypatch):
    from hyena_jax.training import folder

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder, "_write_json", full)
    assert run("train", "quickstart", "--workdir", tmp_path / "run", "--data.path", text, *SMALL) == 3
    assert "No space left on device" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["train", "quickstart", "--help"], *in_wide(["--help"], ["train", "--help"], ["eval", "--help"])],
)
def test_help_is_quick_and_complete(arguments):
    """By the processor's time of the command, which other processes of a loaded machine do not lengthen."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "hyena_jax", *arguments], capture_output=True, text=True, check=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2
    if arguments[:2] == ["train", "quickstart"]:
        for flag in ("--model.n-layers", "--data.path", "--optimizer.learning-rate", "--training.steps",
                     "--parallel.devices", "--[no-]logging.tensorboard", "--seed"):  # fmt: skip
            assert flag in done.stdout


def test_of_a_long_error_both_ends_are_printed(capsys):
    assert fail("must be \x1b" + "y" * 150_000 + " or less", 2) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert len(line) < 2000
    assert line.startswith("hyena-jax: error: must be \\x1byyy")
    assert "yyy ... (148," in line
    assert "characters are left out) ... yyy" in line
    assert line.endswith(" or less")
    fail("a" * 1800, 2)
    assert capsys.readouterr().err == f"hyena-jax: error: {'a' * 1800}\n"
