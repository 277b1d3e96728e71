"""Real compilations for TPUs that are not there; run with -m aot where the extra `tpu` is installed."""

import dataclasses

import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

from hyena_jax.cli import main
from hyena_jax.config import (
    MIXER_CONFIGS,
    AdamWConfig,
    Experiment,
    LanguageModelConfig,
    ParallelConfig,
    TextConfig,
)
from hyena_jax.mixers import mixer_class
from hyena_jax.parallel.sharded import AXES, arrange, batch_spec, rows_of_process
from hyena_jax.parallel.strategy import all_devices
from hyena_jax.plan.collectives import collectives
from hyena_jax.plan.compiling import Limits, compile_step
from hyena_jax.plan.hlo import Program
from hyena_jax.plan.planning import make_plan
from hyena_jax.plan.roofline import costs
from hyena_jax.plan.targets import compile_only_devices, parse_target
from hyena_jax.system.chips import GIB

pytest.importorskip("libtpu", reason="needs the extra tpu")
pytestmark = pytest.mark.aot

TARGET = parse_target("v5e:2x2")
LIMITS = Limits(300, 12 * GIB)
LAYOUTS = {
    "pmap": ParallelConfig(),
    "fsdp": ParallelConfig(strategy="sharded", fsdp=4),
    "sequence": ParallelConfig(strategy="sharded", fsdp=1, sequence=4),
}


def experiment(mixer, parallel, n_layers=1, **sizes) -> Experiment:
    widths = {"d_model": 128, "d_ff": 256, "max_len": 512, "vocab_size": 512, "dtype": "bfloat16"} | sizes
    model = LanguageModelConfig(pattern=(mixer,), n_layers=n_layers, **widths)
    data = TextConfig(seq_len=model.max_len, batch_size=8)
    return Experiment(model=model, data=data, optimizer=AdamWConfig(), parallel=parallel)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MIXER_CONFIGS)
def test_every_mixer_compiles_in_every_layout(name, layout):
    mixer = MIXER_CONFIGS[name]()
    if layout == "sequence" and "sequence_axis" not in mixer_class(mixer).__dataclass_fields__:
        pytest.skip(f"{name} does not shard sequences")
    compiled = compile_step(experiment(mixer, LAYOUTS[layout]), TARGET, LIMITS)
    assert 0 < compiled.memory < TARGET.chip.usable
    assert sum(cost.roofline for cost in costs(Program(compiled.text), TARGET.chip)) > 0


@pytest.mark.parametrize("name", ["hyena", "hawk", "attention"])
def test_two_layers_exchange_little_more_than_they_must(name):
    """Weights twice and gradients once; the embedding, whose gradients are summed whole, apart."""
    mixer, sizes = MIXER_CONFIGS[name](), {"d_model": 1024, "d_ff": 4096, "n_layers": 2}
    given = experiment(mixer, LAYOUTS["fsdp"], **sizes)
    plan = make_plan(given, TARGET, LIMITS, whole=True)
    assert sum(row.received for row in plan.exchanges) <= 1.5 * plan.needed_exchange


@pytest.mark.parametrize("name", ["v5e:4x4", "v5p:2x2x2"])
def test_a_mesh_of_slices_spans_them_by_data_alone_and_rows_follow_its_sharding(name):
    devices = all_devices(None, compile_only_devices(parse_target(name, 2)))
    n = len(devices)
    for data, fsdp, sequence in ((2, n // 2, 1), (4, n // 8, 2), (n, 1, 1)):
        layout = ParallelConfig(strategy="sharded", data=data, fsdp=fsdp, sequence=sequence)
        mesh = arrange(layout, devices)
        assert [{device.slice_index for device in half.flat} for half in np.split(mesh, 2)] == [{0}, {1}]
        rows = NamedSharding(Mesh(mesh, AXES), batch_spec(1)).devices_indices_map((data * fsdp,))
        for process in {device.process_index for device in devices}:
            starts = {
                index[0].start or 0 for device, index in rows.items() if device.process_index == process
            }
            assert {*rows_of_process(mesh, process).parts} == starts


def test_two_slices_reduce_within_a_slice_and_then_between_them():
    """By the compiled program: a chip receives from the other slice its part of the gradients, once."""
    layout = ParallelConfig(strategy="sharded", data=2, fsdp=4)
    given = experiment(MIXER_CONFIGS["attention"](), layout)
    given = dataclasses.replace(given, data=dataclasses.replace(given.data, batch_size=16))
    one, two = (
        make_plan(given_, target, LIMITS, whole=True)
        for given_, target in (
            (experiment(MIXER_CONFIGS["attention"](), LAYOUTS["fsdp"]), TARGET),
            (given, parse_target("v5e:2x2", 2)),
        )
    )
    part = one.n_params / 4  # of the gradients, on a chip, in bfloat16 or float32; small ones are whole
    assert 2 * part <= two.between_slices <= 6 * part
    assert one.between_slices == 0
    assert sum(row.received for row in two.exchanges) <= 1.2 * sum(row.received for row in one.exchanges)


def test_no_exchange_of_one_chip():
    given = experiment(MIXER_CONFIGS["hyena"](), ParallelConfig())
    compiled = compile_step(given, parse_target("v5e:1x1"), LIMITS)
    assert collectives(Program(compiled.text)) == []


def test_more_than_a_chip_holds_is_said_with_its_size(capsys):
    flags = "--target v5e:1x1 --model.remat none --data.batch-size 262144 --whole"
    assert main(["plan", "quickstart", *flags.split()]) == 1
    said = capsys.readouterr()
    assert "GiB" in said.err + said.out


@pytest.mark.parametrize(
    ("flag", "line"), [("--max-seconds=1", "--max-seconds 1"), ("--max-memory=0.3", "--max-memory")]
)
def test_limits_end_the_compiler(flag, line, capsys):
    assert main(["plan", "quickstart", "--target", "v5e:2x2", flag]) == 3
    assert line in capsys.readouterr().err


def test_a_layout_that_does_not_divide_the_target(capsys):
    flags = "--target v5e:2x2 --parallel.strategy sharded --parallel.fsdp 3"
    assert main(["plan", "quickstart", *flags.split()]) == 2
    assert "must be the 4 devices" in capsys.readouterr().err


def test_fewer_layers_tell_what_all_do():
    """One and two layers, continued to four, against four: within 5%."""
    given = experiment(MIXER_CONFIGS["hyena"](), ParallelConfig(), n_layers=4)
    short, whole = (make_plan(given, TARGET, LIMITS, whole=whole) for whole in (False, True))
    for end in ("roofline", "pessimistic"):
        assert getattr(short.seconds, end) == pytest.approx(getattr(whole.seconds, end), rel=0.05)
    assert short.memory == pytest.approx(whole.memory, rel=0.1)
    assert short.n_params == whole.n_params
    assert dataclasses.replace(short, compile_seconds=0).forward_products == whole.forward_products
