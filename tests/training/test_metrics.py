import json
import math
import re
import time
from types import SimpleNamespace

import pytest

from hyena_jax.system.errors import UserError
from hyena_jax.training.hooks import Show
from hyena_jax.training.metrics import MetricsLog, draw_learning_curves, read_rows
from hyena_jax.training.optimizer import make_schedule


def test_rows_come_back_with_all_digits(tmp_path):
    with MetricsLog(tmp_path, 0) as log:
        log.write(1, {"train/loss": 1 / 3})
    (row,) = read_rows(tmp_path / "metrics.jsonl")
    assert abs(row.pop("time") - time.time()) < 60
    assert row == {"step": 1, "train/loss": 1 / 3}


def test_what_is_not_finite_is_null_in_the_rows_of_now_and_of_before(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "train/perplexity": Infinity, "train/loss": NaN}\n')
    with MetricsLog(tmp_path, 1) as log:
        log.write(2, {"train/perplexity": math.inf, "train/loss": 800.0})
    assert not re.search("NaN|Infinity", path.read_text())  # which strict JSON does not have
    before, now = map(json.loads, path.read_text().splitlines())
    assert before == {"step": 1, "train/perplexity": None, "train/loss": None}
    assert (now["train/perplexity"], now["train/loss"]) == (None, 800.0)
    assert draw_learning_curves(tmp_path, {"perplexity": "perplexity", "loss": "loss"}).stat().st_size


def test_the_row_of_an_evaluation_that_is_made_again_is_dropped(tmp_path):
    with MetricsLog(tmp_path, 0) as log:
        for step in (1, 2):
            log.write(step, {"train/loss": 1.0})
            log.write(step, {"validation/loss": 2.0})
    with MetricsLog(tmp_path, 2, evaluates_again=True):
        found = [(row["step"], "validation/loss" in row) for row in read_rows(tmp_path / "metrics.jsonl")]
    assert found == [(1, False), (1, True), (2, False)]


def test_resuming_drops_later_rows_and_a_line_cut_short(tmp_path):
    with MetricsLog(tmp_path, 0) as log:
        for step in (1, 2, 3):
            log.write(step, {"train/loss": float(step)})
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text()[:-9])
    with MetricsLog(tmp_path, 1) as log:
        log.write(2, {"train/loss": 20.0})
        log.sync()
    assert [row["train/loss"] for row in read_rows(path)] == [1.0, 20.0]


WRONG = [b"{", b"[1]", b'{"a": 1}', b"\xff", b"3", b'{"step": 2, "a": "b"}', b'{"step": 2, "a": [1]}']
WRONG += [b'{"step": "a"}', b'{"step": 1.5}']
WRONG += [b'{"step": 2, "a": 1' + 400 * b"0" + b"}", b'{"step": ' + 9000 * b"[" + 9000 * b"]" + b"}"]


@pytest.mark.parametrize("line", WRONG)
def test_a_broken_row_is_an_error_that_deletes_nothing(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 3}\n')
    before = path.read_bytes()
    with pytest.raises(UserError, match=r"metrics.jsonl line 2 is not a row"):
        MetricsLog(tmp_path, 1)
    assert path.read_bytes() == before


def test_curves_are_a_png_also_in_a_folder_with_dollar_signs(tmp_path):
    folder = tmp_path / r"a$\b$_{"
    folder.mkdir()
    with MetricsLog(folder, 0) as log:
        log.write(1, {"train/loss": 2.0})
        log.write(1, {"validation/loss": 2.5})
    for labels in ({"loss": "loss"}, {"loss": "loss", "accuracy": "accuracy"}):
        assert draw_learning_curves(folder, labels).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.xdist_group("trained")
def test_the_logged_rate_is_that_of_the_step(trained, experiment):
    """Which step t takes at t - 1: 0 at the first."""
    schedule = make_schedule(experiment.optimizer, experiment.training.steps)
    rows = [row for row in read_rows(trained / "metrics.jsonl") if "train/learning_rate" in row]
    assert len(rows) > 2
    assert [row["train/learning_rate"] for row in rows] == [
        pytest.approx(float(schedule(row["step"] - 1)), rel=1e-6) for row in rows
    ]


def test_the_summary_counts_operations_in_billions():
    """1,000 tokens in 2 s with 4e6 operations each, on two devices that have no published peak."""
    shares = {"data_wait": 0.25}
    clock = SimpleNamespace(shares=lambda: shares, units_per_step=100, seconds=2.0, flops_per_unit=4e6)
    devices = [SimpleNamespace(device_kind="none")] * 2
    setup = SimpleNamespace(strategy=SimpleNamespace(devices=devices), data=SimpleNamespace(unit="token"))
    line = Show(SimpleNamespace(clock=clock, setup=setup))._summary(11)
    shown = "75% training, 25% waiting for data; 250 tokens/s a device over all of it"
    assert line == f"time      {shown}, 1.0 model GFLOP/s a device"
