"""Processes of the fork server behave as new interpreters."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

from support.fork_server import ForkServer
from support.processes import wait_until_gone
from support.waiting import wait_until

STATE = """
import json, os, signal, sys, threading
print(json.dumps({
    "argv": sys.argv, "cwd": os.getcwd(), "name": __name__, "own": os.environ.get("OWN"),
    "path": os.environ.get("PYTHONPATH"), "leader": os.getsid(0) == os.getpid() or None, "stdin": sys.stdin.read(),
    "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler, "main": sys.modules["__main__"].STATE,
})) if globals().setdefault("STATE", 1) else None
"""
ENDS = {
    "return": ("print('done')", 0),
    "exit": ("import sys; sys.exit(3)", 3),
    "message": ("raise SystemExit('no such setting')", 1),
    "error": ("import atexit; atexit.register(print, 'at exit'); raise ValueError('wrong')", 1),
    "interrupt": ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT),
    "terminate": ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    "thread": ("import threading; threading.Timer(0.01, print, ['late']).start()", 0),
    "no_such_script": (None, 1),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = ForkServer(tmp_path_factory.mktemp("processes"), imports=["numpy"])
    yield server
    server.close()


@pytest.fixture(params=["source", "file"])
def make(request, tmp_path):
    """``make(code)``: script for the fork server and for an interpreter."""

    def make(code: str):
        if request.param == "source":
            return code, ["-c", code]
        (tmp_path / "script.py").write_text(code)
        return tmp_path / "script.py", [str(tmp_path / "script.py")]

    return make


def test_a_script_finds_what_an_interpreter_would_give_it(server, make, tmp_path, monkeypatch):
    monkeypatch.setenv("OWN", "1")
    script, command = make(STATE)
    fresh = subprocess.run(
        [sys.executable, *command, "a", "b=c"], cwd=tmp_path, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    forked = server.run(script, ["a", "b=c"], cwd=tmp_path)
    expected = json.loads(fresh.stdout)
    assert json.loads(forked.stdout) == expected | {"leader": True}


@pytest.mark.parametrize("end", ENDS)
def test_a_script_ends_as_in_an_interpreter(server, tmp_path, end):
    code, status = ENDS[end]
    if code is None:
        assert server.run(tmp_path / "nowhere.py").returncode == status
        return
    fresh = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    forked = server.run(code)
    assert forked.returncode == fresh.returncode == status
    assert forked.stdout == fresh.stdout and forked.stderr.split("\n")[-2:] == fresh.stderr.split("\n")[-2:]


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
