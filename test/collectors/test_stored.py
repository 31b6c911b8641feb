"""Stored rollouts in place of a collector: order, staleness, states, and files that appear while it reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.collected_rows import check_same_rows
from support.collecting import groups_of
from support.stored_rows import make_groups
from support.waiting import PATIENCE, in_thread
from torchrl_rloo.collectors import GroupSource, LLMCollector, StoredRollouts
from torchrl_rloo.data import keys, load_prompts
from torchrl_rloo.embedded import addition_prompts, build_model, build_tokenizer
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.envs.transforms import DatasetExhaustedError
from torchrl_rloo.modules import TransformersWrapper
from torchrl_rloo.replay import RolloutFiles, RolloutWriter
from torchrl_rloo.replay.rollouts import RolloutFileError
from torchrl_rloo.rewards import boxed_accuracy

HASH = "0" * 64


def write(folder: Path, *group_ids: int, **row: int) -> None:
    RolloutWriter(folder, model="tiny", tokenizer=HASH, groups_per_file=2).extend(make_groups(*group_ids, **row))


def source(folder: Path, **kwargs) -> StoredRollouts:
    return StoredRollouts(RolloutFiles(folder), **{"groups_per_batch": 2} | kwargs)


def delivered(stored: StoredRollouts) -> list[list[int]]:
    return [sorted(set(groups_of(rows))) for rows in stored]


def test_batches_of_a_collector_return_as_they_were_stored(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    prompts = load_prompts(addition_prompts("train", size=8))
    env = DatasetChatEnv(prompts, tokenizer, prompts_per_batch=2, num_generations=2, epochs=1, rewards=boxed_accuracy)
    policy = TransformersWrapper(
        build_model(tokenizer, seed=0), tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 4}
    )
    writer = RolloutWriter(tmp_path, model="tiny", tokenizer=tokenizer)
    collector = LLMCollector(env, policy, postproc=writer)
    batches = list(collector)
    collector.shutdown()
    stored = GroupSource(StoredRollouts(RolloutFiles(tmp_path, tokenizer=tokenizer), groups_per_batch=2))
    for rows in batches:
        check_same_rows(stored.collect().trained, rows)
    with pytest.raises(DatasetExhaustedError):
        stored.collect()
    assert stored.collector.num_tokens == collector.num_tokens and stored.collector.batches == 4
    assert stored.collector.dialog_turns == collector.dialog_turns
    stored.close()


def test_batches_cross_files_and_the_last_may_be_short(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 3, 4, 5)
    write(tmp_path, 5, 6, 7)
    stored = source(tmp_path, groups_per_batch=3)
    assert delivered(stored) == [[1, 2, 3], [4, 5, 6], [7]]
    assert stored.counts == {"stored/groups": 7} and stored.batches == 3


def test_files_that_appear_later_are_delivered(tmp_path: Path) -> None:
    write(tmp_path, 1)
    stored = source(tmp_path, patience_s=PATIENCE)
    batch = in_thread(stored.collect)
    write(tmp_path, 2)
    assert groups_of(batch.result(PATIENCE)) == [1, 1, 2, 2]
    stored.patience_s = 0.0
    with pytest.raises(DatasetExhaustedError, match="all 2 groups of"):
        stored.collect()
    write(tmp_path, 3)
    assert groups_of(stored.collect()) == [3, 3]


@pytest.mark.parametrize("on_stale", ["mask", "baseline"])
def test_stale_tokens_are_masked(on_stale: str, tmp_path: Path) -> None:
    write(tmp_path, 1, version=0)
    write(tmp_path, 2, version=1)
    stored = source(tmp_path, policy_version=1, max_staleness=1, on_stale=on_stale)
    stored.update_policy_weights_()
    rows = stored.collect()
    assert [int(row[keys.ACTION_MASK].sum()) for row in rows.unbind(0)] == [0, 0, 6, 7]
    assert stored.counts["staleness/masked_tokens"] == 13 and stored.counts["staleness/masked_rows"] == 2


def test_stale_groups_are_dropped_without_reading_them(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, version=0)
    write(tmp_path, 3, version=2)
    first, _ = RolloutFiles(tmp_path).files()
    with open(first.path, "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    stored = source(tmp_path, policy_version=3, max_staleness=1, on_stale="drop")
    assert delivered(stored) == [[3]] and stored.counts["stored/stale_groups"] == 2


@pytest.mark.parametrize("auto_acknowledge", [True, False])
def test_a_restored_source_delivers_what_was_not_acknowledged(auto_acknowledge: bool, tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 3, 4, 5, 6)
    stored = source(tmp_path, auto_acknowledge=auto_acknowledge)
    stored.collect()
    if not auto_acknowledge:
        assert stored.acknowledge() == 2
    stored.collect()
    stored.update_policy_weights_()
    if not auto_acknowledge:
        assert stored.acknowledge([4]) == 1
        with pytest.raises(KeyError, match="were not returned, or were acknowledged before"):
            stored.acknowledge([4])
    resumed = source(tmp_path, auto_acknowledge=auto_acknowledge)
    resumed.load_state_dict(stored.state_dict())
    assert resumed.policy_version == 1 and resumed.batches == 2
    assert delivered(resumed) == ([[5, 6]] if auto_acknowledge else [[3, 5], [6]])


def test_a_damaged_file_leaves_its_groups_undelivered(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 3)
    second = RolloutFiles(tmp_path).files()[1].path
    content = second.read_bytes()
    second.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    stored = source(tmp_path, groups_per_batch=3)
    with pytest.raises(RolloutFileError, match=second.name):
        stored.collect()
    assert stored.batches == 0
    second.write_bytes(content)
    assert groups_of(stored.collect()) == [1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"groups_per_batch": 0}, "groups_per_batch=0 must be at least 1"),
        ({"max_staleness": -1}, "max_staleness=-1 must be at least 0"),
        ({"patience_s": -1}, "patience_s=-1 must be at least 0"),
        ({"on_stale": "requeue"}, "on_stale='requeue' must be one of"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments: dict, reason: str, tmp_path: Path) -> None:
    write(tmp_path, 1)
    with pytest.raises(ValueError, match=reason):
        source(tmp_path, **arguments)
