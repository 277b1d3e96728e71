"""What is put of a file that grows; runs in buckets are tested with the training."""

from hyena_jax.system.storage.mirror import Mirror, _whole_lines


def test_of_a_growing_file_whole_lines_are_put():
    assert [_whole_lines(data) for data in (b"", b'{"a"', b"1\n", b'1\n22\n{"a"')] == [0, 0, 2, 5]


def test_the_file_that_makes_a_folder_a_run_s_is_put_last(tmp_path):
    (tmp_path / "wandb" / "offline-run").mkdir(parents=True)
    (tmp_path / "run").mkdir()  # of a sweep, which has a mirror of its own
    offline = "wandb/offline-run/a.wandb"
    for name in ("config.json", "data.json", "metrics.jsonl", "plot.png", ".lock", "run/a", offline):
        (tmp_path / name).touch()
    mirror = Mirror.__new__(Mirror)  # without the lock of a bucket
    mirror._path = tmp_path
    assert mirror._names() == ["data.json", "plot.png", offline, "config.json"]
