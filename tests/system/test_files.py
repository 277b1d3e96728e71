"""Files and folders: whole or missing whatever happens, locked by one process, refused by name if not fit."""

import json
import os
import stat
import time
from pathlib import Path

import pytest

from hyena_jax.benchmark.settings import Function
from hyena_jax.system import files
from hyena_jax.system.errors import UserError, as_urls
from hyena_jax.system.files import (
    locked,
    new_folder,
    open_input,
    parse_json,
    read_json,
    replacing,
    require_can_hold_files,
    require_free,
    write_text,
)
from hyena_jax.training.options import StartOptions
from hyena_jax.training.timing import check_profile


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_write_that_fails_leaves_the_old_file_and_no_draft(tmp_path, monkeypatch):
    def full(_):
        raise OSError("full")

    write_text(tmp_path / "a.json", "old")
    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="full"):
        write_text(tmp_path / "a.json", "new")
    assert names(tmp_path) == ["a.json"]
    assert (tmp_path / "a.json").read_text() == "old"


def test_a_link_is_replaced_not_its_target(tmp_path):
    (tmp_path / "outside").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "outside")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "outside").read_text() == "precious"
    assert not (tmp_path / "link").is_symlink()


def test_a_draft_is_never_a_file_that_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr(files.secrets, "token_hex", lambda _: "a")
    (tmp_path / ".a.draft").symlink_to(tmp_path / "other")
    with pytest.raises(FileExistsError):
        write_text(tmp_path / "text", "text")
    assert names(tmp_path) == [".a.draft"]


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir, lambda path: path.symlink_to("nowhere")])
def test_what_appeared_while_a_new_file_was_written_is_left_alone(tmp_path, make):
    path, message = tmp_path / "a", "a' was made by somebody else meanwhile, and is left alone"
    with pytest.raises(UserError, match=message), replacing(path, is_new=True) as draft:
        draft.write_text("ours")
        make(path)
    assert names(tmp_path) == ["a"]
    assert path.is_dir() or path.is_symlink() or path.read_text() == ""
    write_text(tmp_path / "b", "ours", is_new=True)
    assert (tmp_path / "b").read_text() == "ours"


@pytest.mark.parametrize("text", ['{"rows": 1}', '"benchmark"', "1", "not JSON"])
def test_results_that_are_not_of_an_earlier_benchmark_are_left_alone(tmp_path, text):
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(UserError, match="^output .*(new, empty, or of an earlier benchmark|not JSON)"):
        Function(target="a.py:f", output=tmp_path).check()
    (tmp_path / "results.json").write_text('{"benchmark": "function"}')
    Function(target="a.py:f", output=tmp_path).check()


@pytest.mark.parametrize("kind", ["file", "below a file", "nowhere", "proc"])
def test_a_folder_that_cannot_hold_files_is_refused_before_it_is_needed(tmp_path, kind):
    (tmp_path / "file").write_text("theirs")
    (tmp_path / "link").symlink_to("nowhere")
    path = tmp_path / {"file": "file", "below a file": "file/a/b", "nowhere": "link", "proc": "/proc/a"}[kind]
    with pytest.raises(UserError, match=f"profile must be a folder that can be written .*got '{path}'"):
        require_can_hold_files("profile", path)
    with pytest.raises(UserError, match="profile must be a folder that can be written"):
        check_profile(StartOptions(profile=path), tmp_path / "run")
    require_can_hold_files("profile", tmp_path / "new" / "one")
    assert names(tmp_path) == ["file", "link"]


def test_a_long_message_takes_linear_time():
    for text in ("x" * 10**6, "/hyena_jax_copy_a" * 10**5, "/tmp/hyena_jax_copy_a/gs;" * 10**5):
        begun = time.monotonic()
        assert as_urls(text) == text
        assert time.monotonic() - begun < 5
    assert as_urls("in '/tmp/hyena_jax_copy_a/gs:/b/run', not\n/x") == "in 'gs://b/run', not\n/x"


@pytest.mark.parametrize("mask", [0o077, 0o002])
def test_files_and_folders_have_the_mode_of_the_umask(tmp_path, mask):
    usual = os.umask(mask)
    try:
        write_text(tmp_path / "text", "text")
        with new_folder(tmp_path / "folder"):
            pass
    finally:
        os.umask(usual)
    assert stat.S_IMODE((tmp_path / "text").stat().st_mode) == 0o666 & ~mask
    assert stat.S_IMODE((tmp_path / "folder").stat().st_mode) == 0o777 & ~mask


def test_a_new_folder_is_there_once_it_is_complete(tmp_path):
    folder = tmp_path / "a" / "b"
    with pytest.raises(ZeroDivisionError), new_folder(folder) as draft:
        (draft / "half").write_text("")
        assert not folder.exists()
        raise ZeroDivisionError
    assert names(tmp_path) == []
    with new_folder(folder) as draft:
        (draft / "whole").write_text("")
    assert names(folder) == ["whole"]
    assert names(folder.parent) == ["b"]


def test_a_folder_is_locked_by_one_holder_who_finds_no_drafts(tmp_path):
    left, own = tmp_path / f".{'0' * 16}.draft", [tmp_path / "thesis.draft", tmp_path / ".draft"]
    for path in (left, *own):
        path.write_text("half")
    with locked(tmp_path) as lock:
        assert names(tmp_path) == [".draft", ".lock", "thesis.draft"]
        with pytest.raises(UserError, match="is in use: another process trains there"), locked(tmp_path):
            pass
        inherited = os.dup(lock)
    with pytest.raises(UserError, match="is in use"), locked(tmp_path):
        pass
    os.close(inherited)
    with locked(tmp_path):
        pass


@pytest.mark.parametrize("is_new", [True, False])
def test_a_start_that_fails_removes_the_folder_only_if_it_made_it(tmp_path, is_new):
    workdir = tmp_path / "run"
    if not is_new:
        workdir.mkdir()
    with pytest.raises(UserError), locked(workdir):
        assert (workdir / ".lock").exists()
        raise UserError("of the start")
    assert workdir.exists() != is_new


def test_a_lock_that_is_a_link_and_a_workdir_that_is_a_file_are_refused(tmp_path):
    (tmp_path / ".lock").symlink_to(tmp_path / "other")
    with pytest.raises(UserError, match=r"\.lock must be a file, but is a symbolic link"), locked(tmp_path):
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="workdir '.*' cannot be created"), locked(tmp_path / "file" / "run"):
        pass


def test_only_regular_files_of_a_limited_size_are_opened(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_bytes(b"12345")
    for path, message in (
        (tmp_path, "path must be a file, not a folder"),
        (tmp_path / "pipe", "path must be a file, not a pipe"),
        ("/dev/zero", "path must be a file, not a device"),
        (tmp_path / "none", "path '.*none' cannot be read: .*No such file"),
        ("a\0b", "path .* cannot be read: .*null"),
        (tmp_path / "file", "path must be a file of at most 4 bytes"),
    ):
        with pytest.raises(UserError, match=message) as caught, open_input("path", path, 4):
            pass
        assert caught.value.argument == "path"
    monkeypatch.setattr(files, "HOLES_FROM", 2**20)
    with open(tmp_path / "holes", "wb") as file:
        file.truncate(2**21)
    with pytest.raises(UserError, match="is a sparse file"), open_input("path", tmp_path / "holes"):
        pass


def test_json_is_refused_with_the_place_of_its_fault_and_if_it_is_too_deep(tmp_path):
    deep = [json.loads("[" * n + "]" * n) for n in (100, 101)]
    assert parse_json(json.dumps(deep[0])) == deep[0]
    for text, message in (
        (json.dumps(deep[1]), "JSON must be at most 100 lists and objects deep"),
        ("[" * 10**5, "JSON must be at most 100 lists and objects deep"),
        ("{1}", "not JSON: Expecting property name.*line 1 column 2"),
        (b"\xff\xfe\x00", "not JSON"),
    ):
        with pytest.raises(UserError, match=f"^{message}"):
            parse_json(text)
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(UserError, match="^config '.*a.json' cannot be read: not JSON"):
        read_json("config", tmp_path / "a.json")


def test_what_would_be_overwritten_is_refused(tmp_path):
    require_free("output", tmp_path / "new")
    (tmp_path / "link").symlink_to(tmp_path / "new")
    for path in (tmp_path, tmp_path / "link"):
        with pytest.raises(UserError, match="output must be a new or an empty folder"):
            require_free("output", path)
    with pytest.raises(UserError, match="path must be a file that does not exist yet"):
        files.require_new_file("path", tmp_path / "link")
    with pytest.raises(UserError, match="path must be a file in an existing folder"):
        files.require_new_file("path", tmp_path / "none" / "file")
