import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from idx_files import idx_bytes, random_images, write_pair
from tensorflow_free import WITHOUT_TENSORFLOW, needs_tensorflow

from hyena_jax.config import ImagesConfig, UserError
from hyena_jax.data.images import Labelled, load_image_set

MNIST = Path(__file__).parents[2].parent / "shared" / "data" / "mnist_t10k"


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
    every = np.concatenate([part.images.reshape(-1, 64) for part in (images.train, images.held_out)])
    from sklearn.datasets import load_digits

    assert sorted(map(bytes, every)) == sorted(map(bytes, load_digits().data.astype(np.uint8)))


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


def test_images_of_two_sizes(tmp_path):
    path, other = write_pair(tmp_path / "a", 9), write_pair(tmp_path / "b", 4, height=7)
    message = r"held-out images must have the training images' shape \(6, 5, 1\), got \(7, 5, 1\)"
    with pytest.raises(UserError, match=message):
        load_image_set(ImagesConfig(path=str(path), validation_path=str(other)))


def test_one_image_cannot_be_split(tmp_path):
    with pytest.raises(UserError, match=r"path must hold at least 2 images, .*, got '.*pair' with 1"):
        load_image_set(ImagesConfig(path=str(write_pair(tmp_path / "pair", 1))))


@pytest.mark.skipif(not MNIST.is_dir(), reason="the 10,000 test images of MNIST are absent")
def test_ten_thousand_images_of_mnist():
    images = load_image_set(ImagesConfig(path=str(MNIST)))
    assert images.train.images.shape == (9000, 28, 28, 1)
    assert images.held_out.images.shape == (1000, 28, 28, 1)
    assert images.train.labels[:5].tolist() == [7, 2, 1, 0, 4]


PREPARE = """
from tensorflow_datasets.image_classification.mnist import MNIST
def splits(self, _):
    sizes = {{"train": 12, "test": 5}}
    return {{
        split: self._generate_examples(size, f"{folder}/{{split}}-images", f"{folder}/{{split}}-labels")
        for split, size in sizes.items()
    }}
MNIST._split_generators = splits
from hyena_jax.config import ImagesConfig
from hyena_jax.data.images import load_image_set
load_image_set(ImagesConfig(name="mnist", tfds_dir="{folder}/tfds"))
"""
READ = """
import numpy as np
from hyena_jax.config import ImagesConfig
from hyena_jax.data.images import load_image_set
train, test, source = load_image_set(ImagesConfig(name="mnist", tfds_dir="{folder}/tfds"))
np.savez("{folder}/read.npz", *train, *test)
print(source)
"""


def run_quietly(code):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return done.stdout


@pytest.mark.grid
@needs_tensorflow
def test_a_prepared_data_set_is_read_without_tensorflow(tmp_path):
    parts = {"train": random_images(12, 28, 28), "test": random_images(5, 28, 28, seed=1)}
    for split, arrays in parts.items():
        for name, array in zip(("images", "labels"), arrays, strict=True):
            (tmp_path / f"{split}-{name}").write_bytes(idx_bytes(array))
    run_quietly(PREPARE.format(folder=tmp_path))
    assert (
        run_quietly(WITHOUT_TENSORFLOW + READ.format(folder=tmp_path))
        == "mnist/3.0.1 of TensorFlow Datasets\n"
    )
    found = list(np.load(tmp_path / "read.npz").values())
    for part, (images, labels) in zip((found[:2], found[2:]), parts.values(), strict=True):
        # Preparing a data set shuffles it.
        order, wanted = (np.argsort([image.tobytes() for image in every]) for every in (part[0], images))
        assert_equal(Labelled(part[0][order], part[1][order]), images[wanted][..., None], labels[wanted])


@needs_tensorflow
def test_offline_says_how_to_supply_the_files(tmp_path, monkeypatch):
    from tensorflow_datasets.core.download import downloader

    def refuse(*args, **kwargs):
        raise ConnectionError("no network")

    monkeypatch.setattr(downloader, "_open_url", refuse)
    with pytest.raises(UserError) as error:
        load_image_set(ImagesConfig(name="cifar10", tfds_dir=str(tmp_path)))
    assert str(error.value) == (
        "name 'cifar10' cannot be prepared (ConnectionError: no network);"
        " save https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz as cifar-10-binary.tar.gz"
        " in a folder and give --data.manual-dir FOLDER,"
        " or give a folder of IDX files with --data.path FOLDER"
    )
    with pytest.raises(UserError, match="train-labels-idx1-ubyte.gz in a folder and give --data.manual-dir"):
        load_image_set(ImagesConfig(name="mnist", tfds_dir=str(tmp_path)))


def test_a_missing_manual_dir(tmp_path):
    config = ImagesConfig(name="mnist", tfds_dir=str(tmp_path), manual_dir=str(tmp_path / "absent"))
    with pytest.raises(UserError, match=r"manual_dir must be an existing folder, got '.*absent'"):
        load_image_set(config)
