"""What the machine and the compiler say of memory."""

from types import SimpleNamespace

import pytest

from hyena_jax.system import files, machine


def test_resident_memory_is_in_bytes(tmp_path, monkeypatch):
    """Linux writes kB where it means KiB."""
    (tmp_path / "status").write_text("VmHWM:\t    3001 kB\nVmRSS:\t    2501 kB\n")
    monkeypatch.setattr(files, "Path", lambda _: tmp_path / "status")
    assert files.resident_bytes("VmRSS") == 2501 * 1024
    assert files.resident_bytes("VmHWM") == 3001 * 1024
    assert files.resident_bytes("VmSwap") == 0


@pytest.mark.parametrize(("share", "fits"), [(0.79, True), (0.81, False)])
def test_a_program_fits_in_four_fifths_of_what_is_available(tmp_path, monkeypatch, share, fits):
    (tmp_path / "meminfo").write_text("MemFree:  5 kB\nMemAvailable:    1000 kB\n")
    monkeypatch.setattr(machine, "Path", lambda _: tmp_path / "meminfo")
    assert machine.fits(int(share * 1000 * 1024)) == fits


def test_outputs_that_take_over_arguments_are_counted_once():
    analysis = SimpleNamespace(
        argument_size_in_bytes=10, output_size_in_bytes=8, alias_size_in_bytes=5, temp_size_in_bytes=2
    )
    executable = SimpleNamespace(memory_analysis=lambda: analysis)
    assert machine.compiled_memory(executable).total == 10 + 3 + 2
