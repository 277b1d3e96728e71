"""`hyena-jax bench model`: a config's whole model, forward, with gradients, and the whole training step."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import flax.linen as nn
import jax

from hyena_jax import models
from hyena_jax.benchmark import verify
from hyena_jax.benchmark.results import Cells, Picture, Results, Row, cost_cells, milliseconds, number, panels
from hyena_jax.benchmark.runner import FORWARD, Benchmark, Case, Size
from hyena_jax.benchmark.settings import Model
from hyena_jax.benchmark.timing import Runnable, compiled, jit_program
from hyena_jax.config import Experiment
from hyena_jax.data.examples import examples_of
from hyena_jax.parallel import all_devices, make_strategy
from hyena_jax.parallel.strategy import Strategy, check_batch
from hyena_jax.system.trees import n_entries
from hyena_jax.training.loss import Score, loss_function, scored
from hyena_jax.training.optimizer import make_optimizer
from hyena_jax.training.step import Batch, init_params, init_state, make_train_step

GRADIENT, TRAIN_STEP = "loss_and_gradient", "train_step"


class ModelBenchmark(Benchmark):
    """A config's model at every length: tokens, or patches of an image."""

    def __init__(self, settings: Model):
        experiment, data = settings.experiment, settings.experiment.data
        if settings.batch_size is not None:
            data = replace(data, batch_size=settings.batch_size)
        n_devices = len(all_devices(experiment.parallel.devices))
        check_batch(data.batch_size, n_devices, experiment.optimizer.accumulation_steps)
        self.examples = examples_of(replace(experiment, data=data), settings.seq_len, settings.vocab_size)
        self.methods = [settings.config]
        self.sizes = [{"length": length} for length in self.examples.batches]

    def check(self, method: str) -> bool:
        return verify.verify_model(method, self.examples.experiment.model)

    def build(self, method: str, size: Size) -> Case:
        """The logits without dropout, the mean loss with dropout and its gradient, on the first device; and
        the training step on all, as in training."""
        experiment = self.examples.experiment
        strategy = make_strategy(replace(experiment.parallel, strategy="pmap", data=None, fsdp=1, sequence=1))
        model = models.build(experiment.model, None, strategy.layout)
        score = loss_function(experiment.loss)
        params, batch = init_params(model, experiment.seed), self.examples.batches[size["length"]]()

        def forward(params: dict, inputs: jax.Array) -> jax.Array:
            return model.apply({"params": params}, inputs, None, True)

        def loss(params: dict, batch: Batch) -> jax.Array:
            rngs = {"dropout": jax.random.key(0)}
            return scored(score, model, params, batch, False, rngs).mean()

        step = _train_step(strategy, model, score, params, batch, experiment)
        programs = {
            FORWARD: jit_program(forward, params, batch["inputs"]),
            GRADIENT: jit_program(jax.value_and_grad(loss), params, batch),
            TRAIN_STEP: step,
        }
        # Units: tokens, or images.
        facts = {"batch": len(batch["inputs"]), "units": batch["targets"].size, "n_params": n_entries(params)}
        return Case(programs, facts)

    def cells(self, row: Row) -> Iterator[Cells]:
        for name, measured in row["passes"].items():
            yield {
                "pass": name.replace("_", " "),
                "length": f"{row['length']:,}",
                "ms": milliseconds(measured),
                f"{self.examples.unit}s/s": f"{row['units'] / measured['seconds']['median']:,.0f}",
                **cost_cells(measured),
                "GFLOP by XLA": number(measured["xla_flops"], ",.3g", 1e9),
            }

    @staticmethod
    def picture(results: Results) -> Picture:
        points = [
            (name, row["length"], each) for row in results["rows"] for name, each in row["passes"].items()
        ]
        return Picture(results["settings"]["config"], "length", panels(points))

    def lines(self, results: Results) -> list[str]:
        return [f"{row['n_params']:,} parameters, batch {row['batch']}" for row in results["rows"][:1]]


def _train_step(
    strategy: Strategy, model: nn.Module, score: Score, params: dict, batch: dict, experiment: Experiment
) -> Runnable:
    """The step as the training loop maps and donates it; each run continues from the previous run's state."""
    optimizer = make_optimizer(experiment.optimizer, params, experiment.training.steps)
    parts = experiment.optimizer.accumulation_steps
    step = make_train_step(model, optimizer, experiment.seed, strategy.axis_name, parts, score)
    state = init_state(params, optimizer)
    step = strategy.map_train_step(step, state)
    # A copy: the state is donated, and the other programs still need the parameters.
    latest = [strategy.place(strategy.host_copy(state))]
    batch = strategy.place_batch(batch)
    program = compiled(step, latest[0], batch)

    def run() -> Any:
        latest[0], metrics = program.run(latest[0], batch)
        return latest[0], metrics

    return program._replace(run=run)
