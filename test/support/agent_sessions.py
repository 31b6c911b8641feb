"""Agents that compact, fork, call tools and lose connections at random; trained ids must be sampled ids.

The agents are HTTP clients of all three formats, with and without streams. An engine around a real model records what
it samples. Each agent records the replies that it has read.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

import torch
from aiohttp import ClientSession
from tensordict import TensorDictBase
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from torchrl_rloo.agents import AgentContext, agent_env
from torchrl_rloo.agents.session import client_message
from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import keys, load_prompts, tensor_rows
from torchrl_rloo.data.segments import split_segments
from torchrl_rloo.data.stop_reasons import stop_reason
from torchrl_rloo.data.templates import decode_response
from torchrl_rloo.embedded import build_model
from torchrl_rloo.engines.base import Request, Sample
from torchrl_rloo.engines.transformers_engine import TransformersEngine
from torchrl_rloo.envs.tools.parsers import ToolCall, without_thinking
from torchrl_rloo.modules import TransformersWrapper, vLLMWrapper

_TURN = "{{ '<|start|>' + m.role + '\n' + m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}"
_TURN += "{% endfor %}{{ '<|end|>\n' }}"
_OPEN = "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
_TOOLS = "{% if tools %}{{ '<|start|>system\n' + (tools | tojson) + '<|end|>\n' }}{% endif %}"
TEMPLATES = {
    "keeps_thinking": _TOOLS + "{% for m in messages %}" + _TURN + "{% endfor %}" + _OPEN,
    "strips_thinking": (
        _TOOLS + "{% set ns = namespace(asked=0) %}"
        "{% for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}"
        "{% for m in messages %}{% if m.role == 'assistant' and loop.index0 < ns.asked %}"
        "{{ '<|start|>assistant\n' + m.content.split('</think>')[-1] + '<|end|>\n' }}"
        "{% else %}" + _TURN + "{% endif %}{% endfor %}" + _OPEN
    ),
}
TOOL = {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}}
Cut = Literal["waiting", "unread", "retried", "repeated"]
CUTS: tuple[Cut, ...] = ("waiting", "unread", "retried", "repeated")


def build_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Build a byte-level BPE tokenizer of three letters' merges, so that most sampled ids are not canonical."""
    core, rng = Tokenizer(BPE()), random.Random(0)
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = [chr(c) for c in range(33, 127)] + ["\u0120", "\u010a"]
    trainer = trainers.BpeTrainer(
        vocab_size=250, special_tokens=["<|pad|>", "<|start|>"], initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(["".join(rng.choices("abc", k=12)) for _ in range(1000)], trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|end|>", pad_token="<|pad|>", additional_special_tokens=["<|start|>"]
    )
    made.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    made.chat_template = TEMPLATES[template]
    return made


def build_thinking_model(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Build a random model whose turns end after about six tokens, and often have thoughts."""
    made = build_model(tokenizer, seed=0)
    tied = made.lm_head.weight.detach()
    made.config.tie_word_embeddings = False
    made.lm_head = torch.nn.Linear(tied.shape[1], tied.shape[0])
    with torch.no_grad():
        made.lm_head.weight.copy_(tied * 3)
        made.lm_head.bias.zero_()
        for token, bias in {"<think>": 4.0, "</think>": 6.0, tokenizer.eos_token: 7.0}.items():
            made.lm_head.bias[tokenizer.convert_tokens_to_ids(token)] = bias
    return made.eval()


def parse_calls(text: str) -> list[ToolCall]:
    """Return a call of a tool for each text with an ``a``."""
    return [ToolCall("look", {"text": text[:4]})] if "a" in text else []


class RecordingEngine(TransformersEngine):
    """Engine that records what it samples, with the prompt."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.sampled: list[tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]] = []

    def generate(self, requests: list[Request]) -> list[Sample]:
        samples = super().generate(requests)
        for request, sample in zip(requests, samples, strict=True):
            self.sampled.append((tuple(request.prompt), tuple(sample.tokens), tuple(sample.log_probs)))
        return samples


Reading = tuple[int, int, str, str]  # tokens of the prompt and of the reply, content, and tool calls


@dataclass
class Journal:
    """Replies that agents have read, and those that they may have, by session."""

    read: dict[str, Counter[Reading]] = field(default_factory=dict)
    cuts: Counter[str] = field(default_factory=Counter)
    formats: Counter[str] = field(default_factory=Counter)


def reading(prompt: int, sampled: int, content: str | None, calls: list[Mapping[str, Any]] | None) -> Reading:
    """Return what identifies a reply."""
    named = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls or ()]
    return prompt, sampled, content or "", json.dumps(named, sort_keys=True)


# Requests and replies of the formats


def write_request(form: str, messages: list[dict], tools: bool, stream: bool, choices: int) -> tuple[str, dict]:
    """Return path and body of a request for a conversation in the form of chat completions."""
    if form == "chat":
        body: dict[str, Any] = {"messages": messages, "n": choices}
        body |= {"tools": [{"type": "function", "function": TOOL}]} if tools else {}
        return "/chat/completions", body | (
            {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        )
    flags = {"stream": True} if stream else {}
    if form == "messages":
        shown = {"name": TOOL["name"], "description": TOOL["description"], "input_schema": TOOL["parameters"]}
        system = "".join(m["content"] for m in messages if m["role"] == "system")
        sent = [_block_message(m) for m in messages if m["role"] != "system"]
        flags |= {"system": system} if system else {}
        return "/messages", {"messages": sent, "max_tokens": 99} | flags | ({"tools": [shown]} if tools else {})
    items: list[dict] = []
    for m in messages:
        if m["role"] == "tool":
            items.append({"type": "function_call_output", "call_id": m["tool_call_id"], "output": m["content"]})
            continue
        if m["content"] or not m.get("tool_calls"):
            items.append({"type": "message", "role": m["role"], "content": m["content"]})
        items += [
            {"type": "function_call", "call_id": call["id"]} | call["function"] for call in m.get("tool_calls", ())
        ]
    return "/responses", {"input": items} | flags | ({"tools": [{"type": "function"} | TOOL]} if tools else {})


def _block_message(message: dict) -> dict:
    if message["role"] == "tool":
        result = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}
        return {"role": "user", "content": [result]}
    blocks: list[dict] = [{"type": "text", "text": message["content"]}] if message["content"] else []
    for call in message.get("tool_calls", ()):
        arguments = json.loads(call["function"]["arguments"])
        blocks.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments})
    return {"role": message["role"], "content": blocks or ""}


def read_reply(form: str, text: str, stream: bool) -> tuple[list[dict], int, int]:
    """Return the messages of a response, and its numbers of prompt and sampled tokens."""
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")] if stream else []
    if form == "chat":
        return _read_chat(events if stream else [json.loads(text)])
    if form == "responses":
        value = events[-1]["response"] if stream else json.loads(text)
        content = "".join(p["text"] for item in value["output"] for p in item.get("content", ()))
        calls = [
            _call(item["call_id"], item["name"], item["arguments"])
            for item in value["output"]
            if item["type"] == "function_call"
        ]
        return [_said(content, calls)], value["usage"]["input_tokens"], value["usage"]["output_tokens"]
    if not stream:
        value = json.loads(text)
        content = "".join(block.get("text", "") for block in value["content"])
        calls = [_call(b["id"], b["name"], json.dumps(b["input"])) for b in value["content"] if b["type"] == "tool_use"]
        return [_said(content, calls)], value["usage"]["input_tokens"], value["usage"]["output_tokens"]
    content, calls = "", []
    for event in events:
        block, delta = event.get("content_block", {}), event.get("delta", {})
        if block.get("type") == "tool_use":
            calls.append(_call(block["id"], block["name"], ""))
        content += delta.get("text", "")
        if "partial_json" in delta:
            calls[-1]["function"]["arguments"] += delta["partial_json"]
    assert events[-1]["type"] == "message_stop"
    usage = events[0]["message"]["usage"]["input_tokens"], events[-2]["usage"]["output_tokens"]
    return [_said(content, calls)], *usage


def _read_chat(parts: list[dict]) -> tuple[list[dict], int, int]:
    """Return the messages of a chat completion, or of its chunks."""
    found: dict[int, dict] = {}
    for choice in (choice for part in parts for choice in part["choices"]):
        said = choice.get("message") or choice["delta"]
        message = found.setdefault(choice["index"], _said("", []))
        message["content"] += said.get("content") or ""
        for call in said.get("tool_calls") or ():
            message.setdefault("tool_calls", []).append(
                _call(call["id"], call["function"]["name"], call["function"]["arguments"])
            )
    usage = parts[-1]["usage"]
    return [found[i] for i in sorted(found)], usage["prompt_tokens"], usage["completion_tokens"]


def _said(content: str, calls: list[dict]) -> dict:
    return {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})


def _call(call_id: str, name: str, arguments: str) -> dict:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


# Agents


class Client:
    """HTTP client of one session, whose connections are lost at random."""

    def __init__(self, http: ClientSession, context: AgentContext, rng: random.Random, journal: Journal, name: str):
        self.http, self.context, self.rng, self.journal = http, context, rng, journal
        self.read = journal.read.setdefault(name, Counter())
        self.numbers = 0

    async def ask(
        self, messages: list[dict], *, tools: bool = False, choices: int = 1, cut: Cut | None = None
    ) -> list[dict]:
        """Return the replies to a conversation, after losing an earlier connection in the way of ``cut``."""
        form = "chat" if choices > 1 else self.rng.choice(["chat", "messages", "responses"])
        stream = self.rng.random() < 0.4
        path, body = write_request(form, messages, tools, stream, choices)
        data, headers = json.dumps(body).encode(), {"Authorization": f"Bearer {self.context.api_key}"}
        self.journal.formats[f"{form}{' stream' * stream}"] += 1
        self.journal.cuts[cut or "none"] += 1
        self.numbers += 1
        if cut == "waiting":
            await self._lose_waiting(path, data, headers)
        elif cut == "unread":
            await self._lose_unread(path, data, headers)
        elif cut == "retried":  # a client's own retry after a time-out
            await self._lose_sent(path, data, headers | {"Connection": "close"})
            headers["X-Stainless-Retry-Count"] = "1"
        elif cut == "repeated":
            headers["Idempotency-Key"] = f"key {self.numbers}"
            await self._lose_sent(path, data, headers)
        async with self.http.post(self.context.base_url + path, data=data, headers=headers) as reply:
            text = await reply.text()
            assert reply.status == 200, text
        found, prompt, sampled = read_reply(form, text, stream)
        # The tokens of choices are counted together
        for message in found:
            self.read[
                reading(prompt, sampled if choices == 1 else 0, message["content"], message.get("tool_calls"))
            ] += 1
        return found

    async def _lose_waiting(self, path: str, data: bytes, headers: dict[str, str]) -> None:
        """Cancel a request before its reply, or soon after."""
        lost = asyncio.ensure_future(self.http.post(self.context.base_url + path, data=data, headers=headers))
        for _ in range(self.rng.randrange(6)):
            await asyncio.sleep(0)
        lost.cancel()
        for reply in await asyncio.gather(lost, return_exceptions=True):
            if not isinstance(reply, BaseException):
                reply.close()

    async def _lose_sent(self, path: str, data: bytes, headers: dict[str, str]) -> None:
        """Leave once the reply arrives, without reading it to its end."""
        reply = await self.http.post(self.context.base_url + path, data=data, headers=headers)
        reply.close()

    async def _lose_unread(self, path: str, data: bytes, headers: dict[str, str]) -> None:
        """Close a socket that holds a reply of which no byte was read, so that the server's side is reset."""
        loop, url = asyncio.get_running_loop(), urlsplit(self.context.base_url)
        head = [f"POST {url.path}{path} HTTP/1.1", f"Host: {url.netloc}", f"Content-Length: {len(data)}"]
        head += [f"{name}: {value}" for name, value in headers.items()]
        with socket.socket() as connection:
            connection.setblocking(False)
            await loop.sock_connect(connection, (url.hostname, url.port))
            await loop.sock_sendall(connection, "\r\n".join(head).encode() + b"\r\n\r\n" + data)
            arrived = asyncio.Event()
            loop.add_reader(connection, arrived.set)
            await arrived.wait()
            loop.remove_reader(connection)


async def converse(client: Client, query: list[dict], name: str, calls: int) -> None:
    """Continue, compact, fork, call sub-agents and tools, and lose connections, at random."""
    rng, messages, tools = client.rng, list(query), client.rng.random() < 0.5
    for i in range(calls):
        cut = rng.choice([None, None, *CUTS])
        match rng.choice(["go on", "go on", "compact", "parallel", "choices", "sub-agent"]):
            case "go on":
                (said,) = await client.ask(messages, tools=tools, cut=cut)
            case "compact":
                messages = [{"role": "user", "content": f"{name}: summary {i}."}]
                (said,) = await client.ask(messages, tools=tools, cut=cut)
            case "parallel":
                asked = [client.ask(messages, tools=tools, cut=rng.choice([None, *CUTS])) for _ in range(2)]
                side = [*messages[:-1], {"role": "user", "content": f"{name}: aside {i}?"}]
                (said,), *_ = await asyncio.gather(*asked, client.ask(side, cut=cut))
            case "choices":
                said = rng.choice(await client.ask(messages, tools=tools, choices=2, cut=cut))
            case "sub-agent":
                system = {"role": "system", "content": "You help."}
                task = [system, {"role": "user", "content": f"{name}: part {i} abc"}]
                (part,), (said,) = await asyncio.gather(client.ask(task), client.ask(messages, tools=tools, cut=cut))
                await client.ask([*task, part, {"role": "user", "content": "and then?"}], cut=rng.choice([None, *CUTS]))
        messages = [*messages, said]
        results = [{"role": "tool", "tool_call_id": c["id"], "content": "bca"} for c in said.get("tool_calls", ())]
        messages += results or [{"role": "user", "content": rng.choice(["more", "abc bca", "c?"])}]


# The check


def check_trained(rows: TensorDictBase, engine: RecordingEngine, journal: Journal, tokenizer: Any) -> dict[str, int]:
    """Check rows against what the engine sampled and what the agents read; return numbers of replies and tokens.

    Raises:
        AssertionError: if a trained reply was not sampled, is trained on twice, or if one that was read is not trained.
    """
    sampled = Counter((prompt, ids) for prompt, ids, _ in engine.sampled)
    log_probs: dict[tuple, list[torch.Tensor]] = {}  # equal replies differ in the rounding of their batches
    for prompt, ids, values in engine.sampled:
        log_probs.setdefault((prompt, ids), []).append(torch.tensor(values))
    trained: Counter[tuple] = Counter()
    found = Counter(rows=len(rows), sampled=len(engine.sampled))
    for row in rows.unbind(0):
        read = journal.read[row["name"]]
        seen: Counter[Reading] = Counter()
        for sample in split_segments(row.unsqueeze(0)).unbind(0):
            found["samples"] += 1
            for call, values in _runs(sample):
                trained[call] += 1
                assert call in sampled, "trained ids that were not sampled"
                assert any(torch.equal(values, others) for others in log_probs[call]), "log-probs of another reply"
                seen[_reading_of(call, tokenizer, read - seen)] += 1
                found["trained_tokens"] += len(call[1])
        assert not read - seen, f"{row['name']}: read, but not trained on: {read - seen}"
        found["unread_but_trained"] += (seen - read).total()
        found["read"] += read.total()
    found["trained"] = trained.total()
    assert not trained - sampled, "replies that are trained on more often than they were sampled"
    return dict(found)


def _runs(sample: TensorDictBase) -> list[tuple[tuple, torch.Tensor]]:
    """Return prompt, ids and log-probs of each run of action tokens."""
    ids, mask = sample[keys.TOKENS].tolist(), sample[keys.ACTION_MASK].int()
    edges = torch.diff(mask, prepend=torch.zeros(1, dtype=mask.dtype), append=torch.zeros(1, dtype=mask.dtype))
    starts, ends = (edges == 1).nonzero().flatten().tolist(), (edges == -1).nonzero().flatten().tolist()
    return [
        ((tuple(ids[:start]), tuple(ids[start:end])), sample[keys.LOG_PROBS][start:end])
        for start, end in zip(starts, ends, strict=True)
    ]


def _reading_of(call: tuple[tuple, tuple], tokenizer: Any, unseen: Counter[Reading]) -> Reading:
    """Return what an agent would read of a trained reply: with or without tools, alone or as one of two choices."""
    (prompt, ids), text = call, decode_response(tokenizer, call[1])
    shown = [_call("", c.name, json.dumps(c.arguments)) for c in parse_calls(without_thinking(text))]
    ways = []
    for calls in ([], shown):
        message = client_message(text, calls)
        ways += [reading(len(prompt), n, message["content"], calls) for n in (len(ids), 0)]
    return next((way for way in ways if unseen[way] > 0), ways[0])


def largest_difference(rows: TensorDictBase, scorer: TransformersWrapper, batch: int = 64) -> float:
    """Return the largest ``abs(ratio - 1)`` of trainer and sampler over all action tokens."""
    largest = 0.0
    with torch.no_grad():
        for part in rows.split(batch):
            part = tensor_rows(split_segments(part))
            scored = scorer.score(part, entropy=False)
            behavior = torch.cat([row[keys.LOG_PROBS][row[keys.ACTION_MASK]] for row in part.unbind(0)])
            ratio = (scored.log_probs[scored.actions.mask].double() - behavior.double()).exp()
            largest = max(largest, float((ratio - 1).abs().max()))
    return largest


def run_sessions(template: str, sessions: int, *, calls: int = 5, seed: int = 0, in_flight: int = 64) -> dict[str, Any]:
    """Run agents, check their rows, and return what was found.

    Args:
        template: name in :data:`TEMPLATES`.
        sessions: number of conversations.
        calls: number of steps of each agent, of one to three calls.
        seed: seed of the agents.
        in_flight: maximum number of concurrent conversations.
    """
    tokenizer, journal = build_tokenizer(template), Journal()
    model = build_thinking_model(tokenizer)
    engine = RecordingEngine(model, tokenizer)
    policy = vLLMWrapper(engine, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 12, "seed": seed})

    async def agent(context: AgentContext, row: dict[str, Any]) -> float:
        async with ClientSession() as http:
            client = Client(http, context, random.Random(f"{seed} {row['name']}"), journal, row["name"])
            await converse(client, row["query"], row["name"], calls)
        return client.rng.random()

    prompts = [
        {"query": [{"role": "user", "content": f"s{i}: abc?"}], "name": f"s{i}"} for i in range(sessions)
    ]  # prompts differ, so that each reply belongs to one session
    env = agent_env(
        agent, tokenizer, dataset=load_prompts(prompts), prompts_per_batch=sessions, shuffle=False, parser=parse_calls,
        max_turns=None, max_seconds=None, on_rewrite="split" if template == "strips_thinking" else "keep",
    )  # fmt: skip
    began = time.process_time()
    try:
        rows = LLMCollector(env, policy, max_in_flight=in_flight).collect()
    finally:
        env.close()
        engine.close()
    cpu = time.process_time() - began
    assert {stop_reason(row) for row in rows.unbind(0)} <= {"ended", "turn_tokens"}, "a session failed"
    found: dict[str, Any] = check_trained(rows, engine, journal, tokenizer)
    scorer = TransformersWrapper(model, tokenizer=tokenizer, generate=False)
    found |= {"ratio_error": largest_difference(rows, scorer), "cpu_s": cpu, "cuts": dict(journal.cuts)}
    (transform,) = (t for t in env.transform.transforms if hasattr(t, "agent"))
    counts = {name: n for name, n in sorted(transform.counts.items()) if n}
    return found | {"formats": dict(journal.formats), "counts": counts}
