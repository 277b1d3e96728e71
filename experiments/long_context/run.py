"""Peak memory of one training step against the length of the sequence.

python experiments/long_context/run.py [--output experiments/long_context] [--lengths 16384 ...] [--layouts]
python experiments/long_context/run.py --plot-only    # plot.png from results.json

Each step runs in its own process, which compiles it, runs it twice on random bytes and reports its peak
resident memory (VmHWM). With `--layouts`, also what XLA plans for each of 2, 4 and 8 devices that shard one
sequence: compiled on as many fake devices, not run. Writes results.json and plot.png.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from results import measured_on, report

from hyena_jax.cli.base import script_flags
from hyena_jax.config import HawkConfig, HyenaConfig, LanguageModelConfig
from hyena_jax.system.errors import choose

MIXERS = {"hyena": HyenaConfig(), "hawk": HawkConfig()}
LENGTHS = tuple(2**k for k in range(14, 21))
# The greatest length of plain steps, which recompute nothing and compute all logits at once.
LONGEST_PLAIN = 2**17
LAYOUT_LEN, LAYOUTS = 2**15, (1, 2, 4, 8)
AXES = ("data", "fsdp", "sequence")
GIB = 2**30
FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Step:
    """One training step: a mixer's name, the length, how it saves memory, and the devices that shard L."""

    mixer: str
    length: int
    remat: str = "block"
    loss_chunk: int = 8192
    n_devices: int = 1

    def model(self) -> LanguageModelConfig:
        """D = 64, 2 layers, a vocabulary of bytes."""
        return LanguageModelConfig(
            pattern=(choose("mixer", self.mixer, MIXERS),),
            n_layers=2,
            d_model=64,
            d_ff=256,
            max_len=self.length,
            vocab_size=256,
            remat=self.remat,
            loss_chunk=self.loss_chunk,
        )


def compile_step(step: Step):
    """The compiled step, its state and its batch; on a mesh if several devices shard the length."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    from hyena_jax import models
    from hyena_jax.config import AdamWConfig
    from hyena_jax.training.optimizer import make_optimizer
    from hyena_jax.training.step import init_params, init_state, make_train_step

    mesh = jax.sharding.Mesh(np.array(jax.devices()[: step.n_devices]).reshape(1, 1, -1), AXES)
    config = step.model()
    params = init_params(models.build(config), seed=0)
    optimizer = make_optimizer(AdamWConfig(), params, total_steps=1000)
    windows = np.random.default_rng(0).integers(0, 256, (1, step.length + 1), dtype=np.int32)
    batch = {"inputs": windows[:, :-1], "targets": windows[:, 1:]}
    with jax.set_mesh(mesh):
        state = jax.device_put(init_state(params, optimizer), NamedSharding(mesh, PartitionSpec()))
        batch = jax.device_put(batch, NamedSharding(mesh, PartitionSpec(None, "sequence")))
        model = models.build(config, sequence_axis=None if step.n_devices == 1 else "sequence")
        train_step = jax.jit(make_train_step(model, optimizer, seed=0), donate_argnums=0)
        compiled = train_step.lower(state, batch).compile()
    return compiled, state, jax.tree.map(jnp.asarray, batch)


def measure(step: Step) -> dict:
    """Planned memory; on one device, also the peak, and the seconds of the second of two steps."""
    from hyena_jax.system.files import resident_bytes
    from hyena_jax.system.machine import compiled_memory

    compiled, state, batch = compile_step(step)
    row = {**asdict(step), "planned_bytes": compiled_memory(compiled).total}
    if step.n_devices == 1:
        for _ in range(2):
            start = time.perf_counter()
            state, metrics = compiled(state, batch)
            loss = float(metrics["loss"])
            row |= {"loss": loss, "step_seconds": time.perf_counter() - start}
        row["peak_bytes"] = resident_bytes("VmHWM")
    return row


def in_a_process(step: Step) -> dict | None:
    """`measure` in its own process; None if that fails, for example for lack of memory."""
    flags = f"--xla_force_host_platform_device_count={step.n_devices}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, __file__, "--one", json.dumps(asdict(step))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        print(f"{step}: exit code {done.returncode}\n{done.stderr[-2000:]}", file=sys.stderr)
        return None
    return json.loads(done.stdout.splitlines()[-1])


@dataclass(frozen=True)
class Flags:
    """Measures, prints and writes."""

    output: Path = FOLDER
    """Folder of results.json and plot.png."""
    mixers: tuple[str, ...] = tuple(MIXERS)
    """Mixers to measure."""
    lengths: tuple[int, ...] = LENGTHS
    """Lengths to measure."""
    layouts: bool = False
    """Also compile for several devices."""
    plot_only: bool = False
    """Draw plot.png from results.json, and measure nothing."""
    one: str | None = None
    """JSON of a single step to measure and print; the program starts itself with it."""


def main(flags: Flags) -> None:
    if flags.one is not None:
        print(json.dumps(measure(Step(**json.loads(flags.one)))))
        return
    steps = []
    for mixer in flags.mixers:
        steps += [Step(mixer, length) for length in flags.lengths]
        plain = [length for length in flags.lengths if length <= LONGEST_PLAIN]
        steps += [Step(mixer, length, "none", length) for length in plain]
        if flags.layouts:
            steps += [Step(mixer, LAYOUT_LEN, n_devices=n) for n in LAYOUTS[1:]]

    def measure_all() -> Iterator[dict]:
        here, rows = measured_on(), []
        for step in steps:
            row = in_a_process(step)
            if row is None:
                continue
            rows.append(row)
            peak = row.get("peak_bytes", 0)
            print(
                f"{step.mixer:6} L={step.length:8,} remat={step.remat:5} devices={step.n_devices} "
                f"planned {row['planned_bytes'] / GIB:6.2f} GiB, peak {peak / GIB:6.2f} GiB",
                flush=True,
            )
            yield here["hardware"] | here["versions"] | {"rows": rows}

    report(
        flags.output,
        measure_all,
        lambda found: draw(found["rows"], flags.output / "plot.png"),
        flags.plot_only,
    )


def draw(rows: list[dict], path: Path) -> None:
    """Peak memory against length: economical steps solid, plain steps dashed, both in the mixer's colour."""
    from matplotlib.figure import Figure

    from hyena_jax.sweeps.figure import COLOURS

    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    for mixer, colour in zip(MIXERS, COLOURS, strict=False):
        for remat, dashes in (("block", "-"), ("none", "--")):
            found = [r for r in rows if (r["mixer"], r["remat"]) == (mixer, remat) and "peak_bytes" in r]
            what = "economical" if remat == "block" else "plain"
            x, y = [r["length"] for r in found], [r["peak_bytes"] / GIB for r in found]
            axes.plot(x, y, dashes, marker="o", color=colour, label=f"{mixer}, {what}", markersize=4)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    axes.tick_params(axis="x", rotation=30)
    axes.set(xlabel="length of the sequence, bytes", ylabel="peak memory of the process, GiB")
    axes.set_title("Two flags about halve the memory of a training step at 131,072 bytes")
    axes.grid(alpha=0.3)
    axes.legend(
        frameon=False, alignment="left", title="economical: --model.remat block --model.loss-chunk 8192"
    )
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main(script_flags(Flags))
