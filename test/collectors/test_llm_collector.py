"""Tests of LLMCollector: whole groups of finished trajectories as rows of the schema, and resumed runs."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tensordict import TensorDictBase
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs import Transform, TransformedEnv
from torchrl.modules.llm.policies import LogProbs, Masks, Tokens

from torchrl_rloo.collectors import CollectionProgress, LLMCollector
from torchrl_rloo.data import encode_prompt, keys, load_prompts
from torchrl_rloo.data.rows import ragged
from torchrl_rloo.envs import ChatEnv, DatasetChatEnv
from torchrl_rloo.envs.transforms import DatasetExhaustedError, FeedbackTransform, KLRewardTransform
from torchrl_rloo.modules import TransformersWrapper
from torchrl_rloo.replay import MCAdvantage
from torchrl_rloo.weight_update import InProcessWeightUpdater, WeightUpdater

REPLY = [{"role": "user", "content": "again"}]


def length_reward(completion_ids, **_) -> list[float]:
    return [float(len(c)) for c in completion_ids]


def first_only(completions, **_) -> list[float | None]:
    return [1.0 if i == 0 else None for i in range(len(completions))]


@pytest.fixture(scope="module")
def data(user: Callable):
    return load_prompts([{"query": user("a" * (i + 1)), "answer": i} for i in range(7)])


@pytest.fixture(scope="module")
def make(random_model, bpe, data) -> Callable[..., LLMCollector]:
    """Make a collector of two groups of three, with ``turns`` of one token each or one turn of up to six."""

    def build(*, turns: int = 0, epochs: int | None = None, env=None, model=random_model, seed=0, **kwargs):
        settings = {"max_new_tokens": 6, "seed": seed}
        transforms = []
        if turns:
            settings = {"max_new_tokens": 1, "stop_token_ids": list(range(len(bpe))), "seed": seed}
            transforms = [
                FeedbackTransform(lambda c, row: REPLY if len(c) < 2 * turns else None, max_turns=turns),
            ]
        ref = TransformersWrapper(random_model, tokenizer=bpe, generate=False)
        env = env or DatasetChatEnv(
            data,
            bpe,
            prompts_per_batch=2,
            num_generations=3,
            epochs=epochs,
            transforms=transforms,
            rewards=[length_reward, first_only],
            after_rewards=[KLRewardTransform(ref, 0.0)],
        )
        return LLMCollector(env, TransformersWrapper(model, tokenizer=bpe, generate_kwargs=settings), **kwargs)

    return build


def same(ours: TensorDictBase, theirs: TensorDictBase) -> bool:
    """Return whether two batches are bit-identical."""
    names = (keys.TOKENS, keys.ACTION_MASK, keys.LOG_PROBS, keys.GROUP_ID, keys.POLICY_VERSION, keys.REWARD)
    return len(ours) == len(theirs) and all(
        torch.equal(a, b) for name in names for a, b in zip(ragged(ours, name), ragged(theirs, name), strict=True)
    )


def all_of(collector: LLMCollector) -> list[TensorDictBase]:
    """Collect every batch by iteration."""
    batches = []
    for rows in collector:
        batches.append(rows)
    return batches


# Rows

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
def test_rows_are_of_the_schema(turns: int, make: Callable, bpe) -> None:
    collector = make(turns=turns)
    for _ in range(2):
        rows = collector.collect()
        assert rows.batch_size == (6,)
        for row in rows.unbind(0):
            leaves = {k for k in row.keys(True, True) if isinstance(row.get(k), torch.Tensor)}
            assert leaves == set(SCHEMA)
            assert set(row.keys()) - {k[0] if isinstance(k, tuple) else k for k in SCHEMA} == {
                keys.QUERY,
                keys.COMPLETION,
                "answer",
            }
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


@pytest.mark.parametrize("turns", [2, 3])
def test_rows_of_several_turns(turns: int, make: Callable, bpe) -> None:
    """The prompt precedes the first action, then actions and feedback alternate."""
    feedback = bpe("<|im_end|>\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)
    for row in make(turns=turns).collect().unbind(0):
        prompt, between = encode_prompt(bpe, row[keys.QUERY]), feedback["input_ids"]
        ids, actions = row[keys.TOKENS].tolist(), row[keys.TOKENS][row[keys.ACTION_MASK]].tolist()
        expected = [*prompt, actions[0]]
        for before, action in zip(actions, actions[1:], strict=False):
            expected += [*between[before == bpe.eos_token_id :], action]
        assert ids == expected and len(actions) == turns == int(row[keys.NUM_TURNS])
        assert row[keys.PROMPT_TOKENS].tolist() == prompt
        assert [m["role"] for m in row[keys.COMPLETION]] == ["assistant", "user"] * (turns - 1) + ["assistant"]


class TurnReward(Transform):
    """Transform that rewards every turn with the number of turns so far."""

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        for row in next_tensordict.unbind(0):
            row.set("reward", row[keys.NUM_TURNS].float().reshape(1, 1))
        return next_tensordict


def test_rewards_of_all_turns_are_summed(make: Callable, bpe, data) -> None:
    def respond(conversation, row):
        return REPLY if len(conversation) < 6 else None

    transforms = [FeedbackTransform(respond, max_turns=5), TurnReward()]
    env = DatasetChatEnv(data, bpe, prompts_per_batch=2, num_generations=3, transforms=transforms)
    collector = make(turns=3, env=env)
    for _ in range(2):
        assert collector.collect()[keys.REWARD].flatten().tolist() == [1.0 + 2.0 + 3.0] * 6


def test_every_batch_holds_whole_groups_once(make: Callable) -> None:
    seen: Counter[int] = Counter()
    for _, rows in zip(range(5), make(), strict=False):
        groups = rows[keys.GROUP_ID].tolist()
        assert groups == sorted(groups) and set(Counter(groups).values()) == {3}
        for group in (rows[:3], rows[3:]):
            assert len({row["answer"] for row in group.unbind(0)}) == 1
            assert len({tuple(row[keys.TOKENS].tolist()) for row in group.unbind(0)}) > 1
        assert not set(groups) & set(seen)
        seen.update(groups)
    assert sum(seen.values()) == 30 and set(seen) == set(range(10))


def test_delivered_rows_do_not_change_afterwards(make: Callable) -> None:
    collector = make(turns=2)
    rows = collector.collect()
    kept = rows.clone()
    collector.collect()
    assert same(rows, kept)


def test_rows_with_unequal_numbers_of_turns_are_all_delivered(make: Callable, bpe, data) -> None:
    def respond(conversation, row):
        return REPLY if len(conversation) < 2 * (1 + row["answer"] % 3) else None

    transforms = [FeedbackTransform(respond, max_turns=5)]
    env = DatasetChatEnv(data, bpe, prompts_per_batch=3, num_generations=2, shuffle=False, transforms=transforms)
    rows = make(turns=3, env=env).collect()
    assert rows[keys.GROUP_ID].tolist() == [0, 0, 1, 1, 2, 2], "in the order of their prompts"
    assert rows[keys.NUM_TURNS].tolist() == [1, 1, 2, 2, 3, 3]
    assert [int(m.sum()) for m in ragged(rows, keys.ACTION_MASK)] == [1, 1, 2, 2, 3, 3]
    assert [row["answer"] for row in rows.unbind(0)] == [0, 0, 1, 1, 2, 2]


def test_rows_without_a_group_are_refused(bpe, random_model, query_rows: Callable) -> None:
    class Queries(Transform):
        def _reset_env_preprocess(self, tensordict):
            return query_rows("abc", "cab")

    env = TransformedEnv(ChatEnv(bpe, batch_size=2), Queries())
    policy = TransformersWrapper(random_model, tokenizer=bpe, generate_kwargs={"max_new_tokens": 1})
    with pytest.raises(KeyError, match="group_id"):
        LLMCollector(env, policy).collect()


# Batch sizes and limits


def test_a_batch_has_at_least_the_turns_asked_for(make: Callable) -> None:
    for wanted, delivered in ((None, 6), (1, 6), (6, 6), (7, 12), (13, 18)):
        rows = make(dialog_turns_per_batch=wanted).collect()
        assert len(rows) == int(rows[keys.NUM_TURNS].sum()) == delivered
        assert set(Counter(rows[keys.GROUP_ID].tolist()).values()) == {3}
    rows = make(turns=2, dialog_turns_per_batch=13).collect()
    assert len(rows) == 12 and int(rows[keys.NUM_TURNS].sum()) == 24


def test_it_stops_after_the_turns_asked_for(make: Callable) -> None:
    for total, batches in ((1, 1), (6, 1), (7, 2), (12, 2)):
        collector = make(total_dialog_turns=total)
        assert len(all_of(collector)) == batches and collector.dialog_turns == 6 * batches
    assert len(all_of(make(turns=3, total_dialog_turns=19))) == 2


def test_a_collector_is_an_ordinary_iterable(make: Callable) -> None:
    assert len(list(make(epochs=1))) == 3


def test_it_stops_with_the_datasets_epochs(make: Callable) -> None:
    """With seven prompts and batches of two, one epoch delivers six prompts and two epochs fourteen."""
    for epochs, batches in ((1, 3), (2, 7)):
        rows = all_of(make(epochs=epochs))
        assert len(rows) == batches
        groups = torch.cat([r[keys.GROUP_ID] for r in rows]).tolist()
        assert groups == [g for g in range(2 * batches) for _ in range(3)]
    exhausted = make(epochs=1)
    all_of(exhausted)
    with pytest.raises(DatasetExhaustedError):
        exhausted.collect()


def test_what_is_left_of_the_epochs_is_delivered(make: Callable) -> None:
    batches = all_of(make(epochs=1, dialog_turns_per_batch=12))
    assert [len(rows) for rows in batches] == [12, 6]


@pytest.mark.parametrize("kwargs", [{"dialog_turns_per_batch": 0}, {"total_dialog_turns": 0}], ids=str)
def test_arguments_are_checked(kwargs: dict, make: Callable) -> None:
    (name, value), *_ = kwargs.items()
    with pytest.raises(ValueError, match=f"{name}={value}"):
        make(**kwargs)


def test_shutdown_ends_the_iteration(make: Callable) -> None:
    collector = make()
    batches = iter(collector)
    next(batches)
    collector.shutdown()
    assert list(batches) == []
    collector.shutdown()


# Versions


class FailingUpdater(WeightUpdater):
    def _send(self, version: int) -> None:
        raise RuntimeError("the weights did not arrive")


def test_a_row_has_the_version_that_sampled_it(make: Callable, random_model) -> None:
    pushed = []

    class Recording(InProcessWeightUpdater):
        def _send(self, version: int) -> None:
            pushed.append(version)
            super()._send(version)

    collector = make(weight_updater=Recording(random_model, random_model))
    batches = iter(collector)
    for version in range(3):
        for _ in range(2):
            assert next(batches)[keys.POLICY_VERSION].tolist() == [version] * 6
        collector.update_policy_weights_()
        assert collector.policy_version == version + 1 and pushed == list(range(1, version + 2))


def test_the_version_grows_only_once_weights_have_arrived(make: Callable) -> None:
    with pytest.raises(RuntimeError, match="weight_updater"):
        make().update_policy_weights_()
    collector = make(weight_updater=FailingUpdater())
    with pytest.raises(RuntimeError, match="did not arrive"):
        collector.update_policy_weights_()
    assert collector.policy_version == 0 and set(collector.collect()[keys.POLICY_VERSION].tolist()) == {0}


def test_rows_after_an_update_are_of_the_new_weights(make: Callable, random_model) -> None:
    trained, sampler = copy.deepcopy(random_model), copy.deepcopy(random_model)
    collector = make(model=sampler, weight_updater=InProcessWeightUpdater(trained, sampler))
    collector.collect()
    with torch.no_grad():
        trained.lm_head.bias.add_(torch.linspace(-3, 3, len(trained.lm_head.bias)))
    scorer = collector.policy.get_new_version(model=trained, generate=False)

    def worst(rows: TensorDictBase) -> float:
        with torch.no_grad():
            scored = scorer.score(rows)
        behaviour = torch.cat([r[keys.LOG_PROBS][r[keys.ACTION_MASK]] for r in rows.unbind(0)])
        return float((scored.log_probs[scored.actions.mask] - behaviour).abs().max())

    assert worst(collector.collect()) > 0.1, "not pushed yet"
    collector.update_policy_weights_()
    assert worst(collector.collect()) <= 1e-5


def test_a_row_over_two_versions_has_the_older(make: Callable, random_model) -> None:
    """If weights arrive between turns, staleness counts from the oldest token."""
    collector = make(turns=2, weight_updater=InProcessWeightUpdater(random_model, random_model))
    collector.progress = lambda progress: progress.finished or collector.update_policy_weights_()
    assert collector.collect()[keys.POLICY_VERSION].tolist() == [0] * 6
    assert collector.policy_version == 1


# Replay buffer, postproc and progress


def test_a_replay_buffer_is_filled_without_text(make: Callable) -> None:
    buffer = ReplayBuffer(storage=LazyStackStorage(100), sampler=SamplerWithoutReplacement(), batch_size=6)
    collector = make(replay_buffer=buffer)
    rows = collector.collect()
    assert len(buffer) == 6
    assert same(buffer[:], rows)
    stored = buffer[:]
    assert not {keys.QUERY, keys.COMPLETION, "answer", "text", "history"} & set(stored.keys())
    assert rows[0][keys.QUERY][0]["role"] == "user", "the rows delivered keep theirs"
    collector.collect()
    assert len(buffer) == 12


def test_a_buffer_with_advantages_takes_whole_groups(make: Callable) -> None:
    buffer = ReplayBuffer(storage=LazyStackStorage(100), transform=MCAdvantage(3), batch_size=6)
    rows = make(replay_buffer=buffer).collect()
    stored = buffer[:]
    assert len(stored) == 6 and buffer._transform[0].pending_rows == 0
    rewards = rows[keys.REWARD].flatten()
    for i, row in enumerate(stored.unbind(0)):
        others = [rewards[j] for j in range(6) if j != i and j // 3 == i // 3]
        assert float(row[keys.ADVANTAGE]) == pytest.approx(float(rewards[i] - sum(others) / 2), abs=1e-5)


def test_postproc_sees_each_batch_once(make: Callable) -> None:
    calls = []

    def postproc(rows: TensorDictBase) -> TensorDictBase:
        calls.append(len(rows))
        return rows[:3]

    buffer = ReplayBuffer(storage=LazyStackStorage(100))
    collector = make(dialog_turns_per_batch=7, postproc=postproc, replay_buffer=buffer)
    assert len(collector.collect()) == 3 and calls == [12] and len(buffer) == 3


def test_progress_counts_the_batch(make: Callable) -> None:
    seen: list[CollectionProgress] = []
    collector = make(turns=2, progress=seen.append)
    collector.collect()
    assert seen == [CollectionProgress(0, 6, 6), CollectionProgress(6, 6, 12)]
    collector.collect()
    assert seen[2:] == [CollectionProgress(0, 6, 6), CollectionProgress(6, 6, 12)]


def test_progress_counts_a_batch_of_several_rollouts(make: Callable) -> None:
    """``total`` and ``turns`` count the whole batch, which has three resets of the environment."""
    seen: list[CollectionProgress] = []
    rows = make(dialog_turns_per_batch=13, progress=seen.append).collect()
    assert len(rows) == 18
    assert [p.finished for p in seen] == [6, 12, 18] and [p.turns for p in seen] == [6, 12, 18]
    assert seen[-1] == CollectionProgress(18, 18, 18)


def test_the_policy_knows_its_collector(make: Callable) -> None:
    collector = make()
    assert collector.policy.collector is collector


# Resumed runs


@pytest.mark.parametrize("turns", [0, 2])
@pytest.mark.parametrize("before", [0, 1, 5])
def test_a_resumed_collector_continues_with_the_same_rows(
    before: int, turns: int, make: Callable, random_model, tmp_path: Path
) -> None:
    updater = InProcessWeightUpdater(random_model, random_model)
    collector = make(turns=turns, weight_updater=updater, epochs=4)
    for _ in range(before):
        collector.collect()
        collector.update_policy_weights_()
    torch.save(collector.state_dict(), tmp_path / "state.pt")
    torch.manual_seed(0)
    expected = [collector.collect() for _ in range(4)]
    resumed = make(turns=turns, weight_updater=updater, epochs=4, seed=7)
    resumed.collect()
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert resumed.policy_version == before
    torch.manual_seed(1)
    assert all(same(resumed.collect(), rows) for rows in expected)
    assert resumed.dialog_turns == collector.dialog_turns
    assert expected[0][keys.POLICY_VERSION].tolist() == [before] * 6


def test_two_runs_of_one_seed_are_the_same_run(make: Callable) -> None:
    one, two = make(turns=2), make(turns=2)
    assert all(same(one.collect(), two.collect()) for _ in range(3))
    assert not same(make().collect(), make(seed=1).collect())


def test_collecting_leaves_the_global_stream_alone(make: Callable) -> None:
    torch.manual_seed(0)
    collector, before = make(), torch.get_rng_state()
    collector.collect()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_limit_on_turns_counts_over_a_restart(make: Callable) -> None:
    collector = make(total_dialog_turns=18)
    batches = iter(collector)
    next(batches)
    resumed = make(total_dialog_turns=18)
    resumed.load_state_dict(collector.state_dict())
    assert len(all_of(resumed)) == 2
