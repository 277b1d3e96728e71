"""`hyena-jax check`: whether everything computes the right values here."""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from hyena_jax.cli.base import Command, fail, note, say, table_console
from hyena_jax.config import Above
from hyena_jax.config.flags import FLAT, PluginFlags
from hyena_jax.system.errors import choose
from hyena_jax.system.files import require_own_folder, write_text
from hyena_jax.system.startup import import_jax, keep_compiled_programs, start_devices

if TYPE_CHECKING:
    from hyena_jax.check import Outcome

FILE = "check.json"
FAKE_DEVICES = 4
SHOWN = 10
"""Wrong values that are printed as lines; all are in the table."""


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
        if not {"JAX_NUM_CPU_DEVICES", "XLA_FLAGS"} & {*os.environ}:
            jax.config.update("jax_num_cpu_devices", FAKE_DEVICES)
            if (jax.config.jax_platforms or "").split(",")[0] in ("", "cpu"):
                os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
        keep_compiled_programs(note)
        start_devices()

        from hyena_jax import check
        from hyena_jax.system.machine import describe_machine, describe_versions
        from hyena_jax.system.output import bar

        every = check.cases()
        for name in self.only:
            if not any(name in case for case in every):
                choose("only", name, every)
        chosen = {n: one for n, one in every.items() if not self.only or any(o in n for o in self.only)}
        console, found = table_console(), []
        with bar("checking", len(chosen), console) as advance:
            for outcome in check.run(chosen, 60 * self.minutes):
                found.append(outcome)
                advance()
                if self.output is not None:
                    about = {"machine": describe_machine(), "versions": describe_versions()}
                    text = json.dumps({**about, "cases": [_as_json(one) for one in found]}, indent=1)
                    write_text(self.output / FILE, text + "\n")
        wrong = sorted((one for one in found if one.is_wrong), key=_badness, reverse=True)
        console.print(_table(wrong + [one for one in found if not one.is_wrong]))
        for fact in {fact.note for one in found for fact in one.facts if fact.holds and fact.note}:
            say(fact)
        if left_out := [name for name in chosen if name not in {one.name for one in found}]:
            say(f"left out, as {self.minutes:g} minutes have passed: {', '.join(left_out)}")
        for one in wrong[:SHOWN]:
            fail(f"{one.name}: {_why(one)}", 1)
        device = jax.local_devices()[0].device_kind
        say(f"{len(found) - len(wrong)} of {len(found)} cases are right on {jax.device_count()} x {device}")
        return 1 if wrong else 0


def _badness(one: "Outcome") -> float:
    """How many times its bound the worst error is."""
    from hyena_jax.check.facts import BOUNDS

    ratios = [fact.error / (BOUNDS[fact.what] or 1e-30) for fact in one.facts if not fact.holds]
    return math.inf if one.fault is not None or any(map(math.isnan, ratios)) else max(ratios)


def _why(one: "Outcome") -> str:
    from hyena_jax.check.facts import BOUNDS

    if one.fault is not None:
        return one.fault
    found = [fact for fact in one.facts if not fact.holds]
    return "; ".join(
        fact.note
        or f"{fact.what} is wrong by {fact.error:.1e} of the largest value, more than {BOUNDS[fact.what]:g}"
        for fact in found
    )


def _as_json(one: "Outcome") -> dict:
    """Its fields; an error that is not finite, which JSON has no number for, as text."""
    facts = [
        {
            **fact._asdict(),
            "error": fact.error if math.isfinite(fact.error) else str(fact.error),
            "holds": fact.holds,
        }
        for fact in one.facts
    ]
    return {
        "name": one.name,
        "right": not one.is_wrong,
        "fault": one.fault,
        "seconds": one.seconds,
        "facts": facts,
    }


def _table(found: "Sequence[Outcome]"):
    """One row a case, one column for each property, with its bound in the head."""
    from rich.table import Table

    from hyena_jax.check.facts import BOUNDS

    table = Table("case", *(f"{what}\n{bound:g}" for what, bound in BOUNDS.items()), "seconds", box=None)
    for one in found:
        errors = {}
        for fact in one.facts:
            errors[fact.what] = f"{fact.error:.1e}" + "" if fact.holds else f"{fact.error:.1e} !"
        table.add_row(one.name, *(errors.get(what, "") for what in BOUNDS), f"{one.seconds:.1f}")
    return table
