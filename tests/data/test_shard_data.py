"""Batches from shards: a function of (seed, step) wherever the shards lie; a wrong source is one line."""

import hashlib
import json
import os
import shutil

import numpy as np
import pytest
from bucket_server import BUCKET
from own_rows import assert_same, joined

from hyena_jax.config import ShardsConfig, TokensConfig
from hyena_jax.data import objects, tokens
from hyena_jax.data.dataset import encoding_from_json, load
from hyena_jax.data.objects import Objects
from hyena_jax.data.shard_index import DTYPES, Index, Shard, digest_of
from hyena_jax.data.tokenizers import BytesTokenizer, DnaTokenizer
from hyena_jax.system.errors import UserError

L = 8
EOS = 10


def write_source(where, sizes, held_out=(40,), seed=0, tokenizer=None, dtype="uint16"):
    """Shards of random ids below the vocabulary's size, with their index; returns the ids by name."""
    tokenizer = tokenizer or BytesTokenizer()
    rng, objects, written = np.random.default_rng(seed), Objects(str(where), "output"), {}
    size = tokenizer.vocab_size

    def shards(kind, sizes):
        for i, n in enumerate(sizes):
            ids = rng.integers(0, size, n).astype(DTYPES[dtype])
            ids[0] = size - 1
            name = f"{kind}-{i:05d}"
            objects.write(f"{name}.bin", ids.tobytes())
            written[name] = ids
            digest = hashlib.sha256(ids.tobytes()).hexdigest()
            yield Shard(name, n, 1, n, int(ids.max()), digest, "")

    parts = tuple(shards("shard", sizes)), tuple(shards("held-out", held_out))
    eos = min(EOS, tokenizer.vocab_size - 1)
    index = Index(dtype, tokenizer.vocab_size, eos, digest_of(tokenizer), *parts)
    objects.write("encoding.json", json.dumps(tokenizer.to_json()).encode())
    objects.write("index.json", index.to_json())
    return written


SIZES = {"web": [100, 57, 200], "code": [64, 33]}


@pytest.fixture
def two(tmp_path):
    """Two sources, and their shards' ids."""
    ids = {name: write_source(tmp_path / name, SIZES[name], seed=i) for i, name in enumerate(SIZES)}
    return ids, tuple(f"{name}={tmp_path / name}" for name in SIZES)


def config(sources, **options):
    sources = tuple(map(str, sources)) if isinstance(sources, list | tuple) else (str(sources),)
    return ShardsConfig(**{"sources": sources, "seq_len": L, "batch_size": 8, **options})


def windows(ids):
    """All runs of L + 1 ids in a shard."""
    return {tuple(ids[i : i + L + 1].tolist()) for i in range(len(ids) - L)}


def rows_of(batch):
    assert {x.dtype for x in batch.values()} == {np.dtype(np.int32)}
    np.testing.assert_array_equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])
    return [tuple(row) for row in np.concatenate([batch["inputs"], batch["targets"][:, -1:]], 1).tolist()]


def test_rows_are_windows_of_the_sources_by_their_weights(two):
    ids, sources = two
    data = load(config(sources, weights=(0.75, 0.25)))
    web, code = (
        set().union(*(windows(x) for shard, x in ids[name].items() if "shard" in shard)) for name in ids
    )
    rows = rows_of(data.rows(3, np.arange(400)))
    assert sum(row in web for row in rows) == 300
    assert {*rows} <= web | code


def test_an_epoch_reads_side_by_side_and_nearly_everything(two):
    data = load(config(two[1][0]))
    n = len(data.train[0])
    assert n == sum((size - 1) // L - 1 for size in SIZES["web"])
    epochs = [rows_of(data.rows(3, np.arange(e * n, (e + 1) * n))) for e in range(3)]
    for rows in epochs:
        assert len(set(rows)) == n
        firsts, lasts = ({row[i] for row in rows} for i in (0, -1))
        assert len(firsts & lasts) >= n - 3 - 60  # ids repeat by chance
    assert len({tuple(rows) for rows in epochs}) == 3
    assert len({frozenset(rows) for rows in epochs}) > 1  # other offsets, not only another order


def test_a_shard_of_one_window(tmp_path):
    write_source(tmp_path, [L + 1, 2 * L, L])
    data = load(config(tmp_path))
    assert len(data.train[0]) == 2
    rows_of(data.rows(0, np.arange(50)))


def batches(data, steps=range(10), n_parts=1, seed=7):
    parts = [data.train_batches(8, seed, part, n_parts) for part in range(n_parts)]
    return [joined([part[t] for part in parts]) for t in steps]


def assert_equal_batches(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        assert_same(one, other)


def test_batches_do_not_depend_on_the_processes_or_on_where_a_run_begins(two):
    data = load(config(two[1], weights=(0.7, 0.3), documents=True))
    whole = batches(data)
    assert_equal_batches(whole, batches(data, n_parts=4))
    assert_equal_batches(whole[5:7], batches(data, [5, 6]))
    assert not np.array_equal(whole[0]["inputs"], batches(data, seed=8)[0]["inputs"])
    assert not np.array_equal(whole[0]["inputs"], whole[1]["inputs"])


def test_shards_that_moved_are_the_same_data(two, tmp_path):
    data = load(config(two[1], weights=(0.7, 0.3)))
    (tmp_path / "new").mkdir()
    for name in SIZES:
        shutil.move(tmp_path / name, tmp_path / "new" / name)
    moved = tuple(f"{name}={tmp_path / 'new' / name / 'index.json'}" for name in SIZES)
    again = load(config(moved, weights=(0.7, 0.3)), encoding_from_json(data.to_json()))
    assert again.fingerprint == data.fingerprint
    assert_equal_batches(batches(data.__class__(**vars(again))), batches(again))
    for change in ({"weights": (0.6, 0.4)}, {"seq_len": L + 1}, {"weights": None}):
        assert load(config(moved, **{"weights": (0.7, 0.3), **change})).fingerprint != data.fingerprint
    write_source(tmp_path / "new" / "code", SIZES["code"], seed=9)
    assert load(config(moved, weights=(0.7, 0.3))).fingerprint != data.fingerprint


@pytest.mark.cloud
def test_a_bucket_gives_the_batches_of_a_folder(two, bucket, tmp_path):
    for i, name in enumerate(SIZES):
        write_source(f"{bucket}/{name}", SIZES[name], seed=i)
    options = {"weights": (0.7, 0.3), "documents": True}
    ours = load(config(two[1], **options))
    theirs = load(config([f"{name}={bucket}/{name}" for name in SIZES], **options))
    assert theirs.fingerprint == ours.fingerprint
    assert_equal_batches(batches(theirs), batches(ours, n_parts=4))  # of ten steps
    assert_equal_batches(list(ours.eval_batches(4)), list(theirs.eval_batches(4)))
    listed = load(config(f"{bucket}/web/shard-*.bin", validation_sources=(f"{bucket}/code",)))
    assert_equal_batches(batches(listed), batches(load(config(two[1][0]))))
    with pytest.raises(UserError, match="sources must be a pattern that some .* match, got 'gs://"):
        load(config(f"{bucket}/nothing/*.bin"))
    with pytest.raises(UserError, match="gs://.*/nothing/index.json does not exist"):
        load(config(f"{bucket}/nothing"))


@pytest.mark.cloud
def test_a_bucket_that_does_not_answer_is_one_line(proxy, tmp_path, monkeypatch):
    monkeypatch.setattr(objects, "RETRIES", 1)
    source = f"gs://{BUCKET}/{tmp_path.name}"
    write_source(source, [100])
    data = load(config(source))
    proxy.fault = lambda method, path: 503
    with pytest.raises(OSError, match=f"^{source}/shard-00000.bin cannot be read: .*answered 503"):
        batches(data)
    with pytest.raises(OSError, match=f"^{source}/index.json cannot be read .*answered 503"):
        load(config(source))


def test_every_held_out_token_is_predicted_once(tmp_path):
    ids = write_source(tmp_path, [100], held_out=(40, 2, 17, 1))
    data = load(config(tmp_path))
    found = list(data.eval_batches(3))
    targets = np.concatenate([batch["targets"][batch["weights"] > 0] for batch in found])
    expected = [x[1:] for name, x in ids.items() if name.startswith("held-out")]
    np.testing.assert_array_equal(targets, np.concatenate(expected))
    assert data.n_held_out == len(targets)
    assert data.held_out_bytes == 59  # of the shards with a token to predict
    assert data.n_eval_rows(3) == 3


def test_validation_sources_are_held_out(two):
    ids, sources = two
    data = load(config(sources[0], validation_sources=(sources[1],)))
    assert data.n_held_out == sum(len(x) - 1 for x in ids["code"].values())


def test_documents_are_kept_apart_by_the_eos_between_them(two):
    data = load(config(two[1], documents=True))
    for batch in (data.rows(0, np.arange(64)), data.held_out_rows(np.arange(3))):
        inputs, segments = batch["inputs"], batch["segment_ids"]
        assert segments.dtype == np.int32
        for row, ids in zip(inputs, segments, strict=True):
            assert ids.tolist() == [int(np.sum(row[:t] == EOS)) for t in range(L)]
    assert "segment_ids" not in load(config(two[1])).rows(0, np.arange(2))


def test_files_without_an_index(tmp_path):
    ids = write_source(tmp_path / "web", SIZES["web"])
    indexed = load(config(tmp_path / "web"))
    (tmp_path / "web" / "index.json").unlink()
    options = {"dtype": "uint16", "vocab_size": 300}
    options |= {"validation_sources": (f"{tmp_path}/web/held-out-00000.bin",)}
    data = load(config(f"{tmp_path}/web/shard-*.bin", **options))
    assert data.tokenizer.vocab_size == 300
    assert_equal_batches(batches(data), batches(indexed))
    files = [f"web={tmp_path / 'web' / f'{name}.bin'}" for name in ids if name.startswith("shard")]
    assert_equal_batches(batches(load(config(files, **options))), batches(data))
    with pytest.raises(UserError, match="dtype must be uint16 or uint32, for .bin files without an index"):
        load(config(files))
    with pytest.raises(UserError, match="vocab_size must be given for .bin files"):
        load(config(files, dtype="uint16"))
    with pytest.raises(UserError, match="documents must be False, since no id ends documents"):
        load(config(files, **options, documents=True))
    assert load(config(files, **options, documents=True, eos=3)).eos == 3
    with pytest.raises(UserError, match="eos must be below the vocabulary's size 300, got 300"):
        load(config(files, **options, documents=True, eos=300))
    small = load(config(files, **{**options, "vocab_size": 200}))
    with pytest.raises(UserError, match="shard-0000.*.bin must be ids below the vocabulary's size 200, got"):
        batches(small)
    (tmp_path / "odd.bin").write_bytes(b"abc")
    with pytest.raises(UserError, match="odd.bin must be uint16 numbers, a multiple of 2 bytes, got '3 byte"):
        load(config(tmp_path / "odd.bin", **options))


def test_files_of_an_indexed_folder_are_as_the_index_says(tmp_path):
    write_source(tmp_path / "web", SIZES["web"], dtype="uint32")
    extra = tmp_path / "web" / "extra.bin"
    extra.write_bytes(bytes(400))
    with pytest.raises(UserError, match=r"extra.bin lies beside an index that lists other files here"):
        load(config(f"{tmp_path}/web/*.bin", dtype="uint32", vocab_size=256))
    extra.unlink()
    whole = load(config(tmp_path / "web"))
    files = config(f"{tmp_path}/web/shard-*.bin", validation_sources=(f"{tmp_path}/web/held-out-*.bin",))
    data = load(files)
    assert_equal_batches(batches(data), batches(whole))
    write_source(tmp_path / "web", SIZES["web"], seed=1, dtype="uint32")
    assert load(files).fingerprint != data.fingerprint


TWO, ENCODING, INDEX = "shard-00001.bin", "encoding.json", "index.json"


def nothing(folder):
    pass


def without(name):
    return lambda folder: (folder / name).unlink()


def written(name, text):
    return lambda folder: (folder / name).write_text(text)


def indexed(**changes):
    def harm(folder):
        values = json.loads((folder / INDEX).read_bytes())
        (folder / INDEX).write_text(json.dumps({**values, **changes}))

    return harm


@pytest.mark.parametrize(
    ("harm", "options", "message"),
    [
        (without(TWO), {}, "shard-00001.bin is missing, but its index lists it"),
        (written(TWO, "ab"), {}, "shard-00001.bin has 2 bytes, but its index says 114"),
        (written(TWO, "ab" * 60), {}, "shard-00001.bin has 120 bytes, but its index says 114"),
        (nothing, {"dtype": "uint32"}, "dtype must be 'uint16', as the index of .* says, got 'uint32'"),
        (nothing, {"vocab_size": 100}, "vocab_size must be 256, as the index of"),
        (nothing, {"eos": 3}, "eos must be 10, as the index of"),
        (nothing, {"weights": (0.5, 0.5)}, "weights must be 1 numbers, one for each source: web, got"),
        (nothing, {"weights": ()}, "weights must be a weight for each source"),
        (nothing, {"seq_len": 200}, "source 'web' is too short: its longest shard has 200 tokens, and seq_l"),
        (without(INDEX), {}, "index.json does not exist: write it with hyena-jax prepare, or name .bin"),
        (without(ENCODING), {}, "encoding.json is missing: the tokenizer"),
        (written(ENCODING, json.dumps(DnaTokenizer().to_json())), {}, "encoding.json must be of SHA-256"),
        (written(INDEX, "{"), {}, "index.json is not an index of shards: not JSON"),
        (written(INDEX, "[]"), {}, "index.json is not an index of shards"),
        (indexed(version=2), {}, "version must be 1, got 2"),
        (indexed(tokenizer_sha256=5), {}, "is not an index of shards: tokenizer_sha256 must be a SHA"),
        (indexed(dtype="int8"), {}, "dtype must be one of uint16, uint32"),
        (indexed(vocab_size=200), {}, "the largest id must be below the .* size 200"),
        (indexed(shards=[{"name": "a"}]), {}, "'tokens' is missing"),
        (indexed(held_out=[]), {}, "hold no tokens to evaluate on: give --data.valid"),
    ],
)
def test_wrong_sources_are_one_line(tmp_path, harm, options, message):
    write_source(tmp_path, SIZES["web"])
    harm(tmp_path)
    with pytest.raises(UserError, match=message) as caught:
        load(config(f"web={tmp_path}", **options))
    assert "\n" not in str(caught.value)


def test_sources_that_are_not_there(tmp_path):
    for sources, message in (
        ((), "data.sources must be folders of shards"),
        (["nowhere/*.bin"], "sources must be a pattern that some .bin files, .* got 'nowhere/"),
        (["gs://b"], "sources must be gs://BUCKET/NAME"),
        ([tmp_path], "^sources .*index.json does not exist: write it with"),
    ):
        with pytest.raises(UserError, match=message):
            load(config(sources))


@pytest.mark.parametrize("name", [INDEX, ENCODING])
def test_an_index_or_a_tokenizer_beyond_a_limit_is_one_line(tmp_path, name):
    write_source(tmp_path, [100])
    os.truncate(tmp_path / name, 2**40)
    with pytest.raises(UserError, match=f"sources must be a file of at most.*{name}'"):
        load(config([str(tmp_path)]))


def test_sources_of_two_tokenizers(two, tmp_path):
    write_source(tmp_path / "dna", [90], tokenizer=DnaTokenizer())
    message = "sources must be of one tokenizer, but the index of .* is of .* and that of .* of .*SHA-256"
    with pytest.raises(UserError, match=message):
        load(config([*two[1], tmp_path / "dna"]))
    with pytest.raises(UserError, match="must be of the run's tokenizer"):
        load(config(tmp_path / "dna"), BytesTokenizer())


def test_documents_of_two_sources_must_end_with_one_id(two, tmp_path):
    indexed(eos=3)(tmp_path / "code")
    with pytest.raises(UserError, match="sources must end documents with one id .* got .'10', '3'."):
        load(config(two[1], documents=True))


def test_a_shard_that_changes_while_it_is_read(two, tmp_path):
    data = load(config(two[1]))
    for path in (tmp_path / "web").glob("*.bin"):
        path.write_bytes(b"ab")
    with pytest.raises(UserError, match=r"shard-.*.bin is shorter than expected: it was changed"):
        batches(data)
    shutil.rmtree(tmp_path / "web")
    with pytest.raises(UserError, match=r"shard-.*.bin does not exist"):
        batches(data)


def test_a_start_reads_no_shard(tmp_path):
    """Which may be of terabytes."""
    write_source(tmp_path, SIZES["web"])
    before = load(config(tmp_path))
    for path in tmp_path.glob("*.bin"):
        path.write_bytes(bytes(path.stat().st_size))
    after = load(config(tmp_path))
    assert (after.fingerprint, after.n_held_out) == (before.fingerprint, before.n_held_out)
    assert not after.rows(0, np.arange(20))["inputs"].any()


def test_one_file_beside_an_index_is_not_read_at_a_start(tmp_path, monkeypatch):
    ids = write_source(tmp_path, [300], held_out=(40,))
    path, held_out = (str(tmp_path / f"{name}.bin") for name in ids)
    options = {"seq_len": L, "vocab_size": 256}
    index = (tmp_path / "index.json").read_bytes()
    (tmp_path / "index.json").unlink()
    slow = load(TokensConfig(path, held_out, **options))
    (tmp_path / "index.json").write_bytes(index)
    monkeypatch.setattr(tokens, "_largest_id", None)
    monkeypatch.setattr(tokens, "fingerprint", None)
    data = load(TokensConfig(path, held_out, **options))
    np.testing.assert_array_equal(data.train, slow.train)
    assert load(TokensConfig(path, **options)).fingerprint != data.fingerprint
    with pytest.raises(UserError, match="ids below the vocabulary's size 100, got|tokens must be ids below"):
        load(TokensConfig(path, held_out, seq_len=L, vocab_size=100))
    monkeypatch.undo()
    (tmp_path / "index.json").unlink()
    assert load(TokensConfig(path, held_out, **options)).fingerprint == slow.fingerprint != data.fingerprint


def test_a_wildcard_does_not_train_on_held_out_shards(tmp_path):
    write_source(tmp_path, [60, 60], held_out=(40,))
    data, whole = load(config(tmp_path / "*.bin")), load(config(tmp_path))
    assert [part.file for part in data.train[0].parts] == ["shard-00000.bin", "shard-00001.bin"]
    assert [part.file for part in data.held_out.parts] == ["held-out-00000.bin"]
    assert_equal_batches(batches(data), batches(whole))


def test_one_file_in_another_dtype_than_its_index_says(tmp_path):
    write_source(tmp_path, [200], dtype="uint32")
    path = str(tmp_path / "shard-00000.bin")
    assert load(TokensConfig(path, dtype="uint32", seq_len=L)).tokenizer.vocab_size == 256
    with pytest.raises(UserError, match="dtype must be uint32, as the index beside .* says, got 'uint16'"):
        load(TokensConfig(path, dtype="uint16", seq_len=L))
