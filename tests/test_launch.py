import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from hyena_jax.cli import launch
from hyena_jax.system.signals import noted_signals, start_process

WAITING, FAILING, DONE = ["sleep", "60"], ["sh", "-c", "exit 3"], ["true"]


def watch(commands, grace=0.0, forwarded=(), ended=False):
    processes, lines = [subprocess.Popen(command) for command in commands], []
    try:
        for process in processes if ended else ():
            process.wait()
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
    stopped = ["sh", "-c", "exit 75"]
    assert watch([stopped, DONE]) == (75, [])
    assert watch([stopped, stopped], forwarded=[signal.SIGTERM], ended=True) == (75, [])
    assert watch([stopped, FAILING], forwarded=[signal.SIGTERM], ended=True) == (3, [])


@pytest.mark.parametrize(
    ("signals", "code", "line"),
    [
        ([signal.SIGINT], 130, "interrupted"),
        ([signal.SIGTERM], 75, "stopped by SIGTERM; rerun the command to continue"),
        ([signal.SIGHUP], 75, "stopped by SIGHUP; rerun the command to continue"),
    ],
)
def test_signals_are_passed_on(signals, code, line):
    assert watch([WAITING, WAITING], grace=10, forwarded=signals) == (code, [line])


def test_a_second_interrupt_ends_what_does_not_listen():
    deaf = [sys.executable, "-c", "import signal; signal.signal(2, signal.SIG_IGN); signal.pause()"]
    assert watch([deaf, deaf], forwarded=[signal.SIGINT] * 2) == (130, ["interrupted"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_are_noted_unless_they_are_ignored(number):
    before = signal.getsignal(number)
    with noted_signals() as asked:
        signal.raise_signal(number)
        assert asked == [number]
    assert signal.getsignal(number) == before
    signal.signal(number, signal.SIG_IGN)
    try:
        with noted_signals() as asked:
            signal.raise_signal(number)
            assert asked == []
    finally:
        signal.signal(number, before)


def test_outside_the_main_thread_no_signals_are_noted():
    """Python does not let other threads set handlers."""

    def asked() -> list[int]:
        with noted_signals() as asked:
            return asked

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(asked).result() == []


def test_a_process_ends_with_its_launcher_before_it_has_imported_anything(tmp_path):
    """A pipe that is already closed stands for a launcher killed while its process started."""
    pipe, held = os.pipe()
    os.close(held)
    script = tmp_path / "waits.py"
    script.write_text("import signal\nsignal.pause()")  # as a config, it would never end
    command = [sys.executable, "-m", "hyena_jax.cli.launched", str(pipe), "train", str(script), "--help"]
    with subprocess.Popen(command, pass_fds=[pipe]) as process:
        os.close(pipe)
        assert process.wait(timeout=60) == -signal.SIGTERM


def test_no_signal_is_lost_while_a_process_starts():
    pipe, held = os.pipe()
    command = [sys.executable, "-m", "hyena_jax.cli.launched", str(pipe), "bench"]
    process = start_process(command, stdin=subprocess.DEVNULL, pass_fds=[pipe])
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == -signal.SIGINT
    os.close(pipe)
    os.close(held)
