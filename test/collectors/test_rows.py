"""Tests of the rows of LLMCollector: their schema, order, and independence of the collector's settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from tensordict import TensorDictBase
from torchrl.envs import Transform
from torchrl.modules.llm.policies import LogProbs, Masks, Tokens

from support.collecting import G, assert_same, groups_of
from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import encode_prompt, keys
from torchrl_rloo.data.rows import ragged
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.envs.transforms import FeedbackTransform, KLRewardTransform
from torchrl_rloo.envs.transforms.reward import TurnRewardTransform
from torchrl_rloo.modules import TransformersWrapper

REPLY = [{"role": "user", "content": "again"}]

SCHEMA = {  # key: (dtype, shape of a row with T tokens and P prompt tokens)
    keys.GROUP_ID: (torch.int64, ()),
    keys.GROUP_SIZE: (torch.int64, ()),
    keys.PROMPT_ID: (torch.int64, ()),
    keys.POLICY_VERSION: (torch.int64, ()),
    keys.NUM_TURNS: (torch.int64, ()),
    keys.TRAJECTORY_ID: (torch.int64, ()),
    keys.STOP_REASON: (torch.int64, ()),
    keys.TOKENS: (torch.int64, ("T",)),
    keys.PROMPT_TOKENS: (torch.int64, ("P",)),
    keys.ATTENTION_MASK: (torch.bool, ("T",)),
    keys.ACTION_MASK: (torch.bool, ("T",)),
    keys.LOG_PROBS: (torch.float32, ("T",)),
    keys.REF_LOG_PROBS: (torch.float32, ("T",)),
    keys.REWARD: (torch.float32, (1, 1)),
    keys.REWARDS: (torch.float32, (2,)),
    keys.DONE: (torch.bool, (1,)),
    keys.TERMINATED: (torch.bool, (1,)),
    keys.TRUNCATED: (torch.bool, (1,)),
}


@pytest.mark.parametrize("turns", [0, 1, 3])
def test_rows_have_the_schema(turns: int, modeled: Callable, bpe) -> None:
    collector = modeled(turns=turns)
    for _ in range(2):
        rows = collector.collect()
        assert rows.batch_size == (6,)
        for row in rows.unbind(0):
            leaves = {k for k in row.keys(True, True) if isinstance(row.get(k), torch.Tensor)}
            assert leaves == set(SCHEMA)
            columns = set(row.keys()) - {k[0] if isinstance(k, tuple) else k for k in SCHEMA}
            assert columns == {keys.QUERY, keys.COMPLETION, "answer", "turns"}
            sizes = {"T": len(row[keys.TOKENS]), "P": len(encode_prompt(bpe, row[keys.QUERY]))}
            for key, (dtype, shape) in SCHEMA.items():
                assert row[key].dtype == dtype, key
                assert row[key].shape == tuple(sizes.get(n, n) for n in shape), key
            assert isinstance(row["tokens"], Tokens) and isinstance(row["masks"], Masks)
            assert isinstance(row["log_probs"], LogProbs) and isinstance(row["next", "ref_log_probs"], LogProbs)
            assert row[keys.ATTENTION_MASK].all() and row[keys.DONE].all()
            assert (row[keys.TERMINATED] != row[keys.TRUNCATED]).all()
            assert row[keys.PROMPT_TOKENS].tolist() == row[keys.TOKENS][: sizes["P"]].tolist()
            assert not row[keys.ACTION_MASK][: sizes["P"]].any() and row[keys.ACTION_MASK][sizes["P"]]
            assert float(row[keys.REWARD]) == float(row[keys.REWARDS].nansum())
        assert rows[keys.REWARD].shape == (6, 1, 1) and rows[keys.DONE].shape == (6, 1)


class TurnReward(Transform):
    """Transform that rewards every turn with the number of turns so far."""

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        for row in next_tensordict.unbind(0):
            row.set("reward", row[keys.NUM_TURNS].float().reshape(1, 1))
        return next_tensordict


def test_rewards_of_all_turns_are_summed(modeled: Callable, bpe, numbered_prompts) -> None:
    feedback = FeedbackTransform(lambda c, row: REPLY if len(c) < 6 else None, max_turns=5)
    env = DatasetChatEnv(
        numbered_prompts, bpe, prompts_per_batch=2, num_generations=3, transforms=[feedback, TurnReward()]
    )
    collector = modeled(turns=3, env=env)
    for _ in range(2):
        assert collector.collect()[keys.REWARD].flatten().tolist() == [1.0 + 2.0 + 3.0] * 6


class Seeds(Transform):
    """Seeds that do not depend on the collector."""

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        for i, row in enumerate(tensordict_reset.unbind(0)):
            row.set(keys.SEED, torch.tensor(1000 * int(row[keys.GROUP_ID]) + i % G))
        return tensordict_reset


@pytest.mark.parametrize("kind", ["engine", "batches"])
def test_rows_do_not_depend_on_how_they_are_sampled(kind: str, scripted: Callable, make_env, random_model, bpe) -> None:
    """Settings change which rows share a batch, and so only the rounding of log-probs."""

    def reply(conversation, row):
        return [{"role": "user", "content": f"again {row['answer']}"}] if len(conversation) < 2 * row["turns"] else None

    def brevity(conversation, row) -> float:
        return -0.25 * len(conversation)

    def build(**kwargs) -> LLMCollector:
        ref = TransformersWrapper(random_model, tokenizer=bpe, generate=False)
        after = (TurnRewardTransform(brevity), KLRewardTransform(ref, 0.1))
        env = make_env(FeedbackTransform(reply), Seeds(), after=after)
        if kind == "engine":
            return scripted(env=env, **kwargs)
        policy = TransformersWrapper(random_model, tokenizer=bpe, generate_kwargs={"max_new_tokens": 6})
        return LLMCollector(env, policy, **kwargs)

    plain, limited, ahead = build(), build(max_in_flight=3), build(ahead=4, reward_threads=2)
    by_group = {}
    for _ in range(3):
        rows = plain.collect()
        by_group |= {group: rows[i : i + G] for i, group in enumerate(groups_of(rows)) if i % G == 0}
        assert_same(limited.collect(), rows, 1e-5)
    for name in ("batches", "dialog_turns", "num_tokens", "policy_version"):
        assert getattr(limited, name) == getattr(plain, name)
    rows = ahead.collect()
    for i in range(0, len(rows), G):
        assert_same(rows[i : i + G], by_group[groups_of(rows)[i]], 1e-5)
    for collector in (plain, limited, ahead):
        collector.shutdown()


def test_rows_with_unequal_numbers_of_turns_keep_the_order_of_their_prompts(modeled: Callable, make_env) -> None:
    rows = modeled(turns=3, env=make_env(prompts_per_batch=3)).collect()
    assert rows[keys.GROUP_ID].tolist() == [0, 0, 1, 1, 2, 2]
    assert rows[keys.NUM_TURNS].tolist() == [1, 1, 2, 2, 3, 3]
    assert [int(m.sum()) for m in ragged(rows, keys.ACTION_MASK)] == [1, 1, 2, 2, 3, 3]
    assert [row["answer"] for row in rows.unbind(0)] == [0, 0, 1, 1, 2, 2]


# Seeds


def test_two_runs_of_one_seed_are_the_same_run(modeled: Callable, make_env, random_model, bpe) -> None:
    """Derived seeds are not in the rows, and differ between members, groups and collectors."""
    torch.manual_seed(0)
    one, two = modeled(turns=2), modeled(turns=2)
    before, delivered = torch.get_rng_state(), []
    for _ in range(3):
        assert_same(rows := one.collect(), two.collect())
        delivered.append((rows, rows.clone()))
    for rows, copied in delivered:
        assert_same(rows, copied, without=())  # later batches do not change earlier ones
    assert torch.equal(torch.get_rng_state(), before), "the global stream is left alone"

    def collect(seed: int) -> list[TensorDictBase]:
        policy = TransformersWrapper(random_model, tokenizer=bpe, generate_kwargs={"max_new_tokens": 6})
        collector = LLMCollector(make_env(), policy, seed=seed, max_in_flight=3, max_batch_size=2)
        rows = [collector.collect() for _ in range(2)]
        collector.shutdown()
        return rows

    same, again, other = collect(0), collect(0), collect(1)
    for ours, theirs in zip(same, again, strict=True):
        assert_same(ours, theirs, 1e-5)
    assert keys.SEED not in same[0].keys()
    tokens = [tuple(row[keys.TOKENS].tolist()) for rows in (*same, *other) for row in rows.unbind(0)]
    assert len(set(tokens)) > 0.8 * len(tokens)


@pytest.mark.parametrize("ahead", [0, 1, 5])
def test_every_batch_holds_whole_groups_once(ahead: int, scripted: Callable) -> None:
    collector = scripted(ahead=ahead, groups_per_batch=3)
    seen: Counter[int] = Counter()
    for _ in range(4):
        rows = collector.collect()
        groups = groups_of(rows)
        assert len(groups) == 3 * G and groups == sorted(groups)
        assert set(Counter(groups).values()) == {G} and not set(groups) & set(seen)
        assert all(len({row["answer"] for row in rows[i : i + G].unbind(0)}) == 1 for i in range(0, len(rows), G))
        seen.update(groups)
    if not ahead:
        assert set(seen) == set(range(12))
