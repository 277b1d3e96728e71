"""Shards are the encoded documents, in the same bytes however they are made; wrong input is one line."""

import gzip
import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from tensorflow_free import prepare_texts
from test_tokenizers import trained_bpe

from hyena_jax.cli.commands import run
from hyena_jax.data import documents, prepare
from hyena_jax.data.objects import Objects
from hyena_jax.data.shard_index import read_index
from hyena_jax.data.tokenizers import BpeTokenizer, BytesTokenizer
from hyena_jax.system.errors import UserError

WORDS = "the quick brown fox jumps over one lazy dog and naps\nthen  two\n\nmore \u00e9t\u00e9 days go by"
WORDS = WORDS.split(" ")
TEXTS = [" ".join(random.Random(i).choices(WORDS, k=5 + i % 40)) for i in range(300)]
BYTES = BytesTokenizer()


def no_progress(n_bytes, n_tokens):
    pass


@pytest.fixture(scope="module")
def bpe():
    return BpeTokenizer(trained_bpe(TEXTS, "<eos>", vocab_size=400).to_str())


@pytest.fixture
def lines(tmp_path):
    path = tmp_path / "docs.jsonl"
    path.write_text("".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(TEXTS)))
    return str(path)


def made(inputs, output, tokenizer=BYTES, workers=1, progress=no_progress, **options):
    options = {"eos": 0, "part_size": 5000, "held_out": 0.1, **options}
    inputs = [inputs] if isinstance(inputs, str) else inputs
    return prepare.prepare(prepare.make_plan(inputs, tokenizer, **options), str(output), workers, progress)


def refused(message, inputs, output, **options):
    with pytest.raises(UserError, match=message):
        made(inputs, output, **options)


def content(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def tokens_of(folder, shards):
    dtype = json.loads((folder / "index.json").read_bytes())["dtype"]
    parts = [np.fromfile(folder / f"{shard.name}.bin", dtype) for shard in shards]
    return np.concatenate(parts) if parts else np.zeros(0, dtype)


def documents_of(folder, shards):
    """The documents in shards, by the ends that are beside them."""
    found = []
    for shard in shards:
        ends = np.fromfile(folder / f"{shard.name}.ends", "<u8").astype(int)
        found += np.split(tokens_of(folder, [shard]), ends)[: len(ends)]
    return found


def test_shards_are_the_encoded_documents(lines, tmp_path, bpe):
    index = made(lines, tmp_path / "out", bpe, eos="<eos>")
    assert read_index("x", (tmp_path / "out" / "index.json").read_bytes(), "x") == index
    assert (index.dtype, index.vocab_size) == ("uint16", bpe.vocab_size)
    assert len(index.shards) > 3
    ours, held_out = (documents_of(tmp_path / "out", shards) for shards in (index.shards, index.held_out))
    assert 10 < len(held_out) < 60  # of 300, a tenth
    eos = bpe.encode("<eos>").tolist()
    expected = {tuple(bpe.encode(text).tolist() + eos) for text in TEXTS}
    assert {tuple(ids.tolist()) for ids in ours + held_out} == expected
    assert len(ours + held_out) == len(TEXTS)
    # In the order of the input.
    rest = [text for text in TEXTS if not prepare._is_held_out(text, 0.1)]
    assert [bpe.decode(ids[:-1]) for ids in ours] == rest
    assert sum(s.text_bytes for s in index.shards) == sum(len(text.encode()) for text in rest)


def test_a_large_vocabulary_is_uint32(lines, tmp_path):
    class Many(BytesTokenizer):
        vocab_size = 2**16 + 1

    index = made(lines, tmp_path / "out", Many(), eos=2**16)
    assert index.dtype == "uint32"
    assert tokens_of(tmp_path / "out", index.shards).max() == 2**16


def test_a_call_that_stops_is_continued(lines, tmp_path):
    made(lines, tmp_path / "whole")
    calls = len([name for name in content(tmp_path / "whole") if name.startswith("part-")])

    assert calls > 5
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            made(lines, tmp_path / "stopped", progress=Mock(side_effect=[None, None, KeyboardInterrupt]))
    made(lines, tmp_path / "stopped")
    assert content(tmp_path / "stopped") == content(tmp_path / "whole")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "stopped").glob("shard-*")}
    made(lines, tmp_path / "stopped")  # nothing is written again
    assert before == {path: path.stat().st_mtime_ns for path in before}


@pytest.mark.faults
def test_killed_five_times(tmp_path):
    """SIGKILL to the command, whose workers end with it; then the same bytes as without."""
    path = tmp_path / "docs.jsonl"
    path.write_text("".join(json.dumps({"text": text * 40}) + "\n" for text in TEXTS * 8))
    common = f"prepare {path} --tokenizer bytes --eos 0 --shard-bytes 200000 --workers 2 --output".split()
    command = [sys.executable, "-m", "hyena_jax", *common]
    subprocess.run([*command, str(tmp_path / "whole")], check=True, capture_output=True)
    n_kills = 0
    for kill in range(5):
        process = subprocess.Popen([*command, str(tmp_path / "killed")], stdout=subprocess.DEVNULL)
        while len(list(tmp_path.glob("killed/part-*"))) < 2 + 2 * kill and process.poll() is None:
            time.sleep(0.01)
        n_kills += process.poll() is None
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert n_kills == 5
    subprocess.run([*command, str(tmp_path / "killed")], check=True, capture_output=True)
    assert content(tmp_path / "killed") == content(tmp_path / "whole")


@pytest.mark.cloud
def test_a_bucket_holds_the_same_bytes(lines, tmp_path, bucket):
    made(lines, tmp_path / "out")
    index = made(lines, bucket)
    objects = Objects(bucket, "output")
    assert {name: objects.read(name) for name in objects.sizes()} == content(tmp_path / "out")
    prepare.verify(bucket, 1, no_progress)
    objects.write("shard-00000.bin", b"ab")
    with pytest.raises(UserError, match="shard-00000.bin has the SHA-256 .* and 2 bytes"):
        prepare.verify(bucket, 1, no_progress)
    assert len(index.shards) > 3


def test_every_kind_of_input_holds_the_same_documents(lines, tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    whole = Path(lines).read_bytes()
    half = whole.index(b"\n", len(whole) // 2) + 1
    (tmp_path / "docs.jsonl.gz").write_bytes(gzip.compress(whole[:half]) + gzip.compress(whole[half:]))
    codec = pyarrow.Codec("zstd")
    frames = b"".join(codec.compress(part).to_pybytes() for part in (whole[:half], whole[half:]))
    (tmp_path / "docs.jsonl.zst").write_bytes(frames)
    table = pyarrow.table({"text": TEXTS})
    parquet.write_table(table, tmp_path / "docs.parquet", row_group_size=70)
    index = made(lines, tmp_path / "out")
    expected = tokens_of(tmp_path / "out", index.shards)
    (tmp_path / "docs.ndjson").write_bytes(whole)
    for suffix in ("ndjson", "jsonl.gz", "jsonl.zst", "parquet"):
        index = made(str(tmp_path / f"docs.{suffix}"), tmp_path / suffix)
        np.testing.assert_array_equal(tokens_of(tmp_path / suffix, index.shards), expected)
    assert len(index.shards) == 5  # one for each group of rows


def test_parquet_files_of_other_text_or_columns(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path, out = tmp_path / "a.parquet", tmp_path / "out"
    latin = pyarrow.array([b"caf\xe9"], pyarrow.binary()).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"text": latin}), path)
    refused("group 0 of '.*a.parquet' cannot be read: 'utf-8' codec", str(path), out)
    parquet.write_table(pyarrow.table([["a"], ["b"]], names=["text", "text"]), path)
    refused("field must be one column of .*: text, text, got 'text'", str(path), tmp_path / "other")


def test_a_split_of_tensorflow_datasets_holds_the_same_documents(lines, tmp_path, monkeypatch):
    prepare_texts(monkeypatch, train=TEXTS, test=["a", "b"])
    monkeypatch.setattr(documents, "TFDS_SPAN", 77)
    index = made(lines, tmp_path / "out")
    expected = tokens_of(tmp_path / "out", index.shards)
    index = made("tfds:fake", tmp_path / "tfds")
    np.testing.assert_array_equal(tokens_of(tmp_path / "tfds", index.shards), expected)
    assert len(index.shards) == 4
    index = made("tfds:fake:test", tmp_path / "test", held_out=0.0)
    np.testing.assert_array_equal(tokens_of(tmp_path / "test", index.shards), [*b"a\0b\0"])
    message = "INPUT must be tfds:fake:SPLIT with one of train, test, got 'tfds:fake:dev"
    refused(message, "tfds:fake:dev", tmp_path / "dev")
    message = "field must be a feature of tfds:fake:train, example 0: text, label"
    refused(message, "tfds:fake", tmp_path / "field", field="body")


def test_a_long_text_is_encoded_as_if_it_were_not_cut(tmp_path, bpe, monkeypatch):
    monkeypatch.setattr(documents, "PIECE", 300)
    text = "\n".join(TEXTS)
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    index = made(str(tmp_path / "a.txt"), tmp_path / "out", bpe, held_out=0.0, eos="<eos>", part_size=4000)
    assert len(index.shards) > 3
    assert [s.documents for s in index.shards] == [0] * (len(index.shards) - 1) + [1]
    np.testing.assert_array_equal(
        tokens_of(tmp_path / "out", index.shards), [*bpe.encode(text), *bpe.encode("<eos>")]
    )


@pytest.mark.parametrize("eos", ["<eos>", None])
def test_what_follows_a_piece_on_the_other_side_is_another_document(tmp_path, bpe, monkeypatch, eos):
    monkeypatch.setattr(documents, "PIECE", 100)
    files = ["\n".join(f"{name} line {i}" for i in range(60)) for name in "abcdef"]
    for name, text in zip("abcdef", files, strict=True):
        (tmp_path / f"{name}.txt").write_text(text)
    inputs = [str(tmp_path / f"{name}.txt") for name in "abcdef"]
    index = made(inputs, tmp_path / "out", bpe, held_out=0.3, eos=eos, part_size=10**6)
    found = []
    for shards in (index.shards, index.held_out):
        ids_of = documents_of(tmp_path / "out", shards)
        ours = [bpe.decode(ids if eos is None else ids[:-1]) for ids in ids_of]
        assert all(any(text in file for file in files) for text in ours)
        assert sum(shard.documents for shard in shards) == len(ours)
        assert sum(map(len, ids_of)) == sum(shard.tokens for shard in shards)
        found += ours
    assert sum(map(len, found)) == sum(map(len, files))
    assert len(found) > 12


@pytest.mark.parametrize(
    "text",
    ["\u00e9" * 5000, "\u3042\u3044\n" * 2000, "a\n\n b" * 3000, "\n" * 9000, "a" + "\ufeff" * 3000],
)
def test_any_text_can_be_cut(tmp_path, monkeypatch, text):
    monkeypatch.setattr(documents, "PIECE", 301)
    monkeypatch.setattr(documents, "SEARCHED", 100)
    (tmp_path / "a.txt").write_text(text)
    index = made(str(tmp_path / "a.txt"), tmp_path / "out", held_out=0.0, eos=None, part_size=1001)
    assert tokens_of(tmp_path / "out", index.shards).astype(np.uint8).tobytes().decode() == text


def test_a_file_that_is_being_written_does_not_count(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"ab")
    (tmp_path / "b.bin.__lock").touch()
    assert Objects(str(tmp_path), "output").sizes() == {"a.bin": 2}


def test_a_folder_is_its_files_in_order(tmp_path):
    for name in ("b.txt", "a/c.md", ".hidden"):
        (tmp_path / "in" / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / "in" / name).write_text(name)
    index = made(str(tmp_path / "in"), tmp_path / "out", held_out=0.0, part_size=100)
    assert tokens_of(tmp_path / "out", index.shards).astype(np.uint8).tobytes() == b"a/c.md\0b.txt\0"
    assert len(index.shards) == 1


@pytest.mark.parametrize("suffix", [".bin", ".ends"])
def test_verify_and_the_same_command_notice_a_shard_that_was_changed(lines, tmp_path, capsys, suffix):
    """And the command makes it again."""
    out = tmp_path / "out"
    made(lines, out)
    assert run(["prepare", "--verify", "--output", str(out), "--workers", "1"]) == 0
    assert "shards are as their index says" in capsys.readouterr().out
    path, again = out / f"shard-00001{suffix}", "remove part-00001.json"
    for data, changed, missing in (
        (path.read_bytes()[:-1], "has the SHA-256", r"has \d+ bytes, but should have"),
        (b"", "has the SHA-256", "has 0 bytes, but should have"),
        (None, "is missing", "has no bytes, but should have"),
    ):
        path.unlink() if data is None else path.write_bytes(data)
        with pytest.raises(UserError, match=f"shard-00001{suffix} {changed}.*{again if data else ''}"):
            prepare.verify(str(out), 1, no_progress)
        refused(f"{suffix} {missing} .* {again}", lines, out)
    (out / "part-00001.json").unlink()
    made(lines, out)
    prepare.verify(str(out), 1, no_progress)


def test_the_same_command_notices_a_description_that_was_edited(lines, tmp_path):
    out = tmp_path / "out"
    made(lines, out)
    path, before = out / "part-00001.json", content(out)
    path.write_text(re.sub('"text_bytes": [0-9]+', '"text_bytes": 1', path.read_text()))
    for _ in ("finished", "not finished"):
        refused("part-00001.json is damaged: .*; remove it and prepare again", lines, out)
        (out / "index.json").unlink(missing_ok=True)
    path.unlink()
    made(lines, out)
    assert content(out) == before
    path.write_text("{}")
    refused("part-00001.json is damaged: .*; remove it and prepare again", lines, out)


def test_of_two_commands_that_begin_at_the_same_moment_one_is_refused(lines, tmp_path, monkeypatch):
    sizes = Objects.sizes

    def meanwhile(objects):
        monkeypatch.setattr(Objects, "sizes", sizes)
        found = objects.sizes()
        made(lines, tmp_path / "out", eos=1)
        return found

    monkeypatch.setattr(Objects, "sizes", meanwhile)
    with pytest.raises(UserError, match="holds shards of other settings: eos; give a new folder"):
        made(lines, tmp_path / "out", eos=2)
    assert prepare.verify(str(tmp_path / "out"), 1, no_progress).eos == 1
    made(lines, tmp_path / "out", eos=1)


def test_an_index_with_a_wrong_name(lines, tmp_path):
    made(lines, tmp_path / "out", held_out=0.0, part_size=10**6)
    path = tmp_path / "out" / "index.json"
    path.write_text(path.read_text().replace("shard-00000", "\\ud800"))
    with pytest.raises(UserError, match=r"index.json is not an index of shards: name is '\\ud800'"):
        prepare.verify(str(tmp_path / "out"), 1, no_progress)


def test_the_command_says_speed_time_left_and_how_to_train(lines, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("hyena_jax.cli.prepare.ROW_EVERY", 0.0)
    flags = "--tokenizer bytes --eos 0 --shard-bytes 5000 --workers 1 --output".split()
    assert run(["prepare", lines, *flags, str(tmp_path / "out")]) == 0
    out, errors = capsys.readouterr()
    assert f"--data shards --data.sources {tmp_path / 'out'}" in out
    row = re.compile(r"preparing   [ \d]+\.\d%   [\d,]+ tokens   [\d,]+ tokens/s(   \d:\d\d:\d\d left)?")
    rows = errors.splitlines()
    assert all(row.fullmatch(line) for line in rows)
    assert "100.0%" in rows[-1]
    assert rows[-1].endswith("0:00:00 left")
    few = tmp_path / "few.txt"
    few.write_text("a text")
    assert run(["prepare", str(few), *flags, str(tmp_path / "two")]) == 0
    assert "so few documents that none is held out by --held-out 0.001: raise it" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eos": 256}, "eos must be an id of the vocabulary, below 256, got 256"),
        ({"eos": "ab"}, r"eos must be .*, or the text of one token \(this is 2: \[97, 98\]\); b"),
        ({"held_out": 0.7}, r"held_out must be in \[0, 0.5\]"),
        ({"field": "body"}, "field must be a key of every document, but .*docs.jsonl, byte 0 is an object"),
        ({"field": "id"}, "field must be a text, but in .* it is int"),
        ({"inputs": ["nowhere.txt"]}, "INPUT must be a file, a folder, or tfds:NAME, got 'nowhere.txt'"),
    ],
)
def test_wrong_settings_are_one_line(lines, tmp_path, options, message):
    refused(message, **{"inputs": lines, "output": tmp_path / "out", **options})


@pytest.mark.parametrize("output", ["s3://bucket/x", "docs.jsonl/x"])
def test_an_output_that_cannot_be_a_folder_is_wrong_input(lines, tmp_path, monkeypatch, output):
    monkeypatch.chdir(tmp_path)
    refused("^output must be a folder (on this machine|that can be written)", lines, output)
    assert os.listdir() == ["docs.jsonl"]


PACKED = gzip.compress(b'{"text": "abc"}\n', mtime=0)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b"abc\xff", "must hold UTF-8 text, but .*a.txt, byte 0 has byte 0xff at offset 3"),
        ("a.jsonl", b'{"text": "a"}\n{"text"', "a.jsonl, byte 14: not JSON"),
        ("a.jsonl", b"[1]\n", "field must be a key of every document, but .* is list"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', r"a.jsonl, byte 0: text must hold only symbols of the bytes"),
        ("a.jsonl.gz", b"abc", "a.jsonl.gz' cannot be read: Not a gzipped file"),
        ("a.jsonl.gz", PACKED[:-9], "a.jsonl.gz' cannot be read"),
        ("a.jsonl.gz", PACKED[:10] + b"\xff" * 9, "a.jsonl.gz' cannot be read: Error -3"),
        ("a.txt.gz", b"abc", "INPUT must be a text, .parquet, or one of .jsonl"),
        ("a.parquet", b"abc", "a.parquet' is not a Parquet file"),
        ("a.bin", b"abc", "is a file of tokens, not of text"),
        ("a.txt", b"", "INPUT must be files with some text"),
    ],
)
def test_wrong_files_are_one_line(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    refused(message, str(tmp_path / name), tmp_path / "out")


def test_documents_that_are_all_empty(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n' * 3)
    given = ["prepare", str(tmp_path / "a.jsonl"), "--tokenizer", "bytes", "--output", str(tmp_path / "out")]
    with pytest.raises(UserError, match="all documents are empty"):
        run([*given, "--workers", "1"])


def test_a_line_of_json_has_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "MAX_DOCUMENT", 99)
    line = json.dumps({"text": "a" * 87}).encode() + b"\n"
    assert len(line) == 100
    path = tmp_path / "a.jsonl"
    path.write_bytes(2 * line.replace(b"a", b"", 1))
    made(str(path), tmp_path / "out")
    path.write_bytes(2 * line)
    message = "byte 0 must be a line of at most 99 bytes, got 'a longer one'"
    refused(message, str(path), tmp_path / "other")


@pytest.mark.grid
def test_an_error_of_a_worker_is_that_of_the_command(lines, tmp_path):
    with Path(lines).open("a") as file:
        file.write('{"other": 1}\n')
    with pytest.raises(UserError, match="field must be a key of every document") as caught:
        made(lines, tmp_path / "out", workers=2)
    assert caught.value.argument == "field"


@pytest.mark.grid
def test_a_worker_that_is_killed_is_one_line_and_bytes_do_not_depend_on_the_workers(lines, tmp_path, bpe):
    def kill_one(n_bytes, n_tokens):
        for process in multiprocessing.active_children()[:1]:
            os.kill(process.pid, signal.SIGKILL)

    with pytest.raises(OSError, match="a worker process died with exit code -9; if it had too little memory"):
        made(lines, tmp_path / "out", bpe, workers=2, part_size=200, progress=kill_one)
    assert multiprocessing.active_children() == []
    made(lines, tmp_path / "out", bpe, workers=3, part_size=200)
    made(lines, tmp_path / "whole", bpe, part_size=200)
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_other_shards_and_other_files_are_left_alone(lines, tmp_path):
    out = tmp_path / "out"
    made(lines, out)
    before, plan = content(out), out / "plan.json"
    refused("other settings: eos, held_out; give a new folder", lines, out, eos=1, held_out=0.2)
    status = os.stat(lines)
    os.utime(lines, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    refused("other settings: the times at which inputs were changed; give a new", lines, out)
    assert content(out) == before
    # As an earlier version wrote it.
    plan.write_text(json.dumps({k: v for k, v in json.loads(plan.read_text()).items() if k != "times"}))
    made(lines, out)
    with Path(lines).open("a") as file:
        file.write('{"text": "more"}\n')
    refused("other settings: inputs or their sizes", lines, out)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("mine")
    refused("output must be a new or empty folder", lines, tmp_path / "other")
    assert content(tmp_path / "other") == {"mine.txt": b"mine"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["a.txt", "--tokenizer", "bytes"], "--output must be given"),
        (["a.txt", "--tokenizer", "bytes", "--output", ""], "--output must be"),
        (["--output", "o", "--tokenizer", "bytes"], "INPUT must be files, folders"),
        (["a.txt", "--output", "o"], "--tokenizer-path must be given exactly when tokenizer is"),
        ([".", "--output", "o", "--tokenizer", "bytes"], "--output must be outside of INPUT '.', which wo"),
        (["a.txt", "--output", "o", "--verify"], "INPUT must be left out with --verify"),
        (["--output", "nowhere", "--verify"], "index.json does not exist: the command that wrote"),
        (["a.txt", "--output", "o", "--tokenizer", "gpt"], "--tokenizer 'gpt' is unknown"),
    ],
)
def test_wrong_command_lines(flags, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        run(["prepare", *flags])
    assert message in str(caught.value)
    assert list(tmp_path.iterdir()) == []
