"""Images are read from IDX files, scikit-learn and TensorFlow Datasets, and normalised into batches."""

import dataclasses
import gzip
from pathlib import Path

import numpy as np
import pytest
from idx_files import idx_bytes, random_images, write_pair
from tensorflow_free import prepare_fake

from hyena_jax.config import Experiment, HyenaConfig, ImageClassifierConfig, ImagesConfig
from hyena_jax.data.dataset import encoding_from_json, load
from hyena_jax.data.images import Normalization, fit_normalization, load_image_set, read_pair
from hyena_jax.system.errors import UserError


@pytest.mark.parametrize("compressed", [False, True])
def test_a_pair_is_found_by_its_magic_numbers(tmp_path, compressed):
    folder = write_pair(tmp_path / "pair", 7, compressed)
    for i, file in enumerate(sorted(folder.iterdir())):
        file.rename(folder / f"{i}.dat")
    (folder / "README").write_text("about the images")
    (folder / ".hidden").write_bytes(idx_bytes(np.zeros(3)))
    (folder / "folder").mkdir()
    images, labels = read_pair("path", str(folder))
    expected = random_images(7)
    assert images.dtype == labels.dtype == np.uint8
    np.testing.assert_array_equal(images, expected[0][..., None])
    np.testing.assert_array_equal(labels, expected[1])


IMAGES, LABELS = (idx_bytes(array) for array in random_images(7))
PACKED = gzip.compress(IMAGES)
WRONG = {
    "nothing": ({}, "path must be a folder with one IDX file of images .*, got '.*' with no files"),
    "images alone": ({"a": IMAGES}, "one of labels .*0x00000801.*, got '.*' with a .0x00000803"),
    "two pairs": ({"a": IMAGES, "b": LABELS, "c.gz": PACKED}, r"b \(0x00000801\), c.gz \(0x00000803\)"),
    "another element type": ({"a": b"\0\0\x0d\x03" + IMAGES[4:], "b": LABELS}, r"a \(0x00000d03\)"),
    "truncated": ({"a": gzip.compress(IMAGES[:-1]), "b": LABELS}, "a' must hold 7 x 6 x 5 bytes .*, got 209"),
    "a bomb": ({"a": gzip.compress(IMAGES + bytes(10**7)), "b": LABELS}, "a' must hold 7 x .*, got more"),
    "within the header": ({"a": IMAGES[:15], "b": LABELS}, "'.*/a' must have a header of 16 bytes, got 15"),
    "sizes beyond memory": ({"a": IMAGES[:4] + b"\xff" * 12, "b": LABELS}, "4294967295 x .*, got a file"),
    "truncated gzip": ({"a": PACKED[:-12], "b": LABELS}, "'.*/a' must be a whole gzip file"),
    "damaged gzip": ({"a": PACKED[:10] + b"\xff" * 30, "b": LABELS}, "'.*/a' must be a whole gzip file"),
    "gzip of other bytes": ({"a": PACKED[:-5] + b"12345", "b": LABELS}, "a' must be a whole gzip file: CRC"),
    "fewer labels": ({"a": IMAGES, "b": idx_bytes(np.zeros(6))}, "got 7 images in .*a' and 6 labels in .*b'"),
    "no images": (
        {"a": idx_bytes(np.zeros((0, 6, 5))), "b": idx_bytes(np.zeros(0))},
        r"path: images in '.*/a' must be not empty, got \(0, 6, 5\)",
    ),
}


@pytest.mark.parametrize(("files", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_folders(tmp_path, files, message):
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=message):
        read_pair("path", str(tmp_path))


def test_a_folder_that_is_not_there(tmp_path):
    pair = write_pair(tmp_path / "pair")
    for path in (tmp_path / "absent", pair / "labels-ubyte"):
        message = f"validation_path must be an existing folder with a pair of IDX files, got '{path}'"
        with pytest.raises(UserError, match=message):
            read_pair("validation_path", str(path))


def assert_equal(part, images, labels):
    assert part.images.dtype == part.labels.dtype == np.uint8
    np.testing.assert_array_equal(part.images, images)
    np.testing.assert_array_equal(part.labels, labels)


def test_digits_are_split_the_same_way_for_ever():
    images = load_image_set(ImagesConfig())
    assert images.train.images.shape == (1437, 8, 8, 1)
    assert images.held_out.images.shape == (360, 8, 8, 1)
    assert set(np.unique(images.train.images)) == set(range(17))
    assert images.held_out.labels[:12].tolist() == [7, 9, 4, 7, 0, 2, 6, 1, 3, 1, 3, 7]
    assert min(np.bincount(images.held_out.labels)) > 25
    from sklearn.datasets import load_digits

    digits = load_digits()
    expected = zip(digits.data.astype(np.uint8), digits.target, strict=True)
    found = [pair for part in (images.train, images.held_out) for pair in zip(*part, strict=True)]
    assert sorted((x.tobytes(), y) for x, y in found) == sorted((x.tobytes(), y) for x, y in expected)


def test_the_last_tenth_of_a_folder_is_held_out(tmp_path):
    path = str(write_pair(tmp_path / "pair", 29))
    found = load_image_set(ImagesConfig(path=path))
    images, labels = random_images(29)
    assert_equal(found.train, images[:26, ..., None], labels[:26])
    assert_equal(found.held_out, images[26:, ..., None], labels[26:])
    assert found.source == f"{path}, held out: its last 10%"


def test_validation_path_is_held_out(tmp_path):
    path, other = (str(write_pair(tmp_path / name, n, seed=n)) for name, n in (("a", 9), ("b", 4)))
    found = load_image_set(ImagesConfig(path=path, validation_path=other))
    assert_equal(found.train, random_images(9, seed=9)[0][..., None], random_images(9)[1])
    assert_equal(found.held_out, random_images(4, seed=4)[0][..., None], random_images(4)[1])


def test_images_of_two_sizes_and_one_image_alone_are_refused(tmp_path):
    path, other, one = (
        str(write_pair(tmp_path / name, n, height=height))
        for name, n, height in (("a", 9, 6), ("b", 4, 7), ("pair", 1, 6))
    )
    message = r"held-out images must have the training images' shape \(6, 5, 1\), got \(7, 5, 1\)"
    with pytest.raises(UserError, match=message):
        load_image_set(ImagesConfig(path=path, validation_path=other))
    with pytest.raises(UserError, match=r"path must hold at least 2 images, .*, got '.*pair' with 1"):
        load_image_set(ImagesConfig(path=one))


MNIST = Path(__file__).parents[2].parent / "shared" / "data" / "mnist_t10k"


@pytest.mark.grid
@pytest.mark.skipif(not MNIST.is_dir(), reason="the 10,000 test images of MNIST are absent")
def test_files_of_mnist_are_read():
    images = load_image_set(ImagesConfig(path=str(MNIST)))
    assert images.train.images.shape == (9000, 28, 28, 1)
    assert images.train.labels[:5].tolist() == [7, 2, 1, 0, 4]


def test_a_data_set_of_tensorflow_datasets_has_its_own_splits(monkeypatch):
    parts = {"train": random_images(12), "test": random_images(5, seed=1)}
    examples = {
        split: [{"image": image[..., None], "label": label} for image, label in zip(*part, strict=True)]
        for split, part in parts.items()
    }
    prepare_fake(monkeypatch, "image", np.zeros((6, 5, 1)), **examples)
    found = load_image_set(ImagesConfig(name="mnist"))
    for part, (images, labels) in zip((found.train, found.held_out), parts.values(), strict=True):
        assert_equal(part, images[..., None], labels)
    assert found.source == "fake/1.0.0 of TensorFlow Datasets"


@pytest.fixture
def config(tmp_path):
    return ImagesConfig(path=str(write_pair(tmp_path / "pair", 40)))


@pytest.fixture
def images(config):
    return load_image_set(config)


def experiment(config, **model):
    model = {"pattern": (HyenaConfig(),), "patch_size": (2, 2), **model}
    return Experiment(ImageClassifierConfig(**model), config)


def test_rows_are_images_of_mean_0_and_deviation_1_in_training_and_their_labels(images):
    pixels, labels = random_images(40)
    pixels = np.float64(pixels) / 255
    mean, std = pixels[:36].mean(), pixels[:36].std()
    assert images.normalization == Normalization(
        pytest.approx(mean, rel=1e-12), pytest.approx(std, rel=1e-12)
    )
    for rows, part in (
        (images.train_rows(np.arange(36)), slice(36)),
        (images.held_out_rows(np.arange(4)), slice(36, 40)),
    ):
        assert (rows["inputs"].dtype, rows["targets"].dtype) == (np.float32, np.int32)
        expected = (pixels[part, ..., None] - mean) / std
        np.testing.assert_allclose(rows["inputs"], expected, rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(rows["targets"], labels[part])


def test_normalization_is_one_for_all_colours_and_of_more_than_one_value():
    colours = np.zeros((2, 3, 3, 3), np.uint8)
    colours[..., 0] = 255
    assert fit_normalization(colours) == Normalization(pytest.approx(1 / 3), pytest.approx(2**0.5 / 3))
    with pytest.raises(UserError, match="training images must be of more than one value, got 7"):
        fit_normalization(np.full((3, 2, 2, 1), 7, np.uint8))


def test_the_model_takes_its_sizes_from_the_images(config, images):
    model = images.complete(experiment(config)).model
    assert (model.image_size, model.channels, model.n_classes) == ((6, 5), 1, 3)
    assert images.complete(experiment(config, n_classes=9)).model.n_classes == 9
    held_out = images.held_out._replace(labels=images.held_out.labels + 4)
    largest = int(held_out.labels.max())
    assert dataclasses.replace(images, held_out=held_out).sizes["n_classes"] == 1 + largest > 4


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"image_size": (5, 6)}, r"model.image_size must be the data's \(6, 5\), got \(5, 6\)"),
        ({"n_classes": 2}, "model.n_classes must be at least the data's 3, got 2"),
        ({"patch_size": (6, 6)}, r"patch_size must be at most image_size=\(6, 5\), got \(6, 6\)"),
    ],
)
def test_a_model_that_contradicts_the_images(config, images, model, message):
    with pytest.raises(UserError, match=message):
        images.complete(experiment(config, **model))


def test_a_given_normalization_is_used_and_survives_json(config, images):
    given = Normalization(0.5, 0.25)
    other = load(config, given)
    assert other.normalization is given
    assert encoding_from_json(other.to_json()) == given
    assert other.to_json()["fingerprint"] == other.fingerprint != images.fingerprint
    assert other.normalization(np.array([0, 255], np.uint8)).tolist() == [-2, 2]


def test_metrics(images):
    sums = {"count": 4.0, "nats": 2.0, "correct": 3.0, "probability": 1.0}
    assert images.metrics(sums) == {"accuracy": 0.75}
    assert images.metrics({"count": 4.0}) == images.loss_metrics(0.5) == {}


@pytest.mark.parametrize("values", [None, {"mean": "x", "std": 1}, {"mean": 0}])
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
