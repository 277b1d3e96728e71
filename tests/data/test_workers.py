"""Work that is shared by processes."""

import hashlib

from hyena_jax.data import workers


def work(n_bytes, number, progress):
    hashlib.sha256(bytes(2**23)).digest()  # some milliseconds
    progress(n_bytes, number)


def test_progress_of_all_processes_is_counted_once(monkeypatch):
    monkeypatch.setattr(workers, "LOOK_EVERY", 1e-3)
    said = []
    workers.share(work, (10,), range(20), 2, lambda n_bytes, n_tokens: said.append((n_bytes, n_tokens)))
    assert [*map(sum, zip(*said, strict=True))] == [20 * 10, 20 * 19 // 2]
