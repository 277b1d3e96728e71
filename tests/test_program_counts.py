"""The gate of counted operations: what it says of a change, and what it counts in a compiled program."""

import json

import program_counts
import pytest

HLO = """HloModule a

%fused (p: f32[8,4]) -> f32[4,8] {
  %p = f32[8,4]{1,0} parameter(0)
  ROOT %t = f32[4,8]{1,0} transpose(%p), dimensions={1,0}
}

ENTRY %main (x: f32[8,4]) -> f32[4,8] {
  %x = f32[8,4]{1,0} parameter(0)
  %c = f32[8,4]{0,1} copy(%x)
  %f = f32[4,8]{1,0} fusion(%c), kind=kLoop, calls=%fused
  ROOT %d = f32[4,8]{1,0} add(%f, %f)
}
"""
COUNTS = {"products": 2.0, "relayouts": 1}


def test_copies_and_transposes_count_within_fusions_too():
    assert program_counts.in_program(HLO) == {"instructions": 3, "fusions": 1, "relayouts": 2}


def test_each_change_is_a_line():
    kept = {"mixer a": COUNTS, "mixer b": COUNTS, "mixer lost": COUNTS}
    found = {"mixer a": {**COUNTS, "relayouts": 2}, "mixer b": COUNTS, "mixer new": COUNTS}
    assert list(program_counts.differences(kept, found)) == [
        "mixer a: relayouts 1 -> 2",
        "mixer new: not kept yet",
        "mixer lost: no such program any more",
    ]


def test_other_versions_have_no_verdict(tmp_path, monkeypatch, capsys):
    file = tmp_path / "counts.json"
    file.write_text(json.dumps({"cpu, jax 0.0.1, jaxlib 0.0.1": {}}))
    monkeypatch.setattr(program_counts, "FILE", file)
    monkeypatch.setattr(program_counts, "start", lambda is_tpu: pytest.fail("compiled"))
    assert program_counts.main([]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert "none are kept for cpu, jax" in line
    assert "kept are cpu, jax 0.0.1" in line
