"""Crowds of agents on one endpoint, of which some crash, hang or disconnect; nothing may be lost or left behind."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import time
from collections import Counter
from typing import Any

from aiohttp import ClientSession, TCPConnector, web

from torchrl_rloo.agents import AgentContext, AgentTransform, agent_env
from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import keys, load_prompts
from torchrl_rloo.data.segments import split_segments
from torchrl_rloo.data.stop_reasons import stop_reason
from torchrl_rloo.embedded import build_tokenizer
from torchrl_rloo.engines.base import Request
from torchrl_rloo.engines.scripted import ScriptedEngine, ScriptedTurn
from torchrl_rloo.modules import vLLMWrapper

FAULTS = ("crash", "disconnect", "hang")
_SETTLE_S = 30.0  # time for closed connections to be noticed


async def ask(http: ClientSession, url: str, key: str, messages: list[dict]) -> str:
    """Return the text of a chat completion."""
    headers = {"Authorization": f"Bearer {key}"}
    async with http.post(f"{url}/chat/completions", json={"messages": messages}, headers=headers) as reply:
        body = await reply.json()
        assert reply.status == 200, body
    return body["choices"][0]["message"]["content"]


async def converse(http: ClientSession, url: str, key: str, query: list[dict], calls: int) -> None:
    """Continue a conversation."""
    messages = list(query)
    for i in range(calls):
        said = await ask(http, url, key, messages)
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"more {i}"}]


def run_crowd(
    agents: int,
    *,
    calls: int = 6,
    fault_share: float = 0.1,
    faults: tuple[str, ...] = FAULTS,
    latency: float = 0.05,
    max_seconds: float | None = 60.0,
) -> dict[str, Any]:
    """Run agents at the same time, check what they leave, and return figures.

    Args:
        agents: number of agents.
        calls: number of calls of each healthy agent.
        fault_share: share of agents that have a fault.
        faults: names in :data:`FAULTS`. Agents crash or hang after the second call, or disconnect during it.
        latency: mean time of a turn of the engine, in seconds.
        max_seconds: time limit of an agent.

    Raises:
        AssertionError: if a row or a reply is lost or doubled, or if a session, a socket, a task or a request is left.
    """
    tokenizer = build_tokenizer()
    rng = random.Random(0)
    kinds = [faults[i % len(faults)] if i < round(agents * fault_share) else "healthy" for i in range(agents)]
    rng.shuffle(kinds)
    sampled: Counter[tuple] = Counter()

    def script(request: Request, index: int) -> ScriptedTurn:
        # Ids that name the request, so that each reply is known from all others
        digits = random.Random(f"{request.seed} {request.prompt}").choices(range(20, 60), k=8)
        sampled[(*request.prompt, *digits)] += 1
        return ScriptedTurn([*digits, tokenizer.eos_token_id], latency=rng.uniform(0, 2 * latency))

    engine = ScriptedEngine(script)
    policy = vLLMWrapper(engine, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 16, "seed": 0})

    async def agent(context: AgentContext, row: dict[str, Any]) -> float:
        async with ClientSession(connector=TCPConnector(limit=0)) as http:
            one = (http, context.base_url, context.api_key, row["query"])
            if row["kind"] == "healthy":
                await converse(*one, calls)
                return 1.0
            await converse(*one, 1)
            if row["kind"] == "disconnect":
                lost = asyncio.ensure_future(ask(*one))
                await asyncio.sleep(rng.uniform(0, latency))
                lost.cancel()
                await asyncio.gather(lost, return_exceptions=True)
                return 0.0
            await ask(*one)
            if row["kind"] == "hang":
                await asyncio.sleep(1e6)
            raise RuntimeError("this agent crashes")

    prompts = [{"query": [{"role": "user", "content": f"{i}"}], "kind": kind, "i": i} for i, kind in enumerate(kinds)]
    limits = {"prompts_per_batch": agents, "max_seconds": max_seconds}
    env = agent_env(agent, tokenizer, dataset=load_prompts(prompts), shuffle=False, **limits)
    (transform,) = (t for t in env.transform.transforms if isinstance(t, AgentTransform))
    server, before = transform.server(), len(os.listdir("/proc/self/fd"))
    memory, cpu, began = _resident_mb(), time.process_time(), time.monotonic()
    try:
        rows = LLMCollector(env, policy).collect()
        cpu, seconds = time.process_time() - cpu, time.monotonic() - began
        memory = _resident_mb() - memory
        left = _settled(server, engine, before)
        trained = _check_rows(rows, kinds, calls, sampled)
    finally:
        env.close()
        engine.close()
    counts = transform.counts
    return {
        "agents": agents,
        "calls": counts["agent/calls"],
        "trained": trained,
        "requests": counts["endpoint/requests"],
        "disconnected": counts["endpoint/disconnected"],
        "failed": counts["agent/failed"],
        "timed_out": counts["agent/timed_out"],
        "cpu_ms_per_call": 1000 * cpu / counts["agent/calls"],
        "seconds": seconds,
        "mb": memory,
        "left": left,
    }


def _check_rows(rows: Any, kinds: list[str], calls: int, sampled: Counter[tuple]) -> int:
    """Check stop reasons and replies of all rows; return the number of replies trained on."""
    reasons = {"healthy": {"ended"}, "crash": {"failed"}, "disconnect": {"ended"}, "hang": {"time"}}
    assert len(rows) == len(kinds)
    trained: Counter[tuple] = Counter()
    for row in rows.unbind(0):
        kind = row["kind"]
        assert stop_reason(row) in reasons[kind], (kind, stop_reason(row))
        found = 0
        for sample in split_segments(row.unsqueeze(0)).unbind(0):
            ids, mask = sample[keys.TOKENS].tolist(), sample[keys.ACTION_MASK].tolist()
            for end in (i for i in range(len(ids)) if mask[i] and (i + 1 == len(ids) or not mask[i + 1])):
                found += 1
                trained[tuple(ids[:end])] += 1
        least, most = (calls, calls) if kind == "healthy" else (1, 2) if kind == "disconnect" else (2, 2)
        assert least <= found <= most, f"{found} replies of an agent of kind {kind}"
    assert max(trained.values()) == 1 and not trained - sampled, "a reply is doubled, or was not sampled"
    return trained.total()


def _settled(server: Any, engine: ScriptedEngine, files: int) -> dict[str, int]:
    """Return what is left of sessions, connections, tasks, requests and files, and check that it is nothing."""
    deadline = time.monotonic() + _SETTLE_S
    while True:
        left = {
            "sessions": len(server._sessions),
            "calls": server._calls.total(),
            "connections": server.gate.open,
            "tasks": len(asyncio.all_tasks(server._loop.loop)),
            "requests": engine.load().running + engine.load().waiting,
            "files": max(0, len(os.listdir("/proc/self/fd")) - files - _LOOPS),
        }
        if not any(left.values()) or time.monotonic() > deadline:
            assert not any(left.values()), left
            return left
        time.sleep(0.01)


_LOOPS = 12  # files of event loops that start on first use


def _resident_mb() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1e6


def client_cost(agents: int, calls: int = 6) -> float:
    """Return CPU ms of the same calls to a server that only echoes a fixed reply: clients and HTTP alone."""
    body = {"choices": [{"message": {"content": "01234567"}}]}

    async def echo(request: web.Request) -> web.Response:
        await request.json()
        return web.json_response(body)

    async def main() -> float:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", echo)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"

        async def agent(i: int) -> None:
            async with ClientSession(connector=TCPConnector(limit=0)) as http:
                await converse(http, url, "key", [{"role": "user", "content": f"{i}"}], calls)

        cpu = time.process_time()
        await asyncio.gather(*map(agent, range(agents)))
        cpu = time.process_time() - cpu
        await runner.cleanup()
        return 1000 * cpu / (agents * calls)

    return asyncio.run(main())
