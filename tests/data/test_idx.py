import gzip

import numpy as np
import pytest
from idx_files import idx_bytes, random_images, write_pair

from hyena_jax.config import UserError
from hyena_jax.data.images import read_pair


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
    np.testing.assert_array_equal(images, expected[0])
    np.testing.assert_array_equal(labels, expected[1])


IMAGES, LABELS = (idx_bytes(array) for array in random_images(7))
PACKED = gzip.compress(IMAGES)
WRONG = {
    "nothing": ({}, "path must be a folder with one IDX file of images .*, got '.*' with no files"),
    "images alone": ({"a": IMAGES}, "one of labels .*0x00000801.*, got '.*' with a .0x00000803"),
    "two pairs": (
        {"a": IMAGES, "b": LABELS, "c.gz": PACKED},
        r"with a \(0x00000803\), b \(0x00000801\), c.gz \(0x00000803\)",
    ),
    "another element type": ({"a": b"\0\0\x0d\x03" + IMAGES[4:], "b": LABELS}, r"a \(0x00000d03\)"),
    "mislabelled": ({"a": b"\0\0\x08\x02" + IMAGES[4:], "b": LABELS}, r"a \(0x00000802\)"),
    "an empty file": ({"a": b"", "b": LABELS}, r"a \(0x\), b"),
    "truncated": ({"a": IMAGES[:-1], "b": LABELS}, "'.*/a' must hold 7 x 6 x 5 bytes after .*, got a file"),
    "truncated, then packed": (
        {"a": gzip.compress(IMAGES[:-1]), "b": LABELS},
        "'.*/a' must hold 7 x 6 x 5 bytes after .*, got 209",
    ),
    "a bomb": (
        {"a": gzip.compress(IMAGES + bytes(10**7)), "b": LABELS},
        "'.*/a' must hold 7 x 6 x 5 bytes after .*, got more",
    ),
    "too long": ({"a": IMAGES, "b": LABELS + b"x"}, "'.*/b' must hold 7 bytes after its header.*, got more"),
    "within the header": ({"a": IMAGES[:15], "b": LABELS}, "'.*/a' must have a header of 16 bytes, got 15"),
    "sizes beyond memory": ({"a": IMAGES[:4] + b"\xff" * 12, "b": LABELS}, "4294967295 x .*, got a file"),
    "truncated gzip": ({"a": PACKED[:-12], "b": LABELS}, "'.*/a' must be a whole gzip file"),
    "damaged gzip": ({"a": PACKED[:10] + b"\xff" * 30, "b": LABELS}, "'.*/a' must be a whole gzip file"),
    "gzip of other bytes": ({"a": PACKED[:-5] + b"12345", "b": LABELS}, "a' must be a whole gzip file: CRC"),
    "fewer labels": (
        {"a": IMAGES, "b": idx_bytes(np.zeros(6))},
        "a label for each image, got 7 images in '.*/a' and 6 labels in '.*/b'",
    ),
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


@pytest.mark.parametrize("name", ["absent", "file"])
def test_no_folder(tmp_path, name):
    (tmp_path / "file").write_bytes(IMAGES)
    message = f"validation_path must be an existing folder with a pair of IDX files, got '.*{name}'"
    with pytest.raises(UserError, match=message):
        read_pair("validation_path", str(tmp_path / name))


def test_a_file_without_permission(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    write_pair(tmp_path)
    monkeypatch.setattr("os.open", refuse)
    with pytest.raises(UserError, match=r"path '.*images-ubyte' cannot be read: .*Permission denied"):
        read_pair("path", str(tmp_path))
