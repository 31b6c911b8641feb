"""Rewards of tokens: a reward function returns a list per completion, and tokens are credited with them."""

from __future__ import annotations

import pytest
import torch

from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import keys, load_prompts
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.envs.transforms import FeedbackTransform, RewardTransform, TurnRewardTransform
from torchrl_rloo.modules import TransformersWrapper
from torchrl_rloo.replay import MCAdvantage
from torchrl_rloo.rewards import ForTask, RewardBatch, RewardRunner, StopProperly, call_reward, make_executor


def parity(completion_ids, **columns):
    """Reward even tokens with 1."""
    return [[float(i % 2 == 0) for i in ids] for ids in completion_ids]


def column(completion_ids, **columns):
    return [torch.tensor(each)[:, None] for each in parity(completion_ids)]


def some(completion_ids, **columns):
    """Reward the tokens of the first row, abstain on the second, and return a number for the others."""
    return [parity(completion_ids)[0], None, *[0.5] * (len(completion_ids) - 2)]


def batch(*ids: list[int]) -> RewardBatch:
    return RewardBatch(["?"] * len(ids), ["a"] * len(ids), list(ids), {"task": ["a", "b", "a"][: len(ids)]})


@pytest.mark.parametrize("function", [parity, column])
def test_a_list_is_the_rewards_of_tokens_and_its_sum_the_score(function):
    call = call_reward(function, batch([2, 4, 5], [1], []))
    assert call.scores == [2, 0, 0] and call.tokens == {0: [1, 1, 0], 1: [0], 2: []}


def test_lists_numbers_and_none_may_stand_beside_each_other():
    call = call_reward(some, batch([2, 3], [4], [6]))
    assert call.scores == [1, None, 0.5] and call.tokens == {0: [1, 0]}


@pytest.mark.parametrize("wrong", [[1.0], [1.0, 2.0, 3.0], [1.0, None], [[1.0, 2.0], [3.0]], [float("inf"), 1.0]])
def test_a_row_with_another_number_of_rewards_abstains_alone(wrong):
    def function(completion_ids, **columns):
        return [wrong if ids == [1, 2] else [1.0] * len(ids) for ids in completion_ids]

    scored = RewardRunner([function])(batch([1, 2], [3], [4, 5, 6]))
    assert scored.scores == [[None, 1, 3]] and sorted(scored.tokens[0]) == [1, 2]


def test_processes_and_duplicates_keep_the_rewards_of_tokens():
    def graded(completion_ids, **columns):  # by value: a worker cannot import this module
        return [[float(i % 2 == 0) for i in ids] for ids in completion_ids]

    runner = RewardRunner([graded], executor=make_executor("process", workers=1))
    try:
        rows = RewardBatch(["?"] * 3, ["a"] * 3, [[2, 1], [2, 1], [4]])
        assert runner(rows).tokens == [{0: [1, 0], 1: [1, 0], 2: [1]}]
    finally:
        runner.close()


def test_wrappers_pass_them_where_they_leave_scores_as_they_are():
    rows = batch([2, 3], [2], [4])
    assert call_reward(ForTask("a", parity), rows).tokens == {0: [1, 0], 2: [1]}
    assert not call_reward(StopProperly(parity), rows).tokens


@pytest.mark.parametrize("clip", [None, (-1.0, 1.0)])
def test_tokens_of_several_turns_get_the_return_of_what_follows(bpe, random_model, user, clip):
    """Compare with a loop over tokens in float64; what no token earned, and a clip, is at the last token."""
    policy = TransformersWrapper(random_model, tokenizer=bpe, generate_kwargs={"max_new_tokens": 12, "seed": 0})
    env = DatasetChatEnv(
        load_prompts([{"query": user("a")}, {"query": user("abc")}]),
        bpe,
        prompts_per_batch=2,
        num_generations=4,
        transforms=[FeedbackTransform(lambda conversation, row: user("go on"), max_turns=2)],
        rewards=RewardTransform(
            [parity, lambda completions, **_: [3.0] * len(completions)][: 1 if clip else 2],
            weights=[0.25] if clip else [0.25, 1.0],
            clip_range=clip,
        ),
        after_rewards=[TurnRewardTransform()],
    )
    rows = LLMCollector(env, policy).collect()
    written = MCAdvantage(4, credit="token").inv(rows)
    wholes: dict[int, list[float]] = {}
    to_go = []
    for row in written.unbind(0):
        ids = row[keys.TOKENS][row[keys.ACTION_MASK]].tolist()
        earned = [0.25 * (i % 2 == 0) for i in ids]
        whole = sum(earned) + 3.0 if clip is None else min(1.0, sum(earned))
        assert row[keys.REWARD].item() == pytest.approx(whole)
        earned[-1] += whole - sum(earned)
        to_go.append([sum(earned[t:]) for t in range(len(ids))])
        wholes.setdefault(int(row[keys.GROUP_ID]), []).append(whole)
        assert not row[keys.TOKEN_REWARDS][~row[keys.ACTION_MASK]].any()
    for row, returns in zip(written.unbind(0), to_go, strict=True):
        group = wholes[int(row[keys.GROUP_ID])]
        baseline = (sum(group) - returns[0]) / 3
        advantages = row[keys.ADVANTAGE][row[keys.ACTION_MASK]].flatten()
        assert torch.allclose(advantages, torch.tensor(returns) - baseline, atol=1e-5)
