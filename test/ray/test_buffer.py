"""Buffers and advantages in Ray actors: several writers, killed processes, bounded memory."""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

import pytest
from tensordict import TensorDictBase
from torchrl.data import ListStorage, ReplayBuffer, SamplerWithoutReplacement

from support.collected_rows import check_same_rows
from support.ray_cluster import RAY_GROUP
from support.stored_rows import Writer, make_groups, make_row
from support.waiting import PATIENCE, in_thread, wait_until
from torchrl_rloo.data import keys, pack_rows, stack_rows, tensor_rows, unpack_rows
from torchrl_rloo.data.metadata import metadata_of
from torchrl_rloo.objectives import KL
from torchrl_rloo.ray import RayGroupBuffer, RayMCAdvantage
from torchrl_rloo.ray.buffer import fetch_group
from torchrl_rloo.replay import MCAdvantage, RowStorage

pytestmark = pytest.mark.xdist_group(RAY_GROUP)


NBYTES = sum(v.nbytes for row in tensor_rows(make_groups(1)).unbind(0) for v in row.values(True, True))


def with_advantages(*group_ids: int) -> TensorDictBase:
    buffer = ReplayBuffer(storage=RowStorage(), transform=MCAdvantage())
    buffer.extend(tensor_rows(make_groups(*group_ids)))
    return buffer[:]


def ids(rows: TensorDictBase) -> list[int]:
    return [int(row[keys.GROUP_ID]) for row in rows.unbind(0)]


@pytest.fixture(scope="module")
def buffer(ray_cluster: str) -> RayGroupBuffer:
    """Buffer of three groups with two uses each; an actor takes seconds to start, so tests share it."""
    return RayGroupBuffer(max_bytes=3 * NBYTES, max_uses=2)


@pytest.fixture(scope="module")
def writers(ray_cluster: str) -> list[Any]:
    """Two actors that write. Tests leave the first alive."""
    import ray

    return [ray.remote(Writer).options(num_cpus=0).remote() for _ in range(2)]


def test_sampled_rows_equal_those_of_a_local_buffer(buffer: RayGroupBuffer, writers: list[Any]) -> None:
    import ray

    ray.get(writers[0].extend.remote(buffer, 1, 2))
    for _ in range(2):
        check_same_rows(buffer.sample(2), with_advantages(1, 2))
    assert len(buffer) == 0 and buffer.stats()["buffer/used_up"] == 2


def test_references_go_through_the_actor_without_their_rows(buffer: RayGroupBuffer) -> None:
    import ray

    rows = make_groups(4)
    reference = ray.put(pack_rows(tensor_rows(rows)))
    buffer.extend_references([(metadata_of(rows), reference, 100)])
    assert buffer.stats()["buffer/bytes"] == 100
    for _ in range(2):
        (group,) = buffer.sample_groups(1)
        assert {payload.ref for payload in group.payloads} == {reference}
        check_same_rows(fetch_group(group), with_advantages(4))


def test_a_full_buffer_holds_writers_back_and_bounds_its_bytes(buffer: RayGroupBuffer, writers: list[Any]) -> None:
    import ray

    written = [writers[i % 2].extend.remote(buffer, i) for i in range(20, 28)]
    wait_until(lambda: buffer.stats().get("buffer/waits", 0) == 2, PATIENCE, "two writers that wait")
    assert buffer.stats()["buffer/bytes"] == 3 * NBYTES and len(ray.wait(written, num_returns=3)[1]) == 5
    taken: list[int] = []
    while len(taken) < 2 * 2 * 8:
        taken += ids(buffer.sample(1, timeout_s=PATIENCE))
        assert buffer.stats()["buffer/bytes"] <= 3 * NBYTES
    ray.get(written)
    assert sorted(taken) == sorted(4 * list(range(20, 28)))


def test_a_consumer_waits_and_a_time_limit_ends_it(buffer: RayGroupBuffer) -> None:
    import ray

    sampled = in_thread(buffer.sample, 1)
    with pytest.raises(TimeoutError, match="groups=2: 0 are there"):
        buffer.sample(2, timeout_s=0.05)
    client = pickle.loads(ray.cloudpickle.dumps(buffer))
    client.extend(make_groups(5))
    assert ids(sampled.result(PATIENCE)) == [5, 5]
    with pytest.raises(ValueError, match="disagree on its size"):
        buffer.extend(stack_rows([make_row(6, 0, size=2), make_row(6, 1, size=3)]))
    buffer.empty()
    assert len(buffer) == 0


def test_rows_outlive_their_writer_and_a_buffer_its_actor(buffer: RayGroupBuffer, writers: list[Any]) -> None:
    """Kill a writer, then the actor; another actor restores the state and receives the missing members."""
    import ray

    ray.get(writers[1].extend.remote(buffer, 31))
    ray.kill(writers[1])  # returns before the process ends, which may still begin the next call
    with pytest.raises(ray.exceptions.RayActorError):
        while True:
            ray.get(writers[1].ping.remote())
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(writers[1].extend.remote(buffer, 32))
    buffer.extend(make_groups(33)[:1])
    check_same_rows(buffer.sample(1), with_advantages(31))
    state = pickle.loads(pickle.dumps(buffer.state_dict()))
    ray.kill(buffer._actor)
    for call in (lambda: buffer.extend(make_groups(2)), lambda: buffer.sample(1), buffer.stats):
        with pytest.raises(ray.exceptions.RayActorError):
            call()
    restored = RayGroupBuffer(max_uses=2)
    restored.load_state_dict(state)
    restored.extend(make_groups(33)[1:])
    check_same_rows(restored.sample(2), with_advantages(33, 31))
    assert len(restored) == 1


def _local(rows: list[TensorDictBase], **kwargs: Any) -> TensorDictBase:
    return MCAdvantage(**kwargs).inv(stack_rows(rows))


def test_members_of_several_writers_meet_in_one_actor(writers: list[Any]) -> None:
    import ray

    transform = RayMCAdvantage(actor_name="advantages")
    for member in range(3):
        assert not ray.get(writers[0].advance.remote(transform, 7, member, 4))
    same = RayMCAdvantage(actor_name="advantages")
    assert same.pending_rows == 3
    state = pickle.loads(pickle.dumps(transform.get_extra_state()))
    for _ in range(2):
        buffer = ReplayBuffer(storage=RowStorage(), transform=same)
        buffer.extend(stack_rows([make_row(7, 3, 4)]))
        check_same_rows(buffer[:], _local([make_row(7, member, 4) for member in range(4)]))
        assert transform.counts["advantage/groups"] == 1 and transform.pending_rows == 0
        transform.set_extra_state(state)
    with pytest.raises(ValueError, match="actor_name='advantages' has the settings [(][)], not [(]num_generations=3"):
        RayMCAdvantage(3, actor_name="advantages")
    with pytest.raises(ValueError, match="process_group cannot be combined with an actor"):
        RayMCAdvantage(2, process_group=object())


def test_advantages_per_token_equal_those_of_one_process(ray_cluster: str) -> None:
    rows = [row.set(keys.REF_LOG_PROBS, row[keys.LOG_PROBS] - 0.1) for row in make_groups(1, 2).unbind(0)]
    transform = RayMCAdvantage(2, kl=KL("token", 0.1))
    assert transform.inv(stack_rows(rows[:1])) is None
    check_same_rows(transform.inv(stack_rows(rows[1:])), _local(rows, kl=KL("token", 0.1)))


def test_a_buffer_of_torchrl_holds_packed_groups(ray_cluster: str) -> None:
    """The guide's recipe: one entry per group, never a lazy stack."""
    from torchrl.data import RayReplayBuffer

    owner = RayReplayBuffer(
        storage=partial(ListStorage, 4),
        sampler=SamplerWithoutReplacement,
        collate_fn=list,
        batch_size=2,
        remote_config={"num_cpus": 0},
    )
    try:
        client = owner.client()
        client.extend([pack_rows(tensor_rows(make_groups(i))) for i in range(3)])
        sampled = [unpack_rows(packed) for packed in client.sample()]
        assert len(sampled) == 2
        for rows in sampled:
            check_same_rows(rows, tensor_rows(make_groups(ids(rows)[0])))
    finally:
        owner.close()
