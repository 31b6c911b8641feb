"""Agents in Ray workers, each of which has its own endpoint."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from aiohttp import ClientSession

from torchrl_rloo.agents import AgentContext, agent_env
from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import keys, load_prompts
from torchrl_rloo.data.segments import split_segments
from torchrl_rloo.embedded import build_tokenizer
from torchrl_rloo.engines import ScriptedEngine, ScriptedTurn
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.modules import vLLMWrapper
from torchrl_rloo.ray import RayLLMCollector

pytest.importorskip("ray")
pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("functions_by_value")]


async def forget(context: AgentContext, row: dict[str, Any]) -> float:
    """Continue once, then start again."""
    messages, headers = list(row["query"]), {"Authorization": f"Bearer {context.api_key}"}
    async with ClientSession() as http:
        for again in (False, False, True):
            sent = [{"role": "user", "content": "Summary."}] if again else messages
            async with http.post(
                f"{context.base_url}/chat/completions", json={"messages": sent}, headers=headers
            ) as reply:
                said = (await reply.json())["choices"][0]["message"]["content"]
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "more"}]
    return float(len(said))


def make_env() -> DatasetChatEnv:
    prompts = load_prompts([{"query": [{"role": "user", "content": f"{i}"}]} for i in range(4)])
    return agent_env(forget, build_tokenizer(), dataset=prompts, prompts_per_batch=4, num_generations=2, seed=0)


def scripted() -> vLLMWrapper:
    tokenizer = build_tokenizer()
    engine = ScriptedEngine(
        lambda request, _: ScriptedTurn([20 + request.seed % 30, 20 + len(request.prompt) % 30, tokenizer.eos_token_id])
    )
    return vLLMWrapper(engine, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 4})


def test_agents_in_ray_workers_give_the_rows_of_llm_collector() -> None:
    remote = RayLLMCollector(make_env, policy_factory=scripted, seed=0)
    local = LLMCollector(make_env(), scripted(), seed=0)
    try:
        found, expected = remote.collect(), local.collect()
    finally:
        remote.shutdown(raise_on_error=False)
        local.shutdown()
    order = found[keys.GROUP_ID].argsort(stable=True).tolist()
    assert len(found) == len(expected) == 8
    for ours, theirs in zip([found[i] for i in order], expected.unbind(0), strict=True):
        assert int(ours[keys.NUM_TURNS]) == 3 and torch.equal(ours[keys.REWARD], theirs[keys.REWARD])
        ours, theirs = (split_segments(row.unsqueeze(0)).unbind(0) for row in (ours, theirs))
        assert len(ours) == len(theirs) == 2
        for one, other in zip(ours, theirs, strict=True):
            for key in (keys.TOKENS, keys.ACTION_MASK, keys.LOG_PROBS):
                assert torch.equal(one[key], other[key]), key
