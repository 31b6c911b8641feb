"""Python sessions and the tool that uses them: variables, output, limits and cleanup."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import pytest

from support.processes import process_state
from support.waiting import wait_until
from torchrl_rloo.envs.tools.python import PythonInterpreter
from torchrl_rloo.envs.tools.tool import ToolError
from torchrl_rloo.sandbox import kernel
from torchrl_rloo.sandbox.sandbox import SandboxUnavailableError
from torchrl_rloo.sandbox.sessions import PythonSession, PythonSessions

try:
    PythonSessions().close()
    MISSING = ""
except SandboxUnavailableError as error:
    MISSING = str(error)
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)
MB = 1 << 20


@pytest.fixture(scope="module")
def sessions() -> Iterator[PythonSessions]:
    sessions = PythonSessions(timeout=60, max_output=1000)
    yield sessions
    sessions.close()


@pytest.fixture
def session(sessions: PythonSessions) -> Iterator[PythonSession]:
    session = sessions.open()
    yield session
    session.close()


def children(pid: int) -> list[int]:
    """Return all processes that any thread of ``pid`` has started, zombies included."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = path.read_text().rpartition(")")[2].split()[1]
        except OSError:  # it has just ended
            continue
        if int(parent) == pid:
            found.append(int(path.parent.name))
    return sorted(found)


def processes(sessions: PythonSessions) -> tuple[int, int, list[int]]:
    """Return the ids of the keeper, of the zygote, and of all sessions."""
    sessions.open().run("1")
    keeper = sessions._keeper.starter.process.pid
    (zygote,) = children(keeper)
    return keeper, zygote, children(zygote)


# output of a call


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("x = 1", ""),
        ("1 + 1", "2\n"),
        ("print('a'); 'b'", "a\n'b'\n"),
        ("import sys; print('a'); print('b', file=sys.stderr); print('c')", "a\nb\nc\n"),
        ("import os; os.write(1, b'raw\\n'); print('text')", "raw\ntext\n"),
        ("print('gr\u00fc\u00df \U0001f600')", "gr\u00fc\u00df \U0001f600\n"),
        ("print('\\ud800')", "\\ud800\n"),
        ("import os; n = os.write(1, b'\\xff\\xfe')", "\ufffd\ufffd"),
        ("print('a\\0b\\r\\nc')", "a\0b\r\nc\n"),
        ("class A:\n  def __repr__(self): return 'an A'\nA()", "an A\n"),
        ("import __main__; y = 3; print(__name__, __main__.y)", "__main__ 3\n"),
        ("from concurrent.futures import ThreadPoolExecutor as T\nsum(T(8).map(abs, range(-9, 0)))", "45\n"),
        ("exit()", ""),
        ("", ""),
        ("def f(x: Unknown) -> int: pass", None),  # annotations are evaluated, as in any program
    ],
)
def test_what_is_shown(session: PythonSession, code: str, output: str | None):
    result = session.run(code)
    assert result.reason == ("error" if output is None else "ok"), result
    assert output is None or (result.output, result.error) == (output, "")


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("1 / 0", '  File "<call 2>", line 1, in <module>\n    1 / 0\nZeroDivisionError: division by zero'),
        ("def f():\n    raise KeyError('k')\nf()", "line 3, in <module>\n    f()\n"),
        ("import json\njson.loads('{')", '  File "<call 2>", line 2, in <module>\n    json.loads'),
        ("x = = 1", "SyntaxError: invalid syntax"),
        ("x = '\0'", "null bytes"),
        ("import numpy", "ModuleNotFoundError"),
        ("input()", "EOFError"),
        ("import sys; sys.exit('too bad')", "SystemExit: too bad"),
        ("earlier()", 'File "<call 1>", line 2, in earlier\n    return 1 / 0'),
    ],
)
def test_an_exception_is_shown_and_survived(session: PythonSession, code: str, error: str):
    session.run("def earlier():\n    return 1 / 0\nkept = 5")
    result = session.run(code)
    assert result.reason == "error" and error in result.error and not result.ended, result
    assert "python_cell" not in result.error and "json/" not in result.error, "the session's own lines only"
    assert session.run("kept").output == "5\n"


def test_variables_live_in_their_own_session_only(sessions: PythonSessions):
    first, second = sessions.open(), sessions.open()
    assert first.run("import math\nx = 41\ndef f(): return x + 1").reason == "ok"
    assert second.run("x").error.endswith("NameError: name 'x' is not defined")
    assert first.run("x += 1; f(), math.floor(2.5)").output == "(43, 2)\n"
    for session in (first, second):
        session.close()
        session.close()
        assert session.run("1").reason == "closed"


def test_the_head_and_the_tail_of_long_output_are_shown(session: PythonSession):
    result = session.run("print('a' * 5000); print('b' * 5000)")
    assert result.reason == "ok" and len(result.output) < 1100
    assert result.output.startswith("aaa") and result.output.endswith("bbb\n")
    assert "[9002 bytes of output are left out here]" in result.output
    assert session.run("print('a' * 999)").output == "a" * 999 + "\n", "as much as may be shown"
    assert session.run("1").output == "1\n", "nothing of an earlier call"


def test_the_same_code_has_the_same_output(sessions: PythonSessions):
    code = "import random; print({'a', 'b', 'c', 'd', 'e'}, random.random())"
    first, second = sessions.open().run(code), sessions.open().run(code)
    assert first.output == second.output and first.reason == "ok"


# processes


def test_calls_of_a_session_come_one_after_another(sessions: PythonSessions):
    first, second = sessions.open(), sessions.open()
    slow = first.submit("import time; time.sleep(0.3); order = ['slow']")
    later = [first.submit(f"order.append({i}); order") for i in range(3)]
    assert second.run("2").output == "2\n"
    assert [f.result().output for f in later] == ["['slow', 0]\n", "['slow', 0, 1]\n", "['slow', 0, 1, 2]\n"]
    assert slow.done()


def test_nothing_runs_between_calls(session: PythonSession):
    code = "import os, threading\ndef f():\n  while True: pass\nthreading.Thread(target=f, daemon=True).start()\n"
    pid = int(session.run(code + "os.getpid()").output)
    wait_until(lambda: process_state(pid) == "T", what="the stop of the process, with all its threads")
    assert session.run("1").output == "1\n", "it continues with the next call"
    wait_until(lambda: process_state(pid) == "T")


def test_sessions_beyond_the_limit_end_the_one_idle_for_longest():
    sessions = PythonSessions(timeout=60, max_sessions=2)
    first, second, third = (sessions.open() for _ in range(3))
    for session in (first, second, third):
        assert not session.run("x = 1").restarted
    assert second.run("x").output == "1\n", "the first made room for the third"
    again = first.run("x")
    assert again.restarted and "NameError" in again.error
    assert not first.run("y = 1").restarted
    _, _, running = processes(sessions)
    assert len(running) == 2
    many = [sessions.open().submit("import time; time.sleep(0.1)") for _ in range(6)]  # wait, since all are busy
    assert [f.result().reason for f in many] == ["ok"] * 6
    sessions.close()


def test_closing_ends_the_process_and_its_calls(sessions: PythonSessions):
    session = sessions.open()
    session.run("1")
    _, zygote, before = processes(sessions)
    running, waiting = session.submit("while True: pass"), session.submit("1")
    session.close()
    assert (running.result(60).reason, waiting.result(60).reason) == ("closed", "closed")
    wait_until(lambda: len(children(zygote)) == len(before) - 1)


def test_many_sessions_leak_nothing():
    sessions = PythonSessions(timeout=60)
    keeper, zygote, _ = processes(sessions)

    def files() -> list[int]:
        return [len(os.listdir(f"/proc/{pid}/fd")) for pid in ("self", keeper, zygote)]

    before = files()
    for _ in range(4):
        many = [sessions.open() for _ in range(50)]
        assert {f.result().output for f in [s.submit("1") for s in many]} == {"1\n"}
        many[0].submit("import os; os._exit(0)").result()
        for session in many:
            session.close()
    wait_until(lambda: len(children(zygote)) == 1)  # that of `processes`
    wait_until(lambda: files() == before)
    sessions.close()
    wait_until(lambda: not Path(f"/proc/{keeper}").exists() and not Path(f"/proc/{zygote}").exists())


def test_a_dropped_object_ends_all():
    sessions = PythonSessions(timeout=60)
    pids = processes(sessions)
    del sessions
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in (*pids[:2], *pids[2])))


def forked(work: Callable[[Callable[[object], int]], None]) -> tuple[int, BinaryIO]:
    """Fork a process that may write lines, and return its id and the file to read them from.

    A fork is quicker than a fresh interpreter, which would import everything again.
    """
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.close(read)
            work(lambda line: os.write(write, f"{line}\n".encode()))
        finally:
            os._exit(0)
    os.close(write)
    return pid, open(read, "rb")


def test_a_killed_trainer_takes_all_with_it():
    def work(tell: Callable[[object], int]) -> None:
        sessions = PythonSessions(timeout=60)
        busy, idle = sessions.open(), sessions.open()
        idle.run("1")
        busy.submit("while True: pass")
        tell(sessions._keeper.starter.process.pid)
        time.sleep(60)

    trainer, lines = forked(work)
    keeper = int(lines.readline())
    (zygote,) = children(keeper)
    wait_until(lambda: len(children(zygote)) == 2)
    pids = [keeper, zygote, *children(zygote)]
    os.kill(trainer, signal.SIGKILL)
    os.waitpid(trainer, 0)
    lines.close()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


@pytest.mark.parametrize("victim", ["keeper", "zygote"])
def test_a_killed_keeper_costs_what_ran(victim: str):
    sessions = PythonSessions(timeout=60)
    busy, idle = sessions.open(), sessions.open()
    idle.run("x = 1")
    call = busy.submit("while True: pass")
    pids = dict(zip(("keeper", "zygote", "sessions"), processes(sessions), strict=True))
    os.kill(pids[victim], signal.SIGKILL)
    result = call.result(60)
    assert (result.reason, result.ended) == ("lost", True)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids["sessions"]))
    assert busy.run("1").output == "1\n"
    again = idle.run("x")
    assert again.restarted and "NameError" in again.error
    sessions.close()


def test_a_hanging_keeper_is_replaced(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torchrl_rloo.sandbox.sessions.GRACE_S", 1.0)
    sessions = PythonSessions(timeout=1)
    session = sessions.open()
    session.run("1")
    os.kill(sessions._keeper.starter.process.pid, signal.SIGSTOP)
    assert session.submit("2").result(60).reason == "lost"
    assert session.submit("3").result(60).output == "3\n"
    sessions.close()


def test_a_session_killed_from_outside_is_replaced(sessions: PythonSessions, session: PythonSession):
    _, zygote, before = processes(sessions)
    session.run("x = 1")
    (pid,) = set(children(zygote)) - set(before)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: pid not in children(zygote))
    again = session.run("x")
    assert again.restarted and "NameError" in again.error


def test_pickles_and_survives_a_fork(sessions: PythonSessions, session: PythonSession):
    copy = pickle.loads(pickle.dumps(sessions))
    assert copy.open().run("5").output == "5\n" and copy.max_output == sessions.max_output
    copy.close()
    session.run("x = 7")
    if (pid := os.fork()) == 0:
        code = 1
        try:
            code = 0 if session.run("6").output == "6\n" else 2
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert session.run("x").output == "7\n"


def test_a_missing_layer_is_refused_by_default():
    def work(tell: Callable[[object], int]) -> None:
        i = kernel.instruction  # no Landlock from here on
        kernel.install_filter(i(0x20, 0) + i(0x15, 444, 0, 1) + i(0x06, 0x00050026) + i(0x06, 0x7FFF0000))
        try:
            PythonInterpreter()
        except SandboxUnavailableError as error:
            tell(error)
        weaker = PythonInterpreter(allow_weaker=True).sessions
        session = weaker.open()
        tell((len(weaker.missing), session.run("1").reason, session.run("import os; os.fork()").reason))

    pid, lines = forked(work)
    message, facts = lines.read().decode().splitlines()
    os.waitpid(pid, 0)
    assert "Landlock" in message and "allow_weaker=True" in message
    assert facts == "(1, 'ok', 'error')"


def test_unusable_settings_are_refused():
    wrong = {"timeout": 0, "cpu_seconds": 0, "memory": MB, "max_output": 0, "max_sessions": 0}
    for name, value in (wrong | {"max_output": 2 * MB}).items():
        with pytest.raises(ValueError, match=name):
            PythonInterpreter(**{name: value})


# the tool


@pytest.fixture(scope="module")
def python() -> Iterator[PythonInterpreter]:
    python = PythonInterpreter(timeout=60, cpu_seconds=1, memory=128 * MB)
    yield python
    python.sessions.close()


def said(python: PythonInterpreter, *codes: str) -> list[str]:
    """Return what the policy reads after each call of one trajectory."""

    async def talk() -> list[str]:
        state, texts = await python.open({}), []
        for code in codes:
            try:
                texts.append(await python.call(state, code=code))
            except ToolError as error:
                texts.append(f"!{error}")
        await python.close(state)
        return texts

    return asyncio.run(talk())


def test_what_the_policy_reads(python: PythonInterpreter):
    first, second, third = said(python, "x = 6", "x * 7", "print('so far')\nx / 0")
    assert (first, second) == ("(no output)", "42")
    assert third.startswith("!The code raised an exception:\n") and third.endswith("it had printed:\nso far")
    looped, lost = said(python, "print('begun'); x = 1\nwhile True: pass", "x")
    assert looped == (
        "!The code took more than 1 s of CPU time and was stopped.\nBefore that it had printed:\nbegun\n"
        "All variables are lost."
    )
    assert "NameError" in lost
    assert said(python, "#" * 70_000) == ["!The code is longer than 64 kB and was not run."]
    (memory,) = said(python, "x = bytearray(1 << 40)")
    assert memory.startswith("!The code exceeded the memory limit of 128 MB.\n")


def test_the_tool_says_that_variables_were_lost():
    python = PythonInterpreter(timeout=60, max_sessions=1)

    async def talk() -> str:
        first, second = await python.open({}), await python.open({})
        await python.call(first, code="x = 1")
        await python.call(second, code="x = 1")
        return await python.call(first, code="print('here')")

    assert asyncio.run(talk()) == "here\nThe interpreter was restarted before this call: earlier variables are lost."
    python.sessions.close()


def test_a_call_that_took_too_long_is_told_from_one_that_failed(python: PythonInterpreter):
    async def call(code: str) -> None:
        await python.call(await python.open({}), code=code)

    with pytest.raises(TimeoutError):
        asyncio.run(call("while True: pass"))
    with pytest.raises(ToolError) as caught:
        asyncio.run(call("1 / 0"))
    assert not isinstance(caught.value, TimeoutError)
