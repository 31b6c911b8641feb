"""Roles of one conversation: own rows, groups and baselines, frozen roles, other policies and failures."""

from __future__ import annotations

import json
import math
from urllib.error import HTTPError
from urllib.request import Request as HTTPRequest
from urllib.request import urlopen

import pytest

from torchrl_rloo.agents import PolicyEndpoint, RolePlay
from torchrl_rloo.data import keys, tensor_rows
from torchrl_rloo.data.rows import stack_rows
from torchrl_rloo.engines.base import EngineError
from torchrl_rloo.engines.scripted import ScriptedEngine, ScriptedTurn
from torchrl_rloo.envs import ChatEnv
from torchrl_rloo.modules import vLLMWrapper
from torchrl_rloo.replay import MCAdvantage

QUERY = [{"role": "user", "content": "abc"}]
BOTH = {"white": QUERY, "black": QUERY}


@pytest.fixture
def endpoints(tokenizer):
    """Three endpoints: two that sample different ids, and one that fails; the seeds of the first are kept."""
    engines, opened, seeds = [], [], []

    def fails(request, index):
        return ScriptedTurn([1], error=EngineError("gone"))

    def first(request, index):
        seeds.append(request.seed)
        return ScriptedTurn([40, 41])

    for script in (first, lambda request, index: ScriptedTurn([50]), fails):
        engines.append(ScriptedEngine(script))
        policy = vLLMWrapper(engines[-1], tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 9})
        opened.append(PolicyEndpoint(policy, ChatEnv(tokenizer)))
    opened[0].seeds = seeds
    yield opened
    for endpoint, engine in zip(opened, engines, strict=True):
        endpoint.close()
        engine.close()


def call(context) -> None:
    data = json.dumps({"messages": QUERY}).encode()
    headers = {"Authorization": f"Bearer {context.api_key}", "Content-Type": "application/json"}
    with urlopen(HTTPRequest(context.base_url + "/chat/completions", data, headers), timeout=60) as reply:
        reply.read()


def sampled(row) -> list[int]:
    return row[keys.TOKENS][row[keys.ACTION_MASK]].tolist()


def test_baselines_are_within_group_and_role(endpoints):
    play, rows, returns = RolePlay(dict.fromkeys(BOTH, endpoints[0])), [], {}
    for group in range(2):
        for member in range(3):
            game = play.open(BOTH, group_id=group)
            for context in game.contexts.values():
                call(context)
            rewards = {"white": float(group + member), "black": -float(member**2)}
            for role, row in game.finish(rewards).items():
                assert row["role"] == role
                returns.setdefault((group, role), []).append(rewards[role])
                rows.append(row)
    assert len({int(row[keys.GROUP_ID]) for row in rows}) == 4
    out = MCAdvantage(3).inv(tensor_rows(stack_rows(rows)))
    found = {}
    for row in out:
        found.setdefault(int(row[keys.GROUP_ID]), []).append(float(row["advantage"]))
    for (group, role), own in returns.items():
        expected = [value - sum(own[:i] + own[i + 1 :]) / 2 for i, value in enumerate(own)]
        assert found[group * 2 + list(BOTH).index(role)] == pytest.approx(expected)


def test_roles_have_own_policies_and_frozen_ones_no_rows(endpoints):
    play = RolePlay({"solver": endpoints[1], "judge": endpoints[0]}, frozen={"judge"})
    game = play.open({"solver": QUERY, "judge": QUERY}, group_id=0)
    for context in game.contexts.values():
        call(context)
    rows = game.finish({"solver": 1.0})
    assert list(rows) == ["solver"] and sampled(rows["solver"]) == [50]
    for context in game.contexts.values():
        with pytest.raises(HTTPError):
            call(context)


def test_a_role_that_never_called_abstains(endpoints):
    game = RolePlay(dict.fromkeys(BOTH, endpoints[0])).open(BOTH, group_id=0)
    call(game.contexts["white"])
    rows = game.finish({"white": 1.0, "black": -1.0})
    assert float(rows["white"][keys.REWARD]) == 1.0 and sampled(rows["white"]) == [40, 41]
    assert math.isnan(rows["black"][keys.REWARD]) and sampled(rows["black"]) == []


def test_seeds_differ_by_role_and_repeat(endpoints):
    for _ in range(2):
        game = RolePlay(dict.fromkeys(BOTH, endpoints[0])).open(BOTH, group_id=0, seed=3)
        for context in game.contexts.values():
            call(context)
    seeds = endpoints[0].seeds
    assert seeds[:2] == seeds[2:] and seeds[0] != seeds[1]


def test_wrong_settings_are_refused_by_name(endpoints):
    roles = dict.fromkeys(BOTH, endpoints[0])
    with pytest.raises(ValueError, match="frozen=.*judge"):
        RolePlay(roles, frozen={"judge"})
    with pytest.raises(ValueError, match="leaves no role"):
        RolePlay(roles, frozen=set(roles))
    with pytest.raises(ValueError, match="queries="):
        RolePlay(roles).open({"white": QUERY}, group_id=0)
    game = RolePlay(roles).open(BOTH, group_id=0)
    with pytest.raises(ValueError, match="rewards="):
        game.finish({"white": 1.0})
    with pytest.raises(ValueError, match="finite"):
        game.finish({"white": 1.0, "black": math.inf})


def test_a_failed_policy_ends_all_roles(endpoints):
    game = RolePlay({"white": endpoints[2], "black": endpoints[0]}).open(BOTH, group_id=0)
    with pytest.raises(HTTPError):
        call(game.contexts["white"])
    with pytest.raises(RuntimeError, match="gone"):
        game.finish({"white": 1.0, "black": -1.0})
    with pytest.raises(HTTPError):
        call(game.contexts["black"])
