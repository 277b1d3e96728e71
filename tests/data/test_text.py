"""Text is read from files, folders, Python itself and TensorFlow Datasets, and encoded into a corpus."""

import ast
import dataclasses
import json
import logging
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from tensorflow_free import WITHOUT_TENSORFLOW, needs_tensorflow, prepare_texts

from hyena_jax.config import ImagesConfig, TextConfig
from hyena_jax.data import text as source
from hyena_jax.data.images import load_image_set
from hyena_jax.data.text import load_corpus, load_text
from hyena_jax.data.tokenizers import CharactersTokenizer
from hyena_jax.system.errors import UserError


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


@pytest.mark.parametrize(
    ("content", "train", "held_out"),
    [
        ("\u00e9" * 17 + "ab", "\u00e9" * 17, "ab"),  # the last tenth of the characters
        (b"\xef\xbb\xbfa\r\nb\rc\n\xef\xbb\xbf", "a\r\nb\rc\n", "\ufeff"),  # only the first mark goes
    ],
)
def test_the_last_tenth_of_a_file_is_held_out(tmp_path, content, train, held_out):
    path = write(tmp_path / "a.txt", content)
    text = load_text(TextConfig(path=path))
    assert text[:2] == (train, held_out)
    assert path in text.source


def test_a_folder_is_its_files_in_order(tmp_path):
    for name in ("b.txt", "a/z.txt", "a/b/c.md", "B.txt", ".hidden", ".git/x", "a/.x"):
        write(tmp_path / "text" / name, f"<{name}>")
    (tmp_path / "text" / "broken").symlink_to("nowhere")
    text = load_text(TextConfig(path=str(tmp_path / "text")))
    assert text.train + text.held_out == "<B.txt><a/b/c.md><a/z.txt><b.txt>"


def test_validation_path_is_held_out(tmp_path):
    path, validation = write(tmp_path / "a.txt", "train"), write(tmp_path / "folder" / "b.txt", "held out")
    text = load_text(TextConfig(path=path, validation_path=str(Path(validation).parent)))
    assert (text.train, text.held_out) == ("train", "held out")


@pytest.mark.parametrize("argument", ["path", "validation_path"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "{} must be an existing text file or folder, got '{}'"),
        ({".hidden": "x", "empty": ""}, "{} must be a file or folder with some text, got '{}'"),
        ({"x": "ok", "y": b"ab\xffc"}, "{} must hold UTF-8 text, but '{}/y' has byte 0xff at offset 2"),
        (b"\xff\xfea\0", "{} must hold UTF-8 text, but '{}' looks like UTF-16: convert it to UTF-8"),
        (b"\xfe\xff\0a", "{} must hold UTF-8 text, but '{}' looks like UTF-16: convert it to UTF-8"),
        (b"\xef\xbb\xbf\xc3", "{} must hold UTF-8 text, but '{}' has byte 0xc3 at offset 3"),
    ],
)
def test_wrong_paths(tmp_path, argument, content, message):
    wrong = tmp_path / "wrong"
    if isinstance(content, bytes):
        write(wrong, content)
    elif content is not None:
        wrong.mkdir()
        for name, data in content.items():
            write(wrong / name, data)
    paths = {"path": write(tmp_path / "good", "good text"), argument: str(wrong)}
    with pytest.raises(UserError) as error:
        load_text(TextConfig(**paths))
    assert str(error.value) == message.format(argument, wrong)


def test_folders_without_permission(tmp_path, monkeypatch):
    def walk(folder, onerror):
        onerror(PermissionError(13, "Permission denied", str(folder / "secret")))
        return iter(())

    monkeypatch.setattr(source.os, "walk", walk)
    with pytest.raises(UserError, match=r"path '.*' cannot be read: .*Permission denied: .*secret"):
        load_text(TextConfig(path=str(tmp_path)))


def test_python_stdlib():
    text = load_text(TextConfig(name="python_stdlib"))
    assert text == load_text(TextConfig(name="python_stdlib"))
    sizes = [len(part.encode()) for part in text[:2]]
    assert 6_000_000 < sum(sizes) <= source.STDLIB_BYTES
    assert 0.05 < sizes[1] / sum(sizes) < 0.2
    assert "import" in text.held_out


@pytest.fixture
def library(tmp_path, monkeypatch):
    monkeypatch.setattr(source.sysconfig, "get_path", lambda name: str(tmp_path))
    return tmp_path


def test_python_stdlib_skips_what_is_no_library(library):
    with pytest.raises(UserError, match="name 'python_stdlib' needs Python's own source files"):
        load_text(TextConfig(name="python_stdlib"))
    for index in range(20):
        write(library / f"m{index:02}.py", f"{index} ")
    for name in ("test/a.py", "x/tests/a.py", "site-packages/a.py", "__pycache__/a.py", "notes.txt"):
        write(library / name, "no library")
    write(library / "latin.py", b"\xe9")
    write(library / "_sysconfigdata_x.py", "no library")
    text = load_text(TextConfig(name="python_stdlib"))
    assert text.held_out == "9 19 "
    assert text.train == "0 1 2 3 4 5 6 7 8 10 11 12 13 14 15 16 17 18 "


def test_python_stdlib_stops_before_the_file_that_would_exceed_its_size(library, monkeypatch):
    for index in range(12):
        write(library / f"m{index:02}.py", "abc")
    write(library / "m09a.py", "long enough to exceed")
    monkeypatch.setattr(source, "STDLIB_BYTES", 32)
    assert load_text(TextConfig(name="python_stdlib"))[:2] == ("abc" * 9, "abc")


def load_in_a_new_process(before="", **options):
    """With warnings as errors; nothing may be said."""
    code = (
        f"{before}\nfrom hyena_jax.config import TextConfig\nfrom hyena_jax.data.text import load_text\n"
        f"text = load_text(TextConfig(**{options!r}))\nprint(repr(tuple(text)))"
    )
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert done.stderr == ""
    return ast.literal_eval(done.stdout)


@pytest.mark.grid
@needs_tensorflow
def test_tiny_shakespeare_of_tfds_equals_the_plain_file(shakespeare, tmp_path):
    options = {"name": "tiny_shakespeare", "tfds_dir": str(tmp_path / "tfds")}
    text = load_in_a_new_process(**options, manual_dir=str(shakespeare.parent))
    assert text[:2] == load_text(TextConfig(path=str(shakespeare)))[:2]
    assert text[2] == "tiny_shakespeare/1.0.0 of TensorFlow Datasets"

    # Once prepared, neither the source file nor TensorFlow is needed.
    assert load_in_a_new_process(WITHOUT_TENSORFLOW, **options) == text
    levels = [logging.getLogger(name).level for name in ("absl", "urllib3")]
    assert load_text(TextConfig(**options)) == text
    assert [logging.getLogger(name).level for name in ("absl", "urllib3")] == levels


@pytest.mark.grid
@needs_tensorflow
def test_preparing_without_tensorflow(shakespeare, tmp_path):
    folders = {"tfds_dir": str(tmp_path), "manual_dir": str(shakespeare.parent)}
    with pytest.raises(subprocess.CalledProcessError) as error:
        load_in_a_new_process(WITHOUT_TENSORFLOW, name="tiny_shakespeare", **folders)
    assert error.value.stdout == ""
    assert error.value.stderr.splitlines()[-1] == (
        "hyena_jax.system.errors.UserError: name 'tiny_shakespeare' must be prepared first, which needs the"
        " package tensorflow: pip install 'hyena_jax[tfds]'"
    )


@pytest.mark.parametrize("key", ["pythonClassName", "python_class_name", "type"])
@pytest.mark.parametrize("is_nested", [False, True])
def test_a_folder_of_tfds_imports_no_code_of_a_stranger(tmp_path, monkeypatch, key, is_nested):
    folder, module = tmp_path / "spoken" / "1.0.0", f"of_a_stranger_{key}_{is_nested}"
    write(tmp_path / "here" / f"{module}.py", "raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path / "here")
    features = {key: f"{module}.Thing", "content": {}} if key == "type" else {key: f"{module}.Thing"}
    if is_nested:
        of_dict = "tensorflow_datasets.core.features.features_dict.FeaturesDict"
        inner = {"text": features}
        content = {"content": inner} if key == "type" else {"featuresDict": {"features": inner}}
        features = {key: of_dict, **content}
    write(folder / "features.json", json.dumps(features))
    split = {"name": "train", "numBytes": "10", "shardLengths": ["1"]}
    about = {"name": "spoken", "version": "1.0.0", "fileFormat": "array_record", "splits": [split]}
    write(folder / "dataset_info.json", json.dumps(about))
    with pytest.raises(UserError, match=f"a class of tensorflow_datasets, .* got '{module}.Thing'$"):
        load_text(TextConfig(name="spoken", tfds_dir=str(tmp_path)))


MNIST_FILES = " and ".join(
    f"https://storage.googleapis.com/cvdf-datasets/mnist/{name} as {name}"
    for part in ("t10k", "train")
    for name in (f"{part}-images-idx3-ubyte.gz", f"{part}-labels-idx1-ubyte.gz")
)
PLAY = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt as input.txt"
)


@needs_tensorflow
@pytest.mark.parametrize(
    ("load", "config", "files", "instead"),
    [
        (load_text, TextConfig(name="tiny_shakespeare"), PLAY, "any text with --data.path FILE"),
        (load_image_set, ImagesConfig("mnist"), MNIST_FILES, "a folder of IDX files with --data.path FOLDER"),
    ],
)
def test_offline_says_how_to_supply_the_files(tmp_path, monkeypatch, load, config, files, instead):
    from tensorflow_datasets.core.download import downloader

    def refuse(*args, **kwargs):
        raise ConnectionError("no\nnetwork")

    monkeypatch.setattr(downloader, "_open_url", refuse)
    with pytest.raises(UserError) as error:
        load(dataclasses.replace(config, tfds_dir=str(tmp_path)))
    assert str(error.value) == (
        f"name '{config.name}' cannot be prepared (ConnectionError: no network);"
        f" save {files} in a folder and give --data.manual-dir FOLDER, or give {instead}"
    )


def test_a_missing_manual_dir(tmp_path):
    folders = {"tfds_dir": str(tmp_path), "manual_dir": str(tmp_path / "absent")}
    with pytest.raises(UserError, match=r"manual_dir must be an existing folder, got '.*absent'"):
        load_text(TextConfig(name="tiny_shakespeare", **folders))


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("tiny_shakespear", "; nearest: tiny_shakespeare"),
        ("tiny_shakespeare:9.9.9", "; nearest: tiny_shakespeare"),
        ("../?", "$"),
    ],
)
def test_unknown_data_set(tmp_path, name, nearest):
    with pytest.raises(UserError, match=f"name must be python_stdlib or a data set .*, got .*{nearest}"):
        load_text(TextConfig(name=name, tfds_dir=str(tmp_path)))


def test_data_set_prepared_in_another_file_format(tmp_path, monkeypatch):
    error = ValueError('Failed to construct dataset "tiny_shakespeare", builder_kwargs "{}": File format ...')
    monkeypatch.setattr("tensorflow_datasets.builder", Mock(side_effect=error))
    message = r"name 'tiny_shakespeare' cannot be opened in .* \(File format ...\); give"
    with pytest.raises(UserError, match=message):
        load_text(TextConfig(name="tiny_shakespeare", tfds_dir=str(tmp_path)))


def test_data_set_that_is_no_text(tmp_path):
    with pytest.raises(UserError, match=r"got 'mnist' with: image \(Image\), label \(ClassLabel\)"):
        load_text(TextConfig(name="mnist", tfds_dir=str(tmp_path)))


def test_examples_are_lines_and_splits_follow_each_other(monkeypatch):
    prepare_texts(monkeypatch, test=["e"], train=["a", "\u00e9"], validation=["c", "d\n"])
    assert load_text(TextConfig(name="fake")) == ("a\n\u00e9", "c\nd\ne", "fake/1.0.0 of TensorFlow Datasets")
    prepare_texts(monkeypatch, train=["a"], unsupervised=["b"])
    with pytest.raises(UserError, match=r"'fake' must have train and .*, got train, unsupervised"):
        load_text(TextConfig(name="fake"))


@pytest.fixture
def config(tmp_path):
    path = write(tmp_path / "text.txt", "caf\u00e9 noir " * 10)
    return TextConfig(path=path, tokenizer="characters", seq_len=4)


def test_tokens_are_the_text_also_in_a_given_vocabulary(config):
    corpus = load_corpus(config)
    assert corpus.tokenizer == CharactersTokenizer(" acfinor\u00e9")
    assert corpus.train.dtype == corpus.held_out.dtype == np.uint8
    assert corpus.tokenizer.decode(corpus.train) == "caf\u00e9 noir " * 9
    assert corpus.tokenizer.decode(corpus.held_out) == "caf\u00e9 noir "
    assert corpus.held_out_bytes == 11
    assert config.path in corpus.source
    given = CharactersTokenizer(" acfinorz\u00e9")
    corpus = load_corpus(config, given)
    assert corpus.tokenizer is given
    assert given.decode(corpus.held_out) == "caf\u00e9 noir "
    with pytest.raises(UserError, match="characters vocabulary, got 'n', 'o', 'i', 'r'"):
        load_corpus(config, CharactersTokenizer(" acf\u00e9"))


@pytest.mark.parametrize(("n_symbols", "dtype"), [(256, np.uint8), (257, np.uint16)])
def test_tokens_have_the_smallest_dtype(config, n_symbols, dtype):
    Path(config.path).write_text("".join(map(chr, range(1000, 1000 + n_symbols))))
    corpus = load_corpus(config)
    assert corpus.train.dtype == corpus.held_out.dtype == dtype
    np.testing.assert_array_equal(np.concatenate([corpus.train, corpus.held_out]), np.arange(n_symbols))


def test_the_vocabulary_covers_a_cluster_that_the_cut_divides(config):
    Path(config.path).write_text("x" * 9 + "e\u0301" * 6)
    corpus = load_corpus(dataclasses.replace(config, tokenizer="graphemes", seq_len=1))
    assert corpus.tokenizer.symbols == ("e", "e\u0301", "x", "\u0301")
    assert corpus.tokenizer.decode(corpus.train).endswith("e")
    assert corpus.tokenizer.decode(corpus.held_out) == "\u0301e\u0301"


def test_fingerprint(config, tmp_path):
    same, other = load_corpus(config), load_corpus(config, CharactersTokenizer(" acfinorz\u00e9"))
    assert load_corpus(config).fingerprint == same.fingerprint
    assert other.fingerprint != same.fingerprint
    text = Path(config.path).read_text()
    parts = (text[:90], "caf\u00e9 noor "), (text[:80], text[80:])  # another text, or only another border
    for train, held_out in parts:
        paths = write(tmp_path / "train", train), write(tmp_path / "held_out", held_out)
        changed = dataclasses.replace(config, path=paths[0], validation_path=paths[1])
        assert load_corpus(changed).fingerprint != same.fingerprint


def test_the_shortest_text_that_fits_and_shorter_ones(config):
    assert len(load_corpus(dataclasses.replace(config, seq_len=9)).held_out) == 10
    for seq_len, message in (
        (100, "the training text is too short: 90 tokens, and seq_len=100 needs at least 101"),
        (10, "the held-out text is too short: 10 tokens, and seq_len=10 needs at least 11"),
    ):
        with pytest.raises(UserError, match=message):
            load_corpus(dataclasses.replace(config, seq_len=seq_len))


def test_a_text_that_does_not_fit_into_memory_is_refused_before_it_is_read(tmp_path, monkeypatch):
    path = write(tmp_path / "a.txt", "a" * 200)
    monkeypatch.setattr(source, "memory_size", lambda: 1000)
    monkeypatch.setattr(source, "read_bytes", None)
    message = "at most 166 bytes, to fit this machine's memory .*hyena-jax prepare"
    with pytest.raises(UserError, match=message):
        load_text(TextConfig(path=path))
