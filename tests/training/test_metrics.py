import pytest

from hyena_jax.config import UserError
from hyena_jax.training.metrics import MetricsLog, draw_learning_curves, read_rows


def test_rows_come_back_with_all_digits(tmp_path):
    with MetricsLog(tmp_path, 0, tensorboard=False) as log:
        log.write(1, {"train/loss": 1 / 3})
    assert read_rows(tmp_path / "metrics.jsonl") == [{"step": 1, "train/loss": 1 / 3}]


def test_resuming_drops_later_rows_and_a_line_cut_short(tmp_path):
    with MetricsLog(tmp_path, 0, tensorboard=False) as log:
        for step in (1, 2, 3):
            log.write(step, {"train/loss": float(step)})
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text()[:-9])
    with MetricsLog(tmp_path, 1, tensorboard=False) as log:
        log.write(2, {"train/loss": 20.0})
        log.sync()
    assert [row["train/loss"] for row in read_rows(path)] == [1.0, 20.0]


@pytest.mark.parametrize("line", [b"{", b"[1]", b'{"a": 1}', b"\xff", b"3"])
def test_a_broken_row_is_an_error_that_deletes_nothing(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 3}\n')
    before = path.read_bytes()
    with pytest.raises(UserError, match=r"metrics.jsonl line 2 is not a row"):
        MetricsLog(tmp_path, 1, tensorboard=False)
    assert path.read_bytes() == before


def test_tensorboard_files_hold_the_values(tmp_path):
    event_file_loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with MetricsLog(tmp_path, 0, tensorboard=True) as log:
        log.write(3, {"train/loss": 0.5})
    events = event_file_loader.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(3, 0.5)]


def test_curves_are_a_png(tmp_path):
    with MetricsLog(tmp_path, 0, tensorboard=False) as log:
        log.write(1, {"train/loss": 2.0})
        log.write(1, {"validation/loss": 2.5})
    for labels in ({"loss": "loss"}, {"loss": "loss", "accuracy": "accuracy"}):
        assert draw_learning_curves(tmp_path, labels).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
