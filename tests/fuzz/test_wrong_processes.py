"""Generated processes that do not fit together are soon refused in one line. Run with -m fuzz."""

from collections import Counter

import jax
import pytest
from fuzz.test_fuzz import FUZZ, Reached, outcome_of
from hypothesis import given, settings
from hypothesis import strategies as st

from hyena_jax.parallel import roll_call

pytestmark = [pytest.mark.fuzz, pytest.mark.xdist_group("wrong_processes")]

FLAGS, JOBS = 60, 60
SECONDS = 60
"""Longest that a case may take."""


@pytest.fixture
def unconnected(monkeypatch):
    """Contacts neither JAX's coordinator nor a name server; every host name is unknown at once."""

    def initialize(*_, **__):
        raise Reached

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    monkeypatch.setattr(roll_call, "RESOLVE_WITHIN", 0.0)
    monkeypatch.setenv("no_grpc_proxy", "")


FREE_PORTS = st.integers(20_000, 60_000)
WRONG = {
    "host": [
        *("nowhere.invalid", "203.0.113.9", "[2001:db8::1]", "", " ", "a b", "::1", "[::1", "a" * 64),
        *("http://127.0.0.1", "host..name", "ä", "127.0.0.1,b", "$(id)", "\n"),
    ],
    "port": ["", "0", "-1", "65536", "99999999999", "http", "1e3", "１２３", " 80", "0x50"],
    "count": ["0", "-1", "two", "", "2.5", "1e400", "9" * 30, "None", "nan", None],
    "number": ["2", "-1", "two", "", "0.5", "1e400", "9" * 30, "None", "nan", None],
}
RIGHT = {"host": ["127.0.0.1", "localhost"], "count": ["2", "3"], "number": ["0", "1"]}


@st.composite
def meetings(draw):
    """Flags of a process, at most two of them wrong."""
    wrong = draw(st.sets(st.sampled_from(sorted(WRONG)), max_size=2))
    values = {
        "port": str(draw(FREE_PORTS)),
        **{name: draw(st.sampled_from(values)) for name, values in RIGHT.items()},
        **{name: draw(st.sampled_from(WRONG[name])) for name in sorted(wrong)},
    }
    flags = {"--coordinator": f"{values['host']}:{values['port']}"}
    flags |= {"--num-processes": values["count"], "--process-id": values["number"]}
    more = ["--distributed"] if draw(st.integers(0, 9)) == 0 else []
    return [*more, *(word for pair in flags.items() if pair[1] is not None for word in pair)]


def test_wrong_flags(unconnected, tmp_path):
    """No process finds the others."""
    outcomes = Counter()

    @settings(FUZZ, max_examples=FLAGS)
    @given(meetings())
    def check(flags):
        workdir = ["--workdir", tmp_path / "run", "--join-timeout", "0.05"]
        outcomes[outcome_of(["train", "quickstart", *workdir, *flags], SECONDS)[0]] += 1
        assert list(tmp_path.iterdir()) == []

    check()
    assert set(outcomes) == {2, 3}
    assert min(outcomes.values()) > FLAGS // 20, outcomes


SLURM = {
    "SLURM_JOB_ID": ["7", "", "x", "-5", "9" * 40],
    "SLURM_STEP_NODELIST": ["localhost", "", ",", "node[001-004]", "nowhere[", "[", "a b", "host,host2"],
    "SLURM_NTASKS": ["1", "2", "0", "-3", "x", ""],
    "SLURM_PROCID": ["0", "1", "5", "-1", "x", ""],
    "SLURM_LOCALID": ["0", "x", ""],
    "JAX_COORDINATOR_PORT": [None, "0", "70000", "x"],
    "JAX_COORDINATOR_ADDRESS": [None, None, "localhost", ":", "nowhere.invalid:80"],
    "JAX_COORDINATOR_BIND_ADDRESS": [None, None, "", "x", "127.0.0.1", "127.0.0.1:x", ":", "203.0.113.1:80"],
}
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": [
        *("1531576320.0;tcp://127.0.0.1:34911", "", "x", "1.0;tcp6://[::1]:1", "1;tcp://")
    ],
    "OMPI_COMM_WORLD_SIZE": ["1", "2", "x", "0"],
    "OMPI_COMM_WORLD_RANK": ["0", "1", "x", "9"],
    "OMPI_COMM_WORLD_LOCAL_RANK": ["0", "x"],
}


def test_wrong_environments(unconnected, tmp_path):
    outcomes = Counter()
    jobs = st.one_of(
        *(
            st.fixed_dictionaries({name: st.sampled_from([None, *values]) for name, values in job.items()})
            for job in (SLURM, SLURM, OPEN_MPI)
        ),
        # Mostly right, so that a single wrong variable shows.
        *(
            st.sampled_from(list(job)).flatmap(
                lambda name, job=job: st.fixed_dictionaries(
                    {key: st.sampled_from(job[key] if key == name else job[key][:1]) for key in job}
                )
            )
            for job in (SLURM, OPEN_MPI)
        ),
    )

    @settings(FUZZ, max_examples=JOBS)
    @given(jobs)
    def check(job):
        with pytest.MonkeyPatch.context() as patch:
            for name in [*SLURM, *OPEN_MPI]:
                value = job.get(name)
                patch.delenv(name, raising=False) if value is None else patch.setenv(name, value)
            workdir = ["--workdir", tmp_path / "run", "--join-timeout", "0.05"]
            code, _ = outcome_of(["train", "quickstart", *workdir, "--distributed"], SECONDS)
        assert code != 0
        outcomes[code] += 1
        assert list(tmp_path.iterdir()) == []

    check()
    assert outcomes[2] > JOBS // 4, outcomes
