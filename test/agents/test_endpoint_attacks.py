"""Attacks on the endpoint over raw sockets: each is refused in one line and counted, and the server lives on."""

from __future__ import annotations

import asyncio
import json
import socket
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace

import pytest
from aiohttp import ClientSession

from support.waiting import wait_until
from torchrl_rloo.agents import PolicyEndpoint
from torchrl_rloo.agents.chat_format import FormatError
from torchrl_rloo.agents.guard import Exchanges
from torchrl_rloo.agents.policy_endpoint import OpenConversation
from torchrl_rloo.data import keys
from torchrl_rloo.engines.base import Request
from torchrl_rloo.engines.scripted import ScriptedEngine, ScriptedTurn
from torchrl_rloo.envs import ChatEnv
from torchrl_rloo.modules import vLLMWrapper

PATIENCE = 60  # seconds; only a test that hangs takes as long
QUERY = [{"role": "user", "content": "abc"}]
PATH = "/v1/chat/completions"
BODY = json.dumps({"messages": QUERY}).encode()
NESTED = "[" * 50_000 + "]" * 50_000


class World:
    """Endpoint in front of an engine whose turns end at once, unless ``latency`` is set."""

    def __init__(self, tokenizer):
        self.latency, self.tokenizer = 0.0, tokenizer
        self.engine = ScriptedEngine(self.script)
        policy = vLLMWrapper(self.engine, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 9})
        self.endpoint = PolicyEndpoint(policy, ChatEnv(tokenizer), max_parallel=2)
        self.server, self.counts = self.endpoint.server, self.endpoint.counts
        self.conversation = self.endpoint.open(QUERY, seed=1)
        self.key, self.host = self.conversation.context.api_key, f"127.0.0.1:{self.server.port}"

    def script(self, request: Request, index: int) -> ScriptedTurn:
        return ScriptedTurn([40 + index % 9, self.tokenizer.eos_token_id], latency=self.latency)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.server.port), timeout=PATIENCE)

    def head(self, *lines: str, path: str = PATH, method: str = "POST", host: str | None = "") -> bytes:
        first = [f"{method} {path} HTTP/1.1"] + ([] if host is None else [f"Host: {host or self.host}"])
        return "\r\n".join([*first, f"Authorization: Bearer {self.key}", *lines, "", ""]).encode("latin-1")

    def post(self, body: bytes, *lines: str, **kwargs: str | None) -> bytes:
        return self.head(f"Content-Length: {len(body)}", *lines, **kwargs) + body

    def answer(self, data: bytes) -> tuple[int, bytes]:
        """Send bytes as they are; return the status and the body of the first response."""
        with self.connect() as connection, suppress(ConnectionError):
            with suppress(ConnectionError):  # refused before all was read
                connection.sendall(data)
            return read_response(connection)
        return 0, b""

    def refused(self, reason: str) -> int:
        return self.counts[f"endpoint/refused/{reason}"]


def read_response(connection: socket.socket) -> tuple[int, bytes]:
    """Return the status and the body of a response; 0 if there is none."""
    with connection.makefile("rb") as file:
        if not (line := file.readline()):
            return 0, b""
        length = 0
        while (header := file.readline()) not in (b"\r\n", b""):
            name, _, value = header.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        return int(line.split()[1]), file.read(length)


@pytest.fixture
def world(tokenizer) -> Iterator[World]:
    made = World(tokenizer)
    yield made
    made.endpoint.close()
    made.engine.close()


def test_hostile_requests_are_refused_in_one_line_and_counted(world: World) -> None:
    ended = world.endpoint.open(QUERY)
    ended.finish()
    call = {"function": {"name": "f", "arguments": NESTED}}
    deep = json.dumps({"messages": [{"role": "assistant", "tool_calls": [call]}]}).encode()
    both = ["Content-Length: 5", "Transfer-Encoding: chunked"]
    attacks = {
        "key": [
            world.post(BODY, path=f"/k/{ended.context.api_key}{PATH}"),
            world.post(BODY, path=f"/k/%00{PATH}"),
            world.post(BODY, path=f"/k/{world.key}%0d%0aX:1{PATH}"),
            world.post(BODY).replace(world.key.encode(), b"\xff\xfe"),
            world.post(BODY).replace(world.key.encode(), world.key[::-1].encode()),
        ],
        "host": [
            world.post(BODY, host="evil.example"),
            world.post(BODY, host=f"127.0.0.1.evil.example:{world.server.port}"),
            world.post(BODY, host=f"localhost@evil.example:{world.server.port}"),
            world.post(BODY, "Origin: http://evil.example"),
            world.post(BODY, "Origin: null"),
            world.head("Origin: http://evil.example", "Access-Control-Request-Method: POST", method="OPTIONS"),
        ],
        "path": [
            world.post(BODY, path="/v1/../v1/chat/completions/../../../etc/passwd"),
            world.post(BODY, path="/v1/chat/completions/"),
            world.post(BODY, path="/%2e%2e/%2e%2e/etc/passwd"),
            world.post(BODY, path="//v1/chat/completions"),
            world.post(BODY, path=f"/k//{world.key}{PATH}"),
            world.head(method="GET"),
            world.head(method="DELETE", path="/v1/models"),
        ],
        "request": [
            world.post(b"[" * 5000),
            world.post(b"[" * 90_000 + b"]" * 90_000),
            world.post(deep),
            world.post(b'{"messages": [{"role": "user", "content": "\\ud800"}]}'),
            world.post(b'{"messages": 1, "messages": 2}'),
            world.post(b'{"messages": [{"role": "user", "content": 1e999}]}'),
            world.post(b"\xff\xfe" + BODY),
            world.post(zlib.compress(b" " * 10_000_000), "Content-Encoding: deflate"),
            world.post(BODY, "Idempotency-Key: " + "k" * 1000),
        ],
        "size": [world.head(f"Content-Length: {2**40}") + b" " * (17 * 2**20)],
        "http": [
            world.post(BODY, host=None),
            b"GET / HTTP/9.9\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            world.head(*both) + b"0\r\n\r\nPOST / HTTP/1.1\r\n",
            world.head("Content-Length: 5", "Content-Length: 6") + b"abcdef",
            world.head("Content-Length: -1"),
            world.head("Content-Length: +5") + b"abcde",
            world.head("Transfer-Encoding: chunked", "Transfer-Encoding: identity") + b"5\r\nabcde\r\n0\r\n\r\n",
            world.head("Content-Length : 5") + b"abcde",
            world.head("X: a\rb"),
            world.head("X: " + "a" * 100_000),
            world.head(*(f"X-{i}: {i}" for i in range(5000))),
            world.head(path="/" + "a" * 100_000),
        ],
    }
    for reason, requests in attacks.items():
        for number, request in enumerate(requests):
            before = world.refused(reason)
            status, body = world.answer(request)
            shown = (reason, number, status, body[:200])
            assert world.refused(reason) == before + 1, (shown, world.counts)
            if body or reason != "size":  # a client that still sends may not see the answer
                assert 400 <= status < 500 and b"\n" not in body and json.loads(body)["error"]["message"], shown
            assert world.answer(world.post(BODY))[0] == 200, shown
    row = world.conversation.finish()
    assert int(row[keys.NUM_TURNS]) == sum(map(len, attacks.values())) == len(world.engine.requests)


def test_slow_and_too_many_connections_are_closed(world: World) -> None:
    world.server.gate.read_timeout = 0.3
    whole = world.post(BODY)
    for part in (b"", whole[:20], whole[:-1]):
        assert world.answer(part)[0] == 408
    assert world.refused("slow") == 3
    world.server.gate.read_timeout, world.server.gate.max_connections = 1e3, 3
    wait_until(lambda: world.server.gate.open == 0)
    # Strangers give way, oldest first, whether they are silent or repeat a request without a key
    silent, loud = [world.connect() for _ in range(2)], world.connect()
    wait_until(lambda: world.server.gate.open == 3)
    assert world.answer(whole)[0] == 200 and read_response(silent[0])[0] == 503 and world.refused("connections") == 1
    for stranger in (
        whole.replace(world.key.encode(), b"x" * 43),
        world.post(BODY, path="/none"),
        world.head(host="a.b"),
    ):
        loud.sendall(stranger)
        assert read_response(loud)[0] in (401, 403, 404) and loud.recv(1) == b""  # it is closed
        loud.close()
        loud = world.connect()
    # Clients with a key do not
    wait_until(lambda: world.server.gate.open == 2)
    known = [world.connect() for _ in range(3)]
    for connection in known:
        connection.sendall(whole)
        assert read_response(connection)[0] == 200
    assert world.server.gate.open == 3 and not world.server.gate.strangers
    status, body = world.answer(whole)
    assert status == 503 and b"3 connections" in body
    known[0].close()
    wait_until(lambda: world.server.gate.open == 2)
    assert world.answer(whole)[0] == 200
    for connection in (*silent, loud, *known):
        connection.close()


ODD = [0, -1, 2**31, 10**30, 1.5, True, False, "5", "", [], [5], {}, {"a": 1}]
USER = {"messages": QUERY}


@pytest.mark.parametrize(
    ("path", "body", "names", "others"),
    [
        (PATH, USER, ("max_tokens", "max_completion_tokens", "n"), ("messages", "tools", "response_format")),
        ("/v1/messages", USER, ("max_tokens",), ("messages", "tools", "system", "tool_choice")),
        ("/v1/responses", {"input": QUERY}, ("max_output_tokens",), ("input", "tools", "instructions", "text")),
    ],
    ids=["chat", "messages", "responses"],
)
def test_odd_values_of_a_request_are_the_agents_fault(world: World, path: str, body: dict, names: tuple, others: tuple):
    """Numbers are refused, other values refused or without effect, and neither breaks the conversation."""

    def ask(**values: object) -> tuple[int, bytes]:
        return world.answer(world.post(json.dumps(body | values).encode(), path=path))

    for value in ODD:
        for name in names:
            status, said = ask(**{name: value})
            assert status == 400 and name in said.decode(), (name, value, said)
        for name in (*others, "model", "stream", "stream_options", "tool_choice", "metadata"):
            assert ask(**{name: value})[0] in (200, 400), (name, value)
            item = [{"role": value, "type": value, "content": value}, {"role": "assistant", name: [value]}]
            assert ask(**{next(iter(body)): item})[0] in (200, 400), (name, value)
        for name in ("temperature", "top_p", "seed", "stop", "stop_sequences", "top_logprobs", "logit_bias"):
            assert ask(**{name: value})[0] == 200, (name, value)
    assert ask(**{names[0]: 2**31 - 1})[0] == 200  # the policy's limit holds
    assert world.counts["agent/failed_calls"] == 0 and world.conversation.session.error is None


async def _post(
    http: ClientSession, conversation: OpenConversation, messages: list[dict], **headers: str
) -> tuple[int, str, dict]:
    url, headers = conversation.context.base_url, {"Authorization": f"Bearer {conversation.context.api_key}"} | headers
    async with http.post(f"{url}/chat/completions", json={"messages": messages}, headers=headers) as reply:
        body = await reply.json()
        said = body["choices"][0]["message"]["content"] if reply.status == 200 else body["error"]["message"]
        return reply.status, said, dict(reply.headers)


def test_calls_beyond_the_limits_wait_or_are_refused_and_cancelled_ones_stop_sampling(world: World) -> None:
    world.latency, world.server.max_waiting = 1e9, 4

    async def main() -> None:
        async with ClientSession() as http:
            calls = [asyncio.ensure_future(_post(http, world.conversation, QUERY)) for _ in range(4)]
            await asyncio.to_thread(wait_until, lambda: world.server._calls.total() == 4)
            await asyncio.to_thread(wait_until, lambda: world.engine.load().running == 2)  # max_parallel
            status, said, headers = await _post(http, world.conversation, QUERY)
            assert status == 429 and headers["Retry-After"] == "1" and "4 calls" in said
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            await asyncio.to_thread(wait_until, lambda: world.engine.load().running == 0)
            world.latency = 0.0
            await asyncio.to_thread(wait_until, lambda: world.server._calls.total() == 0)
            assert (await _post(http, world.conversation, QUERY))[0] == 200

    asyncio.run(main())
    row = world.conversation.finish()
    assert int(row[keys.NUM_TURNS]) == 1 and world.refused("busy") == 1
    # The call after them takes the first one's random numbers
    assert world.counts["agent/cancelled_calls"] == 4
    assert world.engine.requests[-1].seed == world.engine.requests[0].seed != world.engine.requests[1].seed


def test_a_closed_endpoint_cancels_its_calls(world: World) -> None:
    world.latency = 1e9
    with world.connect() as connection:
        connection.sendall(world.post(BODY))
        wait_until(lambda: world.engine.load().running == 1)
        began = time.monotonic()
        world.endpoint.close()
        assert read_response(connection)[0] != 200 and time.monotonic() - began < 30
    wait_until(lambda: world.engine.load().running == 0)


def test_repeated_requests_get_the_first_reply(world: World) -> None:
    async def main() -> list[tuple[int, str, dict]]:
        async with ClientSession() as http:

            def ask(messages: list[dict] = QUERY, **headers: str):
                return _post(http, world.conversation, messages, **headers)

            found = [await ask(**{"Idempotency-Key": "k"}), await ask(**{"Idempotency-Key": "k"})]
            found += await asyncio.gather(*(ask(**{"Idempotency-Key": "both"}) for _ in range(2)))
            found += [await ask(Connection="close"), await ask(**{"X-Stainless-Retry-Count": "1"}), await ask()]
            found += [await ask(**{"X-Stainless-Retry-Count": "1"})]
            other = await ask([{"role": "user", "content": "b"}], **{"Idempotency-Key": "k"})
            assert other[0] == 400 and "another request" in other[1]
            return found

    said = [reply[1] for reply in asyncio.run(main())]
    assert said[0] == said[1] and said[2] == said[3], said
    # Without a key, the first retry repeats the request whose connection is closed; the last two are new calls
    assert len({said[i] for i in (0, 2, 4, 6, 7)}) == 5 and said[5] == said[4]
    assert world.counts["endpoint/retried"] == 3 and len(world.engine.requests) == 5
    row = world.conversation.finish()
    assert int(row[keys.NUM_TURNS]) == 5


class _Closed:
    @staticmethod
    def is_closing() -> bool:
        return True


def test_equal_requests_whose_replies_were_lost_get_one_reply_each() -> None:
    """Two connections break at the same time; so do those of a request with a key."""

    async def main() -> None:
        exchanges, lost = Exchanges(), []
        for key in (None, None, "key"):
            digest, found = await exchanges.find("/path", b"body", key, None)
            assert found is None
            reply = SimpleNamespace(call=SimpleNamespace(delivered=False, continued=False))

            async def sample(reply: SimpleNamespace = reply) -> list:
                return [reply]

            lost.append(await exchanges.replies(digest, None, key, _Closed(), sample))
            lost[-1][0].call.delivered = True
        for (reply,) in lost:  # the resets arrive
            reply.call.delivered = False
        repeated = [(await exchanges.find("/path", b"body", None, "1"))[1] for _ in range(3)]
        assert [e and e.replies.result() for e in repeated] == [lost[0], lost[1], None]
        assert (await exchanges.find("/path", b"body", "key", None))[1].replies.result() == lost[2]
        with pytest.raises(FormatError, match="another request"):
            await exchanges.find("/path", b"other", "key", None)

    asyncio.run(main())
