"""Folders, names and messages of strangers: each command works, or refuses in one line. Run with -m fuzz."""

import json
import re
import shutil
from contextlib import chdir
from pathlib import Path

import pytest
from fuzz import test_fuzz
from fuzz.test_fuzz import FUZZ
from hypothesis import example, given, settings
from hypothesis import strategies as st

import hyena_jax
from hyena_jax.cli.base import OfConfig
from hyena_jax.cli.commands import COMMANDS
from hyena_jax.config import Experiment, HawkConfig, LanguageModelConfig, TextConfig
from hyena_jax.config.flags import flags_of
from hyena_jax.data.tokenizers import BytesTokenizer
from hyena_jax.system.errors import UserError
from hyena_jax.training.folder import write_description

pytestmark = [pytest.mark.fuzz, pytest.mark.xdist_group("strange_folders")]

COMPARISONS, NAMES, FAULTS = 20, 6, 60
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
