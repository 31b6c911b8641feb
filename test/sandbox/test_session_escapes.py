"""Attacks on Python sessions across calls: forged packets, work between calls, other sessions, leftovers of a close."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest

from support.processes import descendants, is_gone, wait_until_gone
from torchrl_rloo.sandbox.sandbox import SandboxUnavailableError
from torchrl_rloo.sandbox.sessions import PythonSession, PythonSessions

try:
    PythonSessions().close()
    MISSING = ""
except SandboxUnavailableError as error:
    MISSING = str(error)
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)


@pytest.fixture(scope="module")
def sessions() -> Iterator[PythonSessions]:
    sessions = PythonSessions(timeout=60.0, cpu_seconds=1, max_output=1000)
    yield sessions
    sessions.close()


@pytest.fixture
def other(sessions: PythonSessions) -> Iterator[PythonSession]:
    session = sessions.open()
    session.run("mine = 'mi' + 'ne'; print('said')")
    yield session
    session.close()


THREAD = "import os, threading, time\ndef forever(f):\n def g():\n  while True:\n   try: f()\n"
THREAD += "   except Exception: pass\n"
THREAD += " threading.Thread(target=g, daemon=True).start()\n"
ATTACKS = {
    # Work between calls
    "thread_prints_later": THREAD + "forever(lambda: (time.sleep(0.001), os.write(1, b'LATER')))",
    "thread_forges_later": THREAD + "forever(lambda: (time.sleep(0.001), os.write(3, b'12345678oLATER')))",
    "timer_prints_later": (
        "import os, signal\nsignal.signal(14, lambda *_: os.write(1, b'LATER'))\nsignal.setitimer(0, 0.05, 0.05)"
    ),
    "exit_handler": "import atexit, os\natexit.register(lambda: os.write(3, b'LATER'))\nimport sys; sys.exit()",
    "finalizer_forges": "import os\nclass A:\n def __del__(s): os.write(3, b'xxxxxxxxoLATER')\na = A()",
    # False answers
    "empty_packet": "import os; n = os.write(3, b'')",
    "short_packet": "import os; n = os.write(3, b'o')",
    "guessed_token": "import os\nfor i in range(200): n = os.write(3, i.to_bytes(8, 'big') + b'oLATER')",
    "long_packet": "import os; n = os.write(3, b'o' * 60_000)",
    "second_answer": (
        "import os, sys\nf = sys._getframe()\nwhile 'packet' not in f.f_locals: f = f.f_back\n"
        "for _ in range(9): n = os.write(3, f.f_locals['packet'][:8] + b'oLATER')"
    ),
    "unknown_letter": (
        "import os, sys\nf = sys._getframe()\nwhile 'packet' not in f.f_locals: f = f.f_back\n"
        "n = os.write(3, f.f_locals['packet'][:8] + b'\\xff' * 3000)"
    ),
    # Broken descriptors
    "channel_replaced": "import os; os.dup2(0, 3)",
    "channel_over_output": "import os; os.dup2(3, 1); os.write(1, b'LATER')",
    "output_over_channel": "import os; os.dup2(1, 3)",
    "copies_of_the_channel": "import os\nfor i in range(4, 32): n = os.dup2(3, i, inheritable=True)",
    "reopened_files": (
        "import os\nfor n in range(9):\n try: os.open(f'/proc/self/fd/{n}', os.O_RDWR)\n except OSError: pass"
    ),
    # Own interpreter
    "patched_read": "import os\nos.read = os.write = lambda *_: b'LATER'",
    "audit_hook": "import sys\nsys.addaudithook(lambda *_: None)\nimport gc; gc.freeze(); gc.disable()",
    "frames": (
        "import sys\nf = sys._getframe()\nwhile f: f.f_trace = lambda *a: 1 / 0; f = f.f_back\n"
        "sys.settrace(lambda *a: None)"
    ),
    "null_pointer": "import ctypes; ctypes.memset(0, 0, 1)",
    "overwritten_code": "import ctypes\nctypes.memset(id(len), 255, 64)\nlen([])",
}


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_changes_no_other_session(sessions: PythonSessions, other: PythonSession, name: str):
    keeper, attacker = sessions._keeper, sessions.open()
    first = attacker.submit(ATTACKS[name]).result(120)
    results = [other.submit("mine").result(120)]
    later = [attacker.submit("2 + 3").result(120) for _ in range(5)]
    results.append(other.submit("print(mine)").result(120))
    assert [result.output for result in results] == ["'mine'\n", "mine\n"] and not any(r.restarted for r in results)
    assert sessions._keeper is keeper and keeper.alive
    assert all(r.reason in ("ok", "error", "killed", "cpu", "memory", "output") for r in (first, *later))
    attacker.close()


def test_nothing_runs_or_is_left_after_a_close():
    before = set(descendants(os.getpid()))
    sessions = PythonSessions(timeout=60.0)
    opened = [sessions.open() for _ in range(4)]
    codes = ["import time; time.sleep(99)", "while True: pass", "1", THREAD]
    running = [session.submit(code) for session, code in zip(opened, codes, strict=True)]
    pids = json.loads(sessions.open().run("import os; [os.getpid(), os.getppid()]").output)
    opened[0].close()
    assert running[0].result(60).reason == "closed"
    sessions.close()
    assert [r.result(60).reason in ("lost", "ok", "killed", "cpu") for r in running[1:]] == [True] * 3
    wait_until_gone(set(descendants(os.getpid())) - before | set(pids))
    assert all(map(is_gone, pids))


@pytest.mark.parametrize("killed", ["keeper", "zygote", "session"])
def test_a_killed_process_costs_variables_only(killed: str):
    sessions = PythonSessions(timeout=60.0)
    session = sessions.open()
    pid, zygote = json.loads(session.run("x = 1\nimport os; [os.getpid(), os.getppid()]").output)
    keeper = sessions._keeper.starter.process.pid
    os.kill({"keeper": keeper, "zygote": zygote, "session": pid}[killed], 9)
    wait_until_gone(pid)
    for _ in range(3):  # the first call may find the end
        result = session.submit("'x' in globals()").result(60)
        if result.reason == "ok":
            break
    assert result.output == "False\n"
    sessions.close()
    wait_until_gone([keeper, zygote, pid])


def test_a_session_cannot_read_the_output_of_another(sessions: PythonSessions, other: PythonSession):
    pid = int(other.run("import os; os.getpid()").output)
    attacker = sessions.open()
    for number in range(6):
        for path in (
            f"/proc/{pid}/fd/{number}",
            f"/proc/{os.getpid()}/fd/{number}",
            f"/proc/{pid}/task/{pid}/fd/{number}",
        ):
            assert attacker.run(f"open({path!r}, 'rb').read()").reason == "error"
    attacker.close()
