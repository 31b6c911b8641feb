"""Tests of trajectories that abstain: what failed is not the policy's doing, so nothing is learned from it."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from tensordict import TensorDictBase
from torchrl.data import ReplayBuffer

from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import keys, load_prompts
from torchrl_rloo.data.stop_reasons import STOP_REASONS, abstains, stop_reason
from torchrl_rloo.diagnostics import completion_metrics
from torchrl_rloo.engines import ScriptedEngine, ScriptedTurn
from torchrl_rloo.engines.base import EngineError
from torchrl_rloo.envs import ChatEnv, DatasetChatEnv
from torchrl_rloo.envs.transforms import FeedbackTransform, KLRewardTransform
from torchrl_rloo.envs.transforms.reward import TurnRewardTransform
from torchrl_rloo.envs.turn_transform import TurnTransform
from torchrl_rloo.functional.advantages import ESTIMATORS
from torchrl_rloo.modules import TransformersWrapper, vLLMWrapper
from torchrl_rloo.objectives import RLOOLoss
from torchrl_rloo.replay import MCAdvantage, RowStorage

G = 4


class Answered:
    """Reward of 1 for every completion, which records how many it was given."""

    __name__ = "answered"
    whole_batch = True  # identical completions are not merged

    def __init__(self):
        self.seen: list[int] = []

    def __call__(self, completions, **columns) -> list[float]:
        self.seen.append(len(completions))
        return [1.0] * len(completions)


class Reference:
    """Scorer that records the rows that it scores."""

    generate = False

    def __init__(self, scorer: TransformersWrapper):
        self.scorer, self.rows = scorer, 0

    def score(self, rows: TensorDictBase):
        self.rows += len(rows)
        return self.scorer.score(rows)


class BreaksAtTurn(TurnTransform):
    """Tool that answers every first turn, and raises for one conversation at its second."""

    def __init__(self):
        super().__init__()
        self.broken = False

    async def step_row(self, row: TensorDictBase, next_row: TensorDictBase) -> None:
        if int(next_row[keys.NUM_TURNS]) == 1:
            self.chat_env.continue_row(next_row, [{"role": "user", "content": "again"}])
        elif not self.broken:
            self.broken = True
            raise OSError("the host of the tool is down")


@pytest.fixture
def world(bpe, user: Callable):
    """Return ``world(*transforms, fails=None)``: environment, policy, reward function of one group of four."""
    engines: list[ScriptedEngine] = []

    def build(*transforms, fails: int | None = None, after=(), **settings):
        def script(request, index: int) -> ScriptedTurn:
            if index == fails:
                raise EngineError("the engine ran out of memory")
            return ScriptedTurn([30, 31, bpe.eos_token_id], [-1.0, -0.5, -0.25])

        engines.append(ScriptedEngine(script))
        reward = Answered()
        dataset = load_prompts([{"query": user("abc")}])
        env = DatasetChatEnv(
            dataset,
            bpe,
            prompts_per_batch=1,
            num_generations=G,
            rewards=reward,
            transforms=transforms,
            after_rewards=after,
            **settings,
        )
        return env, vLLMWrapper(engines[-1], tokenizer=bpe, generate_kwargs={"max_new_tokens": 6}), reward

    yield build
    for engine in engines:
        engine.close()


def check_group(rows: TensorDictBase, scorer: TransformersWrapper) -> None:
    """Check that one row of the group abstains and that neither it nor the others learn from its failure."""
    rewards, failed = rows[keys.REWARD].flatten(), rows[keys.REWARD].flatten().isnan()
    assert int(failed.sum()) == 1 and bool((rewards[~failed] == rewards[~failed][0]).all())
    assert bool(rows[keys.REWARDS][failed].isnan().all()) and not bool(rows[keys.REWARDS][~failed].isnan().any())
    for estimator in ESTIMATORS.keys() - {"remax"}:  # it needs a greedy member
        buffer = ReplayBuffer(storage=RowStorage(), transform=MCAdvantage(G, estimator=estimator), batch_size=G)
        buffer.extend(rows)
        advantages = buffer[:]["advantage"].flatten()
        if estimator != "reinforce":  # without a baseline, equal rewards have a signal
            assert not advantages.any(), estimator
        assert advantages[failed].tolist() == [0.0]
    assert RLOOLoss(scorer)(buffer.sample()).loss_objective.isfinite()
    metrics = completion_metrics(rows, ["answered"], [1.0])
    assert metrics["reward"] == 1.0 and metrics["frac_abstained"] == 0.25 and metrics["rewards/answered/mean"] == 1.0


def test_a_failed_request_is_no_part_of_its_groups_baseline(world: Callable, random_model, bpe) -> None:
    scorer = TransformersWrapper(random_model, tokenizer=bpe, generate=False)
    reference = Reference(scorer)
    env, policy, reward = world(fails=1, after=(KLRewardTransform(reference, 0.0),))
    collector = LLMCollector(env, policy)
    rows = collector.collect()
    collector.shutdown()
    assert sorted(stop_reason(row) for row in rows.unbind(0)) == ["answered"] * 3 + ["failed"]
    assert reward.seen == [3], "the reward function is not called for the failed row"
    assert reference.rows == 3, "nor is the reference"
    check_group(rows, scorer)


def test_a_tool_that_fails_at_the_second_turn(world: Callable, random_model, bpe) -> None:
    scorer = TransformersWrapper(random_model, tokenizer=bpe, generate=False)
    env, policy, reward = world(BreaksAtTurn(), after=(TurnRewardTransform(lambda c, row: 0.25),))
    collector = LLMCollector(env, policy)
    rows = collector.collect()
    collector.shutdown()
    assert reward.seen == [3] and rows[keys.NUM_TURNS].tolist() == [2] * G
    check_group(rows, scorer)
    (failed,) = [row for row in rows.unbind(0) if stop_reason(row) == "failed"]
    assert failed[keys.TOKEN_REWARDS][failed[keys.ACTION_MASK]].isnan().all(), "its first turn is not blamed either"
    buffer = ReplayBuffer(storage=RowStorage(), transform=MCAdvantage(G, credit="turn"), batch_size=G)
    buffer.extend(rows)
    assert not any(row["advantage"].any() for row in buffer[:].unbind(0))


def test_stepping_by_hand_marks_the_same_rows(world: Callable) -> None:
    for rewards in (True, False):
        env, policy, _ = world(BreaksAtTurn())
        if not rewards:  # the mark does not depend on a RewardTransform
            del env.transform.transforms[-1]
        rows = env.step(policy(env.reset()))
        assert not rows[keys.REWARD].isnan().any()
        rows = env.step(policy(env.step_mdp(rows)))
        assert int(rows[keys.REWARD].isnan().sum()) == 1 and rows[keys.DONE].all()


@pytest.mark.parametrize("on_time_limit", ["score", "abstain"])
def test_the_user_chooses_for_conversations_out_of_time(on_time_limit: str, world: Callable) -> None:
    def slow(conversation, row) -> list:
        time.sleep(0.03)
        return [{"role": "user", "content": "again"}]

    env, policy, reward = world(FeedbackTransform(slow), max_seconds=0.02, on_time_limit=on_time_limit)
    rows = LLMCollector(env, policy).collect()
    assert [stop_reason(row) for row in rows.unbind(0)] == ["time"] * G
    assert rows[keys.REWARD].isnan().all() == (on_time_limit == "abstain")
    assert reward.seen == ([G] if on_time_limit == "score" else [])


def test_a_turn_without_tokens_abstains(world: Callable, bpe) -> None:
    env, _, reward = world()
    rows = env.reset()
    for i, row in enumerate(rows.unbind(0)):
        new = torch.tensor([30, bpe.eos_token_id] if i else [], dtype=torch.long)
        row.set(keys.TOKENS, torch.cat([row[keys.PROMPT_TOKENS], new]))
    rows = env.step(rows)
    assert rows[keys.REWARD].flatten().isnan().tolist() == [True, False, False, False] and reward.seen == [3]


def test_reasons_that_abstain(bpe) -> None:
    assert [reason for reason in STOP_REASONS if abstains(reason)] == ["failed", "cancelled"]
    with pytest.raises(KeyError, match="reason='tired' must be one of"):
        abstains("tired")
    with pytest.raises(ValueError, match="on_time_limit='abstain' requires max_seconds"):
        ChatEnv(bpe, on_time_limit="abstain")
    with pytest.raises(ValueError, match="on_time_limit='skip' must be one of"):
        ChatEnv(bpe, on_time_limit="skip", max_seconds=1.0)
