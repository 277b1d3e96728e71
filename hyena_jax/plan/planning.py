"""A plan: what a training step takes on a target, estimated from its compiled program.

A deep model is compiled with one and with two repeats of its pattern, and every figure is continued as a
straight line to its depth.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hyena_jax.config import Experiment
from hyena_jax.parallel import wants_kernels
from hyena_jax.plan.collectives import KINDS as EXCHANGES
from hyena_jax.plan.collectives import collectives, received_between_slices
from hyena_jax.plan.compiling import Compiled, Limits, compile_step
from hyena_jax.plan.hlo import Program
from hyena_jax.plan.kernels import KernelWork
from hyena_jax.plan.roofline import KINDS, REACHED, TERMS, costs, largest_term
from hyena_jax.plan.step import n_params
from hyena_jax.plan.targets import Target
from hyena_jax.system.errors import require
from hyena_jax.training.timing import PASSES_OF_TRAINING

# Figures that are listed, of each kind of list.
MAX_LISTED = 8
# Of a chip's memory. Continued, `pile_hyena:153m` had 16.39 GiB in place of 14.24, Hawk 1B 10.34 of 13.31.
NEAR = 0.25

Figures = dict[tuple[str, ...], float]
"""Numbers by name, such as ("roofline", "loss"), that are linear in a model's depth."""


@dataclass(frozen=True)
class Ends:
    """A figure estimated twice, from the optimistic end and from the pessimistic; see `plan.roofline`."""

    roofline: float
    pessimistic: float


@dataclass(frozen=True)
class KindRow:
    """The instructions of one kind: seconds of a step, and which term bounds most of them at peak."""

    kind: str
    seconds: Ends
    products: float
    memory: float
    vector: float

    @property
    def bound(self) -> str:
        return largest_term(self)


@dataclass(frozen=True)
class ExchangeRow:
    """The exchanges of one kind: bytes that a chip receives in a step."""

    kind: str
    received: float
    received_per_repeat: float | None
    """None where the model was compiled at one depth."""


@dataclass(frozen=True)
class LargeExchange:
    """A large exchange: bytes that a chip receives in a step, in all rounds."""

    kind: str
    received: float
    rounds: int
    shapes: str
    source: str


@dataclass(frozen=True)
class Listed:
    """An expensive instruction of the deepest program that was compiled."""

    name: str
    kind: str
    source: str
    seconds: Ends
    bound: str


@dataclass(frozen=True)
class StepPlan:
    """Estimates for one training step. Bytes are of one chip, seconds of one step."""

    target: str
    n_chips: int
    layout: str
    remat: str
    kernels: bool
    """Whether the step takes the Pallas kernels of the target."""
    batch_size: int
    unit: str
    units: int
    """Tokens or images in a step."""
    assumes_vocabulary: bool
    """Whether the model takes its vocabulary from its text, which was not read."""
    n_layers: int | None
    n_params: int
    compiled_layers: tuple[int, ...]
    """One if the program was compiled whole."""
    compile_seconds: float
    memory: float
    usable_memory: float
    memory_parts: dict[str, float]
    """`parameters`, `optimizer`, and the rest: activations, gradients, temporary arrays."""
    buffers: tuple[tuple[int, str], ...]
    """The largest temporary buffers of the deepest program that was compiled."""
    exchanges: tuple[ExchangeRow, ...]
    largest_exchanges: tuple[LargeExchange, ...]
    """The largest of the deepest program that was compiled."""
    needed_exchange: float
    """Bytes that a chip must receive: weights twice and gradients once, or gradients to be averaged."""
    between_slices: float
    """Bytes that a chip receives from other slices, through the data-centre network; not in `exchanges`."""
    between_slices_seconds: float
    kinds: tuple[KindRow, ...]
    exchange_seconds: Ends
    seconds: Ends
    largest: tuple[Listed, ...]
    forward_products: float
    """FLOPs of the products of one forward pass of the whole batch."""
    forward_transforms: float
    """FLOPs of its Fourier transforms, 5 n log2 n a complex one."""
    peak: float
    """FLOPs a second of a chip in bfloat16."""

    @property
    def fits(self) -> bool:
        return self.memory <= self.usable_memory

    @property
    def units_per_second(self) -> Ends:
        """Tokens or images a second and chip."""
        return self._rates(self.units)

    def mfu(self, with_transforms: bool) -> Ends:
        """Model FLOPs utilisation: three times the forward pass's FLOPs, over what the chips could do."""
        flops = self.forward_products + (self.forward_transforms if with_transforms else 0)
        return self._rates(PASSES_OF_TRAINING * flops / self.peak)

    def _rates(self, amount: float) -> Ends:
        return Ends(*(amount / self.n_chips / s for s in (self.seconds.roofline, self.seconds.pessimistic)))


def make_plan(experiment: Experiment, target: Target, limits: Limits, whole: bool) -> StepPlan:
    """Compiles the training step, all layers if `whole`, and estimates what it takes.

    Memory near the chip's is not continued from fewer layers: then all layers are compiled after all.

    UserError if `parallel.devices` is given; see also `compile_step`.
    """
    of_target = "None: the target says how many chips take part"
    require(experiment.parallel.devices is None, "parallel.devices", experiment.parallel.devices, of_target)
    n_layers, pattern = (getattr(experiment.model, name, None) for name in ("n_layers", "pattern"))
    depths, variants = (n_layers,), [experiment]  # None if the model has no depth
    if not (whole or n_layers is None or pattern is None or n_layers <= 2 * len(pattern)):
        depths = len(pattern), 2 * len(pattern)
        variants = [replace(experiment, model=replace(experiment.model, n_layers=n)) for n in depths]
    compiled = [compile_step(each, target, limits) for each in variants]
    figures = [_figures(each, target) for each in compiled]
    total, per_repeat = figures[-1], None
    if len(depths) == 2:
        once, twice = figures
        repeats = n_layers / depths[0]
        names = dict.fromkeys([*once, *twice])
        per_repeat = {name: twice.get(name, 0) - once.get(name, 0) for name in names}
        total = {name: once.get(name, 0) + (repeats - 1) * per_repeat[name] for name in names}
    plan = _plan(experiment, target, compiled, depths, total, per_repeat)
    is_near = abs(plan.memory / plan.usable_memory - 1) <= NEAR
    return make_plan(experiment, target, limits, whole=True) if is_near and len(depths) == 2 else plan


def with_other_kernels(experiment: Experiment, target: Target) -> Experiment:
    """The experiment with the Pallas kernels of the target, if it would run without them; else without."""
    choice = "off" if wants_kernels(experiment.parallel, target.chip.platform) else "on"
    return replace(experiment, parallel=replace(experiment.parallel, kernels=choice))


def _figures(compiled: Compiled, target: Target) -> Figures:
    """The figures of a program that are linear in its depth."""
    program = Program(compiled.text)
    figures: Figures = {("memory",): compiled.memory, ("hbm",): 0.0}
    seconds = ("roofline", "pessimistic", *TERMS)
    figures |= {(name, kind): 0.0 for kind in KINDS for name in seconds}
    for cost in costs(program, target.chip, _kernels(compiled)):
        figures["hbm",] += cost.memory  # also where it hides behind the rest
        for name in seconds:
            figures[name, cost.kind] += getattr(cost, name)
    figures |= {("received", kind): 0.0 for kind in EXCHANGES}
    for one in collectives(program):
        figures["received", one.kind] += one.rounds * one.received(target.chips_of_slice)
    figures["between slices",] = received_between_slices(program, target.n_slices)
    return figures | dict(_numbers((), compiled.facts))


def _kernels(compiled: Compiled) -> dict[str, KernelWork]:
    return {name: KernelWork(**work) for name, work in compiled.facts["kernels"].items()}


def _numbers(names: tuple[str, ...], facts: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], float]]:
    for name, value in facts.items():
        if isinstance(value, dict):
            yield from _numbers((*names, name), value)
        elif not isinstance(value, str):
            yield (*names, name), value


def _plan(
    experiment: Experiment,
    target: Target,
    compiled: Sequence[Compiled],
    depths: tuple[int | None, ...],
    total: Figures,
    per_repeat: Figures | None,
) -> StepPlan:
    chip, deepest = target.chip, compiled[-1]
    kinds = tuple(
        KindRow(
            kind,
            Ends(total["roofline", kind], total["pessimistic", kind]),
            *(total[name, kind] for name in TERMS),
        )
        for kind in KINDS
        if total["memory", kind] + total["vector", kind] > 0
    )
    exchanges = tuple(
        ExchangeRow(kind, total["received", kind], per_repeat and per_repeat["received", kind])
        for kind in EXCHANGES
        if total["received", kind] > 0
    )
    received = sum(row.received for row in exchanges)
    exchange = Ends(received / (chip.link_rate * chip.dims), received / chip.link_rate)
    between = total["between slices",] / chip.between_slices if target.n_slices > 1 else 0.0
    busy = Ends(
        max(sum(row.seconds.roofline for row in kinds), total["hbm",]),
        max(sum(row.seconds.pessimistic for row in kinds), total["hbm",] / REACHED),
    )
    parts = {name: total[name, "device"] for name in ("parameters", "optimizer")}
    # Parameters are counted where the depth ends within a repeat, whose layers may differ.
    is_straight = per_repeat is None or experiment.model.n_layers % depths[0] == 0
    program = Program(deepest.text)
    found = sorted(costs(program, chip, _kernels(deepest)), key=lambda cost: cost.pessimistic, reverse=True)
    received = {one: one.rounds * one.received(target.chips_of_slice) for one in collectives(program)}
    return StepPlan(
        target=str(target),
        n_chips=target.n_chips,
        layout=describe_layout(experiment, target),
        remat=getattr(experiment.model, "remat", "none"),
        kernels=wants_kernels(experiment.parallel, target.chip.platform),
        batch_size=experiment.data.batch_size,
        unit=deepest.facts["unit"],
        units=deepest.facts["units"],
        assumes_vocabulary=getattr(experiment.model, "vocab_size", 0) is None,
        n_layers=getattr(experiment.model, "n_layers", None),
        n_params=round(total["n_params",]) if is_straight else n_params(experiment),
        compiled_layers=tuple(n for n in depths if n is not None),
        compile_seconds=sum(each.seconds for each in compiled),
        memory=total["memory",],
        usable_memory=chip.usable,
        memory_parts={**parts, "rest": total["memory",] - sum(parts.values())},
        buffers=deepest.buffers[:MAX_LISTED],
        exchanges=exchanges,
        largest_exchanges=tuple(
            # Of JAX's own names, the last ones say which operation it is.
            LargeExchange(
                one.kind, each, one.rounds, ", ".join(one.shapes), "/".join(one.source.split("/")[-3:])
            )
            for one, each in sorted(received.items(), key=lambda item: -item[1])[:MAX_LISTED]
        ),
        needed_exchange=_needed(experiment, target, total),
        between_slices=total["between slices",],
        between_slices_seconds=between,
        kinds=kinds,
        exchange_seconds=exchange,
        # Exchanges hide behind the rest, or come after it.
        seconds=Ends(
            max(busy.roofline, exchange.roofline, between),
            busy.pessimistic + exchange.pessimistic + between,
        ),
        largest=tuple(
            Listed(cost.name, cost.kind, cost.source, Ends(cost.roofline, cost.pessimistic), cost.bound)
            for cost in found[:MAX_LISTED]
        ),
        forward_products=total["forward", "products"],
        forward_transforms=total["forward", "transforms"],
        peak=chip.flops,
    )


def _needed(experiment: Experiment, target: Target, total: Figures) -> float:
    """Bytes that a chip must receive in a step from its slice, the shards of a sequence apart.

    Under fsdp the weights twice and the gradients once, in the activations' dtype. Then each gradient is
    averaged over the devices that hold the same shard of it, in float32.
    """
    sizes, n = experiment.parallel, target.chips_of_slice
    fsdp = sizes.fsdp if sizes.strategy == "sharded" else 1
    narrow = 0.5 if getattr(experiment.model, "dtype", None) == "bfloat16" else 1.0
    gathered = 3 * (1 - 1 / fsdp) * narrow * total["parameters", "sharded"]
    return gathered + 2 * (1 - fsdp / n) * total["parameters", "device"]


def describe(experiment: Experiment, target: Target) -> str:
    """What a search varies, in words: layout, remat and batch."""
    remat = getattr(experiment.model, "remat", "none")
    return f"{describe_layout(experiment, target)}, remat {remat}, batch {experiment.data.batch_size}"


def describe_layout(experiment: Experiment, target: Target) -> str:
    """`pmap over 16`, or `data 4 x fsdp 4 x sequence 1`."""
    sizes = experiment.parallel
    n = target.n_chips
    if sizes.strategy != "sharded":
        return f"pmap over {n}"
    data = sizes.data or max(1, n // (sizes.fsdp * sizes.sequence))
    return f"data {data} x fsdp {sizes.fsdp} x sequence {sizes.sequence}"
