"""Rows of several samples: stashed, kept in buffers and checkpoints, and split."""

from __future__ import annotations

import ast
import copy
import pickle
import time

import pytest
import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.modules.llm.policies import LogProbs, Masks, Tokens

from support.waiting import PATIENCE
from torchrl_rloo.data import keys, tensor_rows
from torchrl_rloo.data.packed import from_plain, pack_rows, to_plain
from torchrl_rloo.data.rows import make_tensorclass, merge_identical, stack_rows
from torchrl_rloo.data.segments import (
    TrajectoryIds,
    refuse_segments,
    sampled_versions,
    select_samples,
    split_segments,
    stash_segment,
    trajectory_id,
)
from torchrl_rloo.embedded import build_tokenizer
from torchrl_rloo.envs import ChatEnv
from torchrl_rloo.modules import TransformersWrapper
from torchrl_rloo.objectives import RLOOLoss
from torchrl_rloo.replay import MCAdvantage

MASKS = ([0, 0, 1, 1, 0, 1], [0, 1, 1], [0, 0, 0, 1])


def context(row: TensorDictBase, sample: int, versions: bool, support: bool) -> TensorDictBase:
    """Set a sample as the current one of a row."""
    mask = torch.tensor(MASKS[sample], dtype=torch.bool)
    actions = int(mask.sum())
    row.set("tokens", make_tensorclass(Tokens, prompt=torch.arange(len(mask)) + 10 * sample))
    row.set("masks", make_tensorclass(Masks, all_assistant_mask=mask))
    row.set("log_probs", make_tensorclass(LogProbs, full=-(mask * (torch.arange(len(mask)) + 10.0 * sample))))
    if versions:
        row.set(keys.ACTION_VERSIONS, torch.arange(actions) + 3 - sample)
    if support:
        sizes = torch.arange(1, actions + 1, dtype=torch.int32)
        ids = torch.arange(int(sizes.sum()), dtype=torch.int32) + 10 * sample
        row.set("support", TensorDict({"ids": ids, "sizes": sizes}, []))
    return row


def make_row(samples: int = 3, versions: bool = True, support: bool = True, group: int = 0) -> TensorDictBase:
    """Make a finished trajectory of several samples."""
    row = context(TensorDict({}, []), 0, versions, support)
    for sample in range(1, samples):
        stash_segment(row)
        context(row, sample, versions, support)
    tokens, mask = row[keys.PROMPT_TOKENS], row[keys.ACTION_MASK]
    row.set("tokens", make_tensorclass(Tokens, full=tokens, prompt=tokens[: int(mask.int().argmax())]))
    row.set("masks", make_tensorclass(Masks, all_attention_mask=torch.ones_like(mask), all_assistant_mask=mask))
    oldest = sampled_versions(row).min() if versions else torch.tensor(1)
    row.set(keys.GROUP_ID, torch.tensor(group)).set(keys.POLICY_VERSION, oldest)
    row.set(keys.REWARD, torch.full((1, 1), float(samples))).set(keys.QUERY, NonTensorData("a question"))
    return row.set("next", row["next"].update({k: torch.tensor([k != "truncated"]) for k in ("done", "truncated")}))


def check(rows: TensorDictBase, samples: list[int], versions: bool = True, support: bool = True) -> None:
    """Check that rows are these samples in order."""
    for row, sample in zip(rows.unbind(0), samples, strict=True):
        expected = context(TensorDict({}, []), sample, versions, support)
        tokens, mask = expected[keys.PROMPT_TOKENS], expected[keys.ACTION_MASK]
        assert keys.PREVIOUS_SEGMENTS not in row.keys()
        assert row[keys.TOKENS].tolist() == tokens.tolist()
        assert row[keys.PROMPT_TOKENS].tolist() == tokens[: MASKS[sample].index(1)].tolist()
        assert row[keys.ACTION_MASK].tolist() == mask.tolist() and row[keys.ATTENTION_MASK].all()
        assert row[keys.LOG_PROBS].tolist() == expected[keys.LOG_PROBS].tolist()
        assert {type(row[k]) for k in ("tokens", "masks", "log_probs")} in ({Tokens, Masks, LogProbs}, {TensorDict})
        for key in (keys.ACTION_VERSIONS, keys.SUPPORT_IDS, keys.SUPPORT_SIZES):
            if (value := expected.get(key, None)) is None:
                assert row.get(key, None) is None
            else:
                assert row[key].tolist() == value.tolist() and row[key].dtype == value.dtype
        if versions:
            assert int(row[keys.POLICY_VERSION]) == int(expected[keys.ACTION_VERSIONS].min())


@pytest.mark.parametrize("support", [True, False])
@pytest.mark.parametrize("versions", [True, False])
def test_each_sample_becomes_a_row(versions: bool, support: bool) -> None:
    rows = stack_rows([make_row(n, versions, support, group=n) for n in (1, 3, 2)])
    before = copy.deepcopy([row.to_dict() for row in rows.unbind(0)])
    out = split_segments(rows)
    check(out, [0, 0, 1, 2, 0, 1], versions, support)
    assert [int(row[keys.GROUP_ID]) for row in out.unbind(0)] == [1, 3, 3, 3, 2, 2]
    assert [float(row[keys.REWARD]) for row in out.unbind(0)] == [1, 3, 3, 3, 2, 2]
    assert all(row[keys.QUERY] == "a question" for row in out.unbind(0))
    for row, old in zip(rows.unbind(0), before, strict=True):
        assert str(row.to_dict()) == str(old), "what was given is not changed"


def test_versions_of_all_samples() -> None:
    assert sampled_versions(make_row(1)).tolist() == [3, 4, 5]
    assert sampled_versions(make_row(3)).tolist() == [3, 4, 5, 2, 3, 1]
    assert sampled_versions(make_row(2, versions=False)) is None


def test_a_sample_that_was_given_up_before_its_turn_is_no_row() -> None:
    row = make_row(2)
    row.set("masks", Masks(all_assistant_mask=torch.zeros(3, dtype=torch.bool)))
    check(split_segments(stack_rows([row])), [0])


def test_samples_survive_buffers_and_checkpoints() -> None:
    """Groups stay whole until advantages are known, and are then split for the loss."""
    rows = [make_row(n, group=group) for n, group in ((3, 0), (2, 0), (1, 1), (1, 1))]
    plain = [from_plain(to_plain(row)) for row in tensor_rows(stack_rows(rows)).unbind(0)]
    buffer = ReplayBuffer(
        storage=LazyStackStorage(8), transform=MCAdvantage(num_generations=2), batch_size=4, collate_fn=lambda x: x
    )
    buffer.extend(stack_rows(plain))
    held = buffer[:]
    assert [float(row[keys.ADVANTAGE]) for row in held.unbind(0)] == [1.0, -1.0, 0.0, 0.0]
    out = split_segments(held)
    check(out, [0, 1, 2, 0, 1, 0, 0])
    assert [float(row[keys.ADVANTAGE]) for row in out.unbind(0)] == [1.0] * 3 + [-1.0] * 2 + [0.0] * 2


def test_rows_with_and_without_samples_are_not_the_same() -> None:
    assert len(merge_identical(stack_rows([make_row(2), make_row(2), make_row(1)]))) == 2
    assert len(merge_identical(split_segments(stack_rows([make_row(3), make_row(3)])))) == 3


def test_what_the_aggregation_makes_of_samples(tokenizer, model) -> None:
    """Splitting keeps a token mean, scales sums, and gives ``K`` samples ``K`` times the weight in a row mean."""
    policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 4})
    scorer = policy.get_new_version(generate=False)
    rows = stack_rows([make_row(3, support=False), make_row(1, support=False)])
    for row, advantage in zip(rows.unbind(0), (1.0, -0.5), strict=True):
        row.set(keys.ADVANTAGE, torch.full((1, 1), advantage))
    out = tensor_rows(split_segments(rows))
    for row, log_probs in zip(out.unbind(0), scorer.score(out).log_probs.detach(), strict=True):
        mask = row[keys.ACTION_MASK]
        log_probs = torch.zeros(len(mask)).masked_scatter(mask, log_probs[: int(mask.sum())])
        row.set("log_probs", make_tensorclass(LogProbs, full=log_probs))
    lengths, advantages = [*(sum(mask) for mask in MASKS), sum(MASKS[0])], [1.0, 1.0, 1.0, -0.5]
    total = sum(a * n for a, n in zip(advantages, lengths, strict=True))
    expected = {"token_mean": total / sum(lengths), "sequence_sum": total / 4, "sequence_mean": sum(advantages) / 4}
    for aggregation, value in expected.items():
        loss = RLOOLoss(scorer, ratio="token", aggregation=aggregation)(out).loss_objective
        assert loss.item() == pytest.approx(-value, abs=1e-5)


@pytest.mark.parametrize(
    "key", [keys.TOKEN_REWARDS, keys.REF_LOG_PROBS, keys.PROXIMAL_LOG_PROBS, keys.STATE_VALUE, keys.ADVANTAGE], ids=str
)
def test_what_only_the_last_sample_has_is_refused(key) -> None:
    row = make_row(2).set(key, torch.zeros(3, 1))
    with pytest.raises(ValueError, match=r"several samples has .*(write it after the split|credit='trajectory')"):
        split_segments(stack_rows([row]))
    rows = stack_rows([make_row(1).set(key, torch.zeros(6, 1))])  # rows of one sample pass untouched
    assert split_segments(rows) is rows


def test_who_reads_whole_trajectories_can_refuse() -> None:
    refuse_segments(make_row(1), "A reader")
    with pytest.raises(ValueError, match="A reader .* 2 more samples .*on_rewrite='keep'"):
        refuse_segments(make_row(3), "A reader")


def test_a_sample_in_which_nothing_was_said_is_no_row() -> None:
    row = make_row(3)
    earlier = row[keys.PREVIOUS_SEGMENTS]
    sizes = earlier["sizes"].tolist()
    earlier["mask"][sizes[0] :] = False
    earlier["versions"], said = earlier["versions"][:3], int(earlier["support_sizes"][:3].sum())
    earlier["support_sizes"], earlier["support_ids"] = earlier["support_sizes"][:3], earlier["support_ids"][:said]
    check(split_segments(stack_rows([row])), [0, 2])


def test_a_trajectory_in_which_nothing_was_said_is_one_row() -> None:
    row = make_row(2, support=False)
    earlier = row[keys.PREVIOUS_SEGMENTS]
    earlier["mask"][:] = False
    earlier["versions"] = earlier["versions"][:0]
    row.set("masks", Masks(all_assistant_mask=torch.zeros(3, dtype=torch.bool)))
    row.set(keys.ACTION_VERSIONS, torch.zeros(0, dtype=torch.long)).set(keys.POLICY_VERSION, torch.tensor(7))
    out = split_segments(stack_rows([row]))
    assert len(out) == 1 and keys.PREVIOUS_SEGMENTS not in out[0].keys() and int(out[0][keys.POLICY_VERSION]) == 7


@pytest.mark.parametrize(("versions", "support"), [(True, True), (False, False)])
@pytest.mark.parametrize("indices", [[0], [2], [0, 2], [0, 1, 2]])
def test_some_samples_are_selected(indices, versions, support):
    row = make_row(3, versions, support)
    chosen = select_samples(row, indices)
    assert (keys.PREVIOUS_SEGMENTS in chosen.keys()) is (len(indices) > 1)
    check(split_segments(stack_rows([chosen])), indices, versions, support)
    if versions:
        assert int(chosen[keys.POLICY_VERSION]) == int(sampled_versions(chosen).min())
    check(split_segments(stack_rows([row])), [0, 1, 2], versions, support)  # the row has not changed


def test_no_sample_leaves_the_first_prompt_without_actions():
    chosen = select_samples(make_row(3), [])
    assert chosen[keys.TOKENS].tolist() == [0, 1] and not chosen[keys.ACTION_MASK].any()
    assert len(sampled_versions(chosen)) == len(chosen[keys.SUPPORT_IDS]) == 0
    with pytest.raises(ValueError, match="of its last sample only"):
        select_samples(make_row(2).set(keys.TOKEN_REWARDS, torch.zeros(3)), [0])


MAX_SECONDS = 0.2  # of a conversation


def open_conversations(groups: list[int] | None, ids: list[int] | None = None) -> list[TensorDictBase]:
    """Return the first rows of two conversations, of these groups and with these ids."""
    env = ChatEnv(build_tokenizer(), batch_size=2, max_seconds=MAX_SECONDS)
    rows = [TensorDict({keys.QUERY: "What is 2+3?"}, []) for _ in range(2)]
    for name, numbers in ((keys.GROUP_ID, groups), (keys.TRAJECTORY_ID, ids)):
        for row, number in zip(rows, numbers or (), strict=False):
            row.set(name, torch.tensor(number))
    return list(env.reset(stack_rows(rows)).unbind(0))


_CONTINUE = """
import pickle, sys
from torchrl_rloo.data import keys
from torchrl_rloo.data.packed import unpack_rows
from torchrl_rloo.embedded import build_tokenizer
from torchrl_rloo.envs import ChatEnv

env = ChatEnv(build_tokenizer(), max_seconds=float(sys.argv[2]))
with open(sys.argv[1], "rb") as file:
    rows = unpack_rows(pickle.load(file))
print([(int(row[keys.TRAJECTORY_ID]), env.limit_reached(row)) for row in rows.unbind(0)])
"""


def test_the_time_of_a_conversation_continues_in_another_process(tmp_path, fork_server) -> None:
    rows = open_conversations(None)
    ids = [int(row[keys.TRAJECTORY_ID]) for row in rows]
    (tmp_path / "rows").write_bytes(pickle.dumps(pack_rows(stack_rows(rows))))
    for limit, reached in ((3600, None), (MAX_SECONDS, "time")):
        time.sleep(MAX_SECONDS)
        child = fork_server.start(_CONTINUE, [tmp_path / "rows", limit])
        assert child.wait(PATIENCE) == 0, child.stderr
        assert ast.literal_eval(child.stdout) == [(i, reached) for i in ids]


def test_ids_of_a_group_are_the_same_everywhere_and_others_differ() -> None:
    ids = TrajectoryIds()
    made = [ids.next(group) for group in (None, *range(3000)) for _ in range(4)]
    assert len(set(made)) == len(made) and all(0 <= number < 2**63 for number in made)
    expected = [1864942345653885167, 6842472824278787000]  # constants, because other processes compute them
    assert [int(row[keys.TRAJECTORY_ID]) for row in open_conversations([5, 5])] == expected
    assert [trajectory_id(5, member) for member in range(2)] == expected


def test_a_drawn_row_keeps_its_id_and_a_new_conversation_gets_another() -> None:
    rows = open_conversations([5, 5], ids=[77, 2**62])
    assert [int(row[keys.TRAJECTORY_ID]) for row in rows] == [77, 2**62]
    again = ChatEnv(build_tokenizer(), batch_size=2).reset(stack_rows(rows))
    assert {int(row[keys.TRAJECTORY_ID]) for row in again.unbind(0)}.isdisjoint({77, 2**62})
