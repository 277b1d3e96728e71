import json
import sys
from functools import partial

import pytest
from bucket_server import BUCKET, reached_at

from hyena_jax.data.objects import Objects
from hyena_jax.system.errors import UserError
from hyena_jax.system.storage.bucket import ABSENT, Bucket, Refused
from hyena_jax.system.storage.location import Location
from hyena_jax.system.storage.mirror import download


@pytest.fixture
def opened(bucket) -> Bucket:
    return Bucket(Location.parse(bucket, "workdir"))


def test_objects_are_put_listed_read_and_deleted(opened, tmp_path):
    put = opened.put("a/b.txt", b"one")
    opened.put("c.txt", b"")
    assert opened.get("a/b.txt") == b"one"
    assert opened.get("none") is opened.stat("none") is None
    assert opened.below() == [put, opened.stat("c.txt")]
    assert [found.name for found in opened.below("a/")] == ["a/b.txt"]
    opened.put("a/", b"")  # a folder, as consoles and mounted buckets make them
    opened.put("/", b"")
    assert opened.level() == ([opened.stat("c.txt")], ["a"])
    assert [found.name for found in opened.below("a/")] == ["a/b.txt"]
    (tmp_path / "in").write_bytes(bytes(10))
    opened.put_file("file", tmp_path / "in")
    opened.get_file("file", tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == bytes(10)
    opened.delete(["a/b.txt", "c.txt", "file", "none", "a/", "/"])
    assert opened.below() == []


def test_a_put_under_a_condition(opened):
    first = opened.put("x", b"1", ABSENT)
    with pytest.raises(Refused, match=r"gs://hyenatest/\w+/x was put by another process"):
        opened.put("x", b"2", ABSENT)
    second = opened.put("x", b"2", first.generation)
    with pytest.raises(Refused):
        opened.put("x", b"3", first.generation)
    assert second.generation != first.generation
    assert second.updated > first.updated
    assert opened.get("x") == b"2"


def test_a_put_whose_answer_was_lost_is_not_refused(opened):
    """The second try meets the object of the first."""
    first = opened.put("x", b"1", ABSENT)
    assert opened.put("x", b"1", ABSENT) == first


def test_a_bucket_that_does_not_exist(bucket):
    nothing = Bucket(Location("no-such-bucket", "run"))
    for use in (nothing.below, lambda: nothing.put("x", b"")):
        with pytest.raises(UserError, match="workdir gs://no-such-bucket/run: there is no such bucket"):
            use()
    assert nothing.get("x") is None


def test_a_server_that_does_not_answer(bucket, monkeypatch):
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:9")
    opened = Bucket(Location("abc", "run"))
    with pytest.raises(OSError, match="abc/run/x cannot be .*: it does not answer .* nothing is lost"):
        opened.put("x", b"", patience=0.5)


def test_what_is_missing_on_this_machine_is_one_line(bucket, monkeypatch):
    """Of runs and of shards."""
    monkeypatch.delenv("STORAGE_EMULATOR_HOST")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/nowhere.json")
    for opened in (lambda: Bucket(Location.parse(bucket, "workdir")), lambda: Objects(bucket, "sources")):
        with pytest.raises(OSError, match=f"^{bucket} cannot be opened: .*nowhere.json"):
            opened()
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "gcsfs", None)
            with pytest.raises(UserError, match=rf"{bucket} needs the package gcsfs: pip install '.*gcs\]'"):
                opened()


@pytest.mark.parametrize("is_local", [False, True])
def test_what_must_not_replace_leaves_what_is_there(bucket, tmp_path, is_local):
    objects = Objects(str(tmp_path / "new") if is_local else bucket, "output")
    for data in (b"first", b"second"):
        objects.write("a", data, replace=False)
        assert objects.read("a") == b"first"
    objects.write("a", b"third")
    assert objects.read("a") == b"third"
    (found,) = objects.sizes()
    assert found == "a"


@pytest.mark.parametrize(
    "answer", [b"{}", b"[]", b"null", b'{"name": 5}', b'{"items": [{}], "prefixes": [3]}']
)
def test_an_answer_that_is_not_of_cloud_storage_is_one_line(proxy, answer):
    with reached_at(proxy.url):
        opened = Bucket(Location(BUCKET, "run"))
        opened.patience = 0.5
        proxy.fault = lambda method, path: answer
        uses = [opened.below, opened.level, partial(opened.stat, "x"), partial(opened.put, "x", b"a", ABSENT)]
        for use in uses:
            said = None
            try:
                found = use()
            except OSError as error:
                said = str(error)
            assert found in ([], ([], [])) if said is None else "cannot be read or written: " in said
            assert "\n" not in (said or "")
        assert opened.get("x") == answer


def test_a_download_with_a_wrong_checksum_is_one_line(opened, monkeypatch):
    media = pytest.importorskip("google.resumable_media.common")

    def download(*_, **__):
        raise media.DataCorruption(None, "Checksum mismatch while downloading:\n\n  x\n")

    opened.put("x", b"1")
    monkeypatch.setattr("google.cloud.storage.Blob.download_as_bytes", download)
    with pytest.raises(OSError, match="/x cannot be read .*: Checksum mismatch while downloading: x;"):
        opened.get("x")


@pytest.mark.parametrize("name", ["../../x", "a/../../../x", "..", ".", "a/b", "a\0b"])
def test_names_that_lead_out_of_a_folder_are_refused(proxy, tmp_path, name):
    about = {"size": "1", "generation": "1", "crc32c": "", "updated": "2024-01-01T00:00:00Z"}
    with reached_at(proxy.url):
        for listed in ({"items": [{"name": f"run/{name}", **about}]}, {"prefixes": [f"run/{name}/"]}):
            proxy.fault = lambda method, path, listed=listed: json.dumps(listed).encode()
            with pytest.raises(UserError, match="lists '.*', which is not the name of a file"):
                download(Bucket(Location(BUCKET, "run")), tmp_path / "copies" / "copy")
    assert list(tmp_path.iterdir()) == []
