"""The speed of a run, by a clock that the test turns."""

from hyena_jax.training import timing


def test_waits_count_as_a_part_of_the_time_and_pauses_not_at_all(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    clock = timing.Clock(units_per_step=10)
    clock.begin(2)
    with clock.waiting():
        now[0] += 1
    now[0] += 3
    with clock.paused("saving"):
        now[0] += 6
    assert clock.wait_share == 1 / 4
    assert clock.units_per_second(6) == 40 / 4
    assert clock.units_per_second(6) is None
    assert clock.shares() == {"data_wait": 0.1, "evaluating": 0.0, "saving": 0.6}
