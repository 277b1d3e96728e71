"""Meshes over several slices of TPUs, which a slower network connects; by devices that are only described."""

from dataclasses import dataclass

import jax
import numpy as np
import pytest
from grid import in_grid
from jax.sharding import Mesh, NamedSharding
from test_distributed import arguments, assert_like_one_process, ended

from hyena_jax import cli
from hyena_jax.config import ParallelConfig
from hyena_jax.parallel.sharded import AXES, arrange, batch_spec, rows_of_process
from hyena_jax.parallel.strategy import RowShard, all_devices
from hyena_jax.system.errors import UserError
from hyena_jax.training.checkpoint import saved_steps


@dataclass(frozen=True)
class Device:
    """A chip of a v5e, as JAX describes it."""

    id: int
    process_index: int
    slice_index: int
    coords: tuple[int, int, int]
    platform: str = "tpu"
    device_kind: str = "TPU v5 lite"
    core_on_chip: int = 0


def slices(n_slices, platform="tpu"):
    """Slices of 4 x 4 chips; a host has a square of four."""
    return all_devices(
        None,
        [
            Device(16 * n + 4 * y + x, 4 * n + 2 * (y // 2) + x // 2, n, (x, y, 0), platform)
            for n in range(n_slices)
            for y in range(4)
            for x in range(4)
        ],
    )


def sharded(data, fsdp, sequence):
    return ParallelConfig(strategy="sharded", data=data, fsdp=fsdp, sequence=sequence)


@pytest.mark.parametrize(("data", "fsdp", "sequence"), [(2, 16, 1), (8, 2, 2), (4, 2, 4)])
def test_only_data_spans_slices(data, fsdp, sequence):
    mesh = arrange(sharded(data, fsdp, sequence), slices(2))
    assert mesh.shape == (data, fsdp, sequence)
    numbers = np.vectorize(lambda device: device.slice_index)(mesh)
    assert (numbers[: data // 2] == 0).all()
    assert (numbers[data // 2 :] == 1).all()
    assert {*mesh.flat} == {*slices(2)}
    shards = [rows_of_process(mesh, process) for process in range(8)]
    assert {part for shard in shards for part in shard.parts} == {*range(data * fsdp)}
    assert len({len(shard.parts) for shard in shards}) == 1


@pytest.mark.parametrize(
    ("n_slices", "sizes", "message"),
    [
        (2, (1, 32, 1), "parallel.fsdp x sequence = 32 x 1 must be at most the 16 devices of each of the 2 "),
        (2, (1, 4, 8), "parallel.fsdp x sequence = 4 x 8 must be at most the 16 devices"),
        (2, (3, 8, 1), "parallel.data x fsdp x sequence = 3 x 8 x 1 must be the 32 devices"),
        (3, (4, 12, 1), "parallel.data must be a multiple of the 3 slices, got 4"),
    ],
)
def test_meshes_that_need_fast_links_between_slices_are_refused(n_slices, sizes, message):
    with pytest.raises(UserError, match=message):
        arrange(sharded(*sizes), slices(n_slices))


def test_one_slice_and_hosts_that_are_no_slices_keep_the_order_of_devices():
    for devices in (slices(1), slices(2, "gpu")):
        found = arrange(sharded(None, 4, 2), devices)
        assert [*found.flat] == [*devices]


def test_rows_follow_the_sharding_of_a_batch():
    devices = np.array(jax.devices()[:4])[[2, 0, 3, 1]].reshape(2, 2, 1)
    sharding = NamedSharding(Mesh(devices, AXES), batch_spec(1))
    rows = {device: index[0].start // 2 for device, index in sharding.devices_indices_map((8,)).items()}
    assert [rows[device] for device in devices.flat] == [0, 1, 2, 3]


def test_processes_that_are_not_neighbours_read_the_rows_of_their_devices():
    mesh = np.array([Device(i, i % 2, 0, (i, 0, 0)) for i in range(8)]).reshape(2, 2, 2)
    assert rows_of_process(mesh, 0) == rows_of_process(mesh, 1) == RowShard((0, 1, 2, 3), 4)
    shards = [rows_of_process(mesh.reshape(4, 2, 1), process) for process in range(2)]
    assert shards == [RowShard((0, 2, 4, 6), 8), RowShard((1, 3, 5, 7), 8)]
    assert [shard.times for shard in shards] == [2, 2]
    np.testing.assert_array_equal(shards[1].of(np.arange(16)), [2, 3, 6, 7, 10, 11, 14, 15])


INTERLEAVED = """
from hyena_jax.parallel import sharded

usual = sharded.arrange
sharded.arrange = lambda config, devices: usual(config, [*devices[::2], *devices[1::2]])
"""


@pytest.mark.scale
@pytest.mark.parametrize("layout", ["--parallel.fsdp 2", *in_grid("--parallel.sequence 2")])
def test_a_run_whose_processes_are_not_neighbours_is_that_of_one_process(text, tmp_path, layout):
    plugin, workdir = tmp_path / "interleaved.py", tmp_path / "two"
    plugin.write_text(INTERLEAVED)
    flags = ["--parallel.strategy", "sharded", *layout.split(), "--plugin", str(plugin)]
    for steps in (4, 6):  # saved, restored and continued
        ended(2, arguments(text, workdir, steps, *flags))
    assert saved_steps(workdir / "checkpoints")[0] == 6
    assert_like_one_process(text, tmp_path, workdir, 6)
    assert cli.main(arguments(text, workdir, 7)) == 0
