"""`hyena-jax plan`: compiles a training step for accelerators ahead of time and estimates what it takes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from hyena_jax.cli.base import OfConfig, fail, note, table_console
from hyena_jax.config import Above, AtLeast, Experiment
from hyena_jax.config.flags import FLAT, PluginFlags, positional
from hyena_jax.system.chips import GIB
from hyena_jax.system.errors import require
from hyena_jax.system.files import memory_size, require_own_folder


@dataclass(frozen=True)
class Plan(OfConfig):
    """Estimate memory, exchanges and time of CONFIG's training step on TPUs or H100s, without having them.

    The step is compiled for the target on this machine; nothing runs. Depth is continued from one and two
    repeats of the model's pattern. Exit code 1: the step does not compile, or does not fit.
    """

    config: str = field(metadata=positional("CONFIG[:VARIANT]"))
    """Name of a config, or a Python file with get_config()."""
    target: str
    """Chips and their torus: v4:AxBxC, v5e:AxB, v5p:AxBxC or v6e:AxB, such as v5e:4x4; h100 or h100:8."""
    num_slices: Annotated[int, AtLeast(1)] = 1
    """Slices of that shape, connected by the data-centre network; only `parallel.data` and pmap span them."""
    search: tuple[str, ...] = ()
    """Compare values of `remat`, `batch`, `layout`, or several of them, and print the best."""
    whole: bool = False
    """Compile all layers."""
    output: Path | None = None
    """Folder for plan.json and plan.png. Without it, no files."""
    most: Annotated[int, AtLeast(1)] = 5
    """Plans of a search to print."""
    max_seconds: Annotated[float, Above(0)] = 900.0
    """A compilation that takes longer is ended."""
    max_memory: float | None = None
    """GiB of this machine's memory that a compilation may take; by default 4/5 of all."""
    plugins: PluginFlags = field(default=PluginFlags(), metadata=FLAT)
    experiment: Experiment = field(default=Experiment(), metadata=FLAT)

    def __post_init__(self) -> None:
        super().__post_init__()
        enough = f"in (0, {memory_size() / GIB:.1f}], the memory of this machine"
        most = self.max_memory
        require(most is None or 0 < most <= memory_size() / GIB, "max_memory", most, enough)
        if self.output is not None:
            require_own_folder("output", self.output, "plan", "plan.json", "plans")

    def run(self, arguments: Sequence[str]) -> int:
        from hyena_jax.plan import presentation
        from hyena_jax.plan.compiling import DoesNotCompile, Limits, Unfinished
        from hyena_jax.plan.planning import make_plan, with_other_kernels
        from hyena_jax.plan.search import candidates, search
        from hyena_jax.plan.targets import parse_target, require_compiler
        from hyena_jax.system.machine import describe_versions
        from hyena_jax.system.output import bar

        experiment, whole = self.experiment, self.whole
        target = parse_target(self.target, self.num_slices)
        rows = list(candidates(experiment, target, self.search)) if self.search else []
        compiler = require_compiler(target)
        memory = 0.8 * memory_size() if self.max_memory is None else self.max_memory * GIB
        limits = Limits(self.max_seconds, int(memory))
        console = table_console()
        summary = {"command": " ".join(["hyena-jax", *arguments]), "versions": describe_versions(compiler)}
        if not self.search:
            try:
                plan = make_plan(experiment, target, limits, whole)
            except DoesNotCompile as error:
                return fail(f"the step does not compile for {target}: {error}", 1)
            presentation.print_plan(plan, console)
            plans = shown = [plan]
            if target.chip.platform == "tpu":
                try:
                    other = make_plan(with_other_kernels(experiment, target), target, limits, whole)
                    kernels = "with" if other.kernels else "without"
                    console.print(f"\n{kernels} Pallas kernels, which would not run")
                    for line in presentation.speeds(other):
                        console.print(line)
                except (DoesNotCompile, Unfinished) as error:
                    console.print(
                        f"with the other kernels the step does not compile: {error}", soft_wrap=True
                    )
        else:
            with bar("compiling", sum(map(len, rows)), console) as advance:
                plans, summary["refused"] = search(rows, target, limits, whole, advance, note)
            presentation.print_best(plans, summary["refused"], self.most, console)
            shown = presentation.best(plans)[: self.most]
        if self.output is not None and plans:
            presentation.write(self.output, shown or plans, summary)
            console.print(f"results: {self.output}", soft_wrap=True)
        if not any(plan.fits for plan in plans):
            return fail(f"the step does not fit a chip of {target}", 1)
        return 0
