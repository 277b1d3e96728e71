"""Timing on a fake clock, statistics, exponents and crossovers."""

import jax.numpy as jnp
import pytest

from hyena_jax.benchmark import timing
from hyena_jax.benchmark.operators import crossover, fitted_exponent
from hyena_jax.benchmark.settings import Effort
from hyena_jax.benchmark.timing import (
    MAX_RUNS,
    Roofline,
    Runnable,
    Timing,
    interleave,
    jit_program,
    measure,
    summarize,
)
from hyena_jax.ops.counts import Work


class Clock:
    """A clock that only the programs advance."""

    def __init__(self):
        self.now, self.order = 0.0, []

    def __call__(self) -> float:
        return self.now

    def program(self, name: str, *seconds: float):
        durations = list(seconds)

        def run():
            self.order.append(name)
            self.now += durations.pop(0) if len(durations) > 1 else durations[0]

        return run


def timed(clock, programs, budget, least_runs):
    return interleave(programs, budget, least_runs, clock=clock, pause=lambda _: None)


def test_programs_take_turns_until_each_has_its_time():
    clock = Clock()
    times = timed(clock, {"a": clock.program("a", 1.0), "b": clock.program("b", 3.0)}, 4.0, 2)
    assert clock.order == ["a", "b", "a", "b", "a", "a"]
    assert (times["a"].median, times["a"].runs) == (1.0, 4)
    assert (times["b"].median, times["b"].runs) == (3.0, 2)


def test_a_slow_program_still_has_its_least_runs_and_a_quick_one_no_more_than_enough():
    clock = Clock()
    times = timed(clock, {"slow": clock.program("slow", 50.0), "quick": clock.program("quick", 1e-9)}, 1.0, 3)
    assert times["slow"].runs == 3
    assert times["quick"].runs == MAX_RUNS


def test_a_run_takes_until_its_result_is_ready():
    clock = Clock()

    class Result:
        def block_until_ready(self):
            clock.now += 2.0

    def run():
        clock.now += 1.0
        return Result()

    times = timed(clock, {"a": run}, 1.0, 1)["a"]
    assert (times.median, times.dispatch) == (3.0, 1.0)


def test_a_copy_reads_and_writes(monkeypatch):
    monkeypatch.setattr(timing, "MATMUL_SIZE", {"cpu": 3})
    monkeypatch.setattr(timing, "COPY_BYTES", {"cpu": 28})
    times = {"matmul": summarize([2.0]), "copy": summarize([4.0])}
    monkeypatch.setattr(timing, "interleave", lambda *_: times)
    assert timing.measure_roofline("float32") == (2 * 27 / 2.0, 2 * 28 / 4.0)


def test_median_quartiles_and_mean():
    times = summarize([5.0, 1.0, 3.0, 2.0, 40.0])
    assert times == Timing(3.0, 2.0, 5.0, 10.2, 5)
    assert summarize([7.0]) == Timing(7.0, 7.0, 7.0, 7.0, 1)
    assert summarize([7.0], [2.0]).dispatch == 2.0
    assert times.of_one(2) == Timing(1.5, 1.0, 2.5, 5.1, 5)


def test_a_measured_program_says_what_its_compiler_said():
    x = jnp.ones((8, 16))
    measured = measure({"product": jit_program(lambda x: x @ x.T, x)}, Effort(0.0, 3, 20.0))["product"]
    assert measured.seconds.runs == 3
    assert measured.compiled_bytes >= x.nbytes + 8 * 8 * 4
    assert measured.xla_flops == 2 * 8 * 8 * 16
    assert measured.live_bytes is None or measured.live_bytes >= 0
    assert min(measured.trace_seconds, measured.lower_seconds, measured.compile_seconds) > 0
    assert measured.first_seconds > 0
    assert measured.seconds.dispatch <= measured.seconds.upper


def test_what_takes_too_long_is_run_once():
    runs = []
    measured = measure({"a": Runnable(lambda: runs.append(1))}, Effort(1.0, 5, max_seconds=0.0))["a"]
    assert len(runs) == 1
    assert measured.seconds.runs == 1


def test_the_exponent_is_that_of_the_long_lengths():
    times = {2**i: 1e-9 * (2**i) ** 1.5 for i in range(12, 17)}
    assert fitted_exponent(times | {256: 7.0}) == pytest.approx(1.5)
    assert fitted_exponent({4096: 1.0, 8192: 2.0, 256: 7.0}) is None
    assert fitted_exponent({4096: 1.0, 8192: 2.0, 16384: 4.0}) == pytest.approx(1.0)


def test_the_crossover_is_interpolated_in_logarithms():
    linear = {2**i: 64.0 * 2**i for i in range(4, 11)}
    quadratic = {2**i: 4.0**i for i in range(4, 11)}
    assert crossover(linear, quadratic) == pytest.approx(64)
    assert crossover(quadratic, linear) is None
    assert crossover({8: 1.0, 16: 1.0}, {8: 2.0, 16: 3.0, 32: 4.0}) == 8
    assert crossover({8: 1.0}, {16: 1.0}) is None
    between = crossover({8: 4.0, 16: 4.0}, {8: 2.0, 16: 8.0})
    assert between == pytest.approx(8 * 2**0.5)


@pytest.mark.parametrize(("flops", "n_bytes"), [(8e9, 1e9), (1e9, 8e9)])
def test_the_least_time_is_that_of_computation_or_of_traffic_whichever_is_longer(flops, n_bytes):
    program = Runnable(lambda: jnp.zeros(()), work=Work(flops, bytes=n_bytes))
    measured = measure({"a": program}, Effort(seconds=0.0), Roofline(1e12, 1e12))["a"]
    assert measured.roofline_share == pytest.approx(8e-3 / measured.seconds.median)
