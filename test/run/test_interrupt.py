"""Stop signals."""

from __future__ import annotations

import logging
import os
import signal
import threading
from pathlib import Path

import pytest

from support.waiting import PATIENCE, wait_until
from torchrl_rloo.run.run import StopSignal


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
import pathlib, sys, time
from torchrl_rloo.run.run import StopSignal
with StopSignal() as stop:
    for step in range(10):
        print("step", step, flush=True)
        while not pathlib.Path("go_on").exists():
            time.sleep(0.01)
        if stop.requested:
            print("saved", step, flush=True)
            break
"""


def test_a_terminated_process_finishes_its_step_and_exits_well(fork_server, tmp_path: Path) -> None:
    process = fork_server.start(_LOOP, cwd=tmp_path)
    wait_until(lambda: process.stdout)
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: process.stderr)
    (tmp_path / "go_on").touch()  # the end of the step
    assert process.wait(PATIENCE) == 0
    assert process.stdout == "step 0\nsaved 0\n"
    assert process.stderr.count("a second signal aborts") == 1  # visible without any logging set-up
