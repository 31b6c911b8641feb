"""Endpoint: OpenAI's and Anthropic's clients, streams, limits, cancelled calls, foreign keys and bad requests."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request as HTTPRequest
from urllib.request import urlopen

import pytest
import torch
from anthropic import Anthropic
from openai import BadRequestError, InternalServerError, OpenAI, Timeout

from torchrl_rloo.agents import PolicyEndpoint
from torchrl_rloo.data import keys
from torchrl_rloo.data.stop_reasons import stop_reason
from torchrl_rloo.engines.base import EngineError, Request
from torchrl_rloo.engines.scripted import ScriptedEngine, ScriptedTurn
from torchrl_rloo.envs import ChatEnv
from torchrl_rloo.modules import vLLMWrapper

PATIENCE = 60  # seconds; only a test that hangs takes as long
QUERY = [{"role": "user", "content": "abc"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": PARAMETERS}}
CALL = '<tool_call>{"name": "look", "arguments": {"city": "b"}}</tool_call>'


class World:
    """Endpoint in front of a scripted engine."""

    def __init__(self, tokenizer, texts: list[str | ScriptedTurn], parser: str | None = "hermes", **limits: Any):
        self.tokenizer, self.texts = tokenizer, texts
        self.engine = ScriptedEngine(self.script)
        policy = vLLMWrapper(self.engine, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 200})
        self.endpoint = PolicyEndpoint(policy, ChatEnv(tokenizer, **limits), parser=parser)
        self.conversation = self.endpoint.open(QUERY, seed=1)
        self.url, self.key = self.conversation.context.base_url, self.conversation.context.api_key

    def script(self, request: Request, index: int) -> ScriptedTurn:
        turn = self.texts[index]
        if isinstance(turn, ScriptedTurn):
            return turn
        ids = self.tokenizer(turn, add_special_tokens=False)["input_ids"]
        return ScriptedTurn([*ids, self.tokenizer.eos_token_id], [-0.5] * (len(ids) + 1))

    def openai(self, **kwargs: Any) -> OpenAI:
        return OpenAI(base_url=self.url, api_key=self.key, max_retries=0, **kwargs)

    def send(self, body: bytes | dict, path: str = "/chat/completions", key: str | None = None) -> tuple[int, Any]:
        """Send a request as it is; return the status and the body."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self.key if key is None else key}", "Content-Type": "application/json"}
        try:
            with urlopen(HTTPRequest(self.url + path, data, headers), timeout=PATIENCE) as reply:
                return reply.status, json.loads(reply.read())
        except HTTPError as error:
            return error.code, json.loads(error.read())


@pytest.fixture
def world(tokenizer) -> Iterator[Callable[..., World]]:
    made = []

    def make(*texts: str | ScriptedTurn, **kwargs) -> World:
        made.append(World(tokenizer, list(texts), **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.endpoint.close()
        one.engine.close()


def said(tokenizer, text: str) -> list[int]:
    return [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


def test_chat_completions_with_tools_streams_and_log_probs(world, tokenizer) -> None:
    here = world("so " + CALL, "It rains.", "More.")
    with here.openai() as client:
        ask = {"model": "any", "tools": [TOOL]}
        first = client.chat.completions.create(messages=QUERY, logprobs=True, **ask)
        (choice,) = first.choices
        (call,) = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls" and choice.message.content == "so"
        assert call.function.name == "look" and json.loads(call.function.arguments) == {"city": "b"}
        assert [entry.logprob for entry in choice.logprobs.content] == [-0.5] * first.usage.completion_tokens
        answer = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
        messages = [*QUERY, choice.message.model_dump(exclude_none=True), answer]
        chunks = list(
            client.chat.completions.create(
                messages=messages, stream=True, stream_options={"include_usage": True}, **ask
            )
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == "It rains." and chunks[-2].choices[0].finish_reason == "stop"
        assert chunks[-1].usage.completion_tokens == len(said(tokenizer, "It rains."))
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And?"}]
        client.chat.completions.create(messages=messages, **ask)
        assert client.models.list().data[0].id == "policy"
    row = here.conversation.finish(reward=2.0)
    # All calls are one sample: no text was encoded again
    assert keys.PREVIOUS_SEGMENTS not in row.keys() and int(row[keys.NUM_TURNS]) == 3
    expected = sum((said(tokenizer, text) for text in here.texts), [])
    assert row[keys.TOKENS][row[keys.ACTION_MASK]].tolist() == expected
    assert list(here.engine.requests[-1].prompt) == row[keys.TOKENS][: -len(said(tokenizer, "More."))].tolist()
    assert float(row[keys.REWARD]) == 2.0 and stop_reason(row) == "ended"
    assert [m["role"] for m in row[keys.COMPLETION]] == ["assistant", "tool", "assistant", "user", "assistant"]


def test_anthropic_messages(world, tokenizer) -> None:
    here = world(CALL, "It rains.")
    tools = [{"name": "look", "description": "Looks.", "input_schema": PARAMETERS}]
    ask = {"model": "any", "max_tokens": 100, "tools": tools}
    context = here.conversation.context.environment()
    with Anthropic(base_url=context["ANTHROPIC_BASE_URL"], api_key=here.key, max_retries=0) as client:
        first = client.messages.create(messages=QUERY, **ask)
        (block,) = first.content
        assert first.stop_reason == "tool_use" and block.name == "look" and block.input == {"city": "b"}
        result = {"type": "tool_result", "tool_use_id": block.id, "content": "rain"}
        messages = [*QUERY, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        with client.messages.stream(messages=messages, **ask) as stream:
            assert "".join(stream.text_stream) == "It rains."
            assert stream.get_final_message().stop_reason == "end_turn"
    row = here.conversation.finish()
    assert keys.PREVIOUS_SEGMENTS not in row.keys()
    assert row[keys.TOKENS][row[keys.ACTION_MASK]].tolist() == said(tokenizer, CALL) + said(tokenizer, "It rains.")


def test_openai_responses(world, tokenizer) -> None:
    here = world("so " + CALL, "It rains.", ScriptedTurn([40] * 300))
    tools = [{"type": "function"} | TOOL["function"]]
    with here.openai() as client:
        first = client.responses.create(model="any", input=QUERY, tools=tools)
        message, call = first.output
        assert message.content[0].text == "so" and call.name == "look"
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        sent = [*QUERY, *(item.model_dump() for item in first.output), result]
        with client.responses.stream(model="any", input=sent, tools=tools) as stream:
            kinds = [event.type for event in stream]
            assert stream.get_final_response().output_text == "It rains."
        assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
        cut = client.responses.create(model="any", input="abc", max_output_tokens=3)
        assert cut.status == "incomplete" and cut.usage.output_tokens == 3
    row = here.conversation.finish()
    assert row[keys.PREVIOUS_SEGMENTS]["sizes"].numel() == 1 and stop_reason(row) == "turn_tokens"


def test_foreign_keys_and_bad_requests_are_refused_and_counted(world, tokenizer) -> None:
    here = world("one", "two")
    other = here.endpoint.open(QUERY)
    good = {"messages": QUERY}
    for key in ("", "no", here.key[:-1], here.key + "x", here.key.swapcase()):
        status, body = here.send(good, key=key)
        assert status == 401 and body["error"]["code"] == "invalid_api_key"
    bad = [
        b"",
        b"{",
        b"[]",
        b'{"messages": "\xff"}',
        b"[" * 5000 + b"]" * 5000,
        {},
        {"messages": []},
        {"messages": [{"role": "root", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        good | {"n": 17},
        good | {"n": True},
        good | {"max_tokens": -1},
        good | {"tools": [{"type": "function"}]},
        good | {"tool_choice": "required"},
        good | {"response_format": {"type": "json_object"}},
        good | {"response_format": 3},
    ]
    for body in bad:
        status, reply = here.send(body)
        assert status == 400 and reply["error"]["message"], body
    assert here.send({"model": "m", "input": QUERY, "previous_response_id": "r"}, "/responses")[0] == 400
    assert here.send({"model": "m", "input": 3, "text": 4}, "/responses")[0] == 400
    assert here.send({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "/messages")[0] == 400
    assert here.send(good | {"tools": 4}, "/messages")[0] == 400
    assert here.send(b" " * (16 * 2**20 + 1))[0] == 413
    counts = here.endpoint.counts
    assert counts["endpoint/refused/key"] == 5 and counts["endpoint/refused/request"] == len(bad) + 4
    assert counts["endpoint/refused/size"] == 1
    assert here.send(good | {"temperature": 0.2})[0] == 200 and counts["endpoint/ignored_sampling"] == 1
    # The calls of one conversation are in no other, and a finished one takes none
    row = here.conversation.finish()
    assert row[keys.TOKENS][row[keys.ACTION_MASK]].tolist() == said(tokenizer, "one")
    assert here.send(good)[0] == 401
    assert stop_reason(other.finish()) == "failed" and len(here.engine.requests) == 1


def test_limits_refuse_calls(world, tokenizer) -> None:
    here = world("one", "two", "three", max_turns=2, max_tokens=40)
    with here.openai() as client:
        ask = client.chat.completions.create
        ask(model="m", messages=QUERY)
        with pytest.raises(BadRequestError, match="leaves none of 40") as raised:
            ask(model="m", messages=[{"role": "user", "content": "a b c d " * 30}])
        assert raised.value.code == "context_length_exceeded"
        ask(model="m", messages=QUERY)
        with pytest.raises(BadRequestError, match="max_turns"):
            ask(model="m", messages=QUERY)
    row = here.conversation.finish(reward=1.0)
    assert stop_reason(row) == "total_tokens" and here.endpoint.counts["agent/refused_calls"] == 2
    # The same prompt twice: two samples, each with its own action tokens
    assert row[keys.PREVIOUS_SEGMENTS]["sizes"].numel() == 1


def test_a_failed_policy_is_an_error_of_the_conversation(world) -> None:
    here = world(ScriptedTurn([1], error=EngineError("out of memory")))
    with here.openai() as client, pytest.raises(InternalServerError, match="out of memory"):
        client.chat.completions.create(model="m", messages=QUERY)
    with pytest.raises(RuntimeError, match="out of memory"):
        here.conversation.finish()


def test_the_client_waits_for_a_busy_event_loop(world, monkeypatch) -> None:
    here = world("one")
    monkeypatch.setattr("openai._base_client.DEFAULT_TIMEOUT", Timeout(600, connect=0.05))

    async def keep_busy() -> None:
        while True:
            time.sleep(0.1)
            await asyncio.sleep(0)

    async def call() -> None:
        busy = asyncio.ensure_future(keep_busy())
        async with here.conversation.context.openai() as client:
            await client.chat.completions.create(model="m", messages=QUERY)
        busy.cancel()

    asyncio.run(call())
    assert int(here.conversation.finish()[keys.NUM_TURNS]) == 1


def test_a_disconnected_call_is_cancelled_and_leaves_no_tokens(world, tokenizer) -> None:
    here = world(ScriptedTurn([40, 41], latency=1e9), "two")
    waiting = threading.Event()
    script = here.engine._script

    def noted(request: Request, index: int) -> ScriptedTurn:
        waiting.set()
        return script(request, index)

    here.engine._script = noted

    async def leave() -> None:
        async with here.conversation.context.openai() as client:
            call = asyncio.ensure_future(client.chat.completions.create(model="m", messages=QUERY))
            await asyncio.to_thread(waiting.wait, PATIENCE)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            await client.chat.completions.create(model="m", messages=QUERY)  # the retry

    asyncio.run(leave())
    row = here.conversation.finish()
    assert row[keys.TOKENS][row[keys.ACTION_MASK]].tolist() == said(tokenizer, "two")
    assert keys.PREVIOUS_SEGMENTS not in row.keys() and int(row[keys.NUM_TURNS]) == 1
    assert torch.equal(row[keys.LOG_PROBS] != 0, row[keys.ACTION_MASK])
