"""TurnRewardTransform: each turn's reward at its last token, their sum as the reward, credit per turn."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.collectors.conversation import next_turn
from torchrl_rloo.data import keys, load_prompts
from torchrl_rloo.envs import DatasetChatEnv, RowStepper
from torchrl_rloo.envs.text import text_env
from torchrl_rloo.envs.transforms import FeedbackTransform, RewardTransform, TurnRewardTransform
from torchrl_rloo.modules import TransformersWrapper
from torchrl_rloo.runtime import event_loop


def length(conversation, row) -> float:
    assert conversation[-1]["role"] == "assistant"
    return float(len(conversation) + len(conversation[-1]["content"]))


@pytest.fixture
def collect(bpe, random_model, user) -> Callable:
    """Return ``collect(function, final)``: 8 rows of one to three turns, in two groups."""

    def make(function, final=lambda completions, **columns: [100.0] * len(completions)):
        asked = itertools.count()

        def respond(conversation, row):
            return user("go on") if next(asked) % 3 else None

        policy = TransformersWrapper(random_model, tokenizer=bpe, generate_kwargs={"max_new_tokens": 40, "seed": 0})
        env = DatasetChatEnv(
            load_prompts([{"query": user("a")}, {"query": user("abc")}]),
            bpe,
            prompts_per_batch=2,
            num_generations=4,
            transforms=[FeedbackTransform(respond, max_turns=3)],
            rewards=final,
            after_rewards=[TurnRewardTransform(function)],
        )
        return LLMCollector(env, policy).collect(), env, policy

    return make


def turns(row) -> list[int]:
    """Return the index of each turn's last action token."""
    mask = row[keys.ACTION_MASK].tolist() + [False]
    return [t for t in range(len(mask) - 1) if mask[t] and not mask[t + 1]]


def test_a_function_knows_the_tokens_of_the_turn(collect):
    """The sum of what it is told over a row's turns is the number of the row's action tokens."""
    rows, _, _ = collect(
        lambda conversation, row: row["turn_tokens"], lambda completions, **_: [0.0] * len(completions)
    )
    for row in rows.unbind(0):
        assert float(row[keys.REWARD]) == int(row[keys.ACTION_MASK].sum())


def test_each_turn_has_its_reward_and_the_last_one_that_of_the_whole(collect):
    rows, _, _ = collect(length)
    assert len({int(row[keys.NUM_TURNS]) for row in rows.unbind(0)}) > 1
    for row in rows.unbind(0):
        said = [
            i + 2 + len(m["content"])  # the prompt is one message
            for i, m in enumerate(row[keys.COMPLETION])
            if m["role"] == "assistant"
        ]
        expected = torch.zeros(len(row[keys.TOKENS]))
        for t, reward in zip(turns(row), said, strict=True):
            expected[t] = reward
        expected[turns(row)[-1]] += 100.0
        assert torch.equal(row[keys.TOKEN_REWARDS], expected)
        assert row[keys.REWARD].item() == expected.sum().item()


def test_a_turn_without_a_reward_costs_its_conversation_alone(collect):
    def fails_once(conversation, row):
        if fails_once.calls == 0:
            fails_once.calls += 1
            raise RuntimeError("no reward")
        return 1.0

    fails_once.calls = 0
    rows, env, _ = collect(fails_once)
    transform = next(t for t in env.transform if isinstance(t, TurnRewardTransform))
    assert transform.counts == {"turn_reward/failed_turns": 1}
    assert sum(bool(row[keys.REWARD].isnan()) for row in rows.unbind(0)) == 1
    fresh = TurnRewardTransform(length)
    fresh.load_state_dict(transform.state_dict())
    assert fresh.counts == {"turn_reward/failed_turns": 1}


def test_each_step_has_the_reward_of_its_turn_and_a_return_counts_each_once(collect, monkeypatch):
    steps = []
    step = TurnRewardTransform._step

    def kept(self, tensordict, next_tensordict):
        out = step(self, tensordict, next_tensordict)
        steps.extend((int(row["trajectory_id"]), float(row["reward"])) for row in out.unbind(0))
        return out

    monkeypatch.setattr(TurnRewardTransform, "_step", kept)
    rows, _, _ = collect(length)
    for row in rows.unbind(0):
        own = [reward for trajectory, reward in steps if trajectory == int(row[keys.TRAJECTORY_ID])]
        assert own == [float(row[keys.TOKEN_REWARDS][t]) for t in turns(row)]
        assert sum(own) == float(row[keys.REWARD])


def test_what_the_environment_gives_a_turn_is_credited_to_it(bpe, random_model):
    """Give turns rewards of 1, 2, 4, ... from the environment and 0.5 from a function, and the trajectory with 100."""

    class Doubles:
        def reset(self, seed=None):
            self.reward = 0.5
            return "abc"

        def step(self, action):
            self.reward *= 2
            return "again", self.reward, self.reward == 4

    def rows_of(*after) -> list:
        policy = TransformersWrapper(random_model, tokenizer=bpe, generate_kwargs={"max_new_tokens": 40, "seed": 0})
        rewards = RewardTransform(lambda completions, **columns: [100.0] * len(completions))
        env = text_env(Doubles, bpe, prompts_per_batch=2, num_generations=2, rewards=rewards, after_rewards=after)
        return list(LLMCollector(env, policy).collect().unbind(0))

    for half, function in ((0.0, None), (0.5, lambda conversation, row: 0.5)):
        for row in rows_of(TurnRewardTransform(function)):
            expected = torch.zeros(len(row[keys.TOKENS]))
            expected[turns(row)] = torch.tensor([1.0, 2.0, 104.0])[: len(turns(row))] + half
            assert len(turns(row)) == 3 and torch.equal(row[keys.TOKEN_REWARDS], expected)
            assert row[keys.REWARD].item() == 107.0 + 3 * half
    assert [row[keys.REWARD].item() for row in rows_of()] == [107.0] * 4


def test_a_conversation_given_up_before_its_turn_abstains(collect):
    _, env, policy = collect(lambda conversation, row: 7.0)
    stepper, rows = RowStepper(env), env.reset()
    fresh = stepper.truncate(rows[0].copy(), "cancelled")
    stepper.finish([fresh])
    assert fresh["next", "reward"].isnan().all()
    assert not fresh["next", "token_rewards", "full"].any()  # no action to credit
    stepped = [event_loop.run(stepper.step(row)) for row in policy(rows).unbind(0)]
    row = next_turn(next(row for row in stepped if not row["next", "done"].any()))
    row = stepper.truncate(row, "cancelled")
    stepper.finish([row])
    assert row["next", "reward"].isnan().all()
    earned, actions = row["next", "token_rewards", "full"], row["next", "masks", "all_assistant_mask"]
    assert earned[actions].isnan().all() and not earned[~actions].any()


def test_what_cannot_be_rewarded_is_refused(bpe, random_model):
    with pytest.raises(ValueError, match="function=3"):
        TurnRewardTransform(3)
    policy = TransformersWrapper(random_model, tokenizer=bpe, generate_kwargs={"max_new_tokens": 2, "seed": 0})
    prompts = load_prompts([{"query": "plain text"}], chat=False)
    env = DatasetChatEnv(prompts, bpe, prompts_per_batch=1, after_rewards=[TurnRewardTransform(length)])
    with pytest.raises(ValueError, match="chat messages, got 'plain text'"):
        LLMCollector(env, policy).collect()


def test_an_async_function_is_refused():
    """Refuse it, since it returns no number and every conversation would abstain."""

    async def judge(conversation, row):
        return 1.0

    with pytest.raises(ValueError, match="judge.*not an async one"):
        TurnRewardTransform(judge)
