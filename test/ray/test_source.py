"""ReferencedSource: metadata of all rows on each rank, and the rows that it fetches; in one process.

Several ranks, also with lost rows, are tested in ``test/ray/test_own_rows.py``.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from support import rank_training
from support.own_rows import STORE, StoreCollector, as_finished
from torchrl_rloo.data import keys, stack_rows
from torchrl_rloo.ray import ReferencedSource
from torchrl_rloo.ray.source import LostRowsError
from torchrl_rloo.replay import MCAdvantage
from torchrl_rloo.runtime.ranks import Ranks

GROUPS, MEMBERS = rank_training.GROUPS, rank_training.MEMBERS


@pytest.fixture
def rows():
    model = rank_training.build_model()
    scorer = rank_training.TransformersWrapper(model, tokenizer=rank_training.TOKENIZER, generate=False)
    made = as_finished(rank_training.build_rows(0, scorer))
    STORE.put(made)
    STORE.lost, STORE.attempts, STORE.fetched = (), 1, []
    return made


def make_source(collector: StoreCollector, **kwargs) -> ReferencedSource:
    observe = kwargs.pop("observe", None)
    return ReferencedSource(Ranks.single(), SimpleNamespace(collector=collector, observe=observe), None, **kwargs)


def ids(rows) -> list[int]:
    return [int(row[keys.TRAJECTORY_ID]) for row in rows]


def test_metadata_of_all_rows_and_own_rows_with_their_advantages(rows):
    observed = []
    source = make_source(StoreCollector(), observe=observed.append)
    metadata, sampled = source.collect()
    assert metadata is sampled and ids(metadata) == ids(rows) == ids(observed[0])
    assert keys.TOKENS not in metadata.keys(True) and (source.policy_version, source.num_tokens) == (3, 7)
    # Advantages of metadata are those of rows, and reach the rows in the order of the batch
    written = MCAdvantage(MEMBERS).inv(metadata)
    expected = {int(row[keys.TRAJECTORY_ID]): row for row in MCAdvantage(MEMBERS).inv(rows).unbind(0)}
    batch = stack_rows(list(written.unbind(0))[7:2:-1])
    own = source.rows_of(batch)
    assert ids(own) == ids(batch)
    for row in own.unbind(0):
        assert torch.equal(row[keys.ADVANTAGE], expected[int(row[keys.TRAJECTORY_ID])][keys.ADVANTAGE])
        assert torch.equal(row[keys.TOKENS], expected[int(row[keys.TRAJECTORY_ID])][keys.TOKENS])
        assert keys.TOKEN_COUNT not in row.keys()
    assert keys.ADVANTAGE not in source.own.rows.keys()  # so that the next epoch has its own


def test_stale_tokens_are_counted_on_rank_0_and_leave_the_metadata(rows):
    collector = StoreCollector("mask")
    metadata, _ = make_source(collector).collect()
    stale = sum(int((3 - row[keys.ACTION_VERSIONS] > 1).sum()) for row in rows.unbind(0))
    assert collector.scheduler.counts["staleness/masked_tokens"] == stale > 0
    actions = sum(int(row[keys.ACTION_MASK].sum()) for row in rows.unbind(0))
    assert sum(int(row[keys.ACTION_COUNT]) for row in metadata.unbind(0)) == actions - stale
    assert all(int(row[keys.VERSION_COUNTS][:, 0].min()) >= 2 for row in metadata.unbind(0) if row[keys.ACTION_COUNT])


def test_what_completes_the_rows_reaches_the_metadata(rows):
    def finish(own):
        for row in own.unbind(0):
            row.set(keys.REWARD, row[keys.REWARD] - 1.0)

    metadata, _ = make_source(StoreCollector(), finish=finish).collect()
    for row, before in zip(metadata.unbind(0), rows.unbind(0), strict=True):
        assert torch.equal(row[keys.REWARD].nan_to_num(7.0), (before[keys.REWARD] - 1.0).nan_to_num(7.0))


def test_lost_groups_are_replaced(rows, capsys):
    STORE.lost, STORE.attempts = (0, 3), 2
    collector = StoreCollector()
    source = make_source(collector)
    metadata, _ = source.collect()
    assert collector.replaced == [[0, 3], [0, 3]]
    groups = [int(row[keys.GROUP_ID]) for row in metadata.unbind(0)]
    assert groups[::MEMBERS] == [1, 2, 4, 0, 3] and sorted(ids(source.own.rows)) == sorted(ids(rows))
    assert (
        "the rows of 2 groups are lost and sampled again: the rows of groups [0, 3] are lost" in capsys.readouterr().out
    )


def test_groups_that_are_lost_again_and_again_end_the_run(rows):
    STORE.lost, STORE.attempts = (2,), 99
    with pytest.raises(RuntimeError, match=r"groups \[2\] were lost after 3 replacements; check the nodes"):
        make_source(StoreCollector()).collect()


def test_an_error_about_other_groups_is_not_retried(rows, monkeypatch):
    def get(ref):
        raise LostRowsError([77], "of another step")

    monkeypatch.setattr(STORE, "get", get)
    with pytest.raises(LostRowsError, match=r"groups \[77"):
        make_source(StoreCollector()).collect()


def test_a_table_fetches_few_rows_and_does_without_lost_ones(rows):
    source = make_source(StoreCollector())
    metadata, _ = source.collect()
    wanted, STORE.fetched = stack_rows([metadata[8], metadata[1]]), []
    assert ids(source.with_text(wanted)) == ids(wanted) and STORE.fetched == [0, 2]
    STORE.lost = (0,)
    assert ids(source.with_text(wanted)) == ids(wanted[:1])


def test_rows_of_another_step_are_refused(rows):
    source = make_source(StoreCollector())
    earlier, _ = source.collect()
    STORE.put(stack_rows(list(rows.unbind(0))[:MEMBERS]))
    source.collect()
    with pytest.raises(ValueError, match="is not a row of this step; empty the buffer after each step"):
        source.rows_of(earlier)


def test_a_row_without_an_own_id_is_refused(rows):
    for row in rows.unbind(0)[:2]:
        row.set(keys.TRAJECTORY_ID, torch.tensor(5))
    with pytest.raises(ValueError, match="the 15 rows must be different ones of the 15 rows of the step"):
        make_source(StoreCollector()).collect()


@pytest.mark.parametrize("name", ["refill", "cache"])
def test_parts_that_need_all_rows_are_refused(name):
    source = SimpleNamespace(**{"refill": None, "cache": None, "collector": StoreCollector()} | {name: object()})
    with pytest.raises(ValueError, match=f"{name} needs the rows of all ranks and cannot be combined with references"):
        ReferencedSource(Ranks.single(), source, None)
