"""What the machine says of a process's memory."""

from hyena_jax.system import files


def test_resident_memory_is_in_bytes(tmp_path, monkeypatch):
    """Linux writes kB where it means KiB."""
    (tmp_path / "status").write_text("VmHWM:\t    3001 kB\nVmRSS:\t    2501 kB\n")
    monkeypatch.setattr(files, "Path", lambda _: tmp_path / "status")
    assert files.resident_bytes("VmRSS") == 2501 * 1024
    assert files.resident_bytes("VmHWM") == 3001 * 1024
    assert files.resident_bytes("VmSwap") == 0
