"""Processes of the fork server behave as new interpreters."""

from __future__ import annotations

import signal
import subprocess

import pytest

from support.fork_server import ForkServer
from support.processes import wait_until_gone
from support.waiting import wait_until


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = ForkServer(tmp_path_factory.mktemp("processes"), imports=["numpy"])
    yield server
    server.close()


def test_children_are_independent_and_can_be_killed_with_what_they_started(server):
    code = """
import os, random, time
if child := os.fork():
    print(child, random.random(), flush=True)
time.sleep(1000)
"""
    processes = [server.start(code) for _ in range(2)]
    said = [wait_until(lambda p=p: p.stdout.endswith("\n") and p.stdout.split()) for p in processes]
    assert said[0][1] != said[1][1]  # states of random generators
    assert [p.poll() for p in processes] == [None, None]
    with pytest.raises(subprocess.TimeoutExpired):
        processes[0].wait(0.0)
    processes[0].kill()
    assert processes[0].wait() == -signal.SIGKILL and processes[1].poll() is None
    wait_until_gone(int(said[0][0]))
    processes[1].send_signal(signal.SIGTERM)
    assert processes[1].wait() == -signal.SIGTERM


def test_nothing_is_left_when_the_server_ends(tmp_path):
    server = ForkServer(tmp_path, imports=())
    process = server.start("import time; time.sleep(1000)")
    server.close()
    wait_until_gone(process.pid)
