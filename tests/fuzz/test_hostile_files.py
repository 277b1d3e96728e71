"""Files that are not what they claim to be: special, sparse, compressed, or changed in any byte.

Each is read, or refused in one line, within bounds on time and memory.
"""

import contextlib
import gzip
import json
import os
import resource
import socket

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from fuzz import test_fuzz
from fuzz.test_fuzz import TRAIN, outcome_of, time_limit
from hypothesis import given, settings
from hypothesis import strategies as st
from idx_files import idx_bytes, random_images

from hyena_jax import config, models
from hyena_jax.config import HawkConfig, LanguageModelConfig, TextConfig, TokensConfig
from hyena_jax.data import dataset
from hyena_jax.data.images import read_pair
from hyena_jax.data.records import read_records
from hyena_jax.data.tokenizers import read_bpe
from hyena_jax.generation import saved_state
from hyena_jax.generation.decoding import prefill
from hyena_jax.system.errors import UserError
from hyena_jax.system.files import read_json
from hyena_jax.training import export
from hyena_jax.training.metrics import read_rows

pytestmark = pytest.mark.fuzz

SECONDS = 90
MEMORY = 2**32
"""Bytes of address space that a case may take in addition to what the process has."""
FUZZ = settings(test_fuzz.FUZZ, max_examples=40)


@contextlib.contextmanager
def bounds():
    """A limit of time and of memory."""
    usual = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, usual[1]))
    try:
        with time_limit(SECONDS):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, usual)


def refused(read, *arguments) -> bool:
    """Whether reading ends with one line; anything but a line or a value fails the test."""
    message = None
    with bounds():
        try:
            read(*arguments)
        except (UserError, OSError) as error:  # the commands show both in one line
            message = str(error)
    if message is None:
        return False
    assert message
    assert len(message.splitlines()) == 1
    assert len(message) < 3000
    return True


@pytest.fixture(scope="module")
def model():
    options = {"n_layers": 1, "d_model": 8, "d_ff": 8, "max_len": 16, "vocab_size": 11}
    module = models.build(LanguageModelConfig(pattern=(HawkConfig(),), **options))
    return module, jax.jit(module.init)(jax.random.key(0), jnp.zeros((1, 3), jnp.int32))["params"]


@pytest.fixture(scope="module")
def samples(model, tmp_path_factory):
    """The bytes of a good file of each format."""
    folder = tmp_path_factory.mktemp("samples")
    prompted, origin = prefill(*model, [np.array([3, 1, 4])]), saved_state.origin(model[0].config, model[1])
    saved_state.save_state(folder / "state", prompted, origin)
    export.write(folder / "model.safetensors", model[1], {}, step=0)
    np.save(folder / "tokens.npy", np.arange(300, dtype=np.uint16) % 7)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    images, labels = map(idx_bytes, random_images(20))
    return {
        "state": (folder / "state").read_bytes(),
        "safetensors": (folder / "model.safetensors").read_bytes(),
        "npy": (folder / "tokens.npy").read_bytes(),
        "images": images,
        "packed": gzip.compress(images),
        "labels": labels,
        "tokenizer": tokenizer.to_str().encode(),
        "config": json.dumps(config.encode(config.Experiment())).encode(),
        "data": b'{"fingerprint": "0", "tokenizer": {"kind": "characters", "symbols": "abc"}}',
        "metrics": b'{"step": 1, "train/loss": 2.5}\n' * 3,
        "records": b">chr1 about it\nACGT\nacgtn\n\n>chr2\n AC GT\n" * 3,
        "text": b"the quick brown fox. " * 30,
    }


@pytest.fixture(scope="module")
def readers(model, samples):
    """For each format a function of a path that reads it as the commands do."""
    shapes, origin = jax.eval_shape(lambda: model[1]), saved_state.origin(model[0].config, model[1])

    def images(path):
        (path.parent / "labels").write_bytes(samples["labels"])
        read_pair("path", str(path.parent))

    def tokens(path):
        dataset.load(TokensConfig(str(path), seq_len=8))

    def tokenizer(path):
        bpe = read_bpe(str(path))
        bpe.decode(bpe.encode("ab" * 9))

    def data(path):
        values = read_json("workdir", path)
        if not isinstance(values, dict):
            raise UserError("not an object")
        with contextlib.suppress(KeyError, TypeError, AttributeError):  # as `read_folder` handles them
            dataset.encoding_from_json(values)

    return {
        "state": lambda path: saved_state.load_state(path, *model, origin),
        "safetensors": lambda path: export.read(path, shapes, str),
        "npy": tokens,
        "bin": tokens,
        "images": images,
        "packed": images,
        "tokenizer": tokenizer,
        "config": config.read,
        "data": data,
        "metrics": read_rows,
        "records": read_records,
        "text": lambda path: dataset.load(TextConfig(path=str(path), seq_len=8)),
    }


NAMES = {"npy": "tokens.npy", "bin": "tokens.bin", "records": "records.fa"}
FORMATS = "state safetensors npy images packed tokenizer config data metrics records text".split()


def make_special(path, kind):
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "socket":
            with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as bound:
                bound.bind(path.name)
        case "folder":
            path.mkdir()
        case "sparse":
            with path.open("wb") as file:
                file.truncate(2**42)
        case "nowhere":
            path.symlink_to(path.parent / "absent")
        case "itself":
            path.symlink_to(path)
        case _:
            path.symlink_to(kind)


SPECIAL = ["pipe", "socket", "folder", "sparse", "nowhere", "itself", "/dev/zero", "/proc/self/mem"]


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("name", [*FORMATS, "bin"])
def test_special_files(readers, tmp_path, name, kind):
    path = tmp_path / NAMES.get(name, "file")
    make_special(path, kind)
    # Where there is no file of metrics, or an empty one, nothing was logged yet.
    empty = name == "metrics" and kind in ("nowhere", "itself", "/proc/self/mem")
    assert refused(readers[name], path) != empty


def test_good_files_are_read(readers, samples, tmp_path):
    for name in FORMATS:
        folder = tmp_path / name
        folder.mkdir()
        path = folder / NAMES.get(name, "file")
        path.write_bytes(samples[name])
        assert not refused(readers[name], path), name


@pytest.mark.parametrize("name", FORMATS)
def test_changed_files(readers, samples, tmp_path, name):
    """Bytes changed, cut or added, headers first: the file is read or refused."""
    good, path = samples[name], tmp_path / NAMES.get(name, "file")
    place = st.one_of(st.integers(0, min(200, len(good) - 1)), st.integers(0, len(good) - 1))
    change = st.tuples(place, st.sampled_from([0, 1, 127, 255, *b'[{"9-,:}]']))
    cut = st.one_of(st.just(len(good)), st.just(len(good)), st.integers(0, len(good)))
    outcomes = {True: 0, False: 0}

    @FUZZ
    @given(st.lists(change, min_size=1, max_size=4), cut, st.sampled_from([b"", b"", b"\0" * 9, b"]" * 9]))
    def check(changes, length, tail):
        data = bytearray(good)
        for at, byte in changes:
            data[at] = byte
        path.write_bytes(data[:length] + tail)
        outcomes[refused(readers[name], path)] += 1

    check()
    assert outcomes[True] > 0


VALUES = [None, True, -1, 0, 2**31, 2**64, 10**400, 1.5, 1e400, "x", "\udcff", "\x1b[2J", [], {}, [[1]]]


def changed_values(value, path=()):
    """Paths to all values inside a JSON value."""
    yield path
    if isinstance(value, dict | list):
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from changed_values(child, (*path, key))


@pytest.mark.parametrize("name", ["config", "data", "tokenizer", "metrics", "state", "safetensors"])
def test_changed_values(readers, samples, tmp_path, name):
    """One value of a JSON file or header replaced by another, or nested without end."""
    sample, path, rest = samples[name], tmp_path / "file", b""
    has_header = name in ("state", "safetensors")
    if has_header:
        length = 8 + int.from_bytes(sample[:8], "little")
        sample, rest = sample[8:length], sample[length:]
    good = json.loads(sample.split(b"\n")[0])
    places = [place for place in changed_values(good) if place]

    @FUZZ
    @given(st.sampled_from(places), st.sampled_from([*VALUES, "deep"]))
    def check(place, value):
        values = json.loads(json.dumps(good))
        inner = values
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = "DEEP" if value == "deep" else value
        text = json.dumps(values).replace('"DEEP"', "[" * 10**5 + "]" * 10**5)
        data = (text + "\n").encode("utf-8", "surrogatepass")
        path.write_bytes((len(data).to_bytes(8, "little") if has_header else b"") + data + rest)
        was_refused = refused(readers[name], path)
        assert was_refused or value != "deep"

    check()


HEADERS = {
    "npy": [
        f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}}}"
        for descr in ("'<u2'", "'|O'", "'<f2'", "'V99999999999'", "[('a', '<u2')]", "3", "'x'")
        for order in ("False", "'x'")
        for shape in ("(300,)", "(-300,)", f"({10**30},)", "()", "(2**62, 4)", "3", "(True,)")
    ],
    "images": [
        bytes([0, 0, 8, 3]) + b"".join(n.to_bytes(4, "big") for n in sizes)
        for sizes in ((2**32 - 1,) * 3, (0, 0, 0), (2**31, 1, 1), (1, 2**16, 2**16), (20, 6, 5))
    ],
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers_that_lie(readers, tmp_path, name):
    path = tmp_path / NAMES.get(name, "file")
    for header in HEADERS[name]:
        if name == "npy":
            data = header.encode().ljust(117) + b"\n"
            data = b"\x93NUMPY\x01\x00" + len(data).to_bytes(2, "little") + data + bytes(64)
        else:
            data = header + bytes(64)
        for content in (data, gzip.compress(data)) if name == "images" else (data,):
            path.write_bytes(content)
            assert refused(readers[name], path), header


FLAGS = [
    ["--data.path", "text.txt", "--data.validation-path"],
    ["--data.path", "text.txt", "--init-from"],
    ["--data", "tokens", "--data.path", "tokens.bin", "--data.tokenizer-path"],
    ["--data.path", "text.txt", "--plugin"],
]


@pytest.mark.parametrize("kind", ["pipe", "/dev/zero", "sparse", "folder"])
@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: flags[-1])
def test_flags_that_name_special_files(tmp_path, monkeypatch, flags, kind):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_bytes(b"the quick brown fox. " * 30)
    (tmp_path / "tokens.bin").write_bytes(bytes(2000))
    name = "special.py" if flags[-1] == "--plugin" else "special"
    make_special(tmp_path / name, kind)
    code, printed = outcome_of([*TRAIN, "--workdir", "run", *flags, name], SECONDS)
    assert code == 2, printed
    assert name in printed
    assert not (tmp_path / "run").exists()
