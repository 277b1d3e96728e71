"""Folders, names and messages of strangers: each command works, or refuses in one line. Run with -m fuzz."""

import json
import random
import re
import shutil
import subprocess
from contextlib import chdir
from dataclasses import replace
from pathlib import Path

import pytest
from fuzz import test_fuzz
from fuzz.test_fuzz import FUZZ, assert_clear, time_limit
from hypothesis import example, given, settings
from hypothesis import strategies as st

import hyena_jax
from hyena_jax.cli.base import OfConfig
from hyena_jax.cli.commands import COMMANDS
from hyena_jax.config import (
    AttentionConfig,
    ConstantConfig,
    Experiment,
    HawkConfig,
    LanguageModelConfig,
    LoggingConfig,
    SGDConfig,
    TextConfig,
    TrainingConfig,
)
from hyena_jax.config.flags import flags_of
from hyena_jax.data.tokenizers import BytesTokenizer
from hyena_jax.system.errors import UserError
from hyena_jax.tasks.arithmetic import MajorityConfig
from hyena_jax.training.checkpoint import saved_steps
from hyena_jax.training.folder import read_folder, write_description

pytestmark = [pytest.mark.fuzz, pytest.mark.xdist_group("strange_folders")]

COMPARISONS, NAMES, FAULTS, HARMS, SOURCES = 20, 6, 60, 24, 12
SECONDS = 120
"""Longest that a command may take."""


def outcome_of(command) -> int:
    """The exit code of a command, which prints no control characters, and one line of error."""
    code, printed = test_fuzz.outcome_of(command, SECONDS)
    strange = {character for character in printed if not (character.isprintable() or character == "\n")}
    assert strange == set(), printed
    return code


SIZES = {"n_layers": 1, "d_model": 8, "d_ff": 8, "max_len": 16, "vocab_size": 256}
EXPERIMENT = Experiment(
    model=LanguageModelConfig(pattern=(HawkConfig(),), **SIZES),
    data=TextConfig(path="text.txt", seq_len=16, batch_size=4),
)


def described(folder: Path) -> Path:
    """A run folder without checkpoints and rows."""
    folder.mkdir(parents=True)
    write_description(folder, EXPERIMENT, {"fingerprint": "f" * 64, "tokenizer": BytesTokenizer().to_json()})
    return folder


NUMBERS = st.one_of(
    st.none(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([1e308, -1e308, 1.7976931348623157e308, 5e-324, 0, -0.0, 10**400, 10**18, True]),
)
WORDS = st.sampled_from(["x", [], {}, "NaN"])
ROWS = st.lists(
    st.fixed_dictionaries(
        {"step": st.one_of(st.integers(1, 50), st.integers(1, 50), st.sampled_from([0, 2**31, 10**18]))},
        optional={
            "time": NUMBERS,
            "train/loss": NUMBERS,
            "validation/loss": NUMBERS,
            "validation/accuracy": NUMBERS,
            "validation/\x1b[2J": NUMBERS,
            "validation/other": st.one_of(NUMBERS, NUMBERS, WORDS),
        },
    ),
    max_size=6,
)


def test_compared_folders(tmp_path):
    """Rows that lack values or have the largest, and rows of others' making."""
    outcomes = {0: 0, 2: 0}

    @settings(FUZZ, max_examples=COMPARISONS)
    @given(
        st.lists(ROWS, min_size=1, max_size=3),
        st.sampled_from([[], [], ["--x", "seconds"], ["--x", "tokens"], ["--metric", "accuracy"]]),
        st.booleans(),
    )
    @example([[{"step": 1, "time": 1.0, "validation/loss": 2.0}]], [], True)
    def check(runs, flags, draws):
        root = tmp_path / "runs"
        shutil.rmtree(root, ignore_errors=True)
        for i, rows in enumerate(runs):
            folder = described(root / f"seed={i}")
            (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        output = ["--output", root / "figure.png"] if draws else []
        code = outcome_of(["compare", root, *flags, *output])
        assert (root / "figure.png").exists() == (draws and code == 0)
        outcomes[code] += 1

    check()
    assert min(outcomes.values()) > 0, outcomes


def test_two_hundred_thousand_evaluations(tmp_path):
    folder = described(tmp_path / "run")
    losses = [1e308, -1e308, None, *range(200_000)]
    rows = ({"step": i + 1, "time": 1.0 + i, "validation/loss": loss} for i, loss in enumerate(losses))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["compare", folder, "--output", tmp_path / "figure.png"]
    assert outcome_of(command) == 0


STRANGE = st.text(
    st.one_of(
        st.sampled_from("\x1b\x00\x07\x08\r\n\t\x7f\x85\x9b\u200e\u202e\u2028\ufeff\udcff\udc80[2J;31mab "),
        st.characters(),
    ),
    min_size=1,
    max_size=12,
)


def test_names_of_folders(tmp_path):
    """Of a run, of a run inside a folder, and of one that is not there."""
    lines = tmp_path / "lines.txt"
    lines.write_text("a line\n")

    @settings(FUZZ, max_examples=NAMES)
    @given(STRANGE.filter(lambda name: name not in (".", "..")), st.booleans())
    def check(name, exists):
        name = name.replace("/", "-")
        root = tmp_path / "root"
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir()
        described(root / "plain")
        (root / "plain" / "metrics.jsonl").write_text('{"step": 1, "validation/loss": 1.0}\n')
        try:
            if exists:
                described(root / name)
            (root / name).exists()
        except (OSError, ValueError, UserError):  # no name of a file
            assert name != "plain"
        folder = f"{root}/{name}"
        for command in (
            ["compare", root],
            ["compare", folder],
            ["eval", folder],
            ["generate", folder, "--prompt", name],
            ["score", folder, "--path", lines],
            ["embed", folder, "--path", lines, "--output", root / "e.npy"],
            ["show", folder],
            ["export", folder, "--output", root / "e.safetensors"],
            ["train", "--resume", folder],
            ["train", folder, "--workdir", root / "new"],
            ["convert", "lfm2", folder, "--output", root / "new"],
            ["sweep", "quickstart", "--grid", f"model.pattern={name}", "--workdir", root / "new"],
            ["task", name],
            [name],
        ):
            code = outcome_of(command)
            assert code != 0 or command[:2] == ["compare", root]
            assert not (root / "new").exists()

    check()


def test_messages_of_plugins(tmp_path):
    """What a plugin raises, where it is imported, and where its parts are used."""
    moments = {
        "import": "raise {kind}({message!r})",
        "config": "def get_config():\n    raise {kind}({message!r})",
        "build": (
            "import flax.linen as nn\n"
            "from dataclasses import dataclass\n"
            "from hyena_jax.config import MixerConfig, register\n"
            "@dataclass(frozen=True)\n"
            "class StrangeConfig(MixerConfig):\n"
            "    def check(self, d_model, max_len):\n"
            "        raise {kind}({message!r})\n"
            "register({name!r}, StrangeConfig, nn.Module)\n"
        ),
    }

    @settings(FUZZ, max_examples=FAULTS)
    @given(
        STRANGE,
        st.sampled_from(["ValueError", "OSError", "KeyError", "RuntimeError", "SystemExit", "UnicodeError"]),
        st.sampled_from(sorted(moments)),
        st.randoms(use_true_random=False),
    )
    def check(message, kind, moment, generator):
        number = generator.getrandbits(60)
        path, name = tmp_path / f"plugin_{number}.py", f"strange_{number}"
        path.write_text(moments[moment].format(kind=kind, message=message, name=name))
        new = ["--workdir", tmp_path / "new"]
        command = {
            "import": ["train", "quickstart", *new, "--plugin", path],
            "config": ["train", path, *new],
            "build": ["train", "quickstart", *new, "--plugin", path, "--model.pattern", name],
        }[moment]
        code = outcome_of(command)
        assert code != 0
        assert not (tmp_path / "new").exists()
        path.unlink()

    check()


BENCHES = {f"bench {name}": kind for name, kind in COMMANDS["bench"].items()}
ALL_COMMANDS = {**{name: kind for name, kind in COMMANDS.items() if name != "bench"}, **BENCHES}


@pytest.mark.parametrize(("called", "command"), ALL_COMMANDS.items(), ids=ALL_COMMANDS.keys())
def test_undecodable_bytes_in_every_argument(tmp_path, called, command):
    """Each flag that takes a text or a path: the command ends at once, and writes nothing."""
    words, values = called.split(), {}
    if issubclass(command, OfConfig):
        words, values = [*words, "quickstart"], {"experiment": hyena_jax.load_config("quickstart")}
    flags = flags_of(command, values)
    places = ["nowhere" for flag in flags if flag.is_positional]
    taking = [flag.name for flag in flags if not flag.is_positional and re.search("str|Path", str(flag.hint))]
    with chdir(tmp_path):
        for flag in taking:
            assert outcome_of([*words, *places, flag, "\udcff"]) == 2, flag
            assert list(tmp_path.iterdir()) == [], flag
        for i in range(len(places)):
            given = [*places[:i], "\udcff", *places[i + 1 :]]
            assert outcome_of([*words, *given]) == 2
            assert list(tmp_path.iterdir()) == []


TRAINED = Experiment(
    model=LanguageModelConfig(pattern=(AttentionConfig(1),), n_layers=1, d_model=4, d_ff=4, max_len=8),
    data=MajorityConfig(seq_len=8, test_rows=16, batch_size=4),
    optimizer=SGDConfig(learning_rate=1e-2, schedule=ConstantConfig(warmup_steps=0), clip_norm=None),
    training=TrainingConfig(steps=4, eval_every=2, checkpoint_every=2, log_every=2),
    logging=LoggingConfig(tensorboard=False),
)


class Started(Exception):
    """A worker would be started: a run is not done."""


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A sweep of two runs that ended."""
    root = tmp_path_factory.mktemp("sweeps") / "a"
    runs = {f"seed={seed}": replace(TRAINED, seed=seed) for seed in (0, 1)}
    return root, runs, hyena_jax.sweep(runs, root, quiet=True)


def harm(root: Path, generator: random.Random) -> str:
    """Does one thing to a sweep's folder; says what."""
    paths = sorted(path for path in root.rglob("*") if path.name != ".lock" and not path.is_symlink())
    near = [path for path in paths if len(path.relative_to(root).parts) <= 2]
    one, other = generator.choice(near + paths[::7]), generator.choice(near)
    how = generator.choice(["remove", "swap", "copy", "flip", "cut", "link", "empty"])
    where = generator.random()
    if how in ("flip", "cut", "empty") and one.is_dir():
        how = "remove"
    if how in ("swap", "copy") and (one in (other, *other.parents) or other in one.parents):
        how = "remove"
    match how:
        case "remove":
            shutil.rmtree(one) if one.is_dir() else one.unlink()
        case "swap":
            one.rename(root / "aside")
            other.rename(one)
            (root / "aside").rename(other)
        case "copy":
            shutil.rmtree(other) if other.is_dir() else other.unlink()
            shutil.copytree(one, other) if one.is_dir() else shutil.copy(one, other)
        case "link":
            moved = root.parent / f"moved_{generator.getrandbits(40)}"
            one.rename(moved)
            one.symlink_to(generator.choice([moved, root.parent / "nothing"]))
        case "empty":
            one.write_bytes(b"")
        case "flip" | "cut":
            data = bytearray(one.read_bytes())
            if data and how == "flip":
                data[int(where * len(data))] ^= 1 << generator.randrange(8)
            one.write_bytes(data if how == "flip" else data[: int(where * len(data))])
    return f"{how} {one.relative_to(root)} {other.relative_to(root)}"


def test_sweeps_harmed_after_they_ended(swept, tmp_path, monkeypatch):
    """The same sweep trains again what is not done, refuses in one line, or has two whole runs."""
    root, runs, outcomes = swept
    ends = {"refused": 0, "started": 0, "done": 0}

    def start(*_, **__):
        raise Started

    monkeypatch.setattr(subprocess, "Popen", start)
    for number in range(HARMS):
        case = tmp_path / str(number)
        copied = case / "sweep"
        shutil.copytree(root, copied)
        generator = random.Random(number)
        said = "; ".join(harm(copied, generator) for _ in range(generator.choice([1, 1, 2])))
        try:
            with time_limit(SECONDS):
                found = hyena_jax.sweep(runs, copied, quiet=True)
        except Started:
            ends["started"] += 1
        except (UserError, OSError) as error:
            message = str(error)
            assert_clear(message)
            ends["refused"] += 1
        except Exception as error:
            error.add_note(f"case {number}: {said}")
            raise
        else:
            ends["done"] += 1
            for name, experiment in runs.items():
                assert found[name].values.keys() == outcomes[name].values.keys(), said
                assert read_folder(copied / name).experiment.seed == experiment.seed, said
                assert saved_steps(copied / name / "checkpoints") != [], said
        shutil.rmtree(case)
    assert min(ends["started"], ends["done"]) > 0, ends  # few draws meet sweep.json itself


MAX_LAYERS = 1024


def test_sources_of_weights(tmp_path):
    """Configs without end or with too many layers, and files of PyTorch that are none."""
    generator = random.Random("sources")
    deep = {
        "yaml": ["[" * 10**5, "- " * 10**4 + "1", "a: " + "{b: " * 10**4, "&a [*a]", "a: &a [*a, *a]"],
        "json": ["[" * 10**5 + "]" * 10**5, '{"a":' * 10**4 + "1" + "}" * 10**4, "", "{", "3", "\udcff"],
    }
    many = [
        {"model_type": "lfm2", "num_hidden_layers": n, "hidden_size": 8, "layer_types": ["conv"] * MAX_LAYERS}
        for n in (MAX_LAYERS, MAX_LAYERS + 1, 10**9, -1, None, "x", True, 1e400)
    ]
    pickles = [b"", b"\x80", b"\x80\x02.", b"\x80\x04cos\nsystem\n(S'true'\ntR.", b"PK\x03\x04" + bytes(99)]
    pickles += [bytes(generator.randrange(256) for _ in range(99)) for _ in range(4)]
    for family in ("recurrentgemma", "lfm2", "safari", "hyenadna", "stripedhyena2"):
        for number in range(SOURCES):
            source = tmp_path / f"{family}_{number}"
            source.mkdir()
            text = generator.choice([*deep["json"], *map(json.dumps, many)])
            (source / "config.json").write_text(text, errors="surrogateescape")
            given = ["--config", source / "given.yml"] if generator.random() < 0.4 else []
            text = generator.choice([*deep["yaml"], *deep["json"]])
            (source / "given.yml").write_text(text, errors="surrogateescape")
            name = generator.choice(["weights.pt", "pytorch_model.bin", "model.safetensors"])
            (source / name).write_bytes(generator.choice(pickles))
            one = generator.choice([source, source / name])
            command = ["convert", family, one, "--output", tmp_path / "new", *given]
            assert outcome_of(command) == 2
            assert not (tmp_path / "new").exists()
