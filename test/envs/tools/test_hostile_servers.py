"""MCP servers that lie, flood or fall silent: the call fails with a short text, and the next one is answered."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.waiting import PATIENCE
from torchrl_rloo.envs.tools import mcp_relay
from torchrl_rloo.envs.tools.mcp import ConnectionLostError, MCPTools
from torchrl_rloo.envs.tools.parsers import ToolCall, ToolResult
from torchrl_rloo.envs.tools.session import ToolSession
from torchrl_rloo.envs.tools.tool import ToolRegistry
from torchrl_rloo.runtime import event_loop

LIAR = str(Path(__file__).with_name("mcp_liar.py"))


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setattr(logging.getLogger("mcp"), "disabled", True)
    monkeypatch.setattr(logging.getLogger("client"), "disabled", True)


def call_twice(kind: str, timeout: float) -> list[ToolResult]:
    with MCPTools.stdio(sys.executable, [LIAR, kind], timeout=timeout, connect_timeout=PATIENCE) as tools:
        session = ToolSession(ToolRegistry(tools), {}, timeout=PATIENCE, max_chars=200)

        async def make() -> list[ToolResult]:
            return [await session.call(ToolCall(tools[0].name, {})) for _ in range(2)]

        return event_loop.run(make())


@pytest.mark.parametrize("kind", ["fine", "garbage", "twice", "flood", "loop", "names"])
def test_noise_does_not_change_the_result(kind):
    assert [(result.outcome, result.text) for result in call_twice(kind, PATIENCE)] == [("ok", "fine")] * 2


@pytest.mark.parametrize("kind", ["wrong_id", "bytes", "silent", "surrogate", "bad_error"])
def test_calls_without_a_valid_answer_time_out(kind):
    assert [result.outcome for result in call_twice(kind, 0.7)] == ["timed_out"] * 2


@pytest.mark.parametrize(
    ("kind", "text"),
    [("huge", "lost"), ("noise", "lost"), ("close", "lost"), ("shape", "ValidationError"), ("error", "m" * 100)],
)
def test_calls_of_a_server_that_breaks_the_protocol_fail(kind, text):
    for result in call_twice(kind, PATIENCE):
        assert result.outcome == "failed" and text in result.text and len(result.text) < 300


@pytest.mark.parametrize("kind", ["big", "control"])
def test_results_are_cut_and_cleaned(kind):
    for result in call_twice(kind, PATIENCE):
        assert result.outcome == "ok" and len(result.text) < 300 and "\0" not in result.text


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("many", "more than 1000 tools"),
        ("pages", "100 pages"),
        ("long_name", "must be 1 to 64 letters"),
        ("no_name", "name='' must be"),
        ("deep_schema", "parameters of give must be a JSON Schema, nested less than 32 deep"),
        ("bad_schema", "did not list its tools: ValidationError"),
        ("no_object", "did not list its tools: ValidationError"),
        ("wrong_list", "did not list its tools: ValidationError"),
    ],
)
def test_lists_of_tools_that_cannot_be_used_are_refused_at_once(kind, message):
    with pytest.raises((ValueError, ConnectionLostError), match=message) as raised:
        MCPTools.stdio(sys.executable, [LIAR, kind], connect_timeout=PATIENCE)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 800


def test_names_become_words_of_letters_digits_and_underscores():
    with MCPTools.stdio(sys.executable, [LIAR, "names"], connect_timeout=PATIENCE) as tools:
        assert [tool.name for tool in tools] == ["a_b__31m___im_end__"]


def relayed(data: str, limit: int) -> subprocess.CompletedProcess:
    code = f"import sys; sys.stdout.buffer.write({data})"
    command = [sys.executable, "-I", "-S", mcp_relay.__file__, str(limit), sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, timeout=PATIENCE)


@pytest.mark.parametrize(
    ("data", "forwarded"),
    [
        (b'{"a": 1}\n{"b": 2}\n', b'{"a": 1}\n{"b": 2}\n'),
        (b'noise\n{"a": 1}\n\n[1]\n {"b": 2}', b'{"a": 1}\n {"b": 2}'),
        (b'{"a": "\xff\r\x0b"}\n', b'{"a": "\xff\r\x0b"}\n'),
        (b"", b""),
    ],
)
def test_the_relay_forwards_objects_to_the_byte(data, forwarded):
    done = relayed(repr(data), 100)
    assert (done.stdout, done.returncode) == (forwarded, 0)


@pytest.mark.parametrize("data", ["b'{' + b'x' * 300_000", "b'x' * 300_000", "b'{}\\n' * 9 + b'{' + b'x' * 100_001"])
def test_the_relay_ends_a_server_at_the_limit_of_a_line(data):
    done = relayed(data, 100_000)
    assert len(done.stdout) < 200_000 and b"more than the limit of 100000 bytes" in done.stderr and done.returncode != 0


def test_the_relay_passes_long_lines_below_the_limit():
    data = "(b'{' + b'y' * 290_000 + b'}\\n') * 2"
    assert relayed(data, 300_000).stdout == (b"{" + b"y" * 290_000 + b"}\n") * 2


def test_a_program_is_found_as_its_process_would_find_it(tmp_path):
    program = tmp_path / "bin" / "my-server"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\nexec {sys.executable} {LIAR} fine\n")
    program.chmod(0o755)
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    for place in ({"command": "my-server", "env": {"PATH": path}}, {"command": "bin/my-server", "cwd": tmp_path}):
        with MCPTools.stdio(**place, connect_timeout=PATIENCE) as tools:
            assert [tool.name for tool in tools] == ["give"]
    program.chmod(0o644)
    with pytest.raises(ConnectionLostError, match="FileNotFoundError: command='bin/my-server' is no program"):
        MCPTools.stdio("bin/my-server", cwd=tmp_path, connect_timeout=PATIENCE)
