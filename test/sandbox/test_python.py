"""Python sessions and the tool that uses them: variables, output, limits and cleanup."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import pickle
import signal
from collections.abc import Iterator

import pytest
from PIL import Image

from support.processes import descendants, process_state, wait_until_gone
from support.waiting import PATIENCE, in_thread, wait_until
from torchrl_rloo.envs.tools.python import PythonInterpreter
from torchrl_rloo.envs.tools.tool import ToolError
from torchrl_rloo.runtime import event_loop
from torchrl_rloo.sandbox import PythonSession, Sandbox, SessionResult

pytestmark = pytest.mark.usefixtures("sandboxed")
MB = 1 << 20


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    sandbox = Sandbox(timeout=60, shown=1000)
    yield sandbox
    sandbox.close()


@pytest.fixture
def session(sandbox: Sandbox) -> Iterator[PythonSession]:
    session = sandbox.open()
    yield session
    session.close()


def processes(sandbox: Sandbox) -> tuple[int, list[int]]:
    """Return the id of the starter, and those of its keepers and their sessions."""
    starter = sandbox.host().process.pid
    return starter, descendants(starter)


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


def test_variables_live_in_their_own_session_only(sandbox: Sandbox):
    first, second = sandbox.open(), sandbox.open()
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


def test_the_same_code_has_the_same_output(sandbox: Sandbox):
    code = "import random; print({'a', 'b', 'c', 'd', 'e'}, random.random())"
    first, second = sandbox.open().run(code), sandbox.open().run(code)
    assert first.output == second.output and first.reason == "ok"


# processes


def test_nothing_runs_between_calls(session: PythonSession):
    code = "import os, threading\ndef f():\n  while True: pass\nthreading.Thread(target=f, daemon=True).start()\n"
    pid = int(session.run(code + "os.getpid()").output)
    wait_until(lambda: process_state(pid) == "T", what="the stop of the process, with all its threads")
    assert session.run("1").output == "1\n", "it continues with the next call"
    wait_until(lambda: process_state(pid) == "T")


def test_sessions_beyond_the_limit_end_the_one_idle_for_longest():
    sandbox = Sandbox(timeout=60, sessions=2)
    first, second, third = (sandbox.open() for _ in range(3))
    for session in (first, second, third):
        assert not session.run("x = 1").restarted
    assert second.run("x").output == "1\n", "the first made room for the third"
    again = first.run("x")
    assert again.restarted and "NameError" in again.error
    assert not first.run("y = 1").restarted
    assert len(processes(sandbox)[1]) == 4
    many = [in_thread(sandbox.open().run, "import time; time.sleep(0.1)") for _ in range(6)]  # wait: all are busy
    assert [f.result(PATIENCE).reason for f in many] == ["ok"] * 6
    sandbox.close()


def test_closing_ends_the_process_and_its_call(sandbox: Sandbox):
    session = sandbox.open()
    family = json.loads(session.run("import os; [os.getpid(), os.getppid()]").output)
    running = in_thread(session.run, "while True: pass")
    wait_until(lambda: process_state(family[0]) == "R", what="the start of the call")
    session.close()
    assert running.result(PATIENCE).reason == session.run("1").reason == "closed"
    wait_until_gone(family)


def test_a_cancelled_call_costs_the_variables(session: PythonSession):
    async def talk() -> SessionResult:
        await session.call("x = 1")
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(session.call("import time; time.sleep(100)"), 0.2)
        return await session.call("print('x' in globals())")

    result = asyncio.run(talk())
    assert (result.output, result.restarted) == ("False\n", True)


def test_many_sessions_leak_nothing():
    sandbox = Sandbox(timeout=60)
    starter = sandbox.host().process.pid
    sandbox.open().run("1")

    def files() -> list[int]:
        return [len(os.listdir(f"/proc/{pid}/fd")) for pid in ("self", starter)]

    async def talk(many: list[PythonSession]) -> set[str]:
        return {result.output for result in await asyncio.gather(*(session.call("1") for session in many))}

    wait_until(lambda: descendants(starter) == [])  # the first session is dropped
    before = files()
    for _ in range(4):
        many = [sandbox.open() for _ in range(50)]
        assert asyncio.run(talk(many)) == {"1\n"}
        many[0].run("import os; os._exit(0)")
        for session in many:
            session.close()
    wait_until(lambda: descendants(starter) == [])
    wait_until(lambda: files() == before)
    sandbox.close()
    wait_until_gone(starter)


def test_a_dropped_object_ends_all():
    sandbox = Sandbox(timeout=60)
    sandbox.open().run("1")
    starter, running = processes(sandbox)
    del sandbox
    wait_until_gone([starter, *running])


def test_a_killed_starter_costs_what_ran():
    sandbox = Sandbox(timeout=60)
    busy, idle = sandbox.open(), sandbox.open()
    idle.run("x = 1")
    call = in_thread(busy.run, "while True: pass")
    starter, running = wait_until(lambda: len((found := processes(sandbox))[1]) == 4 and found)
    os.kill(starter, signal.SIGKILL)
    result = call.result(PATIENCE)
    assert (result.reason, result.ended) == ("lost", True)
    wait_until_gone(running)
    assert busy.run("1").output == "1\n"
    again = idle.run("x")
    assert again.restarted and "NameError" in again.error
    sandbox.close()


@pytest.mark.parametrize("hangs", [False, True])
def test_a_lost_keeper_is_replaced(monkeypatch: pytest.MonkeyPatch, hangs: bool):
    monkeypatch.setattr("torchrl_rloo.sandbox.sandbox.GRACE_S", 1.0 if hangs else PATIENCE)
    sandbox = Sandbox(timeout=1 if hangs else 60)
    session, other = sandbox.open(), sandbox.open()
    assert other.run("x = 1").reason == "ok"
    pid, keeper = json.loads(session.run("x = 1\nimport os; [os.getpid(), os.getppid()]").output)
    os.kill(keeper, signal.SIGSTOP if hangs else signal.SIGKILL)
    assert session.run("2").reason == "lost"
    wait_until_gone([pid, keeper])
    assert "NameError" in session.run("x").error and other.run("x").output == "1\n"
    sandbox.close()


def test_a_session_killed_from_outside_is_replaced(sandbox: Sandbox, session: PythonSession):
    pid = int(session.run("x = 1\nimport os; os.getpid()").output)
    os.kill(pid, signal.SIGKILL)
    wait_until_gone(pid)
    again = session.run("x")
    assert again.restarted and "NameError" in again.error


def test_pickles_and_survives_a_fork(sandbox: Sandbox, session: PythonSession):
    copy = pickle.loads(pickle.dumps(sandbox))
    assert copy.open().run("5").output == "5\n" and copy.policy == sandbox.policy
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
    python.sandbox.close()


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
    python.sandbox.close()


def test_a_call_that_took_too_long_is_told_from_one_that_failed(python: PythonInterpreter):
    async def call(code: str) -> None:
        await python.call(await python.open({}), code=code)

    with pytest.raises(TimeoutError):
        asyncio.run(call("while True: pass"))
    with pytest.raises(ToolError) as caught:
        asyncio.run(call("1 / 0"))
    assert not isinstance(caught.value, TimeoutError)


def test_a_channel_that_its_request_has_closed_counts_as_ended(session: PythonSession):
    assert session.run("1").output == "1\n"
    link = session.link
    link._channel.close()
    link.close()
    assert not link.is_usable()


def test_displayed_images_are_parts_of_the_result() -> None:
    draw = "import struct, zlib\ndef chunk(kind, data):\n    return struct.pack('>I', len(data)) + kind + data + "
    draw += "struct.pack('>I', zlib.crc32(kind + data))\nhead = struct.pack('>IIBBBBB', 3, 2, 8, 0, 0, 0, 0)\n"
    draw += "png = b'\\x89PNG\\r\\n\\x1a\\n' + chunk(b'IHDR', head) + chunk(b'IDAT', zlib.compress(b'\\0abc\\0abc')) + "
    draw += "chunk(b'IEND', b'')\nprint('before')\ndisplay(png)\nprint('after')"
    python = PythonInterpreter(timeout=30, images=True)
    assert "display" in python.description and python.returns_images
    assert "display" not in PythonInterpreter().description
    try:
        session = event_loop.run(python.open({}))
        text, image = event_loop.run(python.call(session, code=draw))
        assert text == "before\n[image]\nafter"
        content = base64.b64decode(image["url"].partition(",")[2])
        assert Image.open(io.BytesIO(content)).size == (3, 2)
        # What follows has no images; a long output keeps its images and loses its middle
        assert event_loop.run(python.call(session, code="1 + 1")) == "2"
        text, *images = event_loop.run(
            python.call(session, code="display(bytes(9000))\nprint('a' * 9000)\ndisplay(png)")
        )
        assert len(images) == 2 and "bytes of output are left out" in text and len(text) < 6000
        with pytest.raises(ToolError, match="takes the bytes of an image file, got str"):
            event_loop.run(python.call(session, code="display('a')"))
        with pytest.raises(ToolError, match="printed more than 1 MB"):
            event_loop.run(python.call(session, code="display(bytes(1 << 20))"))
    finally:
        python.sandbox.close()
