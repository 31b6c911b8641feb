"""MCPTools with a real server over stdio and HTTP: concurrent calls, sessions, and servers that die."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.processes import is_gone
from support.waiting import PATIENCE, wait_until
from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import keys, load_prompts
from torchrl_rloo.engines import ScriptedEngine, ScriptedTurn
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.envs.tools.mcp import ConnectionLostError, MCPTools
from torchrl_rloo.envs.tools.parsers import ToolCall, ToolResult
from torchrl_rloo.envs.tools.session import ToolSession
from torchrl_rloo.envs.tools.tool import ToolRegistry, tool
from torchrl_rloo.envs.transforms.tools import ToolTransform
from torchrl_rloo.images import ImageStore
from torchrl_rloo.modules import vLLMWrapper
from torchrl_rloo.runtime import event_loop

SERVER = str(Path(__file__).with_name("mcp_server.py"))


class HTTPServer:
    """Process of the server, which can be killed and restarted at its address."""

    def __init__(self):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/mcp"
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen([sys.executable, SERVER, str(self.port)], stderr=subprocess.DEVNULL)
        wait_until(self._listens)

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)


@pytest.fixture(scope="module")
def http_server() -> Iterator[HTTPServer]:
    server = HTTPServer()
    yield server
    server.kill()


@pytest.fixture
def connect(request) -> Iterator[Callable[..., MCPTools]]:
    """Return ``connect(transport, **settings)``, which connects to a server over "stdio" or "http"."""
    opened = []

    def make(transport: str = "stdio", **settings: Any) -> MCPTools:
        settings = {"timeout": 60.0, "connect_timeout": PATIENCE} | settings
        if transport == "stdio":
            opened.append(MCPTools.stdio(sys.executable, [SERVER], **settings))
        else:
            opened.append(MCPTools.http(request.getfixturevalue("http_server").url, **settings))
        return opened[-1]

    yield make
    for tools in opened:
        tools.close()


@pytest.fixture(scope="module", params=["stdio", "http"])
def tools(request) -> Iterator[MCPTools]:
    """Return the tools of a server that all tests share, over either transport."""
    settings = {"timeout": 60.0, "connect_timeout": PATIENCE}
    if request.param == "http":
        url = request.getfixturevalue("http_server").url
        made = MCPTools.http(url, headers={"X-Shelf": "7"}, **settings)
    else:
        os.environ["SECRET_OF_TESTS"] = "s"
        made = MCPTools.stdio(sys.executable, [SERVER], env={"SHELF": "7"}, **settings)
        del os.environ["SECRET_OF_TESTS"]
    with made:
        yield made


class Trajectory:
    """Trajectory whose calls run as those of a ToolTransform."""

    def __init__(self, tools, timeout: float = PATIENCE, store: ImageStore | None = None):
        self.session = ToolSession(ToolRegistry(tools), {"column": 1}, timeout=timeout, store=store)

    def results(self, *calls: tuple[str, dict]) -> list[ToolResult]:
        async def make() -> list[ToolResult]:
            return await asyncio.gather(*(self.session.call(ToolCall(name, arguments)) for name, arguments in calls))

        return event_loop.run(make())

    def __call__(self, name: str, **arguments: Any) -> str:
        return self.results((name, arguments))[0].text

    def end(self) -> None:
        event_loop.run(self.session.close())


def test_tools_are_as_the_server_declares_them(tools) -> None:
    named = {each.name: each for each in tools}
    assert len(named) == len(tools) == 17 and "odd_name" in named
    assert named["add"].description == "Adds two numbers."
    assert named["add"].schema["function"]["parameters"]["required"] == ["a"]
    call = Trajectory([*tools, tool(local)])
    assert (call("add", a=2, b=3), call("add", a=2), call("odd_name"), call("local")) == ("5", "3", "odd", "here")
    assert call("several") == ("one\n[image 20x10]\n[link: a book, file:///book]\na page\ntwo")
    assert call("nothing") == "(nothing)"


def test_images_of_a_server_are_stored(tools, tmp_path) -> None:
    store = ImageStore(tmp_path)
    (result,) = Trajectory(tools, store=store).results(("several", {}))
    assert [part["type"] for part in result.parts] == ["text", "image", "text", "text", "text"]
    assert store.load(result.parts[1]["url"]).size == (20, 10)


def local() -> str:
    """Run without a server."""
    return "here"


def test_errors_are_told(tools) -> None:
    call = Trajectory(tools)
    assert call("refuse") == "Error: no such shelf"
    assert call("crash").startswith("Error: ") and "crash" in call("crash")
    assert call("add", a="x").startswith("Error: ")
    assert call("add", a=1) == "2"


def test_a_call_that_takes_too_long_ends_and_delays_no_other(tools, monkeypatch) -> None:
    call = Trajectory(tools)
    before = call("arrived", tool="wait")

    async def play() -> list[ToolResult]:
        with monkeypatch.context() as patch:
            patch.setattr(tools, "timeout", 3.0)
            late = asyncio.ensure_future(call.session.call(ToolCall("wait", {"seconds": 600})))
            while (await call.session.call(ToolCall("arrived", {"tool": "wait"}))).text == before:
                await asyncio.sleep(0.01)
        return [await call.session.call(ToolCall("wait", {"seconds": 0})), await late]

    quick, late = event_loop.run(play())
    assert late.outcome == "timed_out" and "3 s" in late.text and quick.text == "waited"
    cut_short = Trajectory(tools, timeout=0.5).results(("wait", {"seconds": 600}))
    assert cut_short[0].outcome == "timed_out" and call("add", a=1) == "2"


def test_many_calls_go_at_a_time(tools) -> None:
    call = Trajectory(tools)
    calls = [("add", {"a": i}) for i in range(100)]
    assert [result.text for result in call.results(*calls)] == [str(i + 1) for i in range(100)]
    meeting = call.results(*[("meet", {"number": 50})] * 50)
    assert {result.text for result in meeting} == {"met"}, "each waits for the others"


def test_a_process_that_is_killed_is_told_and_started_again(connect) -> None:
    call = Trajectory(connect())
    first = int(call("pid"))

    async def kill_during_calls() -> list[ToolResult]:
        calls = [asyncio.ensure_future(call.session.call(ToolCall("meet", {"number": 4}))) for _ in range(3)]
        while (await call.session.call(ToolCall("arrived", {"tool": "meet"}))).text != "3":
            await asyncio.sleep(0.01)
        os.kill(first, signal.SIGKILL)
        return [await each for each in calls]

    for result in event_loop.run(kill_during_calls()):
        assert result.outcome == "failed" and result.text.startswith(
            "Error: the tool's server was lost during the call"
        )
    second = int(call("pid"))
    assert second != first and call("add", a=1) == "2"
    assert "lost during the call" in call("die")
    assert int(call("pid")) not in (first, second)


def test_a_call_that_only_reads_is_made_again_once(connect, tmp_path: Path) -> None:
    call = Trajectory(connect())
    before = int(call("pid"))
    after = int(call("die_once", marker=str(tmp_path / "died")))
    assert after == int(call("pid")) != before


def test_an_http_server_that_is_killed_and_comes_back() -> None:
    server = HTTPServer()
    with MCPTools.http(server.url, timeout=60.0, connect_timeout=PATIENCE) as tools:
        call = Trajectory(tools)
        assert call("add", a=1) == "2"
        assert call("die").startswith("Error: the tool's server was lost during the call")
        server.kill()
        gone = [call("add", a=1) for _ in range(3)]
        assert all(text.startswith("Error: the tool's server") for text in gone), gone
        server.start()
        assert call("add", a=1) == "2"
    server.kill()


def test_a_trajectory_has_its_own_session_over_http(connect) -> None:
    tools = connect("http", per_trajectory=True)
    first, second = Trajectory(tools), Trajectory(tools)
    assert [first("increase") for _ in range(3)] == ["1", "2", "3"]
    assert second("increase") == "1"
    assert (first("count"), second("count")) == ("3", "1"), "the tools of a server share the session"
    calls = [("increase", {}), ("count", {})] * 2
    assert [result.text for result in first.results(*calls)] == ["4", "4", "5", "5"], "one at a time, in order"
    first.end()
    third = Trajectory(tools)
    assert (third("count"), second("count")) == ("0", "1")
    assert len(tools._connections) == 2
    second.end()
    third.end()
    assert not tools._connections


def test_conversations_of_a_collector_have_their_own_sessions(connect, tokenizer, user) -> None:
    tools = connect("http", per_trajectory=True)
    call = '<tool_call>{"name": "%s", "arguments": {}}</tool_call><|im_end|>'
    turns = [
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in (call % "increase", call % "count", "7")
    ]

    def script(request, index: int) -> ScriptedTurn:
        said = tokenizer.decode(request.prompt).count("<tool_response>")
        return ScriptedTurn([*turns[min(said, 2)], *[tokenizer.eos_token_id] * (said == 2)])

    transform = ToolTransform([*tools, local], result_role="user", show_schemas=False, timeout=PATIENCE)
    env = DatasetChatEnv(
        load_prompts([{"query": user("Count.")}]),
        tokenizer,
        prompts_per_batch=1,
        num_generations=4,
        transforms=[transform],
    )
    with ScriptedEngine(script) as engine:
        rows = LLMCollector(env, vLLMWrapper(engine, tokenizer=tokenizer)).collect()
    for row in rows.unbind(0):
        said = [m["content"] for m in row[keys.COMPLETION] if m["role"] == "user"]
        assert said == ["<tool_response>\n1\n</tool_response>"] * 2 and int(row[keys.NUM_TOOL_CALLS]) == 2
    assert not tools._connections, "left with their conversations"


def test_a_trajectory_has_its_own_process_over_stdio(connect) -> None:
    tools = connect(per_trajectory=True)
    first, second = Trajectory(tools), Trajectory(tools)
    pids = [int(call("pid")) for call in (first, second)]
    assert len(set(pids)) == 2 and not any(map(is_gone, pids))
    assert (first("increase"), first("increase"), second("increase")) == ("1", "2", "1")
    assert "its state of this conversation is lost" in first("die")
    assert (first("increase"), second("increase")) == ("1", "2")
    second.session.timeout = 1.0
    (late,) = second.results(("block", {}))
    assert late.outcome == "timed_out" and late.text.endswith("and its state is lost")
    second.session.timeout = PATIENCE
    assert second("count") == "0", "the other tools share the new session"
    pids += [int(call("pid")) for call in (first, second)]
    for call in (first, second):
        call.end()
    wait_until(lambda: not tools._connections and all(map(is_gone, pids)))


def test_environment_and_headers(tools) -> None:
    call = Trajectory(tools)
    if tools._mode == "auto" and call("header", key="x-shelf") == "7":
        return  # over HTTP
    assert call("variable", key="SHELF") == "7"
    assert call("variable", key="SECRET_OF_TESTS") != "s", "not inherited"


def test_closing_ends_even_a_blocked_process_and_refuses_calls(connect) -> None:
    with connect() as tools:
        call = Trajectory(tools)
        pid = int(call("pid"))
        tools.timeout = 1.0
        assert call.results(("block", {}))[0].outcome == "timed_out"
    wait_until(lambda: is_gone(pid))
    assert call("add", a=1) == "Error: the tool's server was closed"
    tools.close()


def test_tools_that_are_forgotten_end_their_server(connect) -> None:
    tools = MCPTools.stdio(sys.executable, [SERVER], connect_timeout=PATIENCE)
    pid = int(event_loop.run(event_loop.call(next(t for t in tools if t.name == "pid").call, None)))
    assert not is_gone(pid)
    del tools
    gc.collect()
    wait_until(lambda: is_gone(pid))


@pytest.mark.slow
def test_nothing_is_left_when_the_process_ends(fork_server) -> None:
    code = (
        "import sys\n"
        "from torchrl_rloo.runtime import event_loop\n"
        "from torchrl_rloo.envs.tools.mcp import MCPTools\n"
        f"tools = MCPTools.stdio(sys.executable, [{SERVER!r}], connect_timeout={PATIENCE})\n"
        "named = {each.name: each for each in tools}\n"
        "print(event_loop.run(event_loop.call(named['pid'].call, None)))\n"
        "tools.timeout = 1.0\n"
        "try: event_loop.run(event_loop.call(named['block'].call, None))\n"
        "except TimeoutError: print('late')\n"
    )
    done = fork_server.run(code)
    pid, late = done.stdout.split()
    assert late == "late", done.stderr
    wait_until(lambda: is_gone(int(pid)))


def test_a_users_function_that_blocks_the_loop_costs_a_reconnection(connect) -> None:
    call = Trajectory(connect())
    first = int(call("pid"))

    async def block():
        time.sleep(4)

    async def blocked():
        with pytest.raises(TimeoutError):
            await event_loop.call(block, timeout=0.2)

    event_loop.run(blocked())
    assert int(call("pid")) != first and call("add", a=1) == "2"
    wait_until(lambda: is_gone(first))


def test_servers_that_cannot_be_reached(tmp_path: Path) -> None:
    with pytest.raises(ConnectionLostError, match="cannot be reached: FileNotFoundError"):
        MCPTools.stdio(str(tmp_path / "no-such-program"))
    with pytest.raises(ConnectionLostError, match="cannot be reached"):
        MCPTools.stdio(sys.executable, ["-c", "pass"], connect_timeout=PATIENCE)
    started = time.monotonic()
    with pytest.raises(ConnectionLostError, match="no answer within 1 s"):
        MCPTools.stdio(sys.executable, ["-c", "import time; time.sleep(600)"], connect_timeout=1.0)
    with pytest.raises(ConnectionLostError, match="cannot be reached"):
        MCPTools.http("http://127.0.0.1:9/mcp", connect_timeout=PATIENCE)
    assert time.monotonic() - started < 100


def test_invalid_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="url='ftp://x' must start with http"):
        MCPTools.http("ftp://x")
    with pytest.raises(ValueError, match="timeout=0 must be above 0"):
        MCPTools.stdio("x", timeout=0)


def test_two_servers_with_tools_of_one_name(connect) -> None:
    one, other = connect("http"), connect("http", prefix="b_")
    call = Trajectory([*one, *other])
    assert call("b_add", a=1) == call("add", a=1) == "2"
    with pytest.raises(ValueError, match="two tools named"):
        ToolRegistry([*one, *one])
