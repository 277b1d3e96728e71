import dataclasses

import numpy as np
import pytest
from idx_files import idx_bytes, random_images, write_pair

from hyena_jax.config import Experiment, HyenaConfig, ImageClassifierConfig, ImagesConfig, UserError
from hyena_jax.data.dataset import encoding_from_json, load
from hyena_jax.data.images import Normalization, fit_normalization, load_image_set


@pytest.fixture
def config(tmp_path):
    return ImagesConfig(path=str(write_pair(tmp_path / "pair", 40)))


@pytest.fixture
def images(config):
    return load_image_set(config)


def experiment(config, **model):
    model = {"pattern": (HyenaConfig(),), "patch_size": (2, 2), **model}
    return Experiment(ImageClassifierConfig(**model), config)


def test_normalization_makes_mean_0_and_deviation_1(images):
    pixels = np.float64(random_images(40)[0][:36]) / 255
    assert images.normalization.mean == pytest.approx(pixels.mean(), rel=1e-12)
    assert images.normalization.std == pytest.approx(pixels.std(), rel=1e-12)
    values = images.normalization(images.train.images)
    assert values.dtype == np.float32
    np.testing.assert_allclose(values[..., 0], (pixels - pixels.mean()) / pixels.std(), rtol=1e-6, atol=1e-6)


def test_normalization_of_colours_is_one_for_all():
    colours = np.zeros((2, 3, 3, 3), np.uint8)
    colours[..., 0] = 255
    assert fit_normalization(colours) == Normalization(pytest.approx(1 / 3), pytest.approx(2**0.5 / 3))


def test_equal_pixels_are_refused():
    with pytest.raises(UserError, match="training images must be of more than one value, got 7"):
        fit_normalization(np.full((3, 2, 2, 1), 7, np.uint8))


def test_batches_to_train_on(images):
    dataset = images.train_batches(batch_size=10, seed=3)
    known = {image.tobytes(): label for image, label in zip(*images.train, strict=True)}
    scale = images.normalization
    seen = []
    for t in range(18):  # five epochs of 36 images
        batch = dataset[t]
        assert (batch["inputs"].shape, batch["inputs"].dtype) == ((10, 6, 5, 1), np.float32)
        assert (batch["targets"].shape, batch["targets"].dtype) == ((10,), np.int32)
        pixels = np.rint((batch["inputs"] * scale.std + scale.mean) * 255).astype(np.uint8)
        assert [known[image.tobytes()] for image in pixels] == batch["targets"].tolist()
        seen += [image.tobytes() for image in pixels]
        np.testing.assert_array_equal(images.train_batches(10, 3)[t]["inputs"], batch["inputs"])
    assert all(sorted(seen[36 * i : 36 * (i + 1)]) == sorted(known) for i in range(5))
    assert seen[:36] != seen[36:72]
    assert (images.train_batches(10, 4)[0]["inputs"] != dataset[0]["inputs"]).any()


@pytest.mark.parametrize("batch_size", [1, 3, 4, 100])
def test_every_held_out_image_is_judged_once(images, batch_size):
    batches = list(images.eval_batches(batch_size))
    inputs, targets, weights = (
        np.concatenate([batch[name] for batch in batches]) for name in ("inputs", "targets", "weights")
    )
    assert len(inputs) == batch_size * -(-4 // batch_size)
    np.testing.assert_array_equal(weights, np.arange(len(inputs)) < 4)
    assert (weights.dtype, targets.dtype, inputs.dtype) == (np.float32, np.int32, np.float32)
    np.testing.assert_array_equal(inputs[:4], images.normalization(images.held_out.images))
    np.testing.assert_array_equal(targets[:4], images.held_out.labels)
    assert images.n_eval_rows() == images.n_held_out == 4


def test_some_held_out_images_are_evenly_spaced(images):
    (batch,) = images.eval_batches(2, max_rows=2)
    np.testing.assert_array_equal(batch["inputs"], images.normalization(images.held_out.images[[0, 3]]))
    assert images.n_eval_rows(2) == 2
    assert images.n_eval_rows(9) == 4


def test_the_model_takes_its_sizes_from_the_images(config, images):
    model = images.complete(experiment(config)).model
    assert (model.image_size, model.channels, model.n_classes) == ((6, 5), 1, 3)
    assert images.complete(experiment(config, n_classes=9)).model.n_classes == 9


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"image_size": (5, 6)}, r"model.image_size must be the data's \(6, 5\), got \(5, 6\)"),
        ({"channels": 3}, "model.channels must be the data's 1, got 3"),
        ({"n_classes": 2}, "model.n_classes must be at least the data's 3, got 2"),
        ({"patch_size": (6, 6)}, r"patch_size must be at most image_size=\(6, 5\), got \(6, 6\)"),
    ],
)
def test_a_model_that_contradicts_the_images(config, images, model, message):
    with pytest.raises(UserError, match=message):
        images.complete(experiment(config, **model))


def test_metrics(images):
    sums = {"count": 4.0, "nats": 2.0, "correct": 3.0, "probability": 1.0}
    assert images.metrics(sums) == {"accuracy": 0.75}
    assert images.metrics({"count": 4.0}) == {}
    assert images.loss_metrics(0.5) == {}


def test_a_given_normalization_is_used_and_survives_json(config, images):
    given = Normalization(0.5, 0.25)
    other = load(config, given)
    assert other.normalization is given
    assert encoding_from_json(other.to_json()) == given
    assert other.to_json()["fingerprint"] == other.fingerprint != images.fingerprint
    assert other.normalization(np.array([0, 255], np.uint8)).tolist() == [-2, 2]


@pytest.mark.parametrize("values", [{}, None, {"mean": "x", "std": 1}, {"mean": 0}])
def test_a_broken_normalization_is_refused(values):
    with pytest.raises(UserError, match="normalization must be what to_json returns"):
        encoding_from_json({"normalization": values})


def test_fingerprint(config, images, tmp_path):
    assert load_image_set(config).fingerprint == images.fingerprint
    assert len(images.fingerprint) == 64
    both = dataclasses.replace(config, validation_path=config.path)
    assert load_image_set(both).fingerprint != images.fingerprint
    labels = random_images(40)[1]
    labels[-1] ^= 1
    (tmp_path / "pair" / "labels-ubyte").write_bytes(idx_bytes(labels))
    assert load_image_set(config).fingerprint != images.fingerprint
