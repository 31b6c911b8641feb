"""Synchronous agents, tools and rewards that wait for others, many more than there are threads."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

import pytest

from support.waiting import PATIENCE, in_thread
from torchrl_rloo import collectors
from torchrl_rloo.agents import AgentContext, PolicyEndpoint, agent_env
from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import keys, load_prompts
from torchrl_rloo.data.stop_reasons import stop_reason
from torchrl_rloo.embedded import build_model, build_tokenizer
from torchrl_rloo.engines import ScriptedEngine, ScriptedTurn
from torchrl_rloo.envs import ChatEnv, DatasetChatEnv, set_call_threads
from torchrl_rloo.envs.transforms import FeedbackTransform
from torchrl_rloo.modules import TransformersWrapper, vLLMWrapper
from torchrl_rloo.runtime import event_loop

AGENTS = 12
ROWS = [{"query": [{"role": "user", "content": f"What is {i}+3?"}]} for i in range(AGENTS // 2)]
_OPENER = build_opener(ProxyHandler({}))


@pytest.fixture(autouse=True)
def few_threads() -> Iterator[None]:
    set_call_threads(4)
    yield
    set_call_threads(event_loop.CALL_THREADS)


@pytest.fixture(scope="module")
def policy() -> TransformersWrapper:
    tokenizer = build_tokenizer()
    settings = {"max_new_tokens": 4, "seed": 0}
    return TransformersWrapper(build_model(tokenizer, seed=0).eval(), tokenizer=tokenizer, generate_kwargs=settings)


def ask(context: AgentContext, messages: list[dict], role: str = "policy") -> str:
    """Ask the policy and wait, as a synchronous client does."""
    body = json.dumps({"model": role, "messages": messages}).encode()
    headers = {"Authorization": f"Bearer {context.api_key}", "Content-Type": "application/json"}
    with _OPENER.open(Request(f"{context.base_url}/chat/completions", body, headers), timeout=PATIENCE) as reply:
        return json.load(reply)["choices"][0]["message"]["content"] or "?"


def asks_once(context: AgentContext, row: dict[str, Any]) -> float:
    ask(context, row["query"])
    return 1.0


def has_a_tool_that_asks(context: AgentContext, row: dict[str, Any]) -> float:
    """Ask, then call a tool through the package, which asks again."""
    said = ask(context, row["query"])
    more = [*row["query"], {"role": "assistant", "content": said}, {"role": "user", "content": "Sure?"}]
    event_loop.run(event_loop.call(ask, context, more))
    return 1.0


async def asks_in_a_thread(context: AgentContext, row: dict[str, Any]) -> float:
    return await asyncio.to_thread(asks_once, context, row)


def plays_two_roles(context: AgentContext, row: dict[str, Any]) -> dict[str, Any]:
    """Ask as both roles, each of which waits for the other."""
    met = threading.Barrier(2)

    def play(role: str) -> str:
        met.wait(PATIENCE)
        return ask(context, row["query"], role)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(play, context.roles))
    return {"rewards": dict.fromkeys(context.roles, 1.0)}


@pytest.mark.parametrize(
    ("agent", "calls", "roles"),
    [
        (asks_once, 1, ()),
        (has_a_tool_that_asks, 2, ()),
        (asks_in_a_thread, 1, ()),
        (plays_two_roles, 1, ("proposer", "solver")),
    ],
)
def test_more_agents_than_threads_end(agent: Callable, calls: int, roles: tuple[str, ...], policy) -> None:
    """A batch waits for all agents by default, so each of them must be running."""
    env = agent_env(
        agent,
        policy.tokenizer,
        dataset=load_prompts(ROWS),
        prompts_per_batch=len(ROWS),
        num_generations=2,
        roles=roles,
        score=lambda calls, row: 0.0,
    )
    collector = LLMCollector(env, policy)
    rows = in_thread(collector.collect).result(PATIENCE).unbind(0)
    assert len(rows) == AGENTS * max(1, len(roles))
    assert {(stop_reason(row), float(row[keys.REWARD]), int(row[keys.NUM_TURNS])) for row in rows} <= {
        (reason, 1.0, calls) for reason in ("ended", "turn_tokens")
    }
    collector.shutdown()


def test_tools_may_use_up_the_threads_while_a_policy_samples_for_them(policy) -> None:
    """Each conversation's tool, and its reward, waits for a policy, which needs a thread itself."""
    turn = ScriptedTurn(policy.tokenizer("5<|im_end|>")["input_ids"])
    player = vLLMWrapper(ScriptedEngine(lambda request, index: turn), tokenizer=policy.tokenizer)
    with PolicyEndpoint(policy, ChatEnv(policy.tokenizer, max_turns=2)) as endpoint:

        def judge(messages: list[dict]) -> str:
            opened = endpoint.open(messages[:1], seed=0)
            said = ask(opened.context, messages[:1])
            opened.finish()
            return said

        env = DatasetChatEnv(
            load_prompts(ROWS),
            policy.tokenizer,
            prompts_per_batch=len(ROWS),
            num_generations=2,
            rewards=lambda prompts, completions: [float(len(judge(prompt)) > 0) for prompt in prompts],
            transforms=[FeedbackTransform(lambda said, row: [{"role": "user", "content": judge(said)}])],
            max_turns=2,
        )
        collector = LLMCollector(env, player)
        rows = in_thread(collector.collect).result(PATIENCE).unbind(0)
        assert [float(row[keys.REWARD]) for row in rows] == [1.0] * AGENTS
        assert {int(row[keys.NUM_TURNS]) for row in rows} == {2}
        collector.shutdown()


def test_collectors_never_queue_behind_functions_of_users() -> None:
    folder = Path(collectors.__file__).parent
    assert not [path.name for path in folder.glob("*.py") if "event_loop.call(" in path.read_text()], "use call_at_once"


def test_calls_that_wait_for_each_other_meet() -> None:
    met = threading.Barrier(AGENTS)

    async def meet() -> list:
        return await asyncio.gather(*(event_loop.call(met.wait, PATIENCE) for _ in range(AGENTS)))

    assert sorted(event_loop.run(meet())) == list(range(AGENTS))


def test_threads_that_compute_stay_few() -> None:
    computing, most, enough = [0], [0], threading.Event()

    def compute() -> None:
        computing[0] += 1
        most[0] = max(most[0], computing[0])
        while not enough.is_set():
            sum(range(1000))
        computing[0] -= 1

    async def run() -> None:
        calls = [asyncio.ensure_future(event_loop.call(compute)) for _ in range(8)]
        await asyncio.sleep(2.5)  # the pool looks for threads that wait
        enough.set()
        await asyncio.gather(*calls)

    event_loop.run(run())
    assert most == [4]
