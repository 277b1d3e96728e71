"""Plans from stored figures: continued depth, bounds, fits; and what the command refuses."""

import dataclasses
import importlib.util
import json
from types import SimpleNamespace

import jax
import pytest
from rich.console import Console

from hyena_jax import config
from hyena_jax.cli import main
from hyena_jax.config import AttentionConfig, FIRConfig, ParallelConfig
from hyena_jax.plan import planning, presentation, search, targets
from hyena_jax.plan.compiling import VOCABULARY, Compiled, Limits, Unfinished
from hyena_jax.plan.step import lower
from hyena_jax.plan.targets import parse_target
from hyena_jax.sweeps.compare import n_params
from hyena_jax.system.chips import GIB
from hyena_jax.system.errors import UserError

TARGET = parse_target("v5e:4x4")
LIMITS = Limits(60, 2**30)


def experiment(n_layers=12, **parallel):
    found = config.load("wikitext103_hyena_125m")
    model = dataclasses.replace(found.model, n_layers=n_layers)
    return dataclasses.replace(found, model=model, parallel=ParallelConfig(**parallel))


TRANSFER = (
    'is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime"}'
)


def text(n_layers: int, n_slices: int) -> str:
    """A program that negates an array once a layer and gathers another one; slices receive 1 GB a layer."""
    crossing = f"\n  %r = (s8[1000000000]{{0}}, u32[], token[]) recv(%t), {TRANSFER}" if n_slices > 1 else ""
    layers = [
        f"  %n{i} = f32[1024,1024]{{1,0:T(8,128)}} negate(%x)\n"
        f"  %g{i} = f32[4096,4]{{1,0}} all-gather(%x), channel_id={i + 1}, replica_groups=[1,16]<=[16]"
        + crossing.replace("%r", f"%r{i}")
        for i in range(n_layers)
    ]
    head = "  %x = f32[1024,1024]{1,0:T(8,128)} parameter(0)\n"
    return f"HloModule m\n\nENTRY %main () -> f32[] {{\n{head}" + "\n".join(layers) + "\n}\n"


@pytest.fixture
def compiled(monkeypatch):
    """Compiles nothing: a program of 3 GiB and half a GiB more a layer, with two parts of state a layer."""
    depths = []

    def compile_step(experiment, target, limits):
        n = experiment.model.n_layers
        depths.append(n)
        facts = {
            "unit": "token",
            "units": 2**18,
            "n_params": 100 + 10 * n,
            "parameters": {"device": 40 * n, "sharded": 640 * n},
            "optimizer": {"device": 80 * n, "sharded": 1280 * n},
            "kernels": {},
            "forward": {"products": 1e15 * n, "transforms": 1e13 * n},
        }
        return Compiled(facts, text(n, target.n_slices), (3 + n / 2) * GIB, ((5, "f32[5]"),), 1.5)

    monkeypatch.setattr(planning, "compile_step", compile_step)
    return depths


def test_the_facts_of_a_step_have_two_moments_of_each_parameter():
    small = experiment(1, devices=1)
    sizes = {"d_model": 8, "ffn": "none", "d_ff": None, "max_len": 16, "pattern": (FIRConfig(),)}
    model = dataclasses.replace(small.model, **sizes)
    data = dataclasses.replace(small.data, seq_len=16, batch_size=2)
    facts = lower(dataclasses.replace(small, model=model, data=data), jax.devices()[:1]).facts
    assert facts["parameters"]["device"] == 4 * facts["n_params"]
    assert 0 <= facts["optimizer"]["device"] - 8 * facts["n_params"] < 100
    assert facts["units"] == 32


def test_depth_is_continued_from_one_and_two_repeats(compiled):
    plan = planning.make_plan(experiment(), TARGET, LIMITS, whole=False)
    assert compiled == [1, 2]
    assert plan.memory == 9 * GIB
    assert plan.fits
    assert plan.n_params == 220
    one = 2 * 4 * 2**20 / TARGET.chip.memory_rate
    assert plan.seconds.roofline == pytest.approx(12 * one)
    received = 4096 * 4 * 4 * 15 / 16
    assert plan.exchanges[0].received == pytest.approx(12 * received)
    assert plan.exchanges[0].received_per_repeat == pytest.approx(received)
    assert plan.exchange_seconds.pessimistic == pytest.approx(12 * received / TARGET.chip.link_rate)
    halved = 12 * 2 * one + plan.exchange_seconds.pessimistic
    assert plan.seconds.pessimistic == pytest.approx(halved)
    speed = 2**18 / 16 / plan.seconds.pessimistic
    assert plan.units_per_second.pessimistic == pytest.approx(speed)
    flops = 3 * 12 * 1e15 / 16
    assert plan.mfu(False).roofline == pytest.approx(flops / 197e12 / plan.seconds.roofline)
    assert plan.mfu(True).roofline == pytest.approx(1.01 * plan.mfu(False).roofline)


def test_slices_exchange_over_their_own_network(compiled):
    """The same shape twice: exchanges are those of a slice, and what crosses between slices comes on top."""
    one = planning.make_plan(experiment(), TARGET, LIMITS, whole=False)
    two = planning.make_plan(experiment(), parse_target("v5e:4x4", 2), LIMITS, whole=False)
    assert (two.target, two.n_chips) == ("2 slices of v5e:4x4", 32)
    assert two.exchanges == one.exchanges
    assert two.needed_exchange == one.needed_exchange
    received = 1e9 * 12  # of the program below, 1 GB a layer
    assert one.between_slices == 0
    assert two.between_slices == pytest.approx(received)
    assert two.between_slices_seconds == pytest.approx(received / 3.125e9)
    assert two.seconds.pessimistic == pytest.approx(one.seconds.pessimistic + received / 3.125e9)
    assert two.seconds.roofline == pytest.approx(received / 3.125e9)  # which hides the rest
    console = Console(record=True, width=200)
    presentation.print_plan(two, console)
    said = console.export_text()
    assert "2 slices of v5e:4x4, 32 chips, pmap over 32" in said
    assert "between slices, over the data-centre network: 12.000 GB received by a chip, 3840.0 ms" in said


def test_the_parameters_of_a_part_of_the_pattern_are_counted(compiled):
    """Two layers in a repeat, of which five layers end with one."""
    found, pattern = experiment(), (FIRConfig(), AttentionConfig())
    small = dataclasses.replace(found.model, pattern=pattern, n_layers=5, vocab_size=None)
    plan = planning.make_plan(dataclasses.replace(found, model=small), TARGET, LIMITS, False)
    assert compiled == [2, 4]
    assert plan.n_params == n_params(dataclasses.replace(small, vocab_size=VOCABULARY))


def test_a_shallow_model_and_a_whole_one_are_compiled_once(compiled):
    planning.make_plan(experiment(2), TARGET, LIMITS, whole=False)
    plan = planning.make_plan(experiment(12), TARGET, LIMITS, whole=True)
    assert compiled == [2, 12]
    assert plan.exchanges[0].received_per_repeat is None
    assert plan.memory == 9 * GIB


@pytest.mark.parametrize(("n_layers", "is_near"), [(17, False), (18, True), (33, True), (34, False)])
def test_memory_near_the_chips_is_that_of_all_layers(compiled, n_layers, is_near):
    """11.8 to 19.7 GiB: a quarter below and above 15.75."""
    plan = planning.make_plan(experiment(n_layers), TARGET, LIMITS, whole=False)
    assert compiled == ([1, 2, n_layers] if is_near else [1, 2])
    assert plan.compiled_layers == ((n_layers,) if is_near else (1, 2))
    assert plan.memory == (3 + n_layers / 2) * GIB


def test_what_a_layout_must_exchange(compiled):
    """pmap averages all gradients in float32; fsdp moves weights twice and gradients once, in bfloat16."""
    pmap = planning.make_plan(experiment(), TARGET, LIMITS, False)
    assert pmap.needed_exchange == pytest.approx(2 * 15 / 16 * 480)
    sharded = planning.make_plan(experiment(strategy="sharded", fsdp=16), TARGET, LIMITS, False)
    assert sharded.needed_exchange == pytest.approx(3 * 15 / 16 * 0.5 * 640 * 12)
    both = planning.make_plan(experiment(strategy="sharded", fsdp=4), TARGET, LIMITS, False)
    assert both.needed_exchange == pytest.approx(3 * 3 / 4 * 0.5 * 640 * 12 + 2 * 3 / 4 * 480)


def test_lines_and_files(compiled, tmp_path):
    plan = planning.make_plan(experiment(40), TARGET, LIMITS, False)
    console = Console(record=True, width=200)
    presentation.print_plan(plan, console)
    said = console.export_text()
    assert "continued from 1 and 2 layers to 40, memory to about a quarter" in said
    assert "23.00 of 15.75 GiB a chip, DOES NOT FIT" in said
    assert said.count("estimated, not measured on a device") == 1
    presentation.write(tmp_path, [plan], {"command": "hyena-jax plan"})
    (kept,) = json.loads((tmp_path / "plan.json").read_text())["plans"]
    assert kept["fits"] is False
    assert kept["units_per_second"]["pessimistic"] == plan.units_per_second.pessimistic
    assert (tmp_path / "plan.png").stat().st_size > 10_000


def test_a_search_reports_each_candidate_with_the_time_left(monkeypatch):
    """A batch that does not fit ends its row: larger ones would not either."""

    def make_plan(experiment, *_):
        fits = experiment.data.batch_size < 300
        return SimpleNamespace(fits=fits, memory=GIB if fits else 40 * GIB)

    monkeypatch.setattr(search, "make_plan", make_plan)
    rows, done, lines = list(search.candidates(experiment(), TARGET, ("batch",))), [], []
    plans, refused = search.search(rows, TARGET, None, False, done.append, lines.append)
    assert ([plan.fits for plan in plans], refused, done) == ([True, True, False], [], [1, 1, 2])
    first, _, last = lines
    assert first == "1 of 4: pmap over 16, remat none, batch 128: fits in 1.0 GiB; 0 s left"
    assert last == "4 of 4: pmap over 16, remat none, batch 512: does not fit in 40.0 GiB; 0 s left"


def test_a_search_continues_after_a_compilation_at_a_limit(monkeypatch):
    def make_plan(experiment, *_):
        if experiment.model.remat == "none":
            raise Unfinished("compiling took longer than --max-seconds 5; raise it")
        return SimpleNamespace(fits=True, memory=GIB)

    monkeypatch.setattr(search, "make_plan", make_plan)
    rows, ignore = list(search.candidates(experiment(), TARGET, ("remat",))), lambda _: None
    plans, refused = search.search(rows, TARGET, None, False, ignore, ignore)
    assert len(plans) == len(rows) - 1
    assert "remat none" in refused[0]
    assert "raise it" in refused[0]


def test_devices_are_those_of_the_target():
    few = dataclasses.replace(experiment(), parallel=ParallelConfig(devices=1))
    with pytest.raises(UserError, match="parallel.devices must be None: the target says how many chips"):
        planning.make_plan(few, TARGET, LIMITS, False)


def test_a_search_over_batch_remat_and_layout():
    found = list(search.candidates(experiment(), TARGET, ("remat", "batch", "layout")))
    assert {len(row) for row in found} == {4}
    assert [one.data.batch_size for one in found[0]] == [128, 256, 512, 1024]
    layouts = dict.fromkeys(planning.describe_layout(row[0], TARGET) for row in found)
    assert list(layouts) == [
        "pmap over 16",
        "data 1 x fsdp 16 x sequence 1",
        "data 4 x fsdp 4 x sequence 1",
        "data 1 x fsdp 4 x sequence 4",
    ]
    assert len(found) == 3 * len(layouts)
    (alone,) = search.candidates(experiment(), TARGET, ("batch",))
    assert {one.model.remat for one in alone} == {experiment().model.remat}
    with pytest.raises(UserError, match="did you mean 'batch'"):
        list(search.candidates(experiment(), TARGET, ("bacth",)))


def test_batches_that_the_chips_do_not_divide_are_left_out():
    odd = dataclasses.replace(experiment(), data=dataclasses.replace(experiment().data, batch_size=40))
    (row,) = search.candidates(odd, TARGET, ("batch",))  # 16 chips
    assert [one.data.batch_size for one in row] == [80, 160]


def test_the_best_plans_fit(compiled):
    small, large = (planning.make_plan(experiment(n), TARGET, LIMITS, False) for n in (6, 40))
    slow = dataclasses.replace(small, units=small.units // 2)
    assert presentation.best([slow, large, small]) == [small, slow]


REFUSED = {
    "an unknown chip": ("--target v5x:4x4", "--target 'v5x' is unknown (did you mean 'v5"),
    "too many axes": ("--target v5e:2x2x2", "--target must be v5e:AxB, 2 numbers of chips, such as v5e:4x4"),
    "odd numbers": ("--target v5p:3x2x1", "--target must be of even numbers"),
    "too many chips": ("--target v5e:64x64", "--target must be at most 1024 chips"),
    "too many GPUs": ("--target h100:9", "--target must be at most 8 chips"),
    "many digits": (f"--target h100:{'9' * 5000}", "must be h100, or h100:N with N from 1 to 8, got"),
    "a batch for no layout": (
        "--target v5e:4x4 --search remat --data.batch-size 3",
        "--data.batch-size must be a multiple of 16, the shards of its rows",
    ),
    "an unknown axis": ("--target v5e:4x4 --search remt", "'remt' is unknown (did you mean 'remat'?)"),
    "no time": ("--target v5e:4x4 --max-seconds 0", "--max-seconds must be above 0"),
    "more memory than there is": ("--target v5e:4x4 --max-memory 1e6", "--max-memory must be in (0,"),
    "no target": ("", "--target must be given"),
    "too many slices": (
        "--target v5e:4x4 --num-slices 65",
        "--num-slices must be in 1..64, for at most 1024 chips, got 65",
    ),
    "no slice": ("--target v5e:4x4 --num-slices 0", "--num-slices must be at least 1, got 0"),
    "slices of GPUs": (
        "--target h100:8 --num-slices 2",
        "--num-slices must be 1 for h100: the network is known for v5e, v5p, v6e",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_gets_one_line(case, capsys):
    flags, line = REFUSED[case]
    assert main(["plan", "quickstart", *flags.split()]) == 2
    said = capsys.readouterr().err.strip()
    assert line in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("target", "line"),
    [("v5e:2x2", "pip install 'hyena_jax[tpu]'"), ("h100", "pip install --no-deps jax-cuda13-pjrt==")],
)
def test_a_missing_compiler_names_what_to_install(target, line, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["plan", "quickstart", "--target", target]) == 2
    assert line in capsys.readouterr().err


def test_a_compiler_of_another_jax_names_the_version_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    versions = {"jax": "0.12.0.1", "libtpu": "0.0.41"}
    monkeypatch.setattr(importlib.metadata, "version", versions.get)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ['libtpu==0.0.50.*; extra == "tpu"'])
    with pytest.raises(UserError, match="libtpu 0.0.41 .* jax 0.12.0.1: pip install 'libtpu==0.0.50"):
        targets.require_compiler(TARGET)
    versions["libtpu"] = "0.0.50.1"
    assert targets.require_compiler(TARGET) == "libtpu"


def test_a_folder_with_other_files_is_left_alone(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    assert main(["plan", "quickstart", "--target", "v5e:2x2", "--output", str(tmp_path)]) == 2
    assert "--output must be new, empty, or of an earlier plan" in capsys.readouterr().err


def test_peaks_are_those_of_the_matrix_units():
    """A core has 4 of them, of 128 x 128 or 256 x 256, and 4 operations a cycle for each of 8 x 128 lanes."""
    for name in ("v4", "v5e", "v5p", "v6e"):
        chip, tile = targets.CHIPS[name], 256 if name == "v6e" else 128
        assert chip.flops == pytest.approx(chip.vector_rate * 2 * tile**2 / 1024, rel=0.01), name
