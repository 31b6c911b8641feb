"""Roles of an agent in a collector: rows, groups, rewards, baselines and failures of each role."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace

import openai
import pytest
import torch

from torchrl_rloo.agents import AgentTransform, agent_env
from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import Role, keys, load_prompts, split_segments, stop_reason, tensor_rows
from torchrl_rloo.diagnostics import completion_metrics
from torchrl_rloo.embedded import build_model
from torchrl_rloo.engines.base import EngineError
from torchrl_rloo.engines.scripted import ScriptedEngine, ScriptedTurn
from torchrl_rloo.modules import TransformersWrapper, vLLMWrapper
from torchrl_rloo.objectives import RLOOLoss
from torchrl_rloo.replay import MCAdvantage, RunningBaseline

ROWS = [{"query": [{"role": "user", "content": f"Task {i}: abc?"}], "place": i} for i in range(2)]
WHITE = [{"role": "system", "content": "white"}, *ROWS[0]["query"]]
BLACK = [{"role": "system", "content": "black"}, *ROWS[0]["query"]]


async def ask(client, messages, model="policy"):
    return await client.chat.completions.create(model=model, messages=messages)


def collect(tokenizer, agent, script=None, settings=None, *, raw=False, **arguments):
    """Collect one batch of a scripted engine, or of an ordinary policy for ``script="model"``."""
    engine = None
    if script == "model":
        generate = {"max_new_tokens": 4, "seed": 0}
        policy = TransformersWrapper(build_model(tokenizer, seed=0), tokenizer=tokenizer, generate_kwargs=generate)
    else:
        engine = ScriptedEngine(script or (lambda request, index: ScriptedTurn([40 + index % 7, 41])))
        policy = vLLMWrapper(engine, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 50, "seed": 0})
    arguments = {"prompts_per_batch": 2, "num_generations": 3, "shuffle": False} | arguments
    env = agent_env(agent, tokenizer, dataset=load_prompts(ROWS), **arguments)
    (transform,) = (t for t in env.transform.transforms if isinstance(t, AgentTransform))
    collector = LLMCollector(env, policy, **(settings or {}))
    try:
        return SimpleNamespace(rows=collector.collect(), counts=transform.counts, policy=policy, collector=collector)
    finally:
        collector.shutdown()
        if engine is not None:
            engine.close()


def of_role(rows, name):
    return [row for row in rows.unbind(0) if row["role"] == name]


def actions(row):
    return row[keys.TOKENS][row[keys.ACTION_MASK]].tolist()


def leave_one_out(values):
    return [v - sum(values[:i] + values[i + 1 :]) / (len(values) - 1) for i, v in enumerate(values)]


def games(white_first=True):
    """Return a game of two players; white earns how often it was played, black a square, by prompt."""
    played: dict[int, int] = {}

    async def game(context, row):
        place = row["place"]
        number = played[place] = played.get(place, -1) + 1
        async with context.openai("white") as white, context.openai("black") as black:
            first = await ask(white, WHITE)
            second = await ask(black, BLACK)
            await ask(black, [*BLACK, second.choices[0].message.model_dump(include={"role", "content"}), *WHITE[1:]])
            assert first.model == "policy"
        return {"rewards": {"white": float(number), "black": -(float(number) ** 2) - 10 * place}, "reward": 0.5}

    return game


def test_each_role_has_rows_groups_rewards_and_a_baseline(tokenizer):
    played = collect(tokenizer, games(), roles=["white", "black"])
    rows = played.rows
    assert len(rows) == 12 and [row["role"] for row in rows.unbind(0)] == (["white"] * 3 + ["black"] * 3) * 2
    assert len(set(rows[keys.GROUP_ID].tolist())) == 4 and set(rows[keys.GROUP_SIZE].tolist()) == {3}
    assert rows["role_id"].tolist() == [0] * 3 + [1] * 3 + [0] * 3 + [1] * 3
    for row in rows.unbind(0):
        white = row["role"] == "white"
        assert int(row[keys.NUM_TURNS]) == (1 if white else 2) and len(actions(row)) == (2 if white else 4)
        text = tokenizer.decode(row[keys.TOKENS].tolist())
        assert row["role"] in text and ("black" if white else "white") not in text
        assert len(row[keys.COMPLETION]) == (1 if white else 3) and stop_reason(row) == "ended"
    metrics = completion_metrics(rows, [], [])
    assert metrics["roles/white/reward"] == pytest.approx(1.5) and metrics["roles/black/mean_length"] == 4
    found = MCAdvantage().inv(tensor_rows(rows))
    for group in rows[keys.CONVERSATION_GROUP].unique().tolist():
        for role, expected in (("white", [0.0, 1.0, 2.0]), ("black", [0.0, -1.0, -4.0])):
            own = [row for row in of_role(rows, role) if int(row[keys.CONVERSATION_GROUP]) == group]
            place = own[0]["place"]
            shift = 0.5 - (10 * int(place) if role == "black" else 0)
            returns = [float(row[keys.REWARD]) for row in own]
            assert sorted(returns) == sorted(value + shift for value in expected)
            ids = {int(row[keys.GROUP_ID]) for row in own}
            advantages = [float(row["advantage"]) for row in found.unbind(0) if int(row[keys.GROUP_ID]) in ids]
            assert len(ids) == 1 and advantages == pytest.approx(leave_one_out(returns))


def test_ratios_of_all_roles_are_one(tokenizer):
    """The loss reads the ids and log-probs of each role's own context, also over several samples."""

    async def game(context, row):
        async with context.openai("white") as white, context.openai("black") as black:
            await asyncio.gather(ask(white, WHITE), ask(white, WHITE), ask(black, WHITE), ask(black, BLACK))
        return {"rewards": {"white": float(torch.rand(())), "black": float(torch.rand(()))}}

    played = collect(tokenizer, game, "model", roles=["white", "black"], max_turn_tokens=4)
    rows = played.rows
    assert len(rows) == 12 and all(keys.PREVIOUS_SEGMENTS in row.keys() for row in rows.unbind(0))
    batch = split_segments(MCAdvantage(3).inv(tensor_rows(rows)))
    assert len(batch) == 24
    assert float(RLOOLoss(played.policy.get_new_version(generate=False))(batch).kl_approx) < 1e-9
    # Equal prompts of two roles are sampled apart
    first = [[actions(row) for row in split_segments(rows).unbind(0) if row["role"] == r] for r in ("white", "black")]
    assert first[0] != first[1]


def test_samples_of_a_role_are_compared_within_one_conversation(tokenizer):
    """Hierarchical groups: solvers of one proposal; a judge whose calls are not trained on."""

    async def propose(context, row):
        async with context.openai() as client:
            proposal = await ask(client, WHITE, "proposer")
            said = {"role": "assistant", "content": proposal.choices[0].message.content}
            tries = [await ask(client, [*BLACK, said, *ROWS[0]["query"]], "solver") for _ in range(4)]
            await ask(client, WHITE, "judge")
        earned = {reply.id: float(i) for i, reply in enumerate(tries)}
        return {"rewards": {"proposer": 7.0, "solver": 1.0}, "call_rewards": earned}

    roles = ["proposer", Role("solver", compare="conversation"), Role("judge", frozen=True)]
    played = collect(tokenizer, propose, roles=roles)
    rows = played.rows
    assert len(of_role(rows, "proposer")) == 6 and len(of_role(rows, "solver")) == 24 and len(rows) == 30
    assert [float(row[keys.REWARD]) for row in of_role(rows, "proposer")] == [7.0] * 6
    groups = {}
    for row in MCAdvantage().inv(tensor_rows(rows)).unbind(0):
        groups.setdefault(int(row[keys.GROUP_ID]), []).append(row)
    solved = [members for members in groups.values() if len(members) == 4]
    assert len(solved) == 6 and len(groups) == 8
    for members in solved:
        returns = [float(row[keys.REWARD]) for row in members]
        assert returns == [1.0, 2.0, 3.0, 4.0]
        assert [float(row["advantage"]) for row in members] == pytest.approx(leave_one_out(returns))
        parent = int(members[0][keys.CONVERSATION_GROUP])
        assert int(members[0][keys.GROUP_ID]) // 4 == parent * 3 + 1


def test_a_running_baseline_for_each_role(tokenizer):
    """Groups have one conversation, and players different returns."""

    async def game(context, row):
        async with context.openai("white") as white, context.openai("black") as black:
            await ask(white, WHITE)
            await ask(black, BLACK)
        return {"rewards": {"white": 1.0 + row["place"], "black": -3.0}}

    rows = collect(tokenizer, game, roles=["white", "black"], num_generations=1).rows
    baseline = RunningBaseline(decay=0.5, by="role")
    found = MCAdvantage(1, estimator=baseline).inv(tensor_rows(rows))
    assert found["advantage"].flatten().tolist() == [1.0, -3.0, 1.5, -1.5]
    assert baseline.baselines == {0: 1.25, 1: -2.25}
    with pytest.raises(KeyError, match="role_id.*agent_env"):
        MCAdvantage(1, estimator=baseline).inv(tensor_rows(rows).exclude("role_id"))
    with pytest.raises(ValueError, match="by='player'"):
        RunningBaseline(by="player")


def test_a_score_rewards_each_role(tokenizer):
    async def game(context, row):
        async with context.openai("white") as white, context.openai("black") as black:
            await ask(black, BLACK)
            await ask(white, WHITE)

    def score(calls, row):
        return {call["role"]: 5.0 + len(calls) if call["role"] == "white" else -1.0 for call in calls}

    rows = collect(tokenizer, game, roles=["white", "black"], score=score).rows
    assert rows[keys.REWARD].flatten().tolist() == ([7.0] * 3 + [-1.0] * 3) * 2


def test_silent_roles_and_failed_conversations_abstain_in_whole_groups(tokenizer):
    async def game(context, row):
        if row["place"] == 1:
            raise RuntimeError("lost")
        async with context.openai("white") as white:
            await ask(white, WHITE)
        return {"rewards": {"white": 1.0, "black": 2.0}}

    roles = ["white", "black", Role("solver", compare="conversation")]
    rows = collect(tokenizer, game, roles=roles).rows
    assert len(rows) == 18
    for row in rows.unbind(0):
        plays = row["role"] == "white" and row["place"] == 0
        assert math.isnan(row[keys.REWARD]) is not plays and bool(actions(row)) is plays
        assert len(row[keys.TOKENS]) and stop_reason(row) == ("ended" if row["place"] == 0 else "failed")
    found = MCAdvantage().inv(tensor_rows(rows))
    assert len(found) == 18 and not found["advantage"].any()


def test_a_failed_policy_abstains_for_all_roles(tokenizer):
    async def game(context, row):
        async with context.openai("white") as white, context.openai("black") as black:
            await ask(black, BLACK)
            await ask(white, WHITE)

    def script(request, index):
        return ScriptedTurn([40], error=EngineError("gone") if index % 2 else None)

    rows = collect(tokenizer, game, script, roles=["white", "black"]).rows
    assert len(rows) == 12 and rows[keys.REWARD].isnan().any()
    for group in rows[keys.CONVERSATION_GROUP].unique():
        own = rows[rows[keys.CONVERSATION_GROUP] == group]
        assert len(own) == 6


def test_wrong_settings_and_calls_are_refused_by_name(tokenizer):
    with pytest.raises(ValueError, match="name='a b'"):
        Role("a b")
    with pytest.raises(ValueError, match="compare='all'"):
        Role("a", compare="all")
    with pytest.raises(TypeError, match=r"use \['white'\]"):
        AgentTransform(games(), roles="white")
    with pytest.raises(ValueError, match="different names"):
        AgentTransform(games(), roles=["white", "white"])
    with pytest.raises(ValueError, match="leaves none to train"):
        AgentTransform(games(), roles=[Role("judge", frozen=True)])

    seen = []

    async def game(context, row):
        async with context.openai() as client:
            for model in ("policy", "black"):
                try:
                    await ask(client, WHITE, model)
                except openai.BadRequestError as error:
                    seen.append(str(error))
        try:
            context.openai("blue")
        except ValueError as error:
            seen.append(str(error))
        return {"rewards": {"blue": 1.0}}

    played = collect(tokenizer, game, roles=["white", "black"], prompts_per_batch=1, num_generations=1)
    assert "must be one of the roles ['white', 'black']" in seen[0] and "role='blue'" in seen[1]
    assert played.counts["agent/failed"] == 1 and played.rows[keys.REWARD].isnan().all()
