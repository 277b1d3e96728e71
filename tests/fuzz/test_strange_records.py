"""Generated FASTA files, and damaged files of scores. Run with -m fuzz."""

import pytest
from fuzz.test_fuzz import FUZZ, assert_clear
from hypothesis import given, settings
from hypothesis import strategies as st

from hyena_jax.data.records import read_records, same_names
from hyena_jax.scoring import score_file
from hyena_jax.system.errors import UserError

pytestmark = [pytest.mark.fuzz, pytest.mark.xdist_group("strange_records")]

FILES = 300

ENDS = st.sampled_from(["\n", "\r\n", "\r"])
NAMES = st.sampled_from(["chr1", "chr1", "chr2", ">", "\x1b[2J", "ß", "chr\u20281", "a" * 300])
PIECES = st.lists(st.sampled_from(["ACGT", "acgtn", "N", " AC GT\t", "", "-", "*"]), max_size=4)
RECORDS = st.lists(st.tuples(NAMES, st.sampled_from(["", " about it", "\t>x"]), PIECES), max_size=6)


@st.composite
def fasta_files(draw):
    """The bytes of a file, with one end of line or several kinds, and the records in it."""
    records, ends = draw(RECORDS), draw(st.sampled_from([ENDS, st.just(draw(ENDS))]))
    lines = [line for name, about, pieces in records for line in [f">{name}{about}", *pieces]]
    text = "".join(line + draw(ends) for line in lines)
    if draw(st.booleans()):
        text = text.rstrip("\r\n")
    start = draw(st.sampled_from(["", "\ufeff", "\n\r\n \r"]))
    expected = [(name.split()[0], "".join("".join(pieces).split())) for name, _, pieces in records]
    return (start + text).encode(), expected


def test_fasta_files(tmp_path):
    """Every end of line that FASTA files have, and names that several records share."""
    path = tmp_path / "records.fa"

    @settings(FUZZ, max_examples=FILES)
    @given(fasta_files())
    def check(file):
        data, expected = file
        path.write_bytes(data)
        if not expected:
            with pytest.raises(UserError, match="a (FASTA )?file with"):
                read_records(path)
            return
        records = read_records(path)
        assert [(record.name, record.text) for record in records] == expected
        names = [name for name, _ in expected]
        said = same_names(records)
        assert (said is None) == (len({*names}) == len(names))
        assert said is None or said.isprintable()

    check()


WRITTEN = [
    score_file.with_checksum(
        {"name": name, "tokens": 3, "scored": 2, "bytes": n_bytes, "log_likelihood": nats, "ids": [1, 2]}
    )
    for name, n_bytes, nats in [("chr1", 3, -1e-5), ("ß\u2028", None, None), ('a\n"', 99, -1e22)]
]


def test_files_of_scores_with_a_flipped_bit(tmp_path):
    """Every bit: the file is refused and stays, or is continued to the bytes of an undisturbed one."""
    path, about = tmp_path / "scores.jsonl", {"run": "a", "step": 3}
    with score_file.continued(path, about, [row["name"] for row in WRITTEN]) as (_, append):
        append(WRITTEN)
    whole, continued = path.read_bytes(), 0
    for place in range(8 * len(whole)):
        data = bytearray(whole)
        data[place // 8] ^= 1 << place % 8
        path.write_bytes(data)
        try:
            with score_file.continued(path, about, [row["name"] for row in WRITTEN]) as (found, append):
                append(WRITTEN[len(found) :])
        except UserError as error:
            message = str(error)
        else:
            assert path.read_bytes() == whole, f"bit {place % 8} of byte {place // 8}"
            continued += 1
            continue
        assert_clear(message)
        assert path.read_bytes() == data
    assert continued > 0
