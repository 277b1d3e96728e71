"""`hyena-jax check`: whether everything computes the right values here."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

from hyena_jax.cli.base import Command, fail, note, say, table_console
from hyena_jax.config import Above
from hyena_jax.config.flags import FLAT, PluginFlags
from hyena_jax.system.errors import choose
from hyena_jax.system.files import n_cpus, require_own_folder, write_text
from hyena_jax.system.signals import begin_beside
from hyena_jax.system.startup import has_accelerator, import_jax, keep_compiled_programs, start_devices

FILE = "check.json"
FAKE_DEVICES = 4
LEAST_CASES, MOST_PROCESSES = 4, 8
"""Cases for a process, which takes seconds to start; and processes, each of about a gigabyte."""


@dataclass(frozen=True)
class Check(Command):
    """Check that everything computes the right values on the devices that JAX finds here.

    Operators in every form of the platform, its kernels too; mixers, with decoding, documents and bfloat16;
    the blocks of every config; training steps on one and on all devices, and a checkpoint: all beside float64
    NumPy, or beside the CPU. What takes the longest comes last. Exit code 1: something differs.

    On a CPU, kernels are interpreted, steps run on four fake devices, and XLA compiles without its late
    optimisations, which takes half of the time, unless XLA_FLAGS is set.
    """

    minutes: Annotated[float, Above(0)] = 60.0
    """End after this time; what is left out is named."""
    only: tuple[str, ...] = ()
    """Cases whose names contain one of these, such as `hyena` or `training`."""
    output: Path | None = None
    """Folder for check.json, which is written after every case."""
    plugins: PluginFlags = field(default=PluginFlags(), metadata=FLAT)

    def run(self, arguments: Sequence[str]) -> int:
        import_jax()
        import jax

        if self.output is not None:
            require_own_folder("output", self.output, "check", FILE, "cases")
            self.output.mkdir(parents=True, exist_ok=True)
        platforms = [name for name in (jax.config.jax_platforms or "").split(",") if name]
        if platforms and "cpu" not in platforms:  # with which steps are compared
            jax.config.update("jax_platforms", ",".join([*platforms, "cpu"]))
        is_cpu = platforms[:1] in ([], ["cpu"]) and not has_accelerator()
        if not {"JAX_NUM_CPU_DEVICES", "XLA_FLAGS"} & {*os.environ}:
            jax.config.update("jax_num_cpu_devices", FAKE_DEVICES)
            os.environ["JAX_NUM_CPU_DEVICES"] = str(FAKE_DEVICES)  # of processes that this one starts
            if is_cpu:
                flags = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
                if version("jaxlib").startswith("0.10."):  # later ones do not know this flag
                    flags.append("--xla_cpu_use_fusion_emitters=false")
                os.environ["XLA_FLAGS"] = " ".join(flags)
        keep_compiled_programs(note)
        start_devices()

        from rich.table import Table

        from hyena_jax import check
        from hyena_jax.check.facts import BOUNDS
        from hyena_jax.system.machine import describe_machine, describe_versions
        from hyena_jax.system.output import bar

        every = check.cases()
        for name in self.only:
            if not any(name in case for case in every):
                choose("only", name, every)
        chosen = {n: one for n, one in every.items() if not self.only or any(o in n for o in self.only)}
        console, found = table_console(), []
        with bar("checking", len(chosen), console) as advance:
            seconds, n = 60 * self.minutes, min(n_cpus(), MOST_PROCESSES, len(chosen) // LEAST_CASES)
            beside = partial(check.run_beside, chosen, seconds, n, self._begin)
            for outcome in beside() if is_cpu and n > 1 else check.run(chosen, seconds):
                found.append(outcome)
                advance()
                if self.output is not None:
                    about = {"machine": describe_machine(), "versions": describe_versions(), "bounds": BOUNDS}
                    done = {"of": len(chosen), "cases": [one.to_json() for one in found]}
                    text = json.dumps({**about, **done}, indent=1)
                    write_text(self.output / FILE, text + "\n")

        table = Table("case", *(f"{what}\n{bound:g}" for what, bound in BOUNDS.items()), "seconds", box=None)
        for one in sorted(found, key=lambda one: -one.worst() if one.says() else 0):
            errors = {fact.what: f"{fact.error:.1e}" + " !" * (not fact.holds) for fact in one.facts}
            table.add_row(one.name, *(errors.get(what, "") for what in BOUNDS), f"{one.seconds:.1f}")
        console.print(table)
        for one in found:
            for fact in one.facts:
                if fact.holds and fact.note:
                    say(f"{one.name}: {fact.note}")
        if left_out := [*chosen][len(found) :]:
            say(f"left out after {self.minutes:g} minutes: {', '.join(left_out)}")
        wrong = sorted((one for one in found if one.says()), key=check.Outcome.worst, reverse=True)
        for one in wrong:
            fail(f"{one.name}: {one.says()}", 1)
        device = f"{jax.device_count()} x {jax.local_devices()[0].device_kind}"
        say(f"{len(found) - len(wrong)} of {len(found)} cases are right on {device}, in float32 and bfloat16")
        return 1 if wrong else 0

    def _begin(self) -> None:
        """Makes a process of `run_beside` ready; its environment and current folder are its parent's."""
        begin_beside()
        self.take("check", [f"--plugin={name}" for name in self.plugins.plugin])
        keep_compiled_programs(note)
        start_devices()
