import signal
import subprocess

import pytest

from hyena_jax import launch

WAITING, FAILING, DONE = ["sleep", "60"], ["sh", "-c", "exit 3"], ["true"]


def watch(commands, grace=0.0, forwarded=()):
    processes, lines = [subprocess.Popen(command) for command in commands], []
    try:
        return launch._watch(processes, grace, lines.append, forwarded), lines
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_all_done_is_code_0_without_a_line():
    assert watch([DONE, DONE]) == (0, [])


def test_the_first_that_fails_is_named_and_the_others_are_not_waited_for():
    line = "process 1 of 3 ended with exit code 3; the others were ended too"
    assert watch([WAITING, FAILING, DONE]) == (3, [line])


def test_a_signal_is_the_cause_of_what_fails_with_it():
    killed = ["sh", "-c", "kill -KILL $$"]
    line = "process 1 of 2 was ended by SIGKILL; the others were ended too"
    assert watch([FAILING, killed], grace=10)[0] in (3, 128 + signal.SIGKILL)
    assert watch([WAITING, killed]) == (128 + signal.SIGKILL, [line])


def test_a_stop_that_was_asked_for_is_no_failure_to_report():
    assert watch([FAILING, FAILING], forwarded=[signal.SIGTERM]) == (3, [])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_passed_on(number):
    with subprocess.Popen(WAITING) as process:
        with launch._forwarded([process]) as forwarded:
            signal.raise_signal(number)
            assert process.wait() == -number
        assert forwarded == [number]
