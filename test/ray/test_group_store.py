"""Store of groups without Ray: who waits, who is dropped, and who is sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from support.stored_rows import make_groups, make_row
from torchrl_rloo.data import PackedRows, keys, stack_rows
from torchrl_rloo.objectives import KL
from torchrl_rloo.ray.group_store import GroupAdvantages, GroupStore, Members, join_rows, split_members
from torchrl_rloo.replay import MCAdvantage


def members(*group_ids: int, **row: Any) -> list[Members]:
    return split_members(make_groups(*group_ids, **row), reads_tokens=False)


def bytes_of(*group_ids: int) -> int:
    return sum(one.nbytes for one in members(*group_ids))


def store(**limits: Any) -> GroupStore:
    return GroupStore(MCAdvantage(), **limits)


def ids(groups: list[Any]) -> list[int]:
    return [group.group_id for group in groups]


async def waits(coroutine: Coroutine) -> asyncio.Task:
    """Start a coroutine, and check that it does not end by itself."""
    task = asyncio.ensure_future(coroutine)
    for _ in range(20):
        await asyncio.sleep(0)
    assert not task.done()
    return task


def test_a_store_with_one_use_is_a_queue() -> None:
    async def check() -> None:
        one = store()
        await one.extend(members(3, 1, 2))
        assert ids(await one.sample(2)) == [1, 2] and await one.size() == 1
        assert one.counts == {"buffer/added": 3, "buffer/sampled": 2, "buffer/used_up": 2}

    asyncio.run(check())


def test_the_least_used_groups_come_first() -> None:
    async def check() -> None:
        one = store(max_uses=2)
        await one.extend(members(1, 2, 3))
        assert [ids(await one.sample(2)) for _ in range(3)] == [[1, 2], [3, 1], [2, 3]]
        assert await one.size() == 0

    asyncio.run(check())


class Named(GroupStore):
    """Store that keeps packed rows under numbers, as an actor keeps them in the object store."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.objects: dict[int, PackedRows] = {}

    def keep(self, rows: PackedRows) -> int:
        self.objects[len(self.objects)] = rows
        return len(self.objects) - 1


def test_members_from_several_writers_complete_a_group() -> None:
    async def check() -> None:
        one = Named(MCAdvantage(), max_groups=1)
        parts = [split_members(stack_rows([make_row(7, member, size=4)]), False) for member in range(4)]
        for part in parts[:3]:
            await one.extend(part)
        assert await one.size() == 0 and (await one.stats())["advantage/pending_rows"] == 3
        assert one.nbytes == sum(part[0].nbytes for part in parts[:3])
        await one.extend(parts[3])
        (group,) = await one.sample(1)
        joined = join_rows(group, one.objects)
        assert joined[keys.ADVANTAGE].flatten().tolist() == pytest.approx([-2, -2 / 3, 2 / 3, 2])
        assert [len(row[keys.TOKENS]) for row in joined.unbind(0)] == [12, 13, 14, 15]

    asyncio.run(check())


@pytest.mark.parametrize("limit", [{"max_groups": 2}, {"max_bytes": bytes_of(1, 2)}])
def test_a_writer_waits_until_there_is_room(limit: dict[str, int]) -> None:
    async def check() -> None:
        one = store(**limit)
        await one.extend(members(1, 2))
        writer = await waits(one.extend(members(3)))
        assert await one.size() == 2 and one.counts["buffer/waits"] == 1
        assert ids(await one.sample(1)) == [1]
        await writer
        assert ids(await one.sample(2)) == [2, 3] and one.nbytes == 0

    asyncio.run(check())


@pytest.mark.parametrize("limit", [{"max_groups": 2}, {"max_bytes": bytes_of(1, 2)}])
def test_the_oldest_groups_are_dropped_where_asked(limit: dict[str, int]) -> None:
    async def check() -> None:
        one = store(**limit, when_full="drop_oldest", max_uses=None)
        for group_id in range(5):
            await one.extend(members(group_id))
            assert one.nbytes <= bytes_of(1, 2)
        assert ids(await one.sample(2)) == [3, 4] and one.counts["buffer/dropped"] == 3

    asyncio.run(check())


def test_the_last_member_of_a_group_enters_a_full_store() -> None:
    async def check() -> None:
        one, late = store(max_bytes=bytes_of(1, 2) - 1), make_groups(9)
        await one.extend(split_members(late[:1], False))
        await one.extend(members(1))
        writer = await waits(one.extend(members(2)))
        await one.extend(split_members(late[1:], False))
        assert ids(await one.sample(2)) == [1, 9]
        await writer

    asyncio.run(check())


def test_incomplete_groups_alone_never_stop_a_writer() -> None:
    async def check() -> None:
        one = store(max_bytes=bytes_of(1))
        for group_id in (1, 2, 3):
            await one.extend(split_members(make_groups(group_id)[:1], False))
        assert (await one.stats())["advantage/pending_rows"] == 3

    asyncio.run(check())


def test_a_consumer_waits_for_groups_and_for_no_longer_than_asked() -> None:
    async def check() -> None:
        one = store()
        consumer = await waits(one.sample(2))
        await one.extend(members(1))
        assert not consumer.done()
        await one.extend(members(2))
        assert ids(await consumer) == [1, 2]
        await one.extend(members(3))
        with pytest.raises(TimeoutError, match="groups=2: 1 are there after 0.01 s"):
            await one.sample(2, timeout_s=0.01)
        assert ids(await one.sample(1)) == [3]

    asyncio.run(check())


def test_stale_groups_are_dropped_when_they_would_be_sampled() -> None:
    async def check() -> None:
        one = store(max_staleness=1, max_groups=2)
        await one.extend(members(1, version=0))
        await one.extend(members(2, version=1))
        writer = await waits(one.extend(members(3, version=2)))
        assert ids(await one.sample(1, policy_version=2)) == [2] and one.counts["buffer/stale"] == 1
        await writer
        with pytest.raises(ValueError, match="max_staleness=1 requires policy_version"):
            await one.sample(1)

    asyncio.run(check())


def test_a_batch_that_exceeds_the_limits_by_itself_is_refused() -> None:
    async def check() -> None:
        with pytest.raises(ValueError, match="max_groups=1 must hold a batch, which has 2"):
            await store(max_groups=1).extend(members(1, 2))
        with pytest.raises(ValueError, match="max_bytes=9 must hold a batch"):
            await store(max_bytes=9).extend(members(1))
        with pytest.raises(ValueError, match="groups=2 must be at least 1 and at most max_groups=1"):
            await store(max_groups=1).sample(2)

    asyncio.run(check())


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"max_groups": 0}, "max_groups=0 must be None or at least 1"),
        ({"max_bytes": 0}, "max_bytes=0 must be"),
        ({"max_uses": 0}, "max_uses=0 must be"),
        ({"max_staleness": -1}, "max_staleness=-1 must be"),
        ({"when_full": "block"}, "when_full='block' must be one of"),
        ({"max_groups": 1, "max_uses": None}, "no group would ever leave"),
    ],
)
def test_limits_out_of_range_are_refused(limits: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        store(**limits)


def test_metadata_have_no_tokens_and_credit_per_token_gets_them() -> None:
    assert not MCAdvantage().reads_tokens and MCAdvantage(kl=KL("token", 0.1)).reads_tokens
    assert MCAdvantage(credit="turn").reads_tokens
    (small,), (large,) = members(1), split_members(make_groups(1), reads_tokens=True)
    assert keys.TOKENS not in small.reads.tensors and keys.TOKENS in large.reads.tensors
    assert small.rows[0].tensors.keys() == large.rows[0].tensors.keys()


def test_rows_that_are_refused_change_nothing() -> None:
    advantages = GroupAdvantages(MCAdvantage())
    rows = make_groups(1)
    rows[1].set(keys.GROUP_SIZE, rows[1][keys.GROUP_SIZE] + 1)
    with pytest.raises(ValueError, match="disagree on its size"):
        advantages.add(split_members(rows, False))
    assert advantages.pending_bytes == 0
