"""Stopping a run by signal."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading

import pytest

from torchrl_rloo.run import StopSignal


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_aborts(number: int, caplog: pytest.LogCaptureFixture) -> None:
    before = signal.getsignal(number)
    with caplog.at_level(logging.WARNING), pytest.raises(KeyboardInterrupt), StopSignal() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested
        assert len(caplog.records) == 1 and "save and stop at the end of this step" in caplog.text
        os.kill(os.getpid(), signal.SIGINT)
    assert len(caplog.records) == 1
    assert signal.getsignal(number) is before


def test_previous_handlers_come_back() -> None:
    seen = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        with StopSignal() as stop:
            pass
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIGTERM] and not stop.requested


def test_off_the_main_thread_it_does_nothing() -> None:
    before = signal.getsignal(signal.SIGINT)
    requested = []

    def loop() -> None:
        with StopSignal() as stop:
            assert signal.getsignal(signal.SIGINT) is before
            requested.append(stop.requested)

    thread = threading.Thread(target=loop)
    thread.start()
    thread.join()
    assert requested == [False]


_LOOP = """
import sys
from torchrl_rloo.run import StopSignal
with StopSignal() as stop:
    for step in range(10):
        print("step", step, flush=True)
        sys.stdin.readline()
        if stop.requested:
            print("saved", step, flush=True)
            break
"""


def test_a_terminated_process_finishes_its_step_and_exits_well() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", _LOOP], stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout.readline() == "step 0\n"
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate("\n", timeout=60)  # the end of the step
    assert process.returncode == 0
    assert output == "saved 0\n"
    assert errors.count("a second signal aborts") == 1  # visible without any logging set-up
