"""What a run shows at its end."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from hyena_jax.generation.sample import draw_predictions


@pytest.mark.parametrize("channels", [1, 2])
def test_right_predictions_are_counted_and_drawn(tmp_path, channels):
    images = np.arange(20.0 * channels).reshape(5, 2, 2, channels)
    true, predicted = np.arange(5), np.array([0, 1, 2, 0, 0])
    data = SimpleNamespace(
        n_eval_rows=lambda count: min(count, 5),
        eval_batches=lambda *_: iter([{"inputs": images, "targets": true}]),
    )
    model = SimpleNamespace(apply=lambda variables, inputs: jax.nn.one_hot(predicted, 7))
    path = tmp_path / "predictions.png"
    assert draw_predictions(model, {}, data, 40, path) == (3, 5)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
