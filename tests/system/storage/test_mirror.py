"""What is put of a file that grows; runs in buckets are tested with the training."""

from hyena_jax.system.storage.mirror import _whole_lines


def test_of_a_growing_file_whole_lines_are_put():
    assert [_whole_lines(data) for data in (b"", b'{"a"', b"1\n", b'1\n22\n{"a"')] == [0, 0, 2, 5]
