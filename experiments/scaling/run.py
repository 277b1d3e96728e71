"""Weak scaling on one machine: the same rows per device, on more fake CPU devices and more processes.

python experiments/scaling/run.py [--steps 30] [--rows 4]

Writes results.json and the table of README.md next to this file. Devices that share cores cannot be faster
than the cores: the table shows how much work the distribution itself adds, as the ratio of a step's time to
the time that one device takes for all rows of that step.
"""

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from results import fill

from hyena_jax.cli.base import script_flags

HERE = Path(__file__).parent
# (processes, devices of each, strategy, fsdp)
LAYOUTS = [
    *((1, n, "pmap", 1) for n in (1, 2, 4, 8)),
    *((1, n, "sharded", n) for n in (2, 4, 8)),
    *((n, 2, "pmap", 1) for n in (2, 4)),
]
FLAG = "--xla_force_host_platform_device_count="


@dataclass(frozen=True)
class Flags:
    """Times a step of each layout, and writes results.json and the page."""

    steps: int = 30
    """Steps that are timed."""
    rows: int = 4
    """Rows per device."""
    worker: bool = False
    """Be one process of a layout: the program starts itself with this and the flags below."""
    strategy: str = "pmap"
    port: int = 0
    processes: int = 1
    process_id: int = 0
    fsdp: int = 1


def measure(strategy: str, fsdp: int, rows: int, steps: int) -> float:
    """Median seconds of a step, without compilation."""
    import jax
    import numpy as np

    from hyena_jax import models, parallel
    from hyena_jax.config import AdamWConfig, HyenaConfig, LanguageModelConfig, ParallelConfig
    from hyena_jax.training.optimizer import make_optimizer
    from hyena_jax.training.step import init_params, init_state, make_train_step

    config = LanguageModelConfig(
        pattern=(HyenaConfig(),), n_layers=4, d_model=128, d_ff=512, max_len=256, vocab_size=256
    )
    model = models.build(config)
    spread = parallel.make_strategy(ParallelConfig(strategy=strategy, fsdp=fsdp))
    params = jax.eval_shape(lambda: init_params(model, 0))
    optimizer = make_optimizer(AdamWConfig(), params, 1000)

    def make():
        return init_state(init_params(model, 0), optimizer)

    step = make_train_step(model, optimizer, 0, spread.axis_name)
    step, state = spread.map_train_step(step, jax.eval_shape(make)), spread.make_state(make)
    windows = np.random.default_rng(0).integers(0, 256, (rows, 257), dtype=np.int32)
    batch = spread.row_shard.of({"inputs": windows[:, :-1], "targets": windows[:, 1:]})
    seconds = []
    for _ in range(steps + 3):
        began = time.perf_counter()
        state, metrics = step(state, spread.place_batch(batch))
        metrics["loss"].item()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[3:])


def worker(flags: Flags) -> None:
    """One process of a layout; the first prints its time."""
    from hyena_jax.config import Cluster
    from hyena_jax.parallel import processes as distributed

    if flags.processes > 1:
        address = f"127.0.0.1:{flags.port}"
        distributed.join(Cluster(False, address, flags.processes, flags.process_id), 100)
    seconds = measure(flags.strategy, flags.fsdp, flags.rows, flags.steps)
    if distributed.is_first():
        print(json.dumps(seconds))
    distributed.leave()


def run_layout(processes: int, devices: int, strategy: str, fsdp: int, rows: int, steps: int) -> float:
    """Seconds of a step with `rows` rows in total."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{FLAG}{devices}"}
    options = {"rows": rows, "steps": steps, "processes": processes, "strategy": strategy, "fsdp": fsdp}
    command = [sys.executable, __file__, "--worker", "--port", str(port)]
    command += [part for name, value in options.items() for part in (f"--{name}", str(value))]
    numbered = [[*command, "--process-id", str(i)] for i in range(processes)]
    started = [
        subprocess.Popen(each, stdout=subprocess.PIPE, text=True, env=environment) for each in numbered
    ]
    outputs = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise RuntimeError(f"{processes} processes of {devices} devices, {strategy}: failed")
    return float(json.loads(outputs[0].splitlines()[-1]))


def table(results: dict) -> str:
    """The machine and the settings in a line, then the ratios of each kind of layout by number of devices."""
    machine, first = results["machine"], results["rows"][0]
    versions = f"JAX {machine['jax']}, Python {machine['python']}"
    settings = f"{first['rows'] // first['devices']} rows a device, {results['steps']} steps a layout"
    ratios: dict[str, dict[int, float]] = {}
    for row in results["rows"]:
        name = "pmap" if row["strategy"] == "pmap" else "sharded by fsdp"
        each = row["devices"] // row["processes"]
        name += ", one process" if row["processes"] == 1 else f", processes of {each} devices"
        ratio = row["seconds"] / results["alone"][str(row["rows"])]
        ratios.setdefault(name, {})[row["devices"]] = ratio
    numbers = sorted({row["devices"] for row in results["rows"]})
    lines = [
        f"{machine['cores']} cores of an {machine['device']}, {versions}, {settings}.",
        "",
        f"| ratio | {numbers[0]} device | " + " | ".join(map(str, numbers[1:])) + " |",
        "|---|" + "---:|" * len(numbers),
    ]
    for name, by_number in ratios.items():
        cells = (f"{by_number[n]:.2f}" if n in by_number else "" for n in numbers)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(flags: Flags) -> None:
    if flags.worker:
        worker(flags)
        return
    rows = []
    for processes, devices, strategy, fsdp in LAYOUTS:
        total = processes * devices
        seconds = run_layout(processes, devices, strategy, fsdp, flags.rows * total, flags.steps)
        row = {"strategy": strategy, "fsdp": fsdp, "processes": processes, "devices": total}
        rows.append({**row, "rows": flags.rows * total, "seconds": seconds})
        print(rows[-1], flush=True)
    alone = {n: run_layout(1, 1, "pmap", 1, n, flags.steps) for n in sorted({r["rows"] for r in rows})}
    from hyena_jax.system.machine import describe_machine, describe_versions

    machine = describe_machine() | describe_versions()
    results = {"machine": machine, "steps": flags.steps, "rows": rows, "alone": alone}
    (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    fill(HERE / "README.md", "table", table(json.loads((HERE / "results.json").read_text())))


if __name__ == "__main__":
    main(script_flags(Flags))
