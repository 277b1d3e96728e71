"""Parts from files outside the package: registered, chosen by name, kept in config.json, refused by name."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar, Literal

import flax.linen as nn
import numpy as np
import pytest

from hyena_jax import cli, config
from hyena_jax.cli.train import Train
from hyena_jax.config import (
    Above,
    AtLeast,
    AtMost,
    Below,
    Between,
    Experiment,
    FilterConfig,
    HawkConfig,
    HyenaConfig,
    LanguageModelConfig,
    MixerConfig,
    S4DFilterConfig,
    plugins,
    register,
)
from hyena_jax.config.flags import read_flags
from hyena_jax.system.errors import UserError

EXTENSIONS = Path(__file__).parent / "extensions"
pytestmark = pytest.mark.usefixtures("own_parts")
MIXERS = EXTENSIONS / "ema.py", EXTENSIONS / "token_shift.py"


@dataclasses.dataclass(frozen=True)
class OwnConfig(MixerConfig):
    gain: float = 1.0


class Own(nn.Module):
    def __call__(self, x, segment_ids=None, deterministic=True):
        return x


class NotCallable(nn.Module):
    pass


def experiment(*pattern) -> Experiment:
    return Experiment(model=LanguageModelConfig(pattern=pattern))


def test_a_registered_part_survives_json_and_is_found():
    register("own", OwnConfig, Own)
    values = json.loads(json.dumps(config.encode(experiment(OwnConfig(gain=2.0)))))
    assert values["model"]["pattern"] == [{"type": "own", "gain": 2.0}]
    assert config.decode(values) == experiment(OwnConfig(gain=2.0))
    assert config.MIXER_CONFIGS.target(OwnConfig) is Own
    assert config.MIXER_CONFIGS.oracle(OwnConfig) is None


def test_the_same_definition_may_be_registered_again_as_a_notebook_does():
    cell = """
import dataclasses
from hyena_jax.config import MixerConfig, register
@dataclasses.dataclass(frozen=True)
class CellConfig(MixerConfig):
    gain: float = 1.0
class Cell:
    def __call__(self, x): ...
register("cell", CellConfig, Cell)
"""
    for _ in range(2):
        names = {"__name__": "__main__"}
        exec(cell, names)
    assert config.MIXER_CONFIGS["cell"] is names["CellConfig"]


class UndecoratedConfig(MixerConfig):
    gain: float = 1.0


@dataclasses.dataclass(frozen=True)
class RequiredConfig(MixerConfig):
    gain: float


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("Own", OwnConfig, Own), "name must be like .*, got 'Own'"),
        (("hyena", OwnConfig, Own), "the name 'hyena' is taken by the mixer HyenaConfig"),
        (("own", OwnConfig, NotCallable), "must be a Linen module with __call__, got 'NotCallable'"),
        (("own", OwnConfig, None), "must be a Linen module with __call__, got None"),
        (("own", Own, Own), "must be a class derived from the base class of its kind"),
        (("own", MixerConfig, Own), "must be a class derived from the base class of its kind"),
        (("own", OwnConfig(), Own), "must be a class derived from the base class of its kind"),
        (("own", UndecoratedConfig, Own), "UndecoratedConfig must be decorated with @dataclasses.dataclass"),
        (("own", RequiredConfig, Own), "RequiredConfig.gain must have a default"),
    ],
)
def test_what_cannot_be_registered_is_refused_by_name(arguments, message):
    with pytest.raises(UserError, match=message):
        register(*arguments)
    assert list(config.MIXER_CONFIGS)[-1] != "own"


@pytest.mark.parametrize(
    "hint",
    [
        dict[str, float],
        list[int] | None,
        Literal[1, 2],
        tuple[()],
        tuple[list[int], ...],
        Any,
        "NoSuch",
        list,
    ],
)
def test_annotations_that_cannot_be_checked_are_refused_by_name(hint):
    odd = dataclasses.make_dataclass("OddConfig", [("a", hint, None)], bases=(MixerConfig,), frozen=True)
    message = r"OddConfig\.a must be annotated with .*, got |annotation of OddConfig"
    with pytest.raises(UserError, match=message):
        register("own", odd, Own)


def test_no_option_is_called_type():
    """In config.json it would take the place of the part's name."""
    odd = dataclasses.make_dataclass("OddConfig", [("type", str, "a")], bases=(MixerConfig,), frozen=True)
    with pytest.raises(UserError, match="OddConfig.type must be another name"):
        register("own", odd, Own)


@dataclasses.dataclass(frozen=True)
class BoundedConfig(OwnConfig):
    """Its options have ranges."""

    gain: Annotated[float, Between(0, 1, "[)")] = 0.5
    """Share."""
    n_taps: Annotated[int | None, AtLeast(1), AtMost(8)] = None
    sizes: tuple[Annotated[int, AtLeast(2)], ...] = (2, 3)
    kind: Annotated[int | Literal["auto"], Above(3)] = "auto"


@dataclasses.dataclass(frozen=True)
class NarrowerConfig(BoundedConfig):
    gain: Annotated[float, Below(0.5)] = 0.1
    n_taps: int | None = 4


@pytest.mark.parametrize(
    ("config_class", "name", "value", "message"),
    [
        (BoundedConfig, "gain", 1.0, "gain must be in [0, 1), got 1.0"),
        (BoundedConfig, "gain", "x", "gain must be a finite float32, got 'x'"),
        (BoundedConfig, "n_taps", 0, "n_taps must be at least 1, got 0"),
        (BoundedConfig, "n_taps", 9, "n_taps must be at most 8, got 9"),
        (BoundedConfig, "sizes", (5, 1), "sizes must be at least 2, got (5, 1)"),
        (BoundedConfig, "sizes", (2**31,), "sizes must be at most 2147483647, got (2147483648,)"),
        (BoundedConfig, "kind", 3, "kind must be above 3, got 3"),
        (NarrowerConfig, "gain", 0.5, "gain must be below 0.5, got 0.5"),
        (NarrowerConfig, "gain", -0.1, "gain must be in [0, 1), got -0.1"),
        (NarrowerConfig, "n_taps", 9, "n_taps must be at most 8, got 9"),
    ],
)
def test_ranges_in_annotations_are_checked_also_in_subclasses(config_class, name, value, message):
    register("bounded", config_class, Own)
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        config_class(**{name: value})
    fits = config_class(gain=0.25, n_taps=None, sizes=(), kind=4)
    assert config.decode(config.encode(experiment(fits))) == experiment(fits)


def test_help_prints_the_ranges_of_a_part_of_the_user(tmp_path, capsys):
    path = tmp_path / "own.py"
    path.write_text(
        "from dataclasses import dataclass\nfrom typing import Annotated\n"
        "from hyena_jax.config import AtLeast, AtMost, LossConfig, register\n"
        "@dataclass(frozen=True)\nclass OwnLoss(LossConfig):\n"
        "    power: Annotated[int | None, AtLeast(1), AtMost(9)] = 2\n    'Exponent.'\n"
        "register('own', OwnLoss, lambda config, logits, targets: targets)"
    )
    arguments = ["train", "quickstart", "--plugin", str(path), "--loss", "own"]
    assert cli.main([*arguments, "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--loss.power INT Exponent. (default: 2; at least 1, at most 9)" in text
    assert " loss: --loss.power" in text  # without a docstring, no signature
    assert cli.main([*arguments, "--workdir", str(tmp_path / "run"), "--loss.power", "0"]) == 2
    assert "error: --loss.power must be at least 1, got 0" in capsys.readouterr().err


def test_a_sweep_names_the_plugins_of_its_runs_for_compare(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("hyena_jax.sweeps.sweep.sweep", lambda runs, workdir, **options: {})
    axis = ["--grid", "model.pattern=hyena,ema", "--workdir", str(tmp_path / "my runs")]
    assert cli.main(["sweep", "quickstart", "--plugin", str(MIXERS[0]), *axis]) == 0
    expected = f"to compare the runs: hyena-jax compare '{tmp_path}/my runs' --plugin {MIXERS[0]}\n"
    assert capsys.readouterr().out == f"\n{expected}"
    assert cli.main(["sweep", "quickstart", *axis[:1], "seed=0,1", *axis[2:]]) == 0
    assert "--plugin" not in capsys.readouterr().out


def test_one_class_has_one_name():
    register("own", OwnConfig, Own)
    with pytest.raises(UserError, match="OwnConfig is already registered as 'own'"):
        register("other", OwnConfig, Own)


def test_what_is_not_registered_cannot_be_saved_or_built():
    message = r"OwnConfig is not a registered mixer: call hyena_jax.register\(name, OwnConfig, module\)"
    with pytest.raises(UserError, match=message):
        config.encode(experiment(OwnConfig()))
    with pytest.raises(UserError, match=message):
        config.MIXER_CONFIGS.target(OwnConfig)


def test_a_module_named_by_a_string_is_imported_when_it_is_used():
    register("own", OwnConfig, "no_such_module:Own")
    with pytest.raises(UserError, match="'no_such_module:Own' cannot be imported: No module named"):
        config.MIXER_CONFIGS.target(OwnConfig)


def chosen(given: Experiment, *arguments: str) -> Experiment:
    line = ["quickstart", "--workdir", "x", *arguments]
    return read_flags(Train, "train", line, {"experiment": given}).experiment


def test_kinds_are_chosen_by_name_outer_ones_first():
    arguments = ["--seed", "1", "--model.pattern.1.filter=s4d", "--model.pattern", "hawk,hyena"]
    found = chosen(Experiment(), *arguments)
    assert found.model.pattern == (HawkConfig(), HyenaConfig(filter=S4DFilterConfig()))
    assert found.seed == 1


def test_a_default_of_the_part_before_is_not_kept():
    """`recall` alone lets test rows occur in training, and its config alone has batches of 32 rows."""
    data = chosen(config.load("tasks:recall"), "--data", "majority").data
    assert (data.disjoint, data.batch_size) == (True, 32)


def test_the_kind_that_is_there_keeps_its_options():
    ours = experiment(HyenaConfig(order=3))
    assert chosen(ours, "--model.pattern.0", "hyena", "--model", "language_model") == ours


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model.pattern", "hawk,hyaena"], "'hyaena' is unknown .did you mean 'hyena'"),
        (["--model.pattern.0.filter", "s5d"], "'s5d' is unknown .did you mean 's4d'"),
        (["--model.pattern"], "--model.pattern must be followed by a name"),
        (["--optimizer", "lion", "--optimizer=sgd"], "--optimizer is given twice"),
        (["--model.pattern", ""], "pattern must be at least one mixer"),
        (["--data", "images"], "data must be what the model reads"),
    ],
)
def test_wrong_choices_are_refused_by_name(arguments, message):
    with pytest.raises(UserError, match=message):
        chosen(Experiment(), *arguments)


def plugin(tmp_path, text: str) -> Path:
    path = tmp_path / "my plugin.py"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 / 0", "cannot be imported: ZeroDivisionError: division by zero"),
        ("import no_such_package", "cannot be imported: ModuleNotFoundError"),
        ("def f(:", "cannot be imported: SyntaxError"),
        ("raise SystemExit(0)", "cannot be imported: SystemExit"),
        ("from hyena_jax.config import *\nregister('x', MixerConfig, int)", "derived from the base class"),
    ],
)
def test_a_plugin_that_fails_is_one_line_and_code_2(tmp_path, capsys, text, message):
    new = tmp_path / "run"
    arguments = ["train", "quickstart", "--plugin", str(plugin(tmp_path, text)), "--workdir", str(new)]
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not new.exists()


def test_a_part_of_the_user_that_fails_is_said_with_its_file_and_line(tmp_path, capsys):
    path = tmp_path / "broken.py"
    text = (EXTENSIONS / "token_shift.py").read_text()
    path.write_text(text.replace("def mix(", "def mix(self, *_):\n        return 1 / 0\n\n    def unused("))
    line = path.read_text().splitlines().index("        return 1 / 0") + 1
    new = ["--plugin", str(path), "--model.pattern", "token_shift", "--workdir", str(tmp_path / "run")]
    assert cli.main(["train", "quickstart", *new]) == 2
    failed = f"hyena-jax: error: your plugin failed: ZeroDivisionError: division by zero ({path}:{line})"
    assert capsys.readouterr().err.splitlines() == [failed]


@pytest.mark.parametrize("error", [KeyError("x"), OSError("no space"), SystemExit(1), UserError("wrong")])
def test_where_our_code_runs_too_only_errors_of_parts_of_the_user_are_theirs(error):
    register("own", OwnConfig, Own)
    for about, is_theirs in ((Experiment(), False), (experiment(OwnConfig()), isinstance(error, KeyError))):
        raised = pytest.raises(UserError if is_theirs else type(error))
        with raised as caught, config.own_code("your plugin failed", about):
            raise error
        assert str(caught.value).startswith("your plugin failed: KeyError: ") == is_theirs


@pytest.mark.parametrize("error", ["SystemExit(0)", "GeneratorExit()", "type('Own', (BaseException,), {})()"])
def test_a_plugin_that_ends_the_process_while_it_is_used_has_failed(error, tmp_path, capsys, monkeypatch):
    module = config.plugins.import_parts(str(plugin(tmp_path, f"def use(*_):\n    raise {error}")))
    monkeypatch.setattr("hyena_jax.cli.commands.run", module.use)
    assert cli.main(["train"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hyena-jax: error: your plugin failed: ")
    assert line.endswith(".py:2)")
    register("own", OwnConfig, Own)
    raised = pytest.raises(UserError, match="^your plugin failed: ")
    with raised, config.own_code("your plugin failed", experiment(OwnConfig())):
        module.use()


@pytest.mark.parametrize("inherited", [None, "1"])
def test_libraries_are_quiet_before_a_plugin_imports_them(inherited, tmp_path, capsys, monkeypatch):
    """XLA reads the variable when it is loaded; without it, it warns of every program from the cache.

    JAX sets it to 1, also for the processes that a program starts which imports JAX.
    """
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL")
    if inherited:
        monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", inherited)
    text = "import os\nraise ValueError(os.environ['TF_CPP_MIN_LOG_LEVEL'])"
    assert cli.main(["train", "quickstart", "--plugin", str(plugin(tmp_path, text))]) == 2
    assert "ValueError: 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--plugin", "no_file.py"], "plugin 'no_file.py': 'no_file.py' is not a file"),
        (["--plugin", "no_such_module"], "plugin 'no_such_module' cannot be imported"),
        (["--plugin"], "--plugin must be followed by"),
    ],
)
def test_a_plugin_that_is_not_there_is_one_line_and_code_2(tmp_path, capsys, arguments, message):
    assert cli.main(["train", "quickstart", "--workdir", str(tmp_path / "run"), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_plugin_that_is_loaded_again_keeps_all_of_its_parts(tmp_path):
    """Parts that it replaces are freed, and new ones take their places in memory."""
    file = tmp_path / "losses.py"
    lines = ["from dataclasses import dataclass", "from hyena_jax.config import LossConfig, register"]
    names = ("la", "lb", "lc", "ld")
    for name in names:
        lines += ["@dataclass(frozen=True)", f"class {name.upper()}(LossConfig):", "    pass"]
        lines += [f"register('{name}', {name.upper()}, print)"]
    file.write_text("\n".join(lines))
    for _ in range(2):
        config.load_plugin(str(file))
    parts = [config.LossConfig.registry.parts[name] for name in names]
    assert [part.plugin and part.plugin.name for part in parts] == [str(file)] * len(names)


def test_config_json_says_where_a_part_came_from_and_who_lacks_it_is_told(tmp_path):
    file = tmp_path / "it's.py"
    shutil.copy(EXTENSIONS / "power_law.py", file)
    config.load_plugin(str(file))
    own = config.FILTER_CONFIGS["power_law"]()
    values = config.encode(experiment(HyenaConfig(filter=own)))
    assert values["plugins"][str(file)]["parts"] == ["filter power_law"]
    assert config.decode(values) == experiment(HyenaConfig(filter=own))
    assert config.changed_plugins(experiment(HyenaConfig(filter=own)), values["plugins"]) == []
    file.write_text(file.read_text() + "# changed\n")
    config.load_plugin(str(file))
    changed = experiment(HyenaConfig(filter=config.FILTER_CONFIGS["power_law"]()))
    (line,) = config.changed_plugins(changed, values["plugins"])
    assert "it'\\''s.py' (its SHA-256 differs)" in line
    moved = {"/elsewhere.py": config.encode(changed)["plugins"][str(file)]}
    assert config.changed_plugins(changed, moved) == []
    assert config.changed_plugins(changed, {"/elsewhere.py": values["plugins"][str(file)]}) == [line]
    del config.FILTER_CONFIGS._parts["power_law"]
    hint = r"power_law must be registered: add --plugin '/.*it'\\''s.py' \(in Python, import it first\)$"
    with pytest.raises(UserError, match=hint):
        config.decode(values)


def test_the_code_of_a_plugin_is_that_of_all_its_modules(tmp_path):
    package = SimpleNamespace(__file__=str(tmp_path / "__init__.py"))
    (tmp_path / "__init__.py").touch()
    (tmp_path / "sub").mkdir()
    empty = plugins._digest(package)
    (tmp_path / "sub" / "more.py").write_text("x = 1")
    assert plugins._digest(package) != empty


def test_an_entry_point_is_imported_when_it_is_named(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    shutil.copy(EXTENSIONS / "power_law.py", tmp_path / "own_filters.py")
    about = tmp_path / "own_filters-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: own_filters\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[hyena_jax.plugins]\nmine = own_filters\n")
    assert "power_law" not in config.FILTER_CONFIGS
    config.load_plugin("mine")
    own = config.FILTER_CONFIGS["power_law"]()
    assert list(config.encode(experiment(HyenaConfig(filter=own)))["plugins"]) == ["mine"]
    sys.modules.pop("own_filters")


def test_what_a_run_folder_says_is_shown_without_control_characters_and_never_imported(tmp_path):
    file = plugin(tmp_path, "raise RuntimeError('imported')")
    values = config.encode(Experiment())
    about = {"sha256": "", "parts": ["mixer \x1b[2Jown\n"]}
    (tmp_path / "config.json").write_text(json.dumps(values | {"plugins": {f"{file}\x1b]0;x\x07": about}}))
    with pytest.raises(UserError) as caught:
        config.read(tmp_path / "config.json")
    assert str(caught.value).isprintable()
    hint = f"--plugin '{file}\\x1b]0;x\\x07'"
    assert f"mixer \\x1b[2Jown  must be registered: add {hint}" in str(caught.value)


@pytest.mark.parametrize(
    "plugins", [[], 3, {"a": 1}, {"a": {"parts": 2}}, {"a": {}}, {"a": {"parts": [["a"]]}}]
)
def test_malformed_plugins_of_a_run_folder_do_no_harm(plugins):
    values = config.encode(Experiment())
    assert config.decode(values | {"plugins": plugins}) == Experiment()
    assert config.changed_plugins(Experiment(), plugins) == []


def test_a_filter_of_ones_own_goes_into_every_long_convolution():
    own = dataclasses.make_dataclass("OwnFilter", [("a", int, 1)], bases=(FilterConfig,), frozen=True)
    register("own", own, Own)
    for name, mixer in config.MIXER_CONFIGS.items():
        if "filter" in mixer.__dataclass_fields__:
            found = config.decode(config.encode(experiment(mixer(filter=own()))))
            assert found.model.pattern[0].filter == own(), name


@pytest.mark.grid
def test_a_mixer_from_a_file_keeps_the_contract():
    """In its own process, as its author would run it."""
    environment = os.environ | {"HYENA_JAX_PLUGINS": os.pathsep.join(map(str, MIXERS))}
    contract = "-m pytest -n 0 tests/mixers/test_contract.py -k".split()
    done = subprocess.run(
        [sys.executable, *contract, "ema or token_shift"],
        cwd=Path(__file__).parents[1],
        env={key: value for key, value in environment.items() if not key.startswith("PYTEST_")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert re.search(r"\b\d\d passed", done.stdout)


def test_an_unknown_name_may_be_one_s_own(tmp_path, capsys):
    train = ["train", "quickstart", "--workdir", str(tmp_path / "run")]
    assert cli.main([*train, "--model.pattern", "token_shift"]) == 2
    own = "a name of your own needs --plugin FILE; in Python, import its module first"
    start = f"hyena-jax: error: --model.pattern 'token_shift' is unknown ({own}); allowed: hyena,"
    assert capsys.readouterr().err.startswith(start)
    assert cli.main([*train, "--optimizer", "adam"]) == 2
    assert f"(did you mean 'adamw'? {own}" in capsys.readouterr().err
    for command in (["train", "tasks:mine"], ["train", "shakespeare_cpu:mine"], ["task", "mine"]):
        assert cli.main(command) == 2
        assert "a name of your own needs --plugin FILE" in capsys.readouterr().err


def test_a_value_that_dataclass_does_not_make_a_field_is_refused():
    @dataclasses.dataclass(frozen=True)
    class Forgotten(MixerConfig):
        gain = 2.0

    message = r"^Forgotten.gain must be annotated to be an option, as in `gain: float"
    with pytest.raises(UserError, match=message):
        register("forgotten", Forgotten, Own)

    @dataclasses.dataclass(frozen=True)
    class Slow(config.AdamWConfig):
        learning_rate = 1e-9

    with pytest.raises(UserError, match=r"^Slow.learning_rate must be annotated"):
        register("slow", Slow, print)

    @dataclasses.dataclass(frozen=True)
    class Fine(config.DataConfig):
        LIMIT: ClassVar[int] = 3
        inputs = "rows"  # not an option of the base class either
        path: str = "a"

        @property
        def is_long(self):
            return True

    register("fine", Fine, print)


READS = """
from dataclasses import dataclass

import numpy as np

from hyena_jax.config import DataConfig, register
from hyena_jax.data import CharactersTokenizer, from_tokens


@dataclass(frozen=True)
class ReadsConfig(DataConfig):
    seq_len: int = 8
    file: str = "missing.npy"


def load(config, encoding):
    return from_tokens(np.load(config.file), config.seq_len, tokenizer=CharactersTokenizer("abc"))


register("reads", ReadsConfig, load)
"""


@pytest.mark.grid
def test_data_of_one_s_own_that_lack_their_file_their_prompt_and_a_path(tmp_path, capsys):
    plugin, run = tmp_path / "reads.py", tmp_path / "run"
    plugin.write_text(READS)
    small = "--model.pattern attention --model.n-layers 1 --model.d-model 8 --model.max-len 8".split()
    small += "--training.steps 1 --data.batch-size 2 --logging.sample-tokens 2 --parallel.devices 1".split()
    train = ["train", "quickstart", "--plugin", str(plugin), "--data", "reads", *small, "--workdir", str(run)]
    assert cli.main(train) == 2
    error = capsys.readouterr().err
    line = READS.splitlines().index("    return from_tokens(np.load(config.file), config.seq_len,"
                                    ' tokenizer=CharactersTokenizer("abc"))') + 1  # fmt: skip
    assert error.startswith("hyena-jax: error: your plugin failed: FileNotFoundError: ")
    assert error.endswith(f"'missing.npy' ({plugin}:{line})\n")
    assert not run.exists()
    rows = tmp_path / "rows.npy"
    np.save(rows, np.arange(200) % 3)
    # The prompt of quickstart, "def ", has letters that these data do not have.
    assert cli.main([*train, "--data.file", str(rows)]) == 0
    assert config.read_run(run).logging.sample_prompt is None
    assert cli.main([*train, "--data.file", str(rows), "--logging.sample-prompt", "def "]) == 2
    assert "None continues held-out data" in capsys.readouterr().err
    capsys.readouterr()
    assert cli.main(["eval", str(run), "--plugin", str(plugin), "--path", str(rows)]) == 2
    message = "left out: 'reads' has no options path and validation_path that could name it; without --path"
    assert message in capsys.readouterr().err
    rows.unlink()
    assert cli.main(["eval", str(run), "--plugin", str(plugin)]) == 2
    assert capsys.readouterr().err.startswith("hyena-jax: error: your plugin failed: FileNotFoundError: ")


def test_what_is_not_a_config_is_told_what_it_may_be(tmp_path, capsys):
    text, run = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("a text")
    run.mkdir()
    (run / "config.json").write_text("{}")
    for given, hint in {
        str(text): "is not a Python file with get_config() (a text to train on: --data.path)",
        str(run): f"is the folder of a run: `train --resume {run}` continues it",
        str(MIXERS[0]): "it has no get_config() (a file that registers parts of your own: --plugin)",
    }.items():
        assert cli.main(["train", given, "--workdir", str(tmp_path / "new")]) == 2
        error = capsys.readouterr().err
        assert hint in error
        assert error.count("\n") == 1
