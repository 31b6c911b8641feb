"""Agents in a collector: the same rows as tools, exact ids however agents call, failures, and commands."""

from __future__ import annotations

import asyncio
import fcntl
import pickle
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import openai  # noqa: F401  a slow import, which must not count as time of an agent
import pytest
import torch
from tensordict import TensorDictBase

from support.waiting import wait_until
from torchrl_rloo.agents import AgentContext, AgentTransform, CommandAgent, agent_env
from torchrl_rloo.agents.agents import read_call_rewards
from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import keys, load_prompts
from torchrl_rloo.data.stop_reasons import stop_reason
from torchrl_rloo.embedded import build_model, build_tokenizer
from torchrl_rloo.embedded.calculator import calculator_prompts
from torchrl_rloo.embedded.resolve import CALCULATOR
from torchrl_rloo.engines.base import EngineError, Request
from torchrl_rloo.engines.scripted import ScriptedEngine, ScriptedTurn
from torchrl_rloo.envs import RowStepper
from torchrl_rloo.envs.tools.parsers import RegexParser
from torchrl_rloo.envs.transforms import FeedbackTransform, TurnRewardTransform
from torchrl_rloo.modules import TransformersWrapper, vLLMWrapper
from torchrl_rloo.rewards import boxed_accuracy

PATIENCE = 60  # seconds; only a test that hangs takes as long
ROWS = [{"query": [{"role": "user", "content": f"Task {i}: abc?"}], "place": i} for i in range(4)]


async def answer(context: AgentContext, row: dict[str, Any]) -> float:
    """Ask once."""
    async with context.openai() as client:
        await client.chat.completions.create(model=context.model, messages=row["query"])
    return 1.0


class World:
    """Collector of one agent over a scripted engine."""

    def __init__(self, tokenizer, agent: Any, script: Any = None, rows: list[dict] = ROWS, **settings: Any):
        self.tokenizer = tokenizer
        self.sampled: list[tuple[list[int], list[int]]] = []
        self.engine = ScriptedEngine(self._record(script or (lambda request, index: ScriptedTurn([40, 41]))))
        self.policy = vLLMWrapper(self.engine, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 50, "seed": 0})
        settings = {"prompts_per_batch": len(rows), "shuffle": False} | settings
        self.env = agent_env(agent, tokenizer, dataset=load_prompts(rows), **settings)
        (self.transform,) = (t for t in self.env.transform.transforms if isinstance(t, AgentTransform))

    def _record(self, script: Callable) -> Callable:
        def turn(request: Request, index: int) -> ScriptedTurn:
            made = script(request, index)
            self.sampled.append((list(request.prompt), list(made.tokens)))
            return made

        return turn

    def collect(self, **settings: Any) -> TensorDictBase:
        try:
            return LLMCollector(self.env, self.policy, **settings).collect()
        finally:
            self.transform.close()
            self.engine.close()

    @property
    def counts(self) -> dict[str, int]:
        return {k: n for k, n in self.transform.counts.items() if n and k.startswith("agent/")}


# The calculator task, three ways


@pytest.fixture(scope="module")
def calculator_policy(warm_model) -> TransformersWrapper:
    tokenizer = build_tokenizer()
    model = type(build_model(tokenizer, 0)).from_pretrained(warm_model("calculator")).eval()
    return TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 16, "seed": 3})


@pytest.mark.parametrize("name", ["openai_agent", "framework_agent", "command_agent"])
def test_rows_of_the_calculator_are_those_of_the_tool(name, calculator_policy) -> None:
    rows = load_prompts(calculator_prompts("train", size=4))
    settings = {"prompts_per_batch": 4, "num_generations": 2, "rewards": boxed_accuracy, "max_turns": 2}
    tokenizer = calculator_policy.tokenizer
    expected = LLMCollector(CALCULATOR.env(rows, tokenizer, **settings), calculator_policy).collect()
    parser = (
        RegexParser(r"<tool>(?P<expression>[^<]*)</tool>", tool="calculator") if name == "framework_agent" else None
    )
    agent = f"torchrl_rloo.embedded.agents.{name}"
    env = agent_env(agent, tokenizer, dataset=rows, parser=parser, **settings)
    found = LLMCollector(env, calculator_policy).collect()
    env.close()
    compared = 0  # rows with a call of the tool
    for ours, theirs in zip(found.unbind(0), expected.unbind(0), strict=True):
        said = " ".join(m["content"] for m in theirs[keys.COMPLETION] if m["role"] == "assistant")
        # The command has a calculator for two numbers only
        simple = re.sub("<tool>[1-9][0-9]*[-+*][1-9][0-9]*</tool>", "", said)
        if name == "command_agent" and "<tool>" in simple:
            continue
        compared += int(theirs[keys.NUM_TURNS]) == 2
        for key in (keys.TOKENS, keys.ACTION_MASK, keys.LOG_PROBS, keys.REWARD, keys.NUM_TURNS):
            # Calls of several agents are batched as they come, which changes the rounding of log-probs
            torch.testing.assert_close(ours[key], theirs[key], rtol=0, atol=0 if name == "openai_agent" else 1e-5)
    assert compared, "no row calls the tool"
    if name == "command_agent":
        assert found[0]["next", "log_extra"]["calls"] == int(found[0][keys.NUM_TURNS])


# Failures and limits


async def by_place(context: AgentContext, row: dict[str, Any]) -> Any:
    if row["place"] == 0:
        raise KeyError("broken agent")
    if row["place"] == 1:
        return 1.0  # without a call
    await answer(context, row)
    return {"rewards": 1.0} if row["place"] == 2 else {"reward": 3, "metrics": {"steps": 1}}


def test_agents_that_fail_abstain_and_are_counted(bpe) -> None:
    world = World(bpe, by_place)
    rows = world.collect()
    assert [stop_reason(row) for row in rows.unbind(0)] == ["failed"] * 3 + ["ended"]
    assert rows[keys.REWARD].isnan().flatten().tolist() == [True] * 3 + [False]
    assert float(rows[3][keys.REWARD]) == 3.0 and rows[3]["next", "log_extra"] == {"steps": 1}
    assert world.counts == {"agent/failed": 3, "agent/calls": 2, "agent/new_samples": 2}


def test_an_agent_that_hangs_is_cancelled_and_keeps_its_tokens(bpe) -> None:
    ended = threading.Event()

    async def hang(context: AgentContext, row: dict[str, Any]) -> None:
        await answer(context, row)
        try:
            await asyncio.sleep(1e6)
        finally:
            ended.set()

    world = World(bpe, hang, rows=ROWS[:1], max_seconds=10.0)
    (row,) = world.collect().unbind(0)
    assert stop_reason(row) == "time" and row[keys.ACTION_MASK].sum() == 2 and ended.wait(PATIENCE)
    assert world.counts["agent/timed_out"] == 1 and float(row[keys.REWARD]) == 0.0


def test_limits_of_calls_and_tokens(bpe) -> None:
    async def forever(context: AgentContext, row: dict[str, Any]) -> None:
        while True:
            await answer(context, row)

    def cut(request: Request, index: int) -> ScriptedTurn:
        return ScriptedTurn([40] * 99, finish="length")

    rows = World(bpe, forever, rows=ROWS[:1], max_turns=3).collect()
    assert stop_reason(rows[0]) == "turns" and int(rows[0][keys.NUM_TURNS]) == 3
    assert stop_reason(World(bpe, answer, cut, ROWS[:1], max_turn_tokens=5).collect()[0]) == "turn_tokens"
    assert stop_reason(World(bpe, answer, cut, ROWS[:1], max_tokens=60).collect()[0]) == "total_tokens"


def test_a_failed_policy_ends_its_agent_and_counts_as_a_failed_turn(bpe) -> None:
    async def stubborn(context: AgentContext, row: dict[str, Any]) -> None:
        while True:
            try:
                return await answer(context, row)
            except Exception:
                await asyncio.sleep(0.01)

    def fail(request: Request, index: int) -> ScriptedTurn:
        return ScriptedTurn([40], error=EngineError("out of memory"))

    world = World(bpe, stubborn, fail)
    rows = world.collect()
    assert [stop_reason(row) for row in rows.unbind(0)] == ["failed"] * 4
    assert world.counts["agent/failed_calls"] >= 4
    with pytest.raises(RuntimeError, match="out of memory"):
        World(bpe, stubborn, fail).collect(max_consecutive_failures=2)


def test_agents_that_never_work_end_the_run(bpe) -> None:
    async def broken(context: AgentContext, row: dict[str, Any]) -> None:
        raise ImportError("requires a_package; pip install a_package")

    with pytest.raises(RuntimeError, match="the first 4 agents all failed, the last with ImportError: requires a_pack"):
        World(bpe, broken).collect()

    async def breaks_once_it_works(context: AgentContext, row: dict[str, Any]) -> None:
        if row["place"] > 0:
            raise ImportError("lost")
        await answer(context, row)

    world = World(bpe, breaks_once_it_works, rows=[ROWS[0], *[row | {"place": 1} for row in ROWS[1:]]])
    assert len(world.collect()) == 4 and world.counts["agent/failed"] == 3


# Commands


def test_a_command_ends_with_its_children_and_its_limits(bpe, tmp_path) -> None:
    def run(code: str, seconds: float = PATIENCE, **settings: Any) -> Any:
        agent = CommandAgent([sys.executable, "-c", code], **settings)
        return asyncio.run(asyncio.wait_for(agent(AgentContext("http://127.0.0.1:1/v1", "k"), {"place": 3}), seconds))

    shown = run("import sys, json; print(sys.stdin.read()); print(json.dumps({'reward': 2}))")
    assert shown == {"reward": 2}
    assert run("print('x' * 300000); print(7)") is None
    with pytest.raises(RuntimeError, match="code 3: lost"):
        run("import sys; print('lost', file=sys.stderr); sys.exit(3)")
    with pytest.raises(RuntimeError, match="MemoryError"):
        run("x = bytearray(2**30)", memory=2**28)
    # A cancelled command takes its children along: the lock that they hold becomes free
    lock = tmp_path / "lock"
    holds = f"import fcntl, time; f = open({str(lock)!r}, 'w'); fcntl.flock(f, fcntl.LOCK_EX); time.sleep(1e6)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {holds!r}])"
    with pytest.raises(TimeoutError):
        run(code, 3.0)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)


GRACE = """
import os, signal, sys, time
folder = sys.argv[1]
def note(name):
    open(os.path.join(folder, name), "w").close()
if os.fork() == 0:
    signal.signal(signal.SIGTERM, lambda *_: (note("child"), os._exit(0)))
    note("ready child")
else:
    signal.signal(signal.SIGTERM, lambda *_: note("parent"))
    note("ready parent")
while True:
    time.sleep(0.01)
"""


def test_at_its_time_limit_a_command_gets_sigterm_and_then_sigkill(bpe, tmp_path) -> None:
    command = CommandAgent([sys.executable, "-c", GRACE, str(tmp_path)], grace=0.3)

    async def run() -> None:
        agent = asyncio.ensure_future(command(AgentContext("http://127.0.0.1:1/v1", "k"), {}))
        await asyncio.to_thread(wait_until, lambda: len(list(tmp_path.iterdir())) == 2)
        agent.cancel()
        began = time.monotonic()
        await asyncio.gather(agent, return_exceptions=True)
        assert agent.cancelled() and time.monotonic() - began >= 0.3  # the parent ignores SIGTERM

    asyncio.run(run())
    assert {path.name for path in tmp_path.iterdir()} == {"ready child", "ready parent", "child", "parent"}
    with pytest.raises(ValueError, match="grace=-1"):
        CommandAgent(["true"], grace=-1)


def test_what_is_refused(bpe) -> None:
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        CommandAgent(["no-such-program"])
    with pytest.raises(ValueError, match="must be a list"):
        CommandAgent("ls")
    with pytest.raises(TypeError, match="agent=3"):
        AgentTransform(3)
    with pytest.raises(ValueError, match="max_parallel=0"):
        AgentTransform(answer, max_parallel=0)
    settings = {"dataset": load_prompts(ROWS), "prompts_per_batch": 4}
    env = agent_env(answer, bpe, transforms=[FeedbackTransform(lambda conversation, row: None)], **settings)
    with pytest.raises(ValueError, match=r"FeedbackTransform.*AgentTransform"):
        RowStepper(env)
    with pytest.raises(ValueError, match="input_mode='text'"):
        RowStepper(agent_env(answer, bpe, input_mode="text", **settings))
    env = agent_env(answer, bpe, **settings)
    with pytest.raises(RuntimeError, match="use LLMCollector"):
        env.step(env.rand_action(env.reset()))


def test_a_transform_pickles_without_its_server(bpe) -> None:
    transform = agent_env(answer, bpe, dataset=load_prompts(ROWS), prompts_per_batch=4).transform.transforms[1]
    url = transform.server().url
    other = pickle.loads(pickle.dumps(transform))
    assert other.server().url != url and other.agent is answer
    other.close()
    transform.close()


# Rewards of calls and of sessions


async def reward_calls(context: AgentContext, row: dict[str, Any]) -> dict[str, Any]:
    """Reward the first of two calls, of which the second continues it unless ``place`` is 1."""
    rewards, messages = {}, list(row["query"])
    async with context.openai() as client:
        for value in (0.25, None):
            reply = await client.chat.completions.create(model=context.model, messages=messages)
            if value is not None:
                rewards[reply.id] = value
            messages += [{"role": "assistant", "content": reply.choices[0].message.content or ""}]
            messages += [{"role": "user", "content": "more"}]
    if row["place"] == 2:
        rewards["chatcmpl-unknown"] = 1.0
    return {"reward": 1.0, "call_rewards": rewards}


def test_rewards_of_calls_of_sessions_and_at_the_end(bpe) -> None:
    def score(calls: list[dict[str, Any]], row: dict[str, Any]) -> float:
        if row["place"] == 1:
            raise ValueError("no score")
        return 10.0 * len(calls) + sum(call["tokens"] for call in calls)

    world = World(bpe, reward_calls, rows=ROWS[:3], score=score, after_rewards=[TurnRewardTransform()])
    first, second, third = world.collect().unbind(0)
    assert float(first[keys.REWARD]) == 1.25 + 20 + 4
    # The reward of the call is at its last token, and all others at the end
    earned = first[keys.TOKEN_REWARDS][first[keys.ACTION_MASK]]
    assert earned.tolist() == [0.0, 0.25, 0.0, 25.0] and first[keys.TOKEN_REWARDS].sum() == 25.25
    # A score that raises, and a reward of an unknown call
    assert second[keys.REWARD].isnan().all() and third[keys.REWARD].isnan().all()
    assert world.counts["agent/failed_rewards"] == world.counts["agent/failed"] == 2
    with pytest.raises(TypeError, match="call_rewards"):
        read_call_rewards({"call_rewards": [1.0]})
    with pytest.raises(ValueError, match="finite"):
        read_call_rewards({"call_rewards": {"a": float("nan")}})
