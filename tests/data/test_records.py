"""Lines of texts and records of FASTA files."""

import pytest

from hyena_jax.data.records import Record, read_records, same_names
from hyena_jax.system.errors import UserError


def test_lines_keep_their_numbers(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes("\ufeffone\r\n\n>two\n three".encode())
    found = [Record("1", "one"), Record("2", ""), Record("3", ">two"), Record("4", " three")]
    assert read_records(path) == found
    path.write_bytes(path.read_bytes() + b"\n")
    assert read_records(path) == found


def test_fasta_records_keep_their_case(tmp_path):
    path = tmp_path / "genome.FA"
    path.write_text(">chr1 the first\nACgt\nNN a\n\n>chr2\n>chr1\r\nC\r\n")
    found = [Record("chr1", "ACgtNNa"), Record("chr2", ""), Record("chr1", "C")]
    assert read_records(path) == found
    assert read_records(path, "lines")[0] == Record("1", ">chr1 the first")
    other = path.rename(tmp_path / "genome.txt")
    assert read_records(other, "fasta") == found


def test_lines_of_fasta_may_end_in_a_bare_carriage_return(tmp_path):
    path = tmp_path / "genome.fa"
    path.write_bytes(b">a\rAC\rGT\r>b x\rT")
    assert read_records(path) == [Record("a", "ACGT"), Record("b", "T")]


def test_shared_names_are_told():
    records = [Record(name, "A") for name in ("a", "b", "a", "c", "c", "a")]
    assert same_names(records) == "several records have the same name: 'a' (3 of them), and 1 more"
    assert same_names(records[:2]) is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "path must be a file with some text"),
        (b"AC\xff", "path must hold UTF-8 text, but .* has byte 0xff at offset 2"),
        (b"\r\n\r", "path must be a FASTA file with at least one record, got"),
        (b"ACGT\n>a\n", "line 1 of .* must be a header such as >chr1, to begin a FASTA file, got 'ACGT'"),
        (b">a\nA\n> \nC", "line 3 of .* must be a header with a name, as >chr1"),
    ],
)
def test_other_files_are_refused(tmp_path, content, message):
    path = tmp_path / "genome.fa"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_records(path)
    with pytest.raises(UserError, match="path .* cannot be read"):
        read_records(tmp_path / "none.fa")
